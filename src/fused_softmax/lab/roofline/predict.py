"""The prediction for one call: its plan, its bytes, what it compiles to, and its least time on a described GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fused_softmax.lab.bench.inputs import DTYPES
from fused_softmax.lab.bench.ops import OPS
from fused_softmax.lab.compiling import compiled
from fused_softmax.lab.cross_compile import MULTIPROCESSORS, Occupancy, Resources, occupancy
from fused_softmax.lab.grading.subjects import subject_named
from fused_softmax.lab.lessons import l11_a_row_over_gpus
from fused_softmax.lab.roofline import model
from fused_softmax.lab.roofline.compiled import Compiled
from fused_softmax.lab.roofline.gpus import GPUS, Gpu, this_gpu
from fused_softmax.lab.roofline.launches import EXPLAINED, moved_elements, plan_of
from fused_softmax.lab.traffic import MODELS, Traffic
from fused_softmax.launch.loss_kernels import SHARED, size_class
from fused_softmax.planning.types import DEVICES, Plan

OURS = "fused_softmax"
# float32 operations for each element, by the formula of each op: the exponential counts as one
OPERATIONS: Mapping[str, int] = {
    "softmax": 5, "log_softmax": 6, "logsumexp": 4, "softmax_backward": 4, "log_softmax_backward": 4,
    "cross_entropy": 7, "cross_entropy_forward": 5, "token_logprobs": 5, "masked_softmax_causal": 6,
    "masked_softmax_additive": 6, "masked_softmax_boolean": 6, "masked_softmax_bias": 6,
    "masked_softmax_causal_backward": 4, "masked_softmax_additive_backward": 4,
}  # fmt: skip
NO_EXPONENTIAL = ("softmax_backward", "masked_softmax_causal_backward", "masked_softmax_additive_backward")
# kernels of a call, one after another: those around a loss count targets, add up losses, and scale the gradient
LAUNCHES: Mapping[str, int] = {
    "01_naive": 5, "05_published": 2, "13_cross_entropy": 7, "cross_entropy": 5, "cross_entropy_forward": 2,
    "logsumexp": 2,
}  # fmt: skip
# and so many more where programs share the sums over rows: what programs counted and added is added up by kernels
# of their own, and a loss alone has its targets counted by one more
MORE_LAUNCHES: Mapping[str, int] = {"cross_entropy": 2, "cross_entropy_forward": 3}
# the plain pass that a lesson is like, if not a copy
PASSES: Mapping[str, str] = {"12_gradient": "add"}


@dataclass(frozen=True)
class Prediction:
    """What a call of one system must do. `plan` is of the shipped kernel; `compiled` and `in_flight` where asked."""

    system: str
    op: str
    dtype: str
    n_rows: int
    n_cols: int
    gpu: Gpu
    plan: Plan | None
    least: Traffic  # elements that any implementation must move
    asked: Traffic  # elements that this one requests
    dram: model.DramBytes
    operations: int  # for each element, by the formula
    exponentials: int
    floor: model.Floor
    compiled: Compiled | None = None
    fit: Occupancy | None = None
    in_flight: model.InFlight | None = None
    instructions: float | None = None  # for each element, of one thread; None where a loop hides it
    launches: int = 1
    passes: str = "copy"  # the plain pass with the same pattern: copy, read or add

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def intensity(self) -> float:
        return model.intensity(self.operations * self.n_rows * self.n_cols, self.dram.all)


def gpu_named(name: str) -> Gpu:
    """The GPU of that name, or this machine's for "this"; KeyError with the names, RuntimeError where there is none."""
    if name == "this":
        return _this()
    if name not in GPUS:
        raise KeyError(f"{name!r} is none of {', '.join(GPUS)}, this")
    return GPUS[name]


@functools.cache
def _this() -> Gpu:
    return this_gpu()


def least_bytes(op: str, n_rows: int, n_cols: int, dtype: str, gpu: str) -> model.DramBytes:
    """Bytes that any implementation of the op must move, over whatever dimension: each element once."""
    least, itemsize = Traffic(*moved_elements(op, n_rows, n_cols)), DTYPES[dtype].itemsize
    dram = model.DramBytes(least.reads * itemsize, least.writes * itemsize)
    return replace(dram, unsent=model.unsent_bytes((dram.written,), gpu_named(gpu)))


