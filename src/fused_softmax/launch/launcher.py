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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..planning.types import Device, Plan, Problem
from . import compile as compiling
from .availability import KernelUnavailable
from .compile import Binding, Kernel, Launch, Pointers
from .context import is_batch_invariant
from .device import describe
from .layout import layout_key, problem_of, run_time_arguments, starts
from .torch_private import current_device, current_stream

# programs of a launch that most often has nothing to do; 31 for each of an H200's multiprocessors
FEW_PROGRAMS = 4096

Flags = tuple[tuple[str, Any], ...]  # the kernel's own constexprs


@dataclass(frozen=True, eq=False)
class RowOp:
    """A kernel over rows and what plans it.

    kernel: loads the kernel that runs a plan. backward, log: what the planner is told of the op. aligned: whether a
    vector at a multiple of 16 bytes is worth a kernel of its own.
    """

    planner: Callable[[Problem, Device], Plan]
    kernel: Callable[[Plan], Any]
    backward: bool = False
    log: bool = False
    aligned: bool = False

    def plan(self, rows: tuple[Tensor, ...], device: Device, invariant: bool) -> Plan:
        """The plan for row tensors (n_rows, n_cols), the last of which is the output."""
        problem = problem_of(*rows, batch_invariant=invariant, backward=self.backward, log=self.log)
        return self.planner(problem, device)


def always(kernel: Kernel) -> Callable[[Plan], Any]:
    """The `kernel` of a RowOp that has one kernel for all plans."""
    return lambda plan: kernel()


