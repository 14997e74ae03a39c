"""Our kernels in the place of ATen's: aten::_softmax, its relatives and their gradients, on the GPU.

`patch()` holds them there. Each is made from the kernel that it replaces, which gets the calls that ours do not take.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import warnings
from collections import deque
from collections.abc import Callable
from operator import methodcaller

import torch
from torch import Tensor

from ..launch import softmax as rows
from ..launch import torch_private
from ..launch.availability import KernelUnavailable
from ..launch.context import is_batch_invariant
from ..launch.device import interpreting
from ..launch.options import TORCH
from ..launch.recent_softmax import recent_gradient, recent_softmax, size_of, softmax_backward, softmax_result
from .library import untraced
from .outputs import is_its_own, may_write_while_reading
from .route import supports_fused_cast, unsupported_reason

Kernel = Callable[..., Tensor]

# a thread may have been on its way into one of our kernels, waiting for the interpreter's lock, when another took it
# out: it runs all the same, so the last few thousand outlive their registration (without this, threads crash)
_kept: deque[object] = deque(maxlen=4096)
# of fused_softmax.stats, while it counts: called with op, tensor, dim, dtype and backward
watch: Callable[..., None] | None = None


def replace(op: str) -> torch.library.Library:
    """Install the kernels of "softmax", "log_softmax" or "safe_softmax", until `restore` of the library.

    With TRITON_INTERPRET=1 they are the CPU's.
    """
    key = "CPU" if interpreting() else "CUDA"
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # torch says once that a kernel was overridden, which is what patch() is for
            warnings.filterwarnings("ignore", message=".*(?s:.*)[Oo]verrid", category=UserWarning)
            for name, ours in _kernels(op).items():
                library.impl(name, untraced(ours(_original(name, key))), key, allow_override=True)
                _kept.append(torch_private.get_kernel(f"aten::{name}", key))
    except BaseException:
        restore(library)
        raise
    return library


def restore(library: torch.library.Library) -> None:
    """Destroy the library that `replace` returned: the kernels that were there before are back.

    A call reads its kernel from torch's table without a lock, a field at a time. If the kernel changes from one in
    Python to one of torch's meanwhile, the call can mix the two, and fails. So where there are other threads, the
    change comes after a wait of at least 50 us, in which calls that have begun go on and no thread can begin one. It
    does not help calls of threads that run no Python, such as autograd's, threads that the system suspends for longer,
    and a Python without the interpreter's lock.
    """
    reset = torch_private.library_reset(library)
    if reset is not None and _wait_alone is not None and threading.active_count() > 1:
        # in one call of C's: between two steps of Python another thread may run
        deque(map(methodcaller("__call__"), (_wait_alone, reset)), maxlen=0)
    torch_private.destroy_library(library)


def _uninterrupted_wait() -> Callable[[], object] | None:
    """What waits at least 50 us and keeps the interpreter's lock, unlike time.sleep; None without usleep."""
    try:
        return functools.partial(ctypes.PyDLL(None).usleep, 50)
    except (TypeError, AttributeError, OSError):
        return None


_wait_alone = _uninterrupted_wait()


def _original(name: str, key: str) -> Kernel:
    """The kernel that is in place now; calling it meets no dispatcher, so it cannot come back here."""
    kernel = torch_private.get_kernel(f"aten::{name}", key)
    return functools.partial(kernel.call_boxed, torch_private.DispatchKeySet(getattr(torch_private.DispatchKey, key)))


def _kernels(op: str) -> dict[str, Callable[[Kernel], Kernel]]:
    """What takes the place of which aten kernels; each is made from the kernel that it replaces."""
    if op == "safe_softmax":
        return {"_safe_softmax": _safe_softmax}
    log = op == "log_softmax"
    return {
        f"_{op}": functools.partial(_forward, log),
        f"_{op}.out": functools.partial(_forward_out, log),
        f"_{op}_backward_data": functools.partial(_backward, log),
        f"_{op}_backward_data.out": functools.partial(_backward_out, log),
    }


def _takes(x: Tensor, dim: int, out_dtype: torch.dtype) -> bool:
    bound = x.dim() or 1
    return (
        -bound <= dim < bound and supports_fused_cast(x.dtype, out_dtype) and unsupported_reason(x, out_dtype) is None
    )


