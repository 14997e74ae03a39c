"""Plan + tensors -> launch, and the cache of compiled kernels; so, the host time of a call.

What a launch needs beside its pointers and its number of rows depends on widths, strides, alignment, dtypes and device
alone. It is worked out once, kept as a `Prepared` under a key of those, and a later call is one look-up and one launch.
The key holds whatever a kernel was built for, so a tensor with another alignment or stride can never meet a kernel that
assumed more. Kernels are compiled from their signature, not by value: no width ever becomes part of a kernel.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import availability
from .device import describe
from .plan import plan as make_plan
from .problem import Device, Plan, Problem

MAX_COLS = 2**31 - 2**16  # of one row; offsets between rows have 64 bits
CAPACITY = 8192  # layouts remembered; a program that meets more starts over, and compiles nothing anew
DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_TRITON_TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
_TRITON_TYPES |= {torch.int64: "*i64", torch.uint8: "*u8"}


_interpreter = threading.RLock()


@dataclass(frozen=True)
class Launch:
    """One kernel launch as data, so that it can be run, or cross-compiled where there is no GPU.

    `args` are the kernel's positional run-time arguments in its order; `meta` holds its constexprs by name and the
    launch's own meta-parameters (num_warps, num_stages, num_ctas, ...).
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: Mapping[str, Any]

    def __call__(self) -> None:
        on = next((a.device for a in self.args if isinstance(a, torch.Tensor) and a.is_cuda), None)
        # interpreted, a launch patches Triton's own modules: one at a time
        with torch.cuda.device(on) if on is not None else _interpreter:
            if on is not None:
                self._compile(on.index)
            self.kernel[self.grid](*self.args, **self.meta)

    def _compile(self, index: int) -> None:
        """Compiles and loads the kernel without a launch, so that a failure is told from an error of the launch."""
        key = (self.kernel, index, tuple(self.meta.items()), tuple(_specialized(a) for a in self.args))
        availability.raise_if_failed(key)
        if key in _ready:
            return
        try:
            self.kernel.warmup(*self.args, grid=self.grid, **self.meta)._init_handles()
        except Exception as error:
            raise availability.failed(key, _name(self.kernel), error) from error
        if len(_ready) >= CAPACITY:
            _ready.clear()
        _ready.add(key)


_ready: set[tuple[Any, ...]] = set()  # what `Launch._compile` has compiled


