"""Wrong answers to the lessons' puzzles: the right answer with a line changed, and the mistake that it makes."""

from __future__ import annotations

from dataclasses import dataclass

from fused_softmax.lab.grading import answer


@dataclass(frozen=True)
class Mutant:
    """Lesson `lesson`'s answer with `changes` (old text, new text)."""

    lesson: int
    mistake: str
    changes: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return f"{self.lesson:02}: {self.mistake}"

    def text(self) -> str:
        """The wrong file."""
        text = answer(self.lesson)
        for old, new in self.changes:
            assert old in text, (self.lesson, old)
            text = text.replace(old, new)
        return text


FILL = ', other=-float("inf")'
STORE_MASK = "denominator, mask=mask)"
OWN_MAXIMUM = "+= tl.exp(xs[c] - tl.max(xs[c]))"
ROUNDED_DOWN = "max(1, n_cols // (vectors * vec))"
SCALE = "exp(line_max - row_max) / row_sum"
STORE_ENDS = "    tl.store(y_ptr + start + end_cols, numerator_end / row_sum, mask=in_ends)\n"
FOUR_PASSES = (
    "    z = x - row_max[:, None]\n    numerator = z.exp()\n    denominator = numerator.sum(dim=1)\n"
    "    y = numerator / denominator[:, None]"
)
NO_MAX, UNFILLED, FILLED = "the maximum is not subtracted", "masked lanes hold 0", "masked lanes filled with +inf"
WRITES, READS = "the store reaches outside of the output", "the load reaches outside of its tensor"


