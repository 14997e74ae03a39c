"""Which kernels, regimes and kernel flags a run has reached, and which it has not.

A fuzz process replaces the three functions that every launch goes through (`Launch.__call__`, `compile_kernel`,
`meta_of`) by ones that also note the kernel and its constexprs; production code has no counter.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

import torch

from fused_softmax import kernels
from fused_softmax.launch import compile as launch
from fused_softmax.launch import launcher

# constexprs that are sizes: told apart as one or many, none or some
_SIZES = {"ROWS", "CTAS", "WARPS_PER_ROW", "OUTERS", "LANES", "PAIR", "WIDTH", "X_VEC", "Y_VEC"}
_COUNTS = {"UNPREDICATED", "UNSEEN", "SMEM_STAGED", "RESIDENT_CHUNKS", "DYNAMIC"}
# constexprs of a few values, which are counted separately
_VALUES = dict.fromkeys(("MASK", "SCALE", "LOSS", "UPSTREAM"), (0, 1, 2)) | {"MASK_COLS": (0, 1, 2, 3)}
# what says nothing: the device, lengths, and how launches overlap
_IGNORED = {"PTX", "VECTORS", "CHUNKS", "EACH", "COLS", "EARLY", "TRIGGER", "WAITS", "PREFETCHED", "VEC", "MASK_VEC"}
_IGNORED |= {"INNER", "THREADS", "BLOCK", "SPLITS", "BULK", "PIECE", "SPAN", "ACROSS", "GROUPS", "UNIT"}

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
    """Count one launch's kernel and constexprs."""
    if not hasattr(kernel, "declaration"):  # a lesson's
        return
    kernel_name = kernel.fn.__name__
    names = kernel.declaration.constexprs
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
    def compiled(kernel: Any, pointers: Any, meta: Any, index: int, counts: Any = ()) -> Any:
        note(kernel, meta)
        return compile_kernel(kernel, pointers, meta, index, counts)

    launch.Launch.__call__ = counted  # type: ignore[method-assign]
    launch.compile_kernel = compiled
    launcher.meta_of = _noting_regime(launcher.meta_of)


def _noting_regime(meta_of: Any) -> Any:
    @functools.wraps(meta_of)
    def noting(kernel: Any, plan: Any, device: Any, flags: Any) -> Any:
        name = kernel.fn.__name__
        if name.startswith("softmax"):
            name = ("log_" if dict(flags)["LOG"] else "") + "softmax" + ("_backward" if "backward" in name else "")
        reached.add((name, f"regime {plan.regime}"))
        return meta_of(kernel, plan, device, flags)

    return noting


def _of_all_kernels() -> Reached:
    """Each kernel, and each of its flags."""
    wanted: Reached = set()
    for kernel in all_kernels():
        name = kernel.fn.__name__
        wanted.add((name, ""))
        for constexpr in kernel.declaration.constexprs:
            wanted |= {(name, label) for label in _labels(constexpr)}
    return wanted


def everything() -> Reached:
    """What a run could reach on this device."""
    wanted = _of_all_kernels()
    regimes = ("warp", "block", "cluster", "two_pass") if _clusters() else ("warp", "block", "two_pass")
    softmaxes = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
    wanted |= {(name, f"regime {regime}") for name in softmaxes for regime in regimes}
    return wanted - unreachable()


def all_kernels() -> list[Any]:
    """Every kernel of the package."""
    found = []
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        own = (value for value in vars(module).values() if hasattr(value, "declaration"))
        found += [kernel for kernel in own if kernel.fn.__module__ == module.__name__]
    return found


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
    never = {("cross_entropy_forward", "WARPS_PER_ROW=many"), ("row_statistics", "WARPS_PER_ROW=many")}
    # a gradient is hidden by a boolean mask; a floating one has been added, and only its output counts
    never |= {("masked_softmax_backward", "MASK=2")}
    # and it reads the mask of few rows, element by element
    never |= {("masked_softmax_backward", "MASK_COLS=3")}
    # a piece of memory has the rows of 4 warps
    statistics = ("row_statistics_gathered", "row_statistics_backward_gathered")
    losses = [f"cross_entropy{which}_gathered" for which in ("", "_forward", "_backward")]
    gathered = ("softmax_gathered", "softmax_backward_gathered", "masked_softmax_gathered", *statistics, *losses)
    # which have one id at most
    never |= {(name, "PICKS=many") for name in statistics}
    transposing = ("softmax_transposed", "softmax_channels_last")
    never |= {(name, "ROWS=1") for name in (*gathered, *transposing, "transposed_copy")}
    # threads that share a position have one column each at least
    planes = [f"softmax_spatial_gathered{way}" for way in ("", "_backward")]
    never |= {(name, "UNPREDICATED=none") for name in planes}
    # columns 2^32 vectors apart take 8 GB and more
    tiles = [f"softmax_spatial{kind}" for kind in ("", "_skewed", "_skewed_backward")]
    never |= {(name, "NEAR=False") for name in tiles}
    # those in registers fill half of their chunks, at least
    held = [f"softmax_spatial_periodic{way}" for way in ("", "_backward")]
    never |= {(name, "UNPREDICATED=none") for name in held}
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        shared = {(kernel, flag) for kernel, flag in _of_all_kernels() if kernel in held}
        never |= {*shared, *((name, "DYNAMIC=some") for name in (*planes, *transposing))}
    if _clusters():  # which rows that do not fit on chip then always take
        never |= {("softmax_two_pass", "CTAS=1"), ("softmax_backward_two_pass", "CTAS=1")}
    if not torch.cuda.is_available():
        # chunks are staged in shared memory by PTX alone; a GPU alone has memory of the host to report to
        staged = ("softmax_backward_resident", "softmax_spatial", "softmax_spatial_backward")
        never |= {*((name, "SMEM_STAGED=some") for name in staged), ("cross_entropy_backward", "REPORTS=True")}
    return never


def missing() -> list[str]:
    """Names of what has not been reached."""
    return sorted(f"{kernel} {flag}".strip() for kernel, flag in everything() - reached)