def _out_dtype(x: Tensor, half_to_float: bool) -> torch.dtype | None:
    """The output's dtype; None if half_to_float is set for an input that is not 16-bit."""
    if not half_to_float:
        return x.dtype
    return None if x.dtype is torch.float32 else torch.float32


def _forward(log: bool, original: Kernel) -> Kernel:
    def forward(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        dtype = _out_dtype(x, half_to_float)
        if watch is not None:
            watch("log_softmax" if log else "softmax", x, dim=dim, dtype=dtype)
        if dtype is not None and type(x) is Tensor and x.is_cuda:
            y = recent_softmax(x, dim, dtype, log)
            if y is None:
                y = softmax_result(x, dim, dtype, dtype, log, rows.prepare_softmax)
            if y is not None and y is not TORCH:
                return y
        if dtype is None or not _takes(x, dim, dtype):
            return original(x, dim, half_to_float)
        try:
            return rows.softmax_forward(x, dim, dtype, log)
        except KernelUnavailable:
            return original(x, dim, half_to_float)

    return forward


def _forward_out(log: bool, original: Kernel) -> Kernel:
    def forward_out(x: Tensor, dim: int, half_to_float: bool, *, out: Tensor) -> Tensor:
        dtype = _out_dtype(x, half_to_float)
        if dtype is None or not _takes(x, dim, dtype) or not _fits(out, x, dtype):
            return original(x, dim, half_to_float, out=out)
        try:
            if not may_write_while_reading(out, x):
                return out.copy_(rows.softmax_forward(x, dim, dtype, log))
            return rows.softmax_forward(x, dim, dtype, log, out)
        except KernelUnavailable:
            return original(x, dim, half_to_float, out=out)

    return forward_out


def _takes_backward(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> bool:
    same = dy.dtype is y.dtype and dy.shape == y.shape and dy.device == y.device
    return same and supports_fused_cast(input_dtype, y.dtype) and _takes(y, dim, y.dtype)


def _backward(log: bool, original: Kernel) -> Kernel:
    def backward(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
        if watch is not None:
            watch("log_softmax" if log else "softmax", y, dim=dim, dtype=y.dtype, backward=True)
        if type(y) is Tensor and type(dy) is Tensor and supports_fused_cast(input_dtype, y.dtype):
            described = dim, input_dtype, log, is_batch_invariant(), size_of(y, dim)
            dx = recent_gradient(dy, y, described)
            if dx is None:
                dx = softmax_backward(dy, y, described, rows.prepare_backward)
            if dx is not None:
                return dx
        if not _takes_backward(dy, y, dim, input_dtype):
            return original(dy, y, dim, input_dtype)
        try:
            return rows.softmax_backward(dy, y, dim, input_dtype, log)
        except KernelUnavailable:
            return original(dy, y, dim, input_dtype)

    return backward


def _backward_out(log: bool, original: Kernel) -> Kernel:
    # the two have different names for their output
    name = "out" if log else "grad_input"

    def backward_out(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype, **outputs: Tensor) -> Tensor:
        out = outputs[name]
        if not _takes_backward(dy, y, dim, input_dtype) or not _fits(out, y, input_dtype):
            return original(dy, y, dim, input_dtype, **outputs)
        try:
            return out.copy_(rows.softmax_backward(dy, y, dim, input_dtype, log))
        except KernelUnavailable:
            return original(dy, y, dim, input_dtype, **outputs)

    return backward_out


def _safe_softmax(original: Kernel) -> Kernel:
    def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        out_dtype = x.dtype if dtype is None else dtype
        if not _takes(x, dim, out_dtype):
            return original(x, dim, dtype)
        try:
            y = rows.softmax_forward(x, dim, out_dtype, False)
        except KernelUnavailable:
            return original(x, dim, dtype)
        # rows that are masked throughout give 0, not NaN
        return y if x.numel() == 0 else y.masked_fill_(x.amax(dim, keepdim=True) == -float("inf"), 0.0)

    return safe_softmax


def _fits(out: Tensor, like: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether out can take the result; an empty one is given its size, other sizes are torch's to resize."""
    if out.dtype is not dtype or out.device != like.device or not is_its_own(out):
        return False
    if out.shape != like.shape and out.numel() == 0:
        out.resize_(like.shape)
    return out.shape == like.shape