def _specialized(argument: Any) -> Any:
    """What Triton may compile a kernel anew for, as an argument changes."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return type(argument)


def _name(kernel: Any) -> str:
    return getattr(kernel, "__name__", None) or str(kernel)


# --- what the tensors say ---------------------------------------------------------------------------------------------


def problem_of(*tensors: Tensor, batch_invariant: bool = False, backward: bool = False, log: bool = False) -> Problem:
    """The Problem of row tensors (n_rows, n_cols) with contiguous columns; the last is the output.

    A single row has the stride of the tensor that it was taken from, and is planned as that tensor's rows are.
    """
    n_cols = tensors[0].shape[1]
    if n_cols > MAX_COLS:
        raise NotImplementedError(f"rows of {n_cols} columns: the kernels count a row's columns in 32 bits")
    item = min(t.element_size() for t in tensors)
    full = 16 // item
    phases, vec = set(), _alignment(n_cols, full)
    for t in tensors:
        first = t.data_ptr() // t.element_size()
        stride = row_stride(t)
        vec = min(vec, _alignment(first, full), _alignment(stride, full))
        phases.add((first % full, stride % full))
    in_phase = len(phases) == 1 and not batch_invariant
    dtypes = [DTYPE_NAMES[t.dtype] for t in (tensors[0], tensors[-1])]
    return Problem(n_cols, dtypes[0], dtypes[1], vec, in_phase=in_phase, backward=backward, log=log)


def row_stride(t: Tensor) -> int:
    """Elements from one row of (n_rows, n_cols) to the next."""
    return t.stride(0)


def _alignment(n: int, full: int) -> int:
    """The largest power of two up to `full` that divides n."""
    return full if n % full == 0 else n & -n


def _run_time_arguments(plan: Plan, tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """(n_cols, each tensor's stride, phase) in the plan's units; what follows n_rows in every kernel's signature."""
    unit = 1 if plan.edge else plan.vec
    strides = tuple(row_stride(t) // unit for t in tensors)
    first = tensors[0].data_ptr() // tensors[0].element_size()
    return (tensors[0].shape[1] // unit, *strides, first % plan.vec if plan.edge else 0)


def _kernel(plan: Plan, backward: bool) -> Any:
    module = "streaming" if plan.regime == "stream" else "resident"
    suffix = "stream" if plan.regime == "stream" else "resident"
    return kernel_of(module, f"softmax_backward_{suffix}" if backward else f"softmax_{suffix}")


def kernel_of(module: str, name: str) -> Any:
    """A kernel of `kernels`; KernelUnavailable where this Triton cannot even decorate it."""
    availability.raise_if_failed(module)
    try:
        return getattr(importlib.import_module(f".kernels.{module}", __package__), name)
    except Exception as error:
        raise availability.failed(module, f"kernels.{module}", error) from error


def softmax_launches(
    x: Tensor, y: Tensor, plan: Plan, *, log: bool = False, device: Device | None = None
) -> list[Launch]:
    """The forward of x into y, both (n_rows, n_cols) with contiguous columns, as the given plan runs it.

    `device` stands in for the tensors' own where a launch is to be cross-compiled.
    """
    return [_launch(plan, (x, y), log, device or _device_of(x), backward=False)]


def backward_launches(
    y: Tensor, dy: Tensor, dx: Tensor, plan: Plan, *, log: bool = False, device: Device | None = None
) -> list[Launch]:
    """The gradient of the forward's output y against dy into dx, all (n_rows, n_cols), as the given plan runs it."""
    return [_launch(plan, (y, dy, dx), log, device or _device_of(y), backward=True)]


def _device_of(t: Tensor) -> Device:
    described = describe(t.device)
    if not isinstance(described, Device):
        raise RuntimeError(described)
    return described


def _launch(plan: Plan, tensors: tuple[Tensor, ...], log: bool, device: Device, backward: bool) -> Launch:
    # an edge kernel takes the aligned address before each tensor's first row, and the distance in between
    phase = _run_time_arguments(plan, tensors)[-1]
    starts = tuple(_shifted(t, phase) for t in tensors) if phase else tensors
    n_rows = tensors[0].shape[0]
    args = (*starts, n_rows, *_run_time_arguments(plan, tensors))
    meta = plan.meta(device, log=log, backward=backward)
    return Launch(_kernel(plan, backward), (-(-n_rows // plan.rows),), args, meta)


def _shifted(t: Tensor, phase: int) -> Tensor:
    """A view that starts `phase` elements before t, within t's storage."""
    return t.as_strided((1,), (1,), t.storage_offset() - phase)


# --- the hot path -----------------------------------------------------------------------------------------------------


class Binding(NamedTuple):
    """A compiled kernel's launcher: call(grid, 1, 1, stream, *middle, *pointers, n_rows, *rest).

    Whoever counts tenths of a microsecond makes that call; everyone else calls `run`.
    """

    call: Callable[..., Any]
    middle: tuple[Any, ...]
    rest: tuple[Any, ...]

    def run(self, grid: int, stream: int, *pointers_and_rows: int | float) -> None:
        self.call(grid, 1, 1, stream, *self.middle, *pointers_and_rows, *self.rest)


class Prepared:
    """A compiled kernel with all its arguments but the pointers and the number of rows."""

    __slots__ = ("binding", "offsets", "plan", "rows")

    def __init__(self, plan: Plan, offsets: tuple[int, ...], binding: Binding):
        self.plan = plan
        self.rows = plan.rows
        self.offsets = offsets  # bytes from each tensor's first row back to the aligned address
        self.binding = binding


_prepared: dict[tuple[Any, ...], Prepared] = {}
_compiled: dict[tuple[Any, ...], Any] = {}
_lock = threading.RLock()


def launch_rows(tensors: tuple[Tensor, ...], log: bool, *, backward: bool = False, invariant: bool = False) -> Plan:
    """Runs the op over row tensors (n_rows, n_cols), the last of which it writes, on their device and current stream.

    RuntimeError where the device has no kernels; the caller has checked shapes, dtypes and that there is work.
    """
    first = tensors[0]
    if first.device.type == "cpu":
        plan = make_plan(problem_of(*tensors, batch_invariant=invariant, backward=backward, log=log), _device_of(first))
        _launch(plan, tensors, log, _device_of(first), backward)()
        return plan
    index = first.get_device()
    prepared = _prepared_for(tensors, log, backward, invariant, index)
    pointers = [t.data_ptr() - offset for t, offset in zip(tensors, prepared.offsets, strict=True)]
    n_rows = first.shape[0]
    grid = -(-n_rows // prepared.rows)
    with on_device(index):
        prepared.binding.run(grid, torch._C._cuda_getCurrentRawStream(index), *pointers, n_rows)
    return prepared.plan


_HERE = nullcontext()


def on_device(index: int) -> AbstractContextManager[Any]:
    """The device as the current one, at no cost where it is."""
    return _HERE if torch._C._cuda_getDevice() == index else torch.cuda.device(index)


def prepared_for(tensors: tuple[Tensor, ...], log: bool, invariant: bool, *, backward: bool = False) -> Prepared | None:
    """The Prepared for row tensors on a GPU, or None where it has no kernels for them."""
    if tensors[0].dtype not in DTYPE_NAMES or not isinstance(describe(tensors[0].device), Device):
        return None
    return _prepared_for(tensors, log, backward, invariant, tensors[0].get_device())


def _prepared_for(tensors: tuple[Tensor, ...], log: bool, backward: bool, invariant: bool, index: int) -> Prepared:
    key = (backward, log, invariant, index, tensors[0].shape[1], *[_layout_key(t) for t in tensors])
    return _prepared.get(key) or prepare(key, tensors, log, backward=backward, invariant=invariant)


def _layout_key(t: Tensor) -> tuple[Any, ...]:
    return (t.dtype, row_stride(t), t.data_ptr() % 32)


def prepare(
    key: tuple[Any, ...], tensors: tuple[Tensor, ...], log: bool, *, backward: bool, invariant: bool
) -> Prepared:
    """Plans, compiles and remembers what `key` stands for, from the tensors of its first call.

    KernelUnavailable where the kernel does not compile.
    """
    with _lock:
        known = _prepared.get(key)
        if known is not None:
            return known
        device = _device_of(tensors[0])
        plan = make_plan(problem_of(*tensors, batch_invariant=invariant, backward=backward, log=log), device)
        scalars = _run_time_arguments(plan, tensors)
        offsets = tuple(scalars[-1] * t.element_size() for t in tensors)
        with torch.cuda.device(tensors[0].device):
            compiled = _compile(plan, device, tuple(t.dtype for t in tensors), log, backward, tensors[0].get_device())
        prepared = Prepared(plan, offsets, _bind(compiled, scalars))
        if len(_prepared) >= CAPACITY:
            _prepared.clear()
        _prepared[key] = prepared
        return prepared


def _compile(plan: Plan, device: Device, dtypes: tuple[torch.dtype, ...], log: bool, backward: bool, index: int) -> Any:
    """The CompiledKernel for a plan."""
    meta = plan.meta(device, log=log, backward=backward)
    return compile_kernel(_kernel(plan, backward), _pointers(plan, dtypes), meta, index)


def _pointers(plan: Plan, dtypes: tuple[torch.dtype, ...]) -> tuple[tuple[torch.dtype, bool], ...]:
    return tuple((dtype, plan.vec * dtype.itemsize % 16 == 0) for dtype in dtypes)


def failure(plan: Plan, device: Device, dtypes: tuple[torch.dtype, ...], log: bool, index: int) -> str | None:
    """Why the forward's kernel of this plan failed to compile in this process, or None where it did not."""
    try:
        kernel = _kernel(plan, False)
    except availability.KernelUnavailable as error:
        return str(error)
    return availability.failure(_compile_key(kernel, _pointers(plan, dtypes), plan.meta(device, log=log), index))


# arguments that are neither pointers nor constexprs: row counts, strides and ignore_index have 64 bits, but for
_NARROW = {"n_cols": "i32", "phase": "i32", "n_splits": "i32", "n_picks": "i32", "n_classes": "i32"}
_REAL = {"scale": "fp32", "smoothing": "fp32", "cap": "fp32", "z_loss": "fp32"}
_OPTIONS = (
    "num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion", "debug", "sanitize_overflow", "launch_pdl",
)  # fmt: skip


def compile_kernel(
    kernel: Any, pointers: tuple[tuple[torch.dtype, bool], ...], meta: Mapping[str, Any], index: int
) -> Any:
    """The CompiledKernel of a kernel on device `index`: built once for each set of compile-time numbers, loaded once.

    pointers: of each `*_ptr` argument, in order, its dtype and whether it is divisible by 16 bytes: Triton knows that
    or nothing. meta: constexprs by name, and launch options. KernelUnavailable where it does not compile or load; it is
    not tried again.
    """
    key = _compile_key(kernel, pointers, meta, index)
    if key not in _compiled:
        availability.raise_if_failed(key)
        try:
            compiled = _built(kernel, pointers, meta)
            compiled._init_handles()  # loads it on the current device
        except Exception as error:
            raise availability.failed(key, _name(kernel), error) from error
        _compiled[key] = compiled
    return _compiled[key]


def _compile_key(
    kernel: Any, pointers: tuple[tuple[torch.dtype, bool], ...], meta: Mapping[str, Any], index: int
) -> tuple[Any, ...]:
    return (kernel, pointers, tuple(meta.items()), index)


def _built(kernel: Any, pointers: tuple[tuple[torch.dtype, bool], ...], meta: Mapping[str, Any]) -> Any:
    import triton
    from triton.compiler import ASTSource

    options = {name: meta[name] for name in _OPTIONS if name in meta}
    constexprs = {name: value for name, value in meta.items() if name not in options}
    of_pointer = iter(pointers)
    signature, attrs = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constexprs:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            dtype, divisible = next(of_pointer)
            signature[name] = _TRITON_TYPES[dtype]
            if divisible:
                attrs[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = _NARROW.get(name) or _REAL.get(name, "i64")
    target = triton.runtime.driver.active.get_current_target()  # builds its own helper on first use
    return triton.compile(ASTSource(kernel, signature, constexprs, attrs), target=target, options=options)


def _bind(compiled: Any, scalars: tuple[int, ...]) -> Binding:
    """The launcher of a compiled kernel with as little in between as this Triton allows; scalars: the arguments after
    n_rows, but for those that a caller gives with each call.

    A Triton that is newer than those tested may call its launcher otherwise: then Triton's own public call is used.
    """
    # Triton skips the constexprs' places
    rest = scalars + (None,) * sum(kind == "constexpr" for kind in compiled.src.signature.values())
    if availability.triton_is_untested():
        return Binding(_public_call, (compiled,), rest)
    function, packed, launcher = compiled.function, compiled.packed_metadata, compiled.run
    direct = getattr(launcher, "launch", None)
    if direct is not None and not hasattr(launcher, "arg_annotations") and launcher.global_scratch_size == 0:
        # triton 3.6: the C function behind the launcher, 0.7 us a call less
        cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
        middle = (function, cooperative, dependent, None, None, packed, None, None, None)
        return Binding(direct, middle, rest)
    return Binding(launcher, (function, packed, None, None, None), rest)


def _public_call(gx: int, gy: int, gz: int, stream: int, compiled: Any, *args: Any) -> None:
    compiled[(gx, gy, gz)](*args, stream=stream)
