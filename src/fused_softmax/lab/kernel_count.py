"""How many kernels an op can ask for: distinct ones over 1,000 random widths, as a table of docs/host-time.md.

    python -m fused_softmax.lab.kernel_count [--check]

Rows are contiguous, on an H200. Two launches have one kernel where Triton compiles it once: the same function,
constexprs, launch options, pointer dtypes and known alignment. No kernel is compiled here.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_softmax.launch import cross_entropy, loss_kernels, masked_softmax, row_statistics
from fused_softmax.launch.launcher import RowOp, meta_of
from fused_softmax.launch.options import CrossEntropy, Flags
from fused_softmax.launch.softmax import softmax_op
from fused_softmax.planning.types import DEVICES, Device

WIDTHS, LARGEST, SEED = 1000, 262_144, 16
# A kernel takes 0.3 to 2 s to compile. An op that meets all widths there are then compiles for at most four minutes,
# once, as Triton keeps kernels on disk; a model meets a few widths.
TARGET = 120
PAGE = Path("docs/host-time.md")
BEGIN, END = "<!-- kernels: python -m fused_softmax.lab.kernel_count -->", "<!-- end of kernels -->"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Find = Callable[[Tensor, Device], tuple[RowOp, tuple[Tensor, ...], Flags]]


def _loss(gradient: bool) -> Find:
    def find(x: Tensor, device: Device) -> tuple[RowOp, tuple[Tensor, ...], Flags]:
        op = CrossEntropy(x, None, None, -100, "mean", 0.0, None, 0.0)
        written = cross_entropy.WITH_GRADIENT[op.kind.arithmetic]
        if gradient and written.plan((x, x), device, False).regime != "two_pass":
            return written, (x, x), loss_kernels.with_gradient_flags(op.kind)
        return cross_entropy.FORWARD[op.kind.arithmetic], (x,), op.kind.flags

    return find


def _softmax(log: bool, backward: bool) -> Find:
    return lambda x, device: (softmax_op(log, backward)[0], (x,) * (3 if backward else 2), (("LOG", log),))


def _statistics(picks: int) -> Find:
    flags = (("PICKS", picks), ("ENTROPY", False), ("RANK", False), ("SCALE", 0), ("KEEP_MOMENTS", False))
    return lambda x, device: (row_statistics.FORWARD, (x,), flags)


def _masked(queries: int) -> Find:
    """Causal scores of so many queries, or 0: of as many as columns."""
    mask = (("MASK", 0), ("MASK_COLS", 0), ("MASK_VEC", 1), ("MASK_ROWS", 0))
    flags = (*mask, ("CAUSAL", True), ("ZERO", False))

    def find(x: Tensor, device: Device) -> tuple[RowOp, tuple[Tensor, ...], Flags]:
        n_cols = x.shape[-1]
        scores = torch.empty(1, queries or n_cols, n_cols, dtype=x.dtype, device="meta")
        return masked_softmax.causal_op(scores), (x, x), flags

    return find


FIND: dict[str, Find] = {
    "softmax": _softmax(False, False),
    "softmax, backward": _softmax(False, True),
    "log_softmax": _softmax(True, False),
    "log_softmax, backward": _softmax(True, True),
    "logsumexp": _statistics(0),
    "token_logprobs": _statistics(1),
    "cross_entropy": _loss(False),
    "cross_entropy with its gradient": _loss(True),
    "masked_softmax, causal": _masked(0),
    "masked_softmax, causal, 30 queries": _masked(30),
}


def widths() -> list[int]:
    """1,000 widths from 1 to 262,144, as many in each octave."""
    drawn = random.Random(SEED)
    return [int(LARGEST ** drawn.random()) for _ in range(WIDTHS)]


def kernels(op: str, dtype: torch.dtype, device: Device = DEVICES["sm_90"]) -> set[tuple[Any, ...]]:
    """What tells the kernels of an op apart, over the widths."""
    memory, found = torch.empty(4 * LARGEST, dtype=dtype), set()
    for n_cols in widths():
        rows = memory[: 2 * n_cols].view(2, n_cols)
        row_op, tensors, flags = FIND[op](rows, device)
        plan = row_op.plan(tensors, device, False)
        kernel = row_op.kernel(plan)
        pointers = row_op.pointers(plan, tuple(t.dtype for t in tensors), (), flags)
        found.add((kernel, tuple(meta_of(kernel, plan, device, flags).items()), pointers))
    return found


def table() -> Iterator[str]:
    """The lines of the Markdown table."""
    yield f"| kernels over {WIDTHS:,} widths | {' | '.join(DTYPES)} |"
    yield "|---|" + "---:|" * len(DTYPES)
    for op in FIND:
        yield f"| {op} | {' | '.join(str(len(kernels(op, dtype))) for dtype in DTYPES.values())} |"


def main(check: bool, page: Path = PAGE) -> int:
    """Writes the table into the page, or compares it; 1 where they differ."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    new = f"{before}{BEGIN}\n{chr(10).join(table())}\n{END}{rest.split(END)[1]}"
    if check:
        if new != text:
            print(f"{page} is not what python -m fused_softmax.lab.kernel_count writes", file=sys.stderr)
        return int(new != text)
    page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main("--check" in sys.argv[1:]))
