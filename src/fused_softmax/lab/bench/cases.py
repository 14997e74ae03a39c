"""Which shapes are measured, and why: frozen cases in named tables.

A table fixes the systems it compares, the seconds that one system may take in one case, and how time is taken:
'events' (CUDA events around eager calls, for cases far larger than the L2), 'graph' (replay of a captured CUDA graph,
for cases so short that the host would be measured instead), 'graph_cold' (the same with nothing of the case in the L2),
'host' (the time until an eager call returns) or 'first_call' (one call in a process that finds no kernel compiled).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fused_softmax.lab.bench.inputs import DTYPES, SHORT, Scores, excerpt, load_tensors, one_input
from fused_softmax.lab.bench.ops import AUTOGRAD, OPS, family
from fused_softmax.lab.bench.shapes import LAYOUTS, MOST, OF_IMAGES, random_shapes, shaped
from fused_softmax.lab.bench.workload import Op

TimedBy = Literal["events", "graph", "graph_cold", "host", "first_call"]
ELEMENTS = 2**28

LADDER_WIDTHS = (256, 1000, 1024, 4096, 8192, 16384, 32768, 50257, 65536, 128256, 131072, 151936, 262144)
FORWARD_WIDTHS = (
    *(256, 512, 1000, 1024, 2048, 3000, 4096, 8192, 12288, 16384, 32000, 32768, 50257, 65536, 100277, 128256),
    *(131072, 151936, 200019, 202048, 256000, 262144, 524288, 1048576),
)
VOCABULARIES = {32000: "Llama 2", 50257: "GPT-2", 100277: "cl100k", 128256: "Llama 3", 151936: "Qwen", 256000: "Gemma"}
SWEEP = "width sweep"
LOSS_SHAPES = ((32768, 4096), (8192, 32000), (8192, 50257), (4096, 128256), (4096, 151936), (2048, 262144))
LOSS_FAMILIES = ("cross_entropy", "token_logprobs", "masked_softmax")
# columns of square attention scores, heads of them until there are 2^28 elements
MASKED_WIDTHS = (1024, 2047, 2048, 4096, 8192)
FEW_ROWS = (1, 16, 128, 512, 1024)
FEW_ROWS_WIDTHS = (256, 1000, 2048, 4096, 8192, 16384, 32000, 50257, 65536, 128256, 151936, 262144)
# (fewest, most) columns that random widths are drawn from, by family of ops
RANDOM_RANGE = (256, 262_144)
RANDOM_RANGES = {
    "cross_entropy": (4096, 262_144),
    "token_logprobs": (4096, 262_144),
    "masked_softmax": (256, 16_384),
}
# (dtype, n_rows, n_cols) that a process calls before it times the first call of another shape
TINY = ("float16", 8, 128)
FIRST_ROWS = 64
FIRST_WIDTHS = {"bfloat16": (4096, 50257, 128256, 262144), "float32": (1024, 50257, 128256, 262144)}
# interpreted, a program costs about a millisecond, so a sweep on the CPU has few rows
CPU_WIDTHS = (256, 1000, 4096, 16384, 50257, 131072)
CPU_ROWS = 3


@dataclass(frozen=True)
class Case:
    """One shape to check and time; `source` is (file, tensor) for real data, None for random normal rows."""

    op: str
    dtype: str
    n_rows: int
    n_cols: int
    reason: str = ""
    timed_by: TimedBy = "events"
    source: tuple[str, str] | None = None
    scores: Scores | None = None  # of attention scores that are not square heads: batches, heads, queries
    # of a tensor (outer, n_cols, inner), which has outer x inner softmaxes, and how it lies; None: rows
    outer: int | None = None
    inner: int | None = None
    layout: str = ""

    @property
    def label(self) -> str:
        """Such as `softmax bf16 4096x128256`, or `softmax bf16 8x19x4096` of a tensor (outer, n_cols, inner)."""
        return f"{self.op} {SHORT[self.dtype]} {shape_text(self)}"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize


def shape_text(of: Any) -> str:
    """Such as `4096x128256`, or `8x19x4096 transposed`, of a case or a record."""
    if of.inner is None:
        return f"{of.n_rows}x{of.n_cols}"
    return f"{of.outer}x{of.n_cols}x{of.inner} {of.layout}".rstrip()


def workload(case: Case) -> Op:
    """The workload of a case: its op's entry, over rows or over a tensor (outer, n_cols, inner)."""
    if case.outer is None or case.inner is None:
        return OPS[case.op]
    return shaped(case.op, case.outer, case.inner, case.layout)


