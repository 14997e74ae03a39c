"""CPU tensors that claim a GPU: the direct path runs here, and Triton's interpreter runs its launches.

`pretend(monkeypatch)` makes every CPU tensor say is_cuda, and replaces what only a GPU has: the current device and
stream, the allocation, and the compiled kernel, whose place the interpreted kernel takes at the same addresses. It
returns the launches as they come: (kernel's name, grid, arguments).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

import torch

from fused_softmax.launch import compile as compiling
from fused_softmax.launch import last_upstream, torch_private

DEVICE = -1  # what get_device() of a CPU tensor says


def pretend(monkeypatch):
    """Until the test ends; the interpreter must be on. Caches are emptied before."""
    launches: list[tuple] = []

    def launch(grid, _y, _z, _stream, kernel, pointers, meta, *args):
        launches.append((kernel.__name__, grid, args))
        of_pointer, given = iter(pointers), []
        for argument, value in zip(kernel.declaration.arguments.values(), args, strict=False):
            given.append(_at(value, next(of_pointer)[0]) if argument.type is None else value)
        kernel[(grid,)](*given, **meta)

    instead = {
        id(torch_private.current_device): lambda: DEVICE,
        id(torch_private.current_stream): lambda index: 0,
        id(torch_private.empty_strided_cuda): torch._C._dynamo.guards._empty_strided_cpu,
    }
    for module in [m for name, m in sys.modules.items() if name.startswith("fused_softmax.")]:
        for name, value in vars(module).copy().items():
            if id(value) in instead:
                monkeypatch.setattr(module, name, instead[id(value)])
            elif isinstance(value, compiling.Cache):
                monkeypatch.setattr(module, name, type(value)())
    monkeypatch.setattr(torch.Tensor, "is_cuda", torch._C.TensorBase.is_cpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)
    monkeypatch.setattr(last_upstream, "_memory", [])
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(compiling, "compile_kernel", lambda kernel, pointers, meta, *_: (kernel, pointers, meta))
    monkeypatch.setattr(compiling, "bind", lambda compiled: compiling.Binding(launch, compiled, ()))
    return launches


def _at(address, dtype):
    """A tensor of one element at an address, which stands for all that follow it."""
    held = (ctypes.c_byte * dtype.itemsize).from_address(address)
    return torch.frombuffer(held, dtype=dtype)
