"""Plan + tensors -> launch: the one way in which every kernel over rows is planned, compiled and launched.

All row kernels take their arguments in one order: pointers to rows, pointers to vectors, n_rows, n_cols, the rows'
strides, phase, n_splits where programs share a row, and the op's own numbers. What depends on widths, strides,
alignment, dtypes and device alone is worked out once and kept under a key of those, so a tensor with another alignment
or stride never meets a kernel that assumed more. The number of rows, temperatures and the like travel with each call.
Nothing is allocated here and no host waits: all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..planning.types import VECTOR_BYTES, Device, Plan, Problem
from . import compile as compiling
from .availability import KernelUnavailable
from .cache import Cache
from .compile import Binding, Launch, Pointers, assert_options, early_start, launch_options
from .context import is_batch_invariant
from .device import device_of
from .kernel_loading import Kernel
from .layout import problem_of, run_time_arguments, starts
from .options import Flags
from .torch_private import current_device, current_stream

# warps of a launch that most often has nothing to do; 32 for each of an H200's multiprocessors
FEW_WARPS = 4224
Dtypes = tuple[torch.dtype, ...]
Alignment = Callable[[Flags, torch.dtype], int]
Vector = Any  # a tensor; or, on a GPU, the address of float32 numbers
_REAL = torch.float32


class RowOp:
    """A kernel over rows and what plans it.

    kernel: loads the kernel that runs a plan. backward, log: what the planner knows of the op. alignment: how many
    bytes divide the address of a vector of a dtype under such flags, where the kernel needs to know. most_warps: the
    most warps of a launch.
    """

    __slots__ = ("alignment", "backward", "kernel", "log", "most_warps", "planner")

    def __init__(
        self, planner: Callable[[Problem, Device], Plan], kernel: Callable[[Plan], Any], backward: bool = False,
        log: bool = False, alignment: Alignment | None = None, most_warps: int | None = None,
    ) -> None:  # fmt: skip
        self.planner, self.kernel, self.backward, self.log = planner, kernel, backward, log
        self.alignment, self.most_warps = alignment, most_warps

    def plan(self, rows: tuple[Tensor, ...], device: Device, invariant: bool) -> Plan:
        """The plan for row tensors (n_rows, n_cols), the last of which is the output."""
        problem = problem_of(*rows, batch_invariant=invariant, backward=self.backward, log=self.log)
        return self.planner(problem, device)

    def pointers(self, plan: Plan, rows: Dtypes, vectors: Dtypes, flags: Flags) -> Pointers:
        """The dtype of each pointer, and the bytes that a kernel of this plan knows to divide its address.

        Both follow from the plan and the flags. The addresses of a call never choose a kernel, so they change no bits.
        """
        of_rows = tuple((dtype, min(plan.vec * dtype.itemsize, VECTOR_BYTES)) for dtype in rows)
        if self.alignment is None:
            return of_rows + tuple((dtype, 1) for dtype in vectors)
        return of_rows + tuple((dtype, self.alignment(flags, dtype)) for dtype in vectors)


def always(kernel: Kernel) -> Callable[[Plan], Any]:
    """The `kernel` of a RowOp that has one kernel for all plans."""
    return lambda plan: kernel()


class Described(NamedTuple):
    """A launch without its tensors, the number of rows and the op's numbers."""

    kernel: Any
    plan: Plan
    meta: Mapping[str, Any]
    scalars: tuple[int, ...]  # n_cols, strides, phase, n_splits
    n_splits: int
    offsets: tuple[int, ...]  # bytes from each tensor's first row back to the aligned address
    most: int | None  # programs

    def programs(self, n_rows: int) -> int:
        needed = -(-n_rows // self.plan.rows) * self.n_splits
        return needed if self.most is None else min(needed, self.most)


# run(rows, vectors, numbers): launches over tensors that lie as those that it was prepared for, any number of rows.
# run.at(n_rows, rows, vectors, numbers) takes pointers, as `layout.pointer` makes them, on the current device.
# On a GPU, run.parts has the parts of a call.
Run = Any


def programs_of_row(plan: Plan, n_cols: int) -> int:
    """How many independent programs share a row of `n_cols` elements."""
    return max(1, -(-n_cols // (plan.chunks * plan.vectors_per_chunk * plan.vec)))


def meta_of(kernel: Any, plan: Plan, device: Device, flags: Flags) -> dict[str, Any]:
    """The constexprs that the kernel has, and the launch's own meta-parameters."""
    pdl = device.supports_pdl
    of_device = dict(PTX=device.ptx, EARLY=pdl, TRIGGER=pdl, WAITS=False, BULK=device.copies_in_bulk)
    known = plan.constexprs() | of_device | dict(flags)
    meta = {name: known[name] for name in kernel.declaration.constexprs}
    return meta | launch_options(kernel, plan, device) | early_start(meta)


def _described(op: RowOp, rows: tuple[Tensor, ...], plan: Plan, device: Device, flags: Flags) -> Described:
    kernel = op.kernel(plan)
    scalars = run_time_arguments(plan, rows)
    offsets = tuple(scalars[-1] * t.element_size() for t in rows)
    n_splits = 1
    if kernel.declaration.splits_rows:
        n_splits = programs_of_row(plan, rows[0].shape[1])
        scalars = (*scalars, n_splits)
    most = None if op.most_warps is None else op.most_warps // plan.num_warps
    return Described(kernel, plan, meta_of(kernel, plan, device, flags), scalars, n_splits, offsets, most)


def row_launch(
    op: RowOp,
    rows: tuple[Tensor, ...],
    vectors: tuple[Vector, ...],
    numbers: tuple[int | float, ...],
    flags: Flags,
    plan: Plan,
    device: Device,
) -> Launch:
    """The launch as a record, as the interpreter runs it and as it is cross-compiled."""
    found = _described(op, rows, plan, device, flags)
    # an unaligned row's kernel takes the aligned address before each tensor's first row, and the distance in between
    phase = run_time_arguments(plan, rows)[-1]
    n_rows = rows[0].shape[0]
    args = (*starts(rows, phase), *vectors, n_rows, *found.scalars, *numbers)
    pointers = op.pointers(plan, tuple(t.dtype for t in rows), _dtypes(vectors), flags)
    alignments = tuple(known for _, known in pointers)
    return Launch(found.kernel, (found.programs(n_rows),), args, found.meta, alignments)


def _dtypes(vectors: tuple[Vector, ...]) -> Dtypes:
    return tuple([_REAL if type(v) is int else v.dtype for v in vectors])


def launch_rows(
    op: RowOp,
    rows: tuple[Tensor, ...],
    vectors: tuple[Vector, ...],
    numbers: tuple[int | float, ...],
    flags: Flags,
    *,
    invariant: bool = False,
) -> None:
    """Runs an op over rows (n_rows, n_cols) with contiguous columns, on their device and current stream.

    vectors: contiguous; one that the flags leave unused may be any tensor. RuntimeError where the device has no
    kernels; KernelUnavailable, with nothing written, where one does not compile.
    """
    if rows[0].shape[0]:
        prepare_rows(op, rows, vectors, flags, invariant)(rows, vectors, numbers)


_prepared = Cache()


def prepare_rows(
    op: RowOp, rows: tuple[Tensor, ...], vectors: tuple[Vector, ...], flags: Flags, invariant: bool
) -> Run:
    """What launches over such rows and vectors: planned and compiled the first time, then cached."""
    first = rows[0]
    if not first.is_cuda:
        op.kernel(op.plan(rows, device_of(first), invariant))  # raises now, before anything is written
        return _interpreted(op, flags, invariant)
    layouts = tuple([(t.dtype, t.stride()[0], t.data_ptr() & 31) for t in rows])
    of_vectors = _dtypes(vectors)
    key = (op, flags, invariant, first.get_device(), first.shape[1], layouts, of_vectors)
    return _prepared.get(key) or _prepare(key, op, rows, of_vectors, flags, invariant)


def _prepare(
    key: tuple[Any, ...], op: RowOp, rows: tuple[Tensor, ...], vectors: Dtypes, flags: Flags, invariant: bool
) -> Run:
    index = rows[0].get_device()
    with compiling.lock:
        if key in _prepared:
            return _prepared[key]
        device = device_of(rows[0])
        found = _described(op, rows, op.plan(rows, device, invariant), device, flags)
        with on_device(index):
            pointers = op.pointers(found.plan, tuple(t.dtype for t in rows), vectors, flags)
            compiled = compiling.compile_kernel(found.kernel, pointers, found.meta, index)
        return _prepared.store(key, _runner(found, compiling.bind(compiled), index))


def _interpreted(op: RowOp, flags: Flags, invariant: bool) -> Run:
    def run(rows: tuple[Tensor, ...], vectors: tuple[Vector, ...], numbers: tuple[int | float, ...]) -> None:
        device = device_of(rows[0])
        row_launch(op, rows, vectors, numbers, flags, op.plan(rows, device, invariant), device)()

    run.at = lambda n_rows, rows, vectors, numbers: run(rows, vectors, numbers)  # type: ignore[attr-defined]
    return run


def _runner(found: Described, binding: Binding, index: int) -> Run:
    # a closure over plain locals, as every look-up of an attribute counts here
    call, prefix, trailing = binding
    scalars, offsets, rows_per_program = found.scalars, found.offsets, found.plan.rows
    n_splits, most = found.n_splits, found.most
    shifted = any(offsets)

    def at(n_rows: int, rows: tuple[int, ...], vectors: tuple[int, ...], numbers: tuple[int | float, ...]) -> None:
        """`run` of addresses, on the current device, which must be this one."""
        if shifted:
            rows = tuple([address - offset for address, offset in zip(rows, offsets, strict=True)])
        grid = -(-n_rows // rows_per_program) * n_splits
        if most is not None and grid > most:
            grid = most
        call(grid, 1, 1, current_stream(index), *prefix, *rows, *vectors, n_rows, *scalars, *numbers, *trailing)

    def plainly_at(
        n_rows: int, rows: tuple[int, ...], vectors: tuple[int, ...], numbers: tuple[int | float, ...]
    ) -> None:
        call(
            -(-n_rows // rows_per_program), 1, 1, current_stream(index), *prefix, *rows, *vectors, n_rows, *scalars,
            *numbers, *trailing,
        )  # fmt: skip

    if not shifted and n_splits == 1 and most is None:
        at = plainly_at

    def run(rows: tuple[Tensor, ...], vectors: tuple[Vector, ...], numbers: tuple[int | float, ...]) -> None:
        if current_device() != index:
            with torch.cuda.device(index):
                return run(rows, vectors, numbers)
        addresses = tuple([v if type(v) is int else v.data_ptr() for v in vectors])
        at(rows[0].shape[0], tuple([t.data_ptr() for t in rows]), addresses, numbers)

    # for the direct path: the launch of an op that takes rows alone, and no numbers; and that of other ops
    run.parts = (index, call, rows_per_program, prefix, (*scalars, *trailing), offsets)  # type: ignore[attr-defined]
    run.at = at  # type: ignore[attr-defined]
    return run


_HERE = nullcontext()


def on_device(index: int) -> AbstractContextManager[Any]:
    """The device as the current one, at no cost where it is."""
    return _HERE if current_device() == index else torch.cuda.device(index)


def on_its_device(x: Tensor, call: Callable[..., Any], *arguments: Any) -> Any:
    """call(*arguments) with x's device as the current one."""
    if not x.is_cuda or current_device() == x.get_device():
        return call(*arguments)
    with torch.cuda.device(x.get_device()):
        return call(*arguments)


# --- kernels over vectors, which need no plan -------------------------------------------------------------------------


def flat_launch(
    kernel: Kernel, tensors: tuple[Tensor, ...], numbers: tuple[int | float, ...], flags: Flags, num_warps: int,
    device: Device, programs: int = 1,
) -> Launch:  # fmt: skip
    """The launch of a kernel over vectors, as a record."""
    declared = kernel().declaration
    meta = {**dict(flags), "num_warps": num_warps}
    if device.kind == "cuda":
        meta |= dict(num_ctas=meta["CTAS"] if declared.on_cluster else 1) | early_start(meta)
    meta |= assert_options(kernel(), device) | device.options()
    return Launch(kernel(), (programs,), (*tensors, *numbers), meta, (1,) * len(tensors))


_flat = Cache()


def prepare_flat(kernel: Kernel, dtypes: tuple[torch.dtype, ...], flags: Flags, num_warps: int, on: Tensor) -> Run:
    """run(vectors, numbers, programs=1) of a kernel over vectors of such dtypes, on the device of `on`.

    It takes pointers, as `layout.pointer` makes them, on the current device.
    """
    device = device_of(on)
    if not on.is_cuda:
        kernel()  # raises now, before anything is written

        def interpreted(vectors: tuple[Tensor, ...], numbers: tuple[int | float, ...], programs: int = 1) -> None:
            flat_launch(kernel, vectors, numbers, flags, num_warps, device, programs)()

        return interpreted
    index = on.get_device()
    key = (kernel, flags, num_warps, index, dtypes)
    run = _flat.get(key)
    if run is None:
        with compiling.lock, on_device(index):
            made = flat_launch(kernel, (), (), flags, num_warps, device)
            compiled = compiling.compile_kernel(made.kernel, tuple((t, 1) for t in dtypes), made.meta, index)
        run = _flat.store(key, _flat_runner(compiling.bind(compiled), index))
    return run


def _flat_runner(binding: Binding, index: int) -> Run:
    call, prefix, trailing = binding

    def run(vectors: tuple[Vector, ...], numbers: tuple[int | float, ...], programs: int = 1) -> None:
        call(programs, 1, 1, current_stream(index), *prefix, *vectors, *numbers, *trailing)

    return run


# --- the plan of a launch ---------------------------------------------------------------------------------------------


def planned(
    op: RowOp, rows: tuple[Tensor, ...], vectors: Dtypes, flags: Flags, on: Tensor, invariant: bool | None = None
) -> Plan | str:
    """The plan for such rows, or why its kernel did not compile in this process.

    rows: they may be meta tensors. vectors: the dtypes of the other pointers. on: a tensor on a device with kernels.
    invariant: as in `launch_rows`; None: as the context says.
    """
    device = device_of(on)
    plan = op.plan(rows, device, is_batch_invariant() if invariant is None else invariant)
    try:
        kernel = op.kernel(plan)
    except KernelUnavailable as error:
        return str(error)
    if device.kind == "interpreter":
        return plan
    pointers = op.pointers(plan, tuple(t.dtype for t in rows), vectors, flags)
    meta = meta_of(kernel, plan, device, flags)
    return compiling.compile_failure(kernel, pointers, meta, on.get_device()) or plan
