"""The launches of an op, or of a lesson's kernel, for a GPU that is not here: they are compiled, and not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fused_softmax.lab.bench.inputs import DTYPES
from fused_softmax.lab.bench.ops import OPS
from fused_softmax.launch import cross_entropy, masked_softmax, row_statistics
from fused_softmax.launch.compile import Launch
from fused_softmax.launch.launcher import RowOp, row_launch
from fused_softmax.launch.softmax import softmax_launch, softmax_op
from fused_softmax.planning.types import DEVICES, Device, Plan

# an op of the benchmark -> how many tensors of rows its kernel takes
EXPLAINED: Mapping[str, int] = {
    "softmax": 2,
    "log_softmax": 2,
    "softmax_backward": 3,
    "log_softmax_backward": 3,
    "cross_entropy": 2,
    "cross_entropy_forward": 1,
    "token_logprobs": 1,
    "masked_softmax_causal": 2,
    "masked_softmax_causal_backward": 3,
}


def row_op(op: str) -> RowOp:
    """The planner and the kernel of an op; KeyError for an op that is not explained."""
    softmax = {
        f"{'log_' * log}softmax{'_backward' * backward}": softmax_op(log, backward)[0]
        for log in (False, True)
        for backward in (False, True)
    }
    others = {
        "cross_entropy": cross_entropy.WITH_GRADIENT["exponential"],
        "cross_entropy_forward": cross_entropy.FORWARD["exponential"],
        "token_logprobs": row_statistics.FORWARD,
        "masked_softmax_causal": masked_softmax.FORWARD[False],
        "masked_softmax_causal_backward": masked_softmax.BACKWARD[False],
    }
    return {**softmax, **others}[op]


def plan_of(op: str, n_cols: int, dtype: str, device: Device) -> Plan:
    """The plan of contiguous, aligned rows; NotImplementedError where PyTorch's own kernel runs."""
    rows = tuple(torch.empty(4, n_cols, dtype=DTYPES[dtype], device="meta") for _ in range(EXPLAINED[op]))
    return row_op(op).plan(rows, device, False)


def op_launch(op: str, n_cols: int, dtype: str, device: Device) -> Launch:
    """The launch of an op's main kernel with its default options; a mask's order of rows is left out."""
    rows = tuple(torch.empty(4, n_cols, dtype=DTYPES[dtype]) for _ in range(EXPLAINED[op]))
    plan, number, ids = plan_of(op, n_cols, dtype, device), torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    if op.startswith(("softmax", "log_softmax")):
        return softmax_launch(rows, plan, log=op.startswith("log"), backward=op.endswith("backward"), device=device)
    if op.startswith("cross_entropy"):
        loss = cross_entropy.CrossEntropy(ids, None, None, -100, "mean", 0.0, None, 0.0)
        numbers, vectors = (loss.ignore_index, *loss.numbers), (*loss.vectors(number), number, number)
        if op == "cross_entropy_forward":
            return row_launch(row_op(op), rows, vectors, numbers, loss.kind.flags, plan, device)
        flags = cross_entropy.with_gradient_flags(loss.kind)
        return row_launch(row_op(op), rows, (*vectors, number), numbers, flags, plan, device)
    if op == "token_logprobs":
        flags = (("PICKS", 1), ("ENTROPY", False), ("SCALE", 0), ("KEEP_MOMENTS", True))
        return row_launch(
            row_op(op), rows, (number, number, number, ids[:, None], number, number), (1, 1.0), flags, plan, device
        )
    flags = (("MASK", 0), ("MASK_COLS", 0), ("MASK_VEC", 1), ("MASK_ROWS", 0), ("CAUSAL", True), ("ZERO", False))
    return row_launch(row_op(op), rows, (rows[0],), (), flags, plan, device)


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
    return Launch(launch.kernel, launch.grid, tuple(args), launch.meta)


def launches_of(request: Mapping[str, Any]) -> Sequence[Launch]:
    """The launches of a request {system, op, dtype, n_rows, n_cols, target}."""
    device, n_cols, dtype = DEVICES[request["target"]], request["n_cols"], request["dtype"]
    if request["system"] == "fused_softmax":
        return [as_called(op_launch(request["op"], n_cols, dtype, device))]
    from fused_softmax.lab.resources import launches

    return launches(request["system"], dtype, request["n_rows"], n_cols, request["target"])


def moved_elements(op: str, n_rows: int, n_cols: int) -> tuple[int, int]:
    """(read, written) elements that any implementation of the op must move."""
    read, written = OPS[op].elements(n_rows, n_cols)
    return read, written
