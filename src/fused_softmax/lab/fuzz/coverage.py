"""Which kernels, regimes and kernel flags a run has reached, and which it has not.

A fuzz process replaces the three functions that every launch goes through (`Launch.__call__`, `compile_kernel`, the
planners' callers) by ones that also note the kernel and its constexprs; production code has no counter.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fused_softmax import launch, loss_launch

# constexprs that are sizes: told apart as one or many, none or some
_SIZES = {"ROWS", "CTAS", "PARTS"}
_COUNTS = {"UNMASKED", "PARKED", "KEPT"}
# constexprs of a few values, each of which is told apart
_VALUES = {"MASK": (0, 1, 2), "MASK_COLS": (0, 1, 2), "SCALE": (0, 1, 2)}
# what says nothing: the device, lengths, and how launches overlap
_IGNORED = {"PTX", "LANES", "CHUNKS", "EACH", "COLS", "TRIGGER", "WAITS", "AHEAD", "VEC", "MASK_VEC"}

Reached = set[tuple[str, str]]
reached: Reached = set()


def _label(name: str, value: Any) -> str | None:
    if name in _IGNORED or name.startswith(("num_", "maxnreg")):
        return None
    if name in _SIZES:
        return f"{name}={'1' if value == 1 else 'many'}"
    if name in _COUNTS:
        return f"{name}={'none' if value == 0 else 'some'}"
    if name == "PICKS":
        return f"PICKS={value if value < 2 else 'many'}"
    if name in _VALUES:
        return f"{name}={int(value)}"
    return f"{name}={bool(value)}" if isinstance(value, (bool, int)) else None


def note(kernel: Any, meta: Any) -> None:
    """Remember one launch's kernel and constexprs."""
    kernel_name = kernel.fn.__name__
    names = kernel.arg_names
    reached.add((kernel_name, ""))
    for name, value in meta.items():
        label = _label(name, value) if name in names else None
        if label is not None:
            reached.add((kernel_name, label))


def install() -> None:
    """Start to note launches in this process."""
    call, compile_kernel = launch.Launch.__call__, launch.compile_kernel
    if hasattr(call, "__wrapped__"):
        return

    @functools.wraps(call)
    def counted(self: launch.Launch) -> None:
        note(self.kernel, self.meta)
        call(self)

    @functools.wraps(compile_kernel)
    def compiled(kernel: Any, pointers: Any, meta: Any, index: int) -> Any:
        note(kernel, meta)
        return compile_kernel(kernel, pointers, meta, index)

    launch.Launch.__call__ = counted  # type: ignore[method-assign]
    launch.compile_kernel = compiled
    for module, name in ((launch, "make_plan"), (loss_launch, "describe_launch")):
        setattr(module, name, _noting_regime(getattr(module, name)))


def _noting_regime(function: Any) -> Any:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if function.__name__ == "describe_launch":
            reached.add((args[0], f"regime {args[2].regime}"))
        else:
            problem = args[0]
            name = ("log_" if problem.log else "") + "softmax" + ("_backward" if problem.backward else "")
            reached.add((name, f"regime {result.regime}"))
        return result

    return noting


def everything() -> Reached:
    """What a run could reach on this device."""
    from fused_softmax.kernels import resident, streaming, strided

    kernels = [resident.softmax_resident, resident.softmax_backward_resident, streaming.softmax_stream]
    kernels += [streaming.softmax_backward_stream, strided.softmax_strided]
    kernels += [loss_launch.kernel_named(name) for name in loss_launch.KERNELS]
    wanted: Reached = set()
    for kernel in kernels:
        name = kernel.fn.__name__
        wanted.add((name, ""))
        for argument in kernel.params if hasattr(kernel, "params") else ():
            if argument.is_constexpr:
                wanted |= {(name, label) for label in _labels(argument.name)}
        if not hasattr(kernel, "params"):  # interpreted: by annotation
            for argument_name, annotation in kernel.fn.__annotations__.items():
                if "constexpr" in str(annotation):
                    wanted |= {(name, label) for label in _labels(argument_name)}
    regimes = ("tile", "block", "cluster", "stream") if _clusters() else ("tile", "block", "stream")
    softmaxes = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
    wanted |= {(name, f"regime {regime}") for name in softmaxes for regime in regimes}
    return wanted - unreachable()


def _labels(name: str) -> tuple[str, ...]:
    if name in _IGNORED:
        return ()
    if name in _SIZES:
        return (f"{name}=1", f"{name}=many")
    if name in _COUNTS:
        return (f"{name}=none", f"{name}=some")
    if name == "PICKS":
        return ("PICKS=0", "PICKS=1", "PICKS=many")
    return tuple(f"{name}={value}" for value in _VALUES.get(name, (False, True)))


def _clusters() -> bool:
    """Whether rows may lie on a thread-block cluster; the interpreter runs such kernels too."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


def unreachable() -> Reached:
    """What no plan asks for, here."""
    # a walk's segments are a CTA's, never a warp's
    never = {("cross_entropy_forward", "PARTS=many"), ("row_statistics", "PARTS=many")}
    if _clusters():  # which rows that do not fit on chip then always take
        never |= {("softmax_stream", "CTAS=1"), ("softmax_backward_stream", "CTAS=1")}
    if not torch.cuda.is_available():
        # chunks are staged in shared memory by PTX alone
        never |= {("softmax_backward_resident", "PARKED=some")}
    return never


def missing() -> list[str]:
    """Names of what has not been reached."""
    return sorted(f"{kernel} {flag}".strip() for kernel, flag in everything() - reached)
