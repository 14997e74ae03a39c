"""Launches the kernels of losses and statistics: row tensors, then vectors of O(rows), then numbers.

All these kernels take their arguments in one order: pointers to rows, pointers to vectors, n_rows, n_cols, the rows'
strides, phase, n_splits where programs share a row, and the op's own numbers. So one function launches them all. As in
`launch`, what depends on widths, strides, alignment and dtypes alone is worked out once and kept under a key of those;
temperatures and the like travel with each call. Nothing is allocated here and no host waits: all of it can be captured
in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import launch
from .launch import Launch
from .problem import Device, Plan, Problem

# kernel -> its module
KERNELS = {
    "row_statistics": "statistics",
    "row_statistics_backward": "statistics",
    "cross_entropy_forward": "losses",
    "count_targets": "losses",
    "reduce_losses": "losses",
    "cross_entropy_resident": "loss_resident",
    "cross_entropy_backward": "loss_gradients",
    "scale_unless_one": "loss_gradients",
    "masked_softmax_forward": "masked",
    "masked_softmax_backward": "masked_gradient",
}
# targets outside the classes are asserted on the device, as torch's are, by the kernels that call `assert_inside`
ASSERTS = ("cross_entropy_forward", "cross_entropy_resident")
# kernels that walk a row: their loads are in registers before they are used, not staged in shared memory
STAGES = {"row_statistics": 3, "cross_entropy_forward": 3, "cross_entropy_backward": 1, "scale_unless_one": 1}
# programs of a launch that most often has nothing to do; 31 for each of an H200's multiprocessors
FEW_PROGRAMS = 4096

Flags = tuple[tuple[str, Any], ...]  # the kernel's own constexprs
Planner = Callable[[Problem, Device], Plan]


@dataclass(frozen=True)
class RowLaunch:
    """A launch but for pointers, the number of rows and the op's numbers."""

    kernel: Any
    plan: Plan
    meta: Mapping[str, Any]
    scalars: tuple[int, ...]  # n_cols, strides, phase, n_splits
    n_splits: int
    run: Callable[..., None] | None  # where compiled

    def programs(self, n_rows: int, most: int | None) -> int:
        needed = -(-n_rows // self.plan.rows) * self.n_splits
        return needed if most is None else min(needed, most)


_prepared: dict[tuple[Any, ...], RowLaunch] = {}


def kernel_named(name: str) -> Any:
    return launch.kernel_of(KERNELS[name], name)


def meta_of(name: str, plan: Plan, device: Device, flags: Flags) -> dict[str, Any]:
    """The constexprs that the kernel has, and the launch's own meta-parameters."""
    names = kernel_named(name).arg_names
    meta = dict(ROWS=plan.rows, CTAS=plan.ctas, LANES=plan.lanes // plan.parts, VEC=plan.vec, CHUNKS=plan.chunks)
    meta |= dict(PARTS=plan.parts, UNMASKED=plan.unmasked, EDGE=plan.edge, PTX=device.ptx, RECOMPUTE=plan.recompute)
    meta = {key: value for key, value in meta.items() if key in names} | dict(flags)
    meta["num_warps"] = plan.num_warps
    if "TRIGGER" in names:
        meta["TRIGGER"] = device.overlaps
    if device.kind == "cuda":
        if "CTAS" in names:
            meta["num_ctas"] = plan.ctas
        if plan.max_registers is not None:
            meta["maxnreg"] = device.registers_within(plan.max_registers, plan.num_warps)
    if device.kind != "interpreter" and name in ASSERTS:
        meta |= dict(debug=True, sanitize_overflow=False)
    return meta | device.options(STAGES.get(name))


def describe_launch(
    name: str, rows: tuple[Tensor, ...], plan: Plan, device: Device, flags: Flags
) -> tuple[dict[str, Any], tuple[int, ...], int]:
    """(meta, scalars, n_splits) of a launch over `rows`."""
    meta = meta_of(name, plan, device, flags)
    scalars = launch._run_time_arguments(plan, rows)
    n_splits = 1
    if "n_splits" in kernel_named(name).arg_names:
        n_splits = max(1, -(-rows[0].shape[1] // (plan.chunks * plan.lanes * plan.vec)))
        scalars = (*scalars, n_splits)
    return meta, scalars, n_splits


def row_launch(
    name: str,
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
    meta, scalars, n_splits = describe_launch(name, rows, plan, device, flags)
    phase = launch._run_time_arguments(plan, rows)[-1]
    starts = tuple(launch._shifted(t, phase) for t in rows) if phase else rows
    n_rows = rows[0].shape[0]
    record = RowLaunch(kernel_named(name), plan, meta, scalars, n_splits, None)
    args = (*starts, *vectors, n_rows, *scalars, *numbers)
    return Launch(record.kernel, (record.programs(n_rows, most),), args, meta)


def launch_rows(
    name: str,
    rows: tuple[Tensor, ...],
    vectors: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    flags: Flags,
    planner: Planner,
    *,
    most: int | None = None,
    invariant: bool = False,
    aligned: bool = False,
) -> None:
    """Runs a kernel over rows (n_rows, n_cols) with contiguous columns, on their device and current stream.

    vectors: contiguous; one that the flags leave unused may be any tensor. `most` bounds the number of programs;
    `aligned`: a vector at a multiple of 16 bytes is worth a kernel of its own.
    """
    first = rows[0]
    if first.shape[0] == 0:
        return
    if first.device.type == "cpu":
        device = launch._device_of(first)
        plan = planner(launch.problem_of(*rows, batch_invariant=invariant), device)
        row_launch(name, rows, vectors, numbers, flags, plan, device, most=most)()
        return
    index = first.get_device()
    layouts = tuple(launch._layout_key(t) for t in rows)
    of_vectors = tuple((v.dtype, aligned and v.data_ptr() % 16 == 0) for v in vectors)
    key = (name, flags, planner, invariant, index, first.shape[1], layouts, of_vectors)
    prepared = _prepared.get(key) or _prepare(key, name, rows, of_vectors, flags, planner, invariant)
    plan = prepared.plan
    phase = prepared.scalars[len(rows) + 1]
    pointers = [t.data_ptr() - phase * t.element_size() for t in rows] + [v.data_ptr() for v in vectors]
    n_rows = first.shape[0]
    assert prepared.run is not None
    with launch.on_device(index):
        stream = torch._C._cuda_getCurrentRawStream(index)
        prepared.run(prepared.programs(n_rows, most), stream, *pointers, n_rows, *prepared.scalars, *numbers)


def _prepare(
    key: tuple[Any, ...],
    name: str,
    rows: tuple[Tensor, ...],
    vectors: tuple[tuple[torch.dtype, bool], ...],
    flags: Flags,
    planner: Planner,
    invariant: bool,
) -> RowLaunch:
    with launch._lock:
        if key in _prepared:
            return _prepared[key]
        device = launch._device_of(rows[0])
        plan = planner(launch.problem_of(*rows, batch_invariant=invariant), device)
        meta, scalars, n_splits = describe_launch(name, rows, plan, device, flags)
        pointers = [*((t.dtype, plan.vec * t.element_size() % 16 == 0) for t in rows), *vectors]
        kernel = kernel_named(name)
        with torch.cuda.device(rows[0].device):
            compiled = launch.compile_kernel(kernel, tuple(pointers), meta, rows[0].get_device())
        if len(_prepared) >= launch.CAPACITY:
            _prepared.clear()
        _prepared[key] = RowLaunch(kernel, plan, meta, scalars, n_splits, launch._bind(compiled, ()).run)
        return _prepared[key]


def flat_launch(
    name: str, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], flags: Flags, num_warps: int, device: Device
) -> Launch:
    """The launch of a kernel of one program over vectors, as a record."""
    meta = {**dict(flags), "num_warps": num_warps}
    if device.kind == "cuda":
        meta |= dict(num_ctas=meta.get("CTAS", 1), launch_pdl=meta.get("WAITS", False))
    meta |= device.options()
    return Launch(kernel_named(name), (1,), (*tensors, *numbers), meta)


def launch_flat(name: str, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], flags: Flags, num_warps: int) -> None:
    """Runs a kernel of one program over vectors."""
    first = tensors[0]
    if first.device.type == "cpu":
        flat_launch(name, tensors, numbers, flags, num_warps, launch._device_of(first))()
        return
    index = first.get_device()
    key = (name, flags, index, tuple(t.dtype for t in tensors))
    run = _flat.get(key)
    with launch.on_device(index):
        if run is None:
            made = flat_launch(name, tensors, numbers, flags, num_warps, launch._device_of(first))
            pointers = tuple((t.dtype, False) for t in tensors)
            with launch._lock:
                compiled = launch.compile_kernel(made.kernel, pointers, made.meta, index)
                run = _flat[key] = launch._bind(compiled, ()).run
        stream = torch._C._cuda_getCurrentRawStream(index)
        run(1, stream, *(t.data_ptr() for t in tensors), *numbers)


_flat: dict[tuple[Any, ...], Callable[..., None]] = {}