def predict(
    system: str, n_rows: int, n_cols: int, dtype: str, gpu: str | Gpu, op: str = "softmax", compile: bool = False
) -> Prediction:
    """Predict a call of `system` ("fused_softmax" or a lesson's) on contiguous, aligned rows.

    NotImplementedError where PyTorch's own kernel runs. With `compile` the kernel is compiled, in another process.
    """
    on = gpu_named(gpu) if isinstance(gpu, str) else gpu
    itemsize, cells = DTYPES[dtype].itemsize, n_rows * n_cols
    plan = plan_of(op, n_cols, dtype, DEVICES[on.target]) if system == OURS else None
    subject = subject_named(system)
    least = subject.moves(n_rows, n_cols) if subject else Traffic(*moved_elements(op, n_rows, n_cols))
    asked = least if subject else _asked(system, op, plan, least, n_rows, n_cols)
    passes = OPS[op].ceiling if system == OURS else PASSES.get(system, "copy")
    again = asked.reads > least.reads and system != "01_naive"
    kernel = fit = in_flight = None
    if (compile or again) and system != "01_naive":
        kernel = compiled(system, dtype, n_rows, n_cols, on.target, op)
    used = kernel.used if kernel is not None else None
    if used is not None:
        fit = occupancy(used, MULTIPROCESSORS[on.target])
        in_flight = _in_flight(used, fit, plan, n_rows, n_cols, itemsize, on)
    rows = (fit.programs if fit else 1) * on.multiprocessors // (plan.ctas if plan else 1)
    footprint = n_rows if system == "01_naive" else min(n_rows, max(1, rows))
    first = Traffic(least.reads, least.writes)
    dram = model.dram_bytes(asked, first.reads, itemsize, footprint, n_cols * itemsize, on)
    if system == "01_naive":  # five tensors pass through memory, unless all of them fit the L2
        dram = model.DramBytes(asked.reads * itemsize, asked.writes * itemsize)
    if system == "05_published":  # it leaves columns unwritten, so the benchmark fills its output with NaN first
        dram = model.DramBytes(dram.read, dram.written + cells * itemsize)
    if system == OURS and (other := OPS[op].other_bytes(n_rows, n_cols)):
        dram = model.DramBytes(dram.read + other, dram.written, dram.kept)
    # kernels that write a tensor each; the other kernels of a call write a number for each row
    tensors = cells * itemsize, asked.writes * itemsize
    of_rank = tensors[1] // l11_a_row_over_gpus.RANKS
    writers = {
        "01_naive": tensors[:1] * 3, "05_published": tensors, "11_over_gpus": (of_rank,) * l11_a_row_over_gpus.RANKS
    }.get(system, tensors[1:])  # fmt: skip
    dram = replace(dram, unsent=model.unsent_bytes(writers, on))
    instructions = _instructions(kernel, used, plan, n_cols)
    launches = LAUNCHES.get(op if system == OURS else system, 1)
    launches += plan is not None and plan.part_cols > 0  # the kernel that merges the parts
    if system == OURS and size_class(n_rows) == SHARED:
        launches += MORE_LAUNCHES.get(op, 0)
    exponentials = 0 if op in NO_EXPONENTIAL else 2 if plan is not None and plan.recompute else 1
    return Prediction(
        system, subject.function if subject else op, dtype, n_rows, n_cols, on, plan, least, asked, dram,
        OPERATIONS[op], exponentials,
        model.floor(
            dram.all, cells, on, instructions=instructions or OPERATIONS[op], exponentials=exponentials,
            in_flight=in_flight, passes=passes, launches=launches,
        ),
        kernel, fit, in_flight, instructions, launches, passes,
    )  # fmt: skip


def _asked(system: str, op: str, plan: Plan | None, least: Traffic, n_rows: int, n_cols: int) -> Traffic:
    if system != OURS:
        return MODELS[system](n_rows, n_cols)
    assert plan is not None
    if plan.regime != "two_pass" or OPS[op].ceiling == "read":
        return least
    # what is resident is read once
    share = 1 - min(1.0, plan.resident_chunks * plan.vectors_per_chunk * plan.vec * plan.ctas / n_cols)
    return Traffic(least.reads + int(share * least.reads), least.writes)


def _in_flight(
    used: Resources, fit: Occupancy, plan: Plan | None, n_rows: int, n_cols: int, itemsize: int, gpu: Gpu
) -> model.InFlight:
    """Bytes that all resident programs have requested before they wait: their rows, or the loads of one step."""
    threads = used.num_warps * MULTIPROCESSORS[gpu.target].warp_size
    text = threads * sum(size * count for size, count in used.loads)  # every load of the program text, once
    rows = plan.rows if plan is not None else 1
    slices = used.num_ctas
    each = min(text, max(1, rows * n_cols * itemsize // slices)) if text else n_cols * itemsize // slices
    programs = min(fit.programs * gpu.multiprocessors, -(-n_rows // rows) * slices)
    return model.InFlight(fit.programs, fit.limiter, each, float(programs * each), gpu.bytes_in_flight, fit.by)


def _instructions(kernel: Compiled | None, used: Resources | None, plan: Plan | None, n_cols: int) -> float | None:
    if kernel is None or used is None or not kernel.instructions or kernel.loops:
        return None
    threads = used.num_warps * 32 * used.num_ctas
    return sum(kernel.instructions.values()) * threads / (n_cols * (plan.rows if plan is not None else 1))


__all__ = ["EXPLAINED", "Prediction", "gpu_named", "least_bytes", "predict"]
