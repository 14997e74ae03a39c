"""The launches of an op, or of a lesson's kernel, for a GPU that is not here: they are compiled, and not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fused_softmax.lab import lessons
from fused_softmax.lab.bench.inputs import DTYPES
from fused_softmax.lab.bench.ops import OPS
from fused_softmax.lab.bench.systems import LESSON_NUMBERS
from fused_softmax.lab.grading.subjects import SUBJECTS
from fused_softmax.lab.plans import described_rows
from fused_softmax.launch import cross_entropy, loss_kernels, masked_softmax, row_statistics
from fused_softmax.launch.compile import Launch
from fused_softmax.launch.launcher import RowOp, row_launch
from fused_softmax.launch.masks import describe_mask
from fused_softmax.launch.softmax import softmax_launch, softmax_op
from fused_softmax.planning.types import DEVICES, Device, Plan

# an op of the benchmark -> how many tensors of rows its kernel takes
EXPLAINED: Mapping[str, int] = {
    "softmax": 2,
    "log_softmax": 2,
    "logsumexp": 1,
    "softmax_backward": 3,
    "log_softmax_backward": 3,
    "cross_entropy": 2,
    "cross_entropy_forward": 1,
    "token_logprobs": 1,
    "masked_softmax_causal": 2,
    "masked_softmax_additive": 2,
    "masked_softmax_boolean": 2,
    "masked_softmax_bias": 2,
    "masked_softmax_causal_backward": 3,
    "masked_softmax_additive_backward": 3,
}
# masks that are data: (dtype, or None for the scores'; its shape next to scores of 2 x 2 x 4 rows)
_MASKS: Mapping[str, tuple[torch.dtype | None, tuple[int, ...]]] = {
    "masked_softmax_additive": (None, (4,)),
    "masked_softmax_boolean": (torch.bool, (4,)),
    "masked_softmax_bias": (None, (1, 2, 4)),
}


def row_op(op: str) -> RowOp:
    """The planner and the kernel of an op; KeyError for an op that is not explained."""
    if op in SOFTMAX:
        return softmax_op(*SOFTMAX[op])[0]
    if op.startswith("masked"):
        # a gradient reads no additive mask
        kind = 0 if op not in _MASKS else 1 if _MASKS[op][0] is torch.bool else 2
        if op.endswith("backward"):
            return (masked_softmax.CAUSAL_BACKWARD if "causal" in op else masked_softmax.BACKWARD)[0]
        return masked_softmax.CAUSAL if "causal" in op else masked_softmax.FORWARD[kind]
    others = {
        "cross_entropy": cross_entropy.WITH_GRADIENT["exponential"],
        "cross_entropy_forward": cross_entropy.FORWARD["exponential"],
        "token_logprobs": row_statistics.FORWARD,
        "logsumexp": row_statistics.FORWARD,
    }
    return others[op]


SOFTMAX = {f"{'log_' * log}softmax{'_backward' * back}": (log, back) for log in (False, True) for back in (False, True)}


def plan_of(op: str, n_cols: int, dtype: str, device: Device) -> Plan:
    """The plan of contiguous, aligned rows; NotImplementedError where PyTorch's own kernel runs."""
    rows = tuple(torch.empty(4, n_cols, dtype=DTYPES[dtype], device="meta") for _ in range(EXPLAINED[op]))
    return row_op(op).plan(rows, device, False)


def op_launch(op: str, n_cols: int, dtype: str, device: Device) -> Launch:
    """The launch of an op's main kernel with its default options."""
    rows = tuple(torch.empty(16, n_cols, dtype=DTYPES[dtype]) for _ in range(EXPLAINED[op]))
    plan, number, ids = plan_of(op, n_cols, dtype, device), torch.zeros(16), torch.zeros(16, dtype=torch.int64)
    if op in SOFTMAX:
        log, backward = SOFTMAX[op]
        return softmax_launch(rows, plan, log=log, backward=backward, device=device)
    if op.startswith("cross_entropy"):
        loss = cross_entropy.CrossEntropy(ids, None, None, -100, "mean", 0.0, None, 0.0)
        numbers, vectors = (loss.ignore_index, *loss.numbers), (*loss.vectors(number), number, number)
        if op == "cross_entropy_forward":
            return row_launch(row_op(op), rows, vectors, numbers, loss.kind.flags, plan, device)
        flags = loss_kernels.with_gradient_flags(loss.kind)
        numbers = loss_kernels.with_gradient_numbers(loss)
        return row_launch(row_op(op), rows, (*vectors, number), numbers, flags, plan, device)
    if op in ("token_logprobs", "logsumexp"):
        picks = op == "token_logprobs"
        flags = (("PICKS", int(picks)), ("ENTROPY", False), ("RANK", False), ("SCALE", 0), ("KEEP_MOMENTS", picks))
        if plan.part_cols:
            return row_launch(row_op(op), rows, (number, number), (1.0,), flags, plan, device)
        read = (number, number, number, ids[:, None] if picks else number, number, number)
        return row_launch(row_op(op), rows, read, (int(picks), 1.0), flags, plan, device)
    return _masked_launch(op, rows, plan, device)


def _masked_launch(op: str, rows: tuple[torch.Tensor, ...], plan: Plan, device: Device) -> Launch:
    x, mask, forward = rows[0].view(2, 2, 4, -1), None, not op.endswith("backward")
    if op in _MASKS:
        dtype, shape = _MASKS[op]
        mask = torch.zeros(*shape, x.shape[-1], dtype=dtype or x.dtype)
    read, flags, _ = describe_mask(mask, x, plan, rows[0], forward=forward)
    flags = (*flags, ("CAUSAL", "causal" in op), *((("ZERO", False),) if forward else ()))
    return row_launch(row_op(op), rows, (read,), (), flags, plan, device)


def as_called(launch: Launch) -> Launch:
    """The launch with the argument types that a call compiles for, and a value for each number that it lacks.

    Kernels are compiled from their declaration. Here Triton takes a type from a value: 64 bits need a large one.
    """
    large, args = 1 << 40, list(launch.args)
    for i, argument in enumerate(launch.kernel.declaration.arguments.values()):
        if i >= len(args):
            args.append(0.5 if argument.type == "fp32" else 3)
        if argument.type == "i64" and isinstance(args[i], int):
            args[i] += large
    return launch._replace(args=tuple(args))


class NoKernel(Exception):
    """A system that launches no kernel of this package; the message says why."""


def launches_of(request: Mapping[str, Any]) -> Sequence[Launch]:
    """The launches of a request {system, op, dtype, n_rows, n_cols, target}; NoKernel where there are none."""
    system, n_cols, dtype = request["system"], request["n_cols"], request["dtype"]
    if system == "fused_softmax":
        return [as_called(op_launch(request["op"], n_cols, dtype, DEVICES[request["target"]]))]
    x, y = described_rows(request["n_rows"], n_cols, dtype)
    if system in SUBJECTS:
        return lessons.load(SUBJECTS[system]).launches_for(x)
    if system not in LESSON_NUMBERS:
        raise NoKernel("not a kernel of this package")
    lesson = lessons.load(LESSON_NUMBERS[system])
    make = lesson.published_launches if system == "05_published" else getattr(lesson, "launches", None)
    if make is None:
        raise NoKernel("eager passes: no kernel of its own")
    return make(x, y)


def moved_elements(op: str, n_rows: int, n_cols: int) -> tuple[int, int]:
    """(read, written) elements that any implementation of the op must move."""
    read, written = OPS[op].elements(n_rows, n_cols)
    return read, written