def _m(lesson: int, mistake: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(lesson, mistake, changes)


MUTANTS: tuple[Mutant, ...] = (
    _m(1, NO_MAX, ("x - row_max[:, None]", "x * 1")),
    _m(1, "one maximum for all rows", ("x.amax(dim=1)", "x.amax().expand(x.shape[0])")),
    _m(
        1,
        "the sum runs over the rows",
        ("numerator.sum(dim=1)", "numerator.sum(dim=0)"),
        ("denominator[:, None]", "denominator"),
    ),
    _m(1, "the result is not divided by the sum", ("numerator / denominator[:, None]", "numerator")),
    _m(
        1,
        "fewer elements are read than five passes read",
        ("x.amax(dim=1)", "x.softmax(1)"),
        (FOUR_PASSES, "    y = row_max"),
    ),
    _m(2, UNFILLED, (FILL, ", other=0.0")),
    _m(2, FILLED, (FILL, ', other=float("inf")')),
    _m(2, NO_MAX, ("tl.exp(x - tl.max(x, axis=0))", "tl.exp(x)")),
    _m(2, WRITES, (STORE_MASK, "denominator)")),
    _m(2, READS, (f", mask=mask{FILL}", "")),
    _m(2, "the result is not divided by the sum", ("numerator / denominator", "numerator")),
    _m(2, "more is read than needed", ("    # end", "    tl.load(x_ptr + row * n_cols + cols, mask=mask)\n    # end")),
    _m(2, "a name that is not defined", ("mask = cols < n_cols", "inside = cols < n_cols")),
    _m(3, "the row stride is taken for n_cols", ("row * x_row_stride", "row * n_cols")),
    _m(3, "the output is written with the input's stride", ("row * y_row_stride", "row * x_row_stride")),
    _m(3, UNFILLED, (FILL, "")),
    _m(
        4,
        "no loop over rows",
        (
            "in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)",
            "in tl.range(tl.program_id(0), tl.num_programs(0), tl.num_programs(0)",
        ),
    ),
    _m(
        4,
        "every program does the same rows",
        ("tl.range(tl.program_id(0), n_rows, tl.num_programs(0)", "tl.range(0, n_rows, 1"),
    ),
    _m(4, "the last row is left out", ("tl.program_id(0), n_rows,", "tl.program_id(0), n_rows - 1,")),
    _m(5, "as published: 512 columns of the row", ("triton.next_power_of_2(triton.cdiv(n_cols, BLOCK_SIZE))", "4")),
    _m(
        5,
        "one axis of the block is reduced, not both",
        ("tl.max(x)", "tl.max(x, axis=0)"),
        ("tl.sum(numerator)", "tl.sum(numerator, axis=0)"),
    ),
    _m(5, UNFILLED, (FILL, "")),
    _m(
        6,
        "each tile's sum is below its own maximum",
        ("lane_sum += tl.exp(x - row_max)", "lane_sum += tl.exp(x - tl.max(x, axis=0))"),
    ),
    _m(6, "whole tiles only", ("range(0, n_cols, BLOCK)", "range(0, n_cols // BLOCK * BLOCK, BLOCK)")),
    _m(6, "the maximum is overwritten by each tile", ("lane_max = tl.maximum(lane_max, x)", "lane_max = x")),
    _m(6, UNFILLED, (FILL, ", other=0.0")),
    _m(7, "the running sum is not rescaled", ("        row_sum *= tl.exp(row_max - shift)\n", "")),
    _m(7, "no guard for tiles of -inf", ('tl.where(new_max == -float("inf"), 0.0, new_max)', "new_max")),
    _m(7, "the maximum starts at 0", ('    row_max = -float("inf")\n', "    row_max = 0.0\n")),
    _m(
        8,
        "the whole tile is reduced",
        ("tl.max(x, axis=1)[:, None]", "tl.max(x)"),
        ("tl.sum(numerator, axis=1)[:, None]", "tl.sum(numerator)"),
    ),
    _m(
        8,
        "the tile is reduced along its rows",
        ("tl.max(x, axis=1)[:, None]", "tl.max(x, axis=0)[None, :]"),
        ("tl.sum(numerator, axis=1)[:, None]", "tl.sum(numerator, axis=0)[None, :]"),
    ),
    _m(
        8, "rows beyond the last are not masked", ("(rows < n_rows) & (cols < n_cols)", "(rows >= 0) & (cols < n_cols)")
    ),
    _m(9, "every CTA normalizes by its own sum", (SCALE, "1.0 / line_sum")),
    _m(
        9,
        "the numerators stay below their line's maximum",
        (SCALE, "tl.where(row_max > LOWEST, 1.0, 1.0) / (row_sum + 0 * line_max)"),
    ),
    _m(
        9,
        "the lines' sums are added as they are",
        (SCALE, "exp(line_max - row_max) / (tl.sum(line_sum, axis=0) + 0 * line_max)"),
    ),
    _m(9, "a line of -inf makes its row NaN", ("tl.maximum(tl.max(x, axis=1), LOWEST)", "tl.max(x, axis=1)")),
    _m(10, "lanes beyond the row's end hold 0", (FILL, "")),
    _m(10, "lanes beyond the row's end hold 0", (f"mask=in_ends{FILL}", "mask=in_ends")),
    _m(
        10,
        "whole vectors only: no head, no tail",
        (STORE_ENDS, ""),
        ("tl.maximum(tl.max(x), tl.max(x_end))", "tl.max(x)"),
        (" + tl.sum(numerator_end)", ""),
    ),
    _m(
        10,
        "the ends are written, but not summed",
        ("tl.maximum(tl.max(x), tl.max(x_end))", "tl.max(x)"),
        (" + tl.sum(numerator_end)", ""),
    ),
    _m(10, WRITES, ("in_body = lanes < body", "in_body = lanes < n_cols")),
    _m(11, "the GPUs' sums are added as they are", ("(sums * (maxima - shift).exp()).sum(0)", "sums.sum(0)")),
    _m(11, "the maximum is the first GPU's", ("row_max = maxima.amax(0)", "row_max = maxima[0]")),
    _m(
        11,
        "a tile does not rescale the running sum",
        ("row_sum * tl.exp(row_max - shift) + tl.sum", "row_sum + tl.sum"),
    ),
    _m(11, "no guard for tiles of -inf", ('tl.where(new_max == -float("inf"), 0.0, new_max)', "new_max")),
    _m(12, "the row's sum is left out", ("y * (dy - row_sum)", "y * dy")),
    _m(12, "the sum of dy, not of dy * y", ("tl.sum(dy * y, axis=0)", "tl.sum(dy, axis=0)")),
    _m(12, "the sum is subtracted outside of the product", ("y * (dy - row_sum)", "y * dy - row_sum")),
    _m(12, "the mean in place of the sum", ("tl.sum(dy * y, axis=0)", "tl.sum(dy * y, axis=0) / n_cols")),
    _m(13, "1 is not subtracted at the target", ("dx - weight, dx)", "dx, dx)")),
    _m(
        13,
        "the gradient is not divided by the count",
        ("weight / row_sum", "1.0 / row_sum"),
        ("dx - weight", "dx - 1.0"),
    ),
    _m(13, "rows that do not count have a gradient", ("    dx = tl.where(counts, dx, 0.0)\n", "")),
    _m(13, "the mean is over all rows", ("(target != -100).sum()", "torch.ones_like(target).sum()")),
    _m(
        13,
        "the row is read again",
        (
            "    numerator = tl.exp(x - row_max)\n",
            "    numerator = tl.exp(x - row_max)\n    tl.load(x_ptr + row * n_cols + cols, mask=mask)\n",
        ),
    ),
    _m(14, "a query does not see itself", ("row % n_queries + 1", "row % n_queries")),
    _m(14, "a query sees one column too many", ("row % n_queries + 1", "tl.minimum(row % n_queries + 2, n_queries)")),
    _m(14, "the row is taken for the query", ("row % n_queries + 1", "tl.minimum(row + 1, n_queries)")),
    _m(14, "hidden scores are 0, not -inf", (FILL, ", other=0.0"), ('hidden, -float("inf"), x', "hidden, 0.0, x")),
    _m(14, "hidden columns are not written", ("y, mask=cols < n_cols", "y, mask=cols < visible")),
    _m(
        14,
        "the mask comes after the softmax",
        ("(cols < needed) & (cols < n_cols)", "cols < n_cols"),
        ('    x = tl.where(hidden, -float("inf"), x)\n', ""),
        (
            "y = numerator * (1.0 / tl.sum(numerator, axis=0))",
            "y = tl.where(hidden, 0.0, numerator / tl.sum(numerator))",
        ),
    ),
    _m(14, "hidden columns are read", ("(cols < needed) & (cols < n_cols)", "cols < n_cols")),
    _m(15, "the loads are not coalesced", ("min(64, max(1, 16384 // block), triton.next_power_of_2(n_pixels))", "1")),
    _m(
        15,
        "the tile is reduced along its pixels",
        ("tl.max(x, axis=0)[None, :]", "tl.max(x, axis=1)[:, None]"),
        ("tl.sum(numerator, axis=0)[None, :]", "tl.sum(numerator, axis=1)[:, None]"),
    ),
    _m(
        15, "the whole tile is reduced", ("tl.max(x, axis=0)[None, :]", "tl.max(x)"), ("axis=0)[None, :]", "axis=None)")
    ),
    _m(15, UNFILLED, (FILL, "")),
    _m(
        16,
        "the number of chunks is rounded down",
        ("triton.cdiv(n_cols, vectors * vec)", ROUNDED_DOWN),
    ),
    _m(
        16,
        "each chunk's sum is below its own maximum",
        ("+= tl.exp(xs[c] - row_max)", "+= tl.exp(xs[c] - tl.max(xs[c]))"),
    ),
    _m(16, "the maximum is the first chunk's", ("tl.maximum(lane_max, xs[c])", "lane_max")),
    _m(16, UNFILLED, (FILL, "")),
)