@dataclass(frozen=True)
class Table:
    """A named set of cases, the systems it compares (() means all that exist), and seconds per system and case."""

    name: str
    cases: tuple[Case, ...]
    systems: tuple[str, ...] = ()
    seconds: float = 0.2


def timed_by(n_rows: int, n_cols: int, itemsize: int) -> TimedBy:
    """Graph replay below 64 MiB of reads and writes, where launches would hide the kernel; events above."""
    return "graph" if 2 * n_rows * n_cols * itemsize < 2**26 else "events"


def sweep(
    op: str, dtypes: Iterable[str], widths: Iterable[int], elements: int = ELEMENTS, n_rows: int | None = None
) -> tuple[Case, ...]:
    """Cases of about `elements` elements (or of exactly n_rows rows) at each width, in each dtype."""
    cases = []
    for dtype in dtypes:
        for n_cols in widths:
            rows = n_rows if n_rows is not None else max(1, elements // n_cols)
            by = timed_by(rows, n_cols, DTYPES[dtype].itemsize)
            cases.append(Case(op, dtype, rows, n_cols, VOCABULARIES.get(n_cols, SWEEP), by))
    return tuple(cases)


def random_widths(count: int, seed: int, fewest: int, most: int) -> tuple[int, ...]:
    """`count` different widths of a seed, half of them odd, log-uniform from `fewest` to `most` - 1 columns.

    ValueError where there are fewer odd or even widths in the range.
    """
    odd, even = most // 2 - fewest // 2, (most + 1) // 2 - (fewest + 1) // 2
    if count // 2 > odd or (count + 1) // 2 > even:
        there = f"there are {odd} odd and {even} even widths from {fewest} to {most - 1}"
        raise ValueError(f"{there}: ask for fewer than {count}, or for a wider range")
    pick = random.Random(seed)
    widths: list[int] = []
    while len(widths) < count:
        width = int(fewest * (most / fewest) ** pick.random())
        width = width | 1 if len(widths) % 2 else max(fewest + fewest % 2, width & ~1)
        if width < most and width not in widths:
            widths.append(width)
    return tuple(sorted(widths))


def random_scores(n_cols: int, elements: int, pick: random.Random) -> Scores:
    """Batches, heads and queries of scores of n_cols columns, at least `elements` in all; one in three is square."""
    n_queries = n_cols if pick.random() < 1 / 3 else int(16 * 512 ** pick.random())
    n_batches = pick.choice((1, 2, 4))
    return n_batches, max(1, -(-elements // (n_batches * n_queries * n_cols))), n_queries


def random_cases(
    op: str,
    count: int,
    seed: int,
    dtypes: Sequence[str] = (),
    elements: int = ELEMENTS,
    n_rows: int | None = None,
    columns: tuple[int, int] | None = None,
) -> tuple[Case, ...]:
    """An op at `count` random widths of its range, in `dtypes` (default: bfloat16, and float32 except for losses).

    columns: the fewest and the most, in place of the op's range. Attention scores have random batches, heads and
    queries too, where n_rows is not given.
    """
    of, pick = family(op), random.Random(seed)
    cases = []
    limits = (columns[0], columns[1] + 1) if columns else RANDOM_RANGES.get(of, RANDOM_RANGE)
    for n_cols in random_widths(count, seed, *limits):
        scores = random_scores(n_cols, elements, pick) if of == "masked_softmax" and n_rows is None else None
        rows = math.prod(scores) if scores else max(1, elements // n_cols) if n_rows is None else n_rows
        why = f"random width, seed {seed}"
        if scores:
            why = f"random batches, heads, queries and columns {(*scores, n_cols)}, seed {seed}"
        for dtype in dtypes or (("bfloat16",) if of in LOSS_FAMILIES else ("bfloat16", "float32")):
            by = timed_by(rows, n_cols, DTYPES[dtype].itemsize)
            cases.append(Case(op, dtype, rows, n_cols, why, by, scores=scores))
    return tuple(cases)


def shaped_cases(op: str, count: int, seed: int, dtypes: Sequence[str] = (), elements: int = MOST) -> tuple[Case, ...]:
    """An op at `count` random shapes, in `dtypes` (default: one that is drawn for each shape)."""
    layouts = OF_IMAGES if op == "cross_entropy" else tuple(LAYOUTS)
    return tuple(
        shaped_case(op, dtype, s.outer, s.n_cols, s.inner, s.layout, f"random shape, seed {seed}")
        for s in random_shapes(count, seed, elements, layouts)
        for dtype in dtypes or (s.dtype,)
    )


def named_shapes(op: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> tuple[Case, ...]:
    """An op at shapes (outer, n_cols, inner), contiguous."""
    return tuple(
        shaped_case(op, dtype, outer, n_cols, inner, "", "given by --shapes")
        for outer, n_cols, inner in shapes
        for dtype in dtypes
    )


def shaped_case(op: str, dtype: str, outer: int, n_cols: int, inner: int, layout: str, reason: str) -> Case:
    """The case of an op over a tensor (outer, n_cols, inner) in a layout."""
    by = timed_by(outer * inner, n_cols, DTYPES[dtype].itemsize)
    return Case(op, dtype, outer * inner, n_cols, reason, by, outer=outer, inner=inner, layout=layout)


PEERS = ("fused_softmax", "torch", "torch.compile", "liger", "quack")
# the systems that take more than rows
SHAPE_PEERS = ("fused_softmax", "torch", "torch.compile")
# (outer, n_cols, inner): images with few and many classes, long columns, tall and narrow, odd sizes
SHAPES = (
    *((16, 19, 2**19), (256, 64, 2**14), (8, 150, 2**18), (64, 1000, 1024), (32, 2048, 1024), (1, 4096, 32768)),
    *((2, 50257, 1024), (1, 2**22, 32), (16, 21, 513 * 513)),
)


def table(name: str, op: str = "softmax") -> Table:
    """The table of that name for an op; raises KeyError with the names there are."""
    both, all_dtypes = ("bfloat16", "float32"), ("bfloat16", "float16", "float32")
    if name == "ladder":
        return Table(name, sweep(op, both, LADDER_WIDTHS))
    if name in ("forward", op):
        # 0.06 s are a hundred rounds of the narrow widths' quarter of a millisecond
        return Table("forward", sweep(op, all_dtypes, FORWARD_WIDTHS), PEERS, 0.06)
    if name == "losses":
        return Table(name, loss_cases(op), (), 0.06)
    if name == "random":
        cases = sweep(op, both, random_widths(10, 2024, 300, 262_144))
        return Table(name, tuple(replace(c, reason="a width that no one tuned for") for c in cases), PEERS)
    if name == "shapes":
        # one program holds the classes of a loss
        named = [shape for shape in SHAPES if op != "cross_entropy" or shape[1] <= 1000]
        return Table(
            name, tuple(shaped_case(op, d, *shape, "", "named") for shape in named for d in both), SHAPE_PEERS, 0.1
        )
    if name in ("few_rows", "few_rows_cold"):
        by: TimedBy = "graph" if name == "few_rows" else "graph_cold"
        shapes = [(r, c) for c in FEW_ROWS_WIDTHS for r in FEW_ROWS]
        return Table(name, tuple(Case(op, d, r, c, "few rows", by) for d in both for r, c in shapes), PEERS, 0.02)
    if name == "small":
        shapes = [(r, c) for c in (1, 5, 33, 100, 257, 1023, 4097) for r in (1, 2, 7, 64, 1000)]
        found = tuple(Case(op, d, r, c, "fusion must not lose here", "graph") for d in all_dtypes for r, c in shapes)
        return Table(name, found, ("fused_softmax", "torch"), 0.03)
    if name == "host":
        return Table(name, host_cases(op, all_dtypes), PEERS, 1.0)
    if name == "first_call":
        return Table(name, first_call_cases(op), ("fused_softmax", "torch"))
    if name == "cpu":
        real = real_cases(op) if OPS[op].inputs is one_input else ()
        return Table(name, (*real, *cpu_sweep(op)))
    raise KeyError(f"no table named {name!r}: there are {', '.join(TABLES)}, and {op!r} for 'forward'")


TABLES = (
    "ladder", "forward", "losses", "random", "shapes", "few_rows", "few_rows_cold", "small", "host", "first_call",
    "cpu",
)  # fmt: skip


def host_cases(op: str, dtypes: Iterable[str]) -> tuple[Case, ...]:
    """8 x 128: one eager call; and, for an op that has it, forward and backward through autograd."""
    found = []
    for name in (name for name in (op, f"{op}_autograd") if name in OPS):
        reason = "forward and backward through autograd" if name in AUTOGRAD else "host time of one eager call"
        found += [Case(name, dtype, 8, 128, reason, "host") for dtype in dtypes]
    return tuple(found)


def first_call_cases(op: str) -> tuple[Case, ...]:
    """A process's very first call, then first calls of new shapes, of the op and of its backward where it has one."""
    found = [Case(op, *TINY, "very first call of a process", "first_call")]
    for name in (name for name in (op, f"{op}_backward") if name in OPS):
        shapes = [(dtype, FIRST_ROWS, n_cols) for dtype, widths in FIRST_WIDTHS.items() for n_cols in widths]
        found += [Case(name, *shape, "first call of a new shape", "first_call") for shape in shapes]
    return tuple(found)


def loss_cases(op: str) -> tuple[Case, ...]:
    """bfloat16 logits of real vocabularies and square attention scores, of the family of `op`; of all for softmax."""
    families = {family(op)} & set(LOSS_FAMILIES) or set(LOSS_FAMILIES)
    found = []
    for name in (name for name in OPS if family(name) in families):
        masked = family(name) == "masked_softmax"
        square = tuple((max(1, ELEMENTS // w**2) * w, w) for w in MASKED_WIDTHS)
        for n_rows, n_cols in square if masked else LOSS_SHAPES:
            reason = "square attention scores" if masked else VOCABULARIES.get(n_cols, SWEEP)
            found.append(Case(name, "bfloat16", n_rows, n_cols, reason))
    return tuple(found)


def cpu_sweep(op: str) -> tuple[Case, ...]:
    """The interpreter's sweep: few rows, the widths that matter; float32 only where it differs (tails, many tiles)."""
    return (
        *sweep(op, ("bfloat16",), CPU_WIDTHS, n_rows=CPU_ROWS),
        *sweep(op, ("float32",), (1000, 50257), n_rows=CPU_ROWS),
    )


def real_cases(op: str, file: Path | None = None) -> tuple[Case, ...]:
    """One case for each floating tensor of at least one dimension in a .safetensors, .npy or .pt file."""
    path = excerpt() if file is None else file
    found = []
    for name, tensor in load_tensors(path).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        n_cols = tensor.shape[-1]
        by = timed_by(tensor.numel() // max(n_cols, 1), n_cols, tensor.element_size())
        found.append(Case(op, dtype, tensor.numel() // max(n_cols, 1), n_cols, f"real: {name}", by, (str(path), name)))
    return tuple(found)