@dataclass(frozen=True)
class Prepared:
    """A launch without its pointers, the number of rows and the op's numbers."""

    kernel: Any
    plan: Plan
    meta: Mapping[str, Any]
    scalars: tuple[int, ...]  # n_cols, strides, phase, n_splits
    n_splits: int
    offsets: tuple[int, ...]  # bytes from each tensor's first row back to the aligned address
    binding: Binding | None  # where compiled

    def programs(self, n_rows: int, most: int | None = None) -> int:
        needed = -(-n_rows // self.plan.rows) * self.n_splits
        return needed if most is None else min(needed, most)


def device_of(t: Tensor) -> Device:
    """The planner's view of t's device; RuntimeError where it has no kernels."""
    described = describe(t.device)
    if not isinstance(described, Device):
        raise RuntimeError(described)
    return described


def meta_of(kernel: Any, plan: Plan, device: Device, flags: Flags) -> dict[str, Any]:
    """The constexprs that the kernel has, and the launch's own meta-parameters."""
    declared = kernel.declaration
    meta = plan.constexprs() | dict(flags) | dict(PTX=device.ptx, TRIGGER=device.supports_pdl)
    meta = {name: meta[name] for name in declared.constexprs}
    meta["num_warps"] = plan.num_warps
    if device.kind == "cuda":
        if declared.on_cluster:
            meta["num_ctas"] = plan.ctas
        if plan.max_registers is not None:
            meta["maxnreg"] = device.registers_within(plan.max_registers, plan.num_warps)
    if device.kind != "interpreter" and declared.asserts:
        meta |= dict(debug=True, sanitize_overflow=False)
    return meta | device.options(declared.num_stages)


def _described(op: RowOp, rows: tuple[Tensor, ...], plan: Plan, device: Device, flags: Flags) -> Prepared:
    kernel = op.kernel(plan)
    scalars = run_time_arguments(plan, rows)
    offsets = tuple(scalars[-1] * t.element_size() for t in rows)
    n_splits = 1
    if kernel.declaration.splits_rows:
        n_splits = max(1, -(-rows[0].shape[1] // (plan.chunks * plan.vectors_per_chunk * plan.vec)))
        scalars = (*scalars, n_splits)
    return Prepared(kernel, plan, meta_of(kernel, plan, device, flags), scalars, n_splits, offsets, None)


def row_launch(
    op: RowOp,
    rows: tuple[Tensor, ...],
    vectors: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    flags: Flags,
    plan: Plan,
    device: Device,
    *,
    most: int | None = None,
) -> Launch:
    """The launch as a record, as the interpreter runs it and as it is cross-compiled."""
    found = _described(op, rows, plan, device, flags)
    # an unaligned row's kernel takes the aligned address before each tensor's first row, and the distance in between
    phase = run_time_arguments(plan, rows)[-1]
    n_rows = rows[0].shape[0]
    args = (*starts(rows, phase), *vectors, n_rows, *found.scalars, *numbers)
    return Launch(found.kernel, (found.programs(n_rows, most),), args, found.meta)


def launch_rows(
    op: RowOp,
    rows: tuple[Tensor, ...],
    vectors: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    flags: Flags,
    *,
    most: int | None = None,
    invariant: bool = False,
) -> None:
    """Runs an op over rows (n_rows, n_cols) with contiguous columns, on their device and current stream.

    vectors: contiguous; one that the flags leave unused may be any tensor. `most` bounds the number of programs.
    RuntimeError where the device has no kernels; KernelUnavailable, with nothing written, where one does not compile.
    """
    first = rows[0]
    if first.shape[0] == 0:
        return
    if first.device.type == "cpu":
        device = device_of(first)
        row_launch(op, rows, vectors, numbers, flags, op.plan(rows, device, invariant), device, most=most)()
        return
    prepared = prepare_rows(op, rows, vectors, flags, invariant)
    assert prepared.binding is not None
    pointers = [t.data_ptr() - offset for t, offset in zip(rows, prepared.offsets, strict=True)]
    pointers += [v.data_ptr() for v in vectors]
    index, n_rows = first.get_device(), first.shape[0]
    with on_device(index):
        stream = current_stream(index)
        prepared.binding.run(
            prepared.programs(n_rows, most), stream, *pointers, n_rows, *prepared.scalars, *numbers
        )  # fmt: skip


_prepared: dict[tuple[Any, ...], Prepared] = {}


def prepare_rows(
    op: RowOp, rows: tuple[Tensor, ...], vectors: tuple[Tensor, ...], flags: Flags, invariant: bool
) -> Prepared:
    """The prepared launch for such rows and vectors on a GPU: planned and compiled the first time, then remembered."""
    of_vectors = tuple((v.dtype, op.aligned and v.data_ptr() % 16 == 0) for v in vectors)
    index = rows[0].get_device()
    key = (op, flags, invariant, index, rows[0].shape[1], *(layout_key(t) for t in rows), of_vectors)
    return _prepared.get(key) or _prepare(key, op, rows, of_vectors, flags, invariant, index)


def _prepare(
    key: tuple[Any, ...],
    op: RowOp,
    rows: tuple[Tensor, ...],
    vectors: Pointers,
    flags: Flags,
    invariant: bool,
    index: int,
) -> Prepared:
    with compiling.lock:
        if key in _prepared:
            return _prepared[key]
        device = device_of(rows[0])
        found = _described(op, rows, op.plan(rows, device, invariant), device, flags)
        with on_device(index):
            pointers = row_pointers(found.plan, tuple(t.dtype for t in rows)) + vectors
            compiled = compiling.compile_kernel(found.kernel, pointers, found.meta, index)
        if len(_prepared) >= compiling.CAPACITY:
            _prepared.clear()
        bound = compiling.bind(compiled)
        _prepared[key] = Prepared(
            found.kernel, found.plan, found.meta, found.scalars, found.n_splits, found.offsets, bound
        )
        return _prepared[key]


def row_pointers(plan: Plan, dtypes: tuple[torch.dtype, ...]) -> Pointers:
    """What a kernel of this plan is compiled for, of row tensors of such dtypes."""
    return tuple((dtype, plan.vec * dtype.itemsize % 16 == 0) for dtype in dtypes)


_HERE = nullcontext()


def on_device(index: int) -> AbstractContextManager[Any]:
    """The device as the current one, at no cost where it is."""
    return _HERE if current_device() == index else torch.cuda.device(index)


# --- kernels of one program over vectors ------------------------------------------------------------------------------


def flat_launch(
    kernel: Kernel, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], flags: Flags, num_warps: int, device: Device
) -> Launch:
    """The launch of a kernel of one program over vectors, as a record."""
    meta = {**dict(flags), "num_warps": num_warps}
    if device.kind == "cuda":
        ctas = meta["CTAS"] if kernel().declaration.on_cluster else 1
        meta |= dict(num_ctas=ctas, launch_pdl=meta.get("WAITS", False))
    meta |= device.options()
    return Launch(kernel(), (1,), (*tensors, *numbers), meta)


def launch_flat(
    kernel: Kernel, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], flags: Flags, num_warps: int
) -> None:
    """Runs a kernel of one program over vectors; KernelUnavailable as `launch_rows`."""
    first = tensors[0]
    if first.device.type == "cpu":
        flat_launch(kernel, tensors, numbers, flags, num_warps, device_of(first))()
        return
    index = first.get_device()
    key = (kernel, flags, index, tuple(t.dtype for t in tensors))
    binding = _flat.get(key)
    with on_device(index):
        if binding is None:
            made = flat_launch(kernel, tensors, numbers, flags, num_warps, device_of(first))
            pointers = tuple((t.dtype, False) for t in tensors)
            with compiling.lock:
                compiled = compiling.compile_kernel(made.kernel, pointers, made.meta, index)
                binding = _flat[key] = compiling.bind(compiled)
        binding.run(1, current_stream(index), *(t.data_ptr() for t in tensors), *numbers)


_flat: dict[tuple[Any, ...], Binding] = {}


# --- what a launch would be -------------------------------------------------------------------------------------------


def planned(
    op: RowOp, rows: tuple[Tensor, ...], vectors: tuple[torch.dtype, ...], flags: Flags, on: Tensor
) -> Plan | str:
    """The plan for such rows, or why its kernel did not compile in this process.

    rows: they may be meta tensors. vectors: the dtypes of the other pointers. on: a tensor on a device with kernels.
    """
    device = device_of(on)
    plan = op.plan(rows, device, is_batch_invariant())
    try:
        kernel = op.kernel(plan)
    except KernelUnavailable as error:
        return str(error)
    if device.kind == "interpreter":
        return plan
    pointers = row_pointers(plan, tuple(t.dtype for t in rows)) + tuple((dtype, op.aligned) for dtype in vectors)
    meta = meta_of(kernel, plan, device, flags)
    return compiling.compile_failure(kernel, pointers, meta, on.get_device()) or plan
