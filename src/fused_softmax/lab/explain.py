"""`fused-softmax explain`: how a call would run on a GPU that need not be here, and its least time, with the reason.

The lines are the prediction of roofline/predict.py in words; `as_data` is the same as plain data, for JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from fused_softmax.lab.grading.subjects import SUBJECTS
from fused_softmax.lab.plans import plan_text
from fused_softmax.lab.roofline.gpus import GPUS, Gpu
from fused_softmax.lab.roofline.launches import EXPLAINED
from fused_softmax.lab.roofline.linear import LINEAR
from fused_softmax.lab.roofline.predict import OURS, Prediction, gpu_named, predict
from fused_softmax.lab.traffic import MODELS
from fused_softmax.launch.availability import KernelUnavailable
from fused_softmax.planning.types import VECTOR_BYTES

# devices that can be compiled for -> the GPU that stands for each
TARGETS: Mapping[str, str] = {gpu.target: name for name, gpu in reversed(list(GPUS.items()))}
OPERATIONS = tuple(EXPLAINED)
PASSES = {"copy": "a copy", "read": "a read", "add": "an addition of two tensors"}
SYSTEMS = (OURS, *(name for name in MODELS if name[0].isdigit()), *SUBJECTS)
__all__ = ["GPUS", "LINEAR", "OPERATIONS", "SYSTEMS", "TARGETS", "as_data", "explain_lines", "lines", "predicted"]


def predicted(
    n_rows: int, n_cols: int, dtype: str, gpu: str = "h200", op: str = "softmax", system: str = OURS
) -> Prediction:
    """The whole prediction of a call; the kernel is compiled in another process.

    KeyError for an unknown GPU; RuntimeError where "this" has no kernels; NotImplementedError where PyTorch's own
    kernel runs.
    """
    try:
        return predict(system, n_rows, n_cols, dtype, gpu, op, compile=True)
    except KernelUnavailable as error:
        raise NotImplementedError(str(error)) from None


def explain_lines(
    n_rows: int, n_cols: int, dtype: str, gpu: str = "h200", op: str = "softmax", system: str = OURS
) -> Iterator[str]:
    """The lines for (n_rows, n_cols) contiguous, aligned rows of `dtype`; errors as `predicted`, except the last."""
    try:
        yield from lines(predicted(n_rows, n_cols, dtype, gpu, op, system))
    except NotImplementedError as error:
        on = gpu_named(gpu).target
        yield f"{op} of {n_rows} x {n_cols} {dtype} on {on}: PyTorch's own kernel runs, because of {error}"


def lines(said: Prediction) -> Iterator[str]:
    """A prediction in words, a line for each question that it answers."""
    gpu, of = said.gpu, said.op if said.system == OURS else f"{said.op} by {said.system}"
    yield (
        f"{of} of {said.n_rows:,} x {said.n_cols:,} {said.dtype} on {gpu.name} ({gpu.target}), "
        f"rows aligned to {_aligned(said)} bytes"
    )
    if said.plan is not None:
        yield f"plan         {plan_text(said.plan)}"
        settings = {name: value for name, value in asdict(said.plan).items() if value and name not in ("regime", "why")}
        yield "             " + ", ".join(f"{name}={value}" for name, value in settings.items())
    yield from _bytes(said)
    total = said.operations * said.n_rows * said.n_cols
    side = "below" if said.intensity < gpu.ridge else "above"
    yield (
        f"operations   {said.operations} for each element, {total:.3g} in all; {said.intensity:.2f} for each byte, "
        f"{side} the ridge point of {gpu.ridge:.1f}"
    )
    yield f"floor        {said.floor.least:,.1f} us: {said.floor.binds} binds"
    source = "measured" if gpu.measured else f"an estimate from the datasheet's {gpu.datasheet_gbps:,.0f}"
    notes = {
        "bandwidth": f"the bytes at the {gpu.rate(said.passes):,.0f} GB/s of {PASSES[said.passes]} ({source})",
        "arithmetic": "instructions and exponentials at the rate of all multiprocessors",
        "latency": "by Little's law, with the bytes that are in flight",
        "launch": "a kernel that does nothing",
    }
    others = f", and {said.launches - 1} more launches" if said.launches > 1 else ""
    for name, us in said.floor.microseconds.items():
        yield f"    {name:10} {us:9,.1f} us, {notes[name]}{others}"
    yield from _compiled(said)


def _aligned(said: Prediction) -> int:
    step = said.n_cols * said.itemsize
    return min(VECTOR_BYTES, step & -step)


def _bytes(said: Prediction) -> Iterator[str]:
    asked, least = said.asked, said.least
    over = (asked.reads + asked.writes) / max(1, least.reads + least.writes)
    yield f"traffic      reads {asked.reads:,} and writes {asked.writes:,} elements, {over:.2f} x the least"
    kept = f"; {said.dram.kept / 1e6:,.1f} MB of the reads come from the L2" if said.dram.kept else ""
    yield f"bytes        {said.dram.read / 1e6:,.1f} MB from memory and {said.dram.written / 1e6:,.1f} MB to it{kept}"
    if said.dram.unsent:
        yield f"             {said.dram.unsent / 1e6:,.1f} MB of the writes are in the L2 when it ends"


def _compiled(said: Prediction) -> Iterator[str]:
    kernel, fit, flight = said.compiled, said.fit, said.in_flight
    if kernel is None:
        yield "compiled     five passes of PyTorch: no kernel of this package"
        return
    if kernel.failed or kernel.none:
        yield f"compiled     {kernel.failed or kernel.none}"
        return
    used = kernel.resources
    widest = {name: used[name][0][0] if used[name] else 0 for name in ("loads", "stores")}
    yield (
        f"compiled     {used['registers']} registers, {used['spilled_bytes']} bytes spilled, "
        f"{used['shared_bytes']:,} bytes of shared memory, widest load {widest['loads']} bytes, "
        f"widest store {widest['stores']} bytes, {used['num_warps']} warps, {used['num_ctas']} CTAs"
    )
    if kernel.instructions:
        if said.instructions is not None:
            each = said.instructions / sum(kernel.instructions.values())
            yield f"instructions {said.instructions:.1f} of a thread for each element:"
        else:
            each = 1.0
            yield "instructions of the program's text, a loop's once:"
        for kind, count in kernel.instructions.items():
            yield f"    {count * each:8,.2f} {kind}" if each != 1.0 else f"    {count:8,} {kind}"
    if fit is not None:
        allowed = ", ".join(f"{name} {count}" for name, count in fit.by.items())
        yield f"occupancy    {fit.programs} programs on a multiprocessor: {fit.limiter} allow no more ({allowed})"
    if flight is not None:
        word = "enough" if flight.enough else "too few"
        yield (
            f"in flight    {flight.bytes / 1e6:,.2f} MB, {flight.bytes_each:,} bytes for each program; Little's law "
            f"needs {flight.needed / 1e6:,.2f} MB ({said.gpu.gbps:,.0f} GB/s x {said.gpu.latency_ns:.0f} ns): {word}"
        )


def as_data(said: Prediction) -> dict[str, Any]:
    """A prediction as plain data. Bytes, microseconds; counts of elements; `compiled` is of one kernel."""
    gpu: Gpu = said.gpu
    data: dict[str, Any] = {
        "op": said.op, "system": said.system, "dtype": said.dtype, "n_rows": said.n_rows, "n_cols": said.n_cols,
        "gpu": {**asdict(gpu), "gflops": gpu.gflops, "ridge": gpu.ridge},
        "plan": asdict(said.plan) if said.plan is not None else None,
        "elements": {"read": said.asked.reads, "written": said.asked.writes},
        "least_elements": {"read": said.least.reads, "written": said.least.writes},
        "bytes": {
            "read": said.dram.read, "written": said.dram.written, "from_l2": said.dram.kept, "unsent": said.dram.unsent,
        },
        "operations": said.operations, "intensity": said.intensity,
        "floor": {"us": said.floor.least, "binds": said.floor.binds, "by": dict(said.floor.microseconds)},
        "compiled": None, "occupancy": None, "in_flight": None,
    }  # fmt: skip
    if said.compiled is not None:
        data["compiled"] = {**asdict(said.compiled), "instructions_per_element": said.instructions}
    if said.fit is not None:
        data["occupancy"] = {"programs": said.fit.programs, "limiter": said.fit.limiter, "by": dict(said.fit.by)}
    if said.in_flight is not None:
        flight = said.in_flight
        data["in_flight"] = {"bytes": flight.bytes, "bytes_each": flight.bytes_each, "needed": flight.needed}
    return data
