"""Elements that each system reads and writes, counted from its algorithm, and elements that any system must move.

M is the number of rows, N the number of columns.

Naive five passes read 5MN + 2M and write 3MN + 2M; one program (or cluster) that keeps the row on chip reads and writes
MN; three passes over chunks read 3MN, the online form 2MN. Counts are requests to memory. A second read may come from
the L2 and then costs less. Systems with an algorithm that this project does not define have no count (None).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fused_softmax.lab.bench.inputs import Scores, batches, queries


@dataclass(frozen=True)
class Traffic:
    """Elements read and written by one call."""

    reads: int
    writes: int


Model = Callable[[int, int], Traffic]


def naive(n_rows: int, n_cols: int) -> Traffic:
    """max: MN read, M written; subtract: MN + M, MN; exp: MN, MN; sum: MN, M; divide: MN + M, MN."""
    cells = n_rows * n_cols
    return Traffic(5 * cells + 2 * n_rows, 3 * cells + 2 * n_rows)


def one_read(n_rows: int, n_cols: int) -> Traffic:
    """The row stays on chip: read once, written once."""
    return Traffic(n_rows * n_cols, n_rows * n_cols)


def two_reads(n_rows: int, n_cols: int) -> Traffic:
    """Online softmax: (max, sum) in one pass over the row, the result in a second."""
    return Traffic(2 * n_rows * n_cols, n_rows * n_cols)


def three_reads(n_rows: int, n_cols: int) -> Traffic:
    """Chunks in three passes: max, then sum of exponentials, then the result."""
    return Traffic(3 * n_rows * n_cols, n_rows * n_cols)


def first_512_columns(n_rows: int, n_cols: int) -> Traffic:
    """The 'vectorized' kernel as published: a block of 128 x 4 columns and no loop."""
    covered = n_rows * min(n_cols, 512)
    return Traffic(covered, covered)


MODELS: dict[str, Model] = {
    "01_naive": naive,
    "02_one_row": one_read,
    "03_driver": one_read,
    "04_persistent": one_read,
    "05_published": first_512_columns,
    "05_vectorized": one_read,
    "06_three_pass": three_reads,
    "07_online": two_reads,
    "08_many_rows": one_read,
    "09_cluster": one_read,
    "liger": one_read,
    "quack": one_read,
}


def regime_traffic(regime: str, n_rows: int, n_cols: int) -> Traffic | None:
    """Traffic of our softmax by its plan's regime: two_pass reads the row twice, torch's own is not counted."""
    if regime == "two_pass":
        return two_reads(n_rows, n_cols)
    return one_read(n_rows, n_cols) if regime in ("warp", "block", "cluster") else None


def traffic(system: str, n_rows: int, n_cols: int, regime: str | None = None) -> Traffic | None:
    """Elements moved by one softmax call of `system` (ours: by its plan's regime); None without a model of it."""
    if system == "fused_softmax":
        return regime_traffic(regime, n_rows, n_cols) if regime else None
    model = MODELS.get(system)
    return model(n_rows, n_cols) if model else None


# --- elements that any implementation must read and write: (n_rows, n_cols) -> (read, written) ------------------------


def one_in_one_out(n_rows: int, n_cols: int, scores: Scores | None = None) -> tuple[int, int]:
    """As a copy."""
    return n_rows * n_cols, n_rows * n_cols


def two_in_one_out(n_rows: int, n_cols: int, scores: Scores | None = None) -> tuple[int, int]:
    """As an addition."""
    return 2 * n_rows * n_cols, n_rows * n_cols


def read_only(n_rows: int, n_cols: int) -> tuple[int, int]:
    """As a read."""
    return n_rows * n_cols, 0


def forward_and_backward(n_rows: int, n_cols: int) -> tuple[int, int]:
    """The forward as a copy, whose result autograd keeps; then result and gradient in, gradient out."""
    return 3 * n_rows * n_cols, 2 * n_rows * n_cols


def _visible(n_rows: int, n_cols: int, scores: Scores | None) -> int:
    """Elements that a causal mask does not hide: the columns of each row up to its query."""
    n_queries = queries(n_rows, n_cols, scores)
    return n_rows // max(n_queries, 1) * sum(min(q + 1, n_cols) for q in range(n_queries))


def causal(n_rows: int, n_cols: int, scores: Scores | None = None) -> tuple[int, int]:
    """Visible elements are read; all are written, zeros too."""
    return _visible(n_rows, n_cols, scores), n_rows * n_cols


def causal_gradient(n_rows: int, n_cols: int, scores: Scores | None = None) -> tuple[int, int]:
    """Visible elements of the result and of its gradient are read; all are written, zeros too."""
    return 2 * _visible(n_rows, n_cols, scores), n_rows * n_cols


def additive(n_rows: int, n_cols: int, scores: Scores | None = None) -> tuple[int, int]:
    """The scores, and the mask of one head once."""
    return (n_rows + queries(n_rows, n_cols, scores)) * n_cols, n_rows * n_cols


def biased(n_rows: int, n_cols: int, scores: Scores | None = None) -> tuple[int, int]:
    """The scores, and the bias of one batch once."""
    return (n_rows + n_rows // batches(n_rows, n_cols, scores)) * n_cols, n_rows * n_cols


def ids(n_rows: int, n_cols: int, scores: Scores | None = None) -> int:
    """Bytes of an int64 target, or id, of each row."""
    return 8 * n_rows


def ids_and_upstream(n_rows: int, n_cols: int, scores: Scores | None = None) -> int:
    """The same, and three float32 numbers of each row: upstream gradients of log-probability, entropy, logsumexp."""
    return (8 + 3 * 4) * n_rows


def boolean_mask(n_rows: int, n_cols: int, scores: Scores | None = None) -> int:
    """Bytes of the mask of one head."""
    return queries(n_rows, n_cols, scores) * n_cols
