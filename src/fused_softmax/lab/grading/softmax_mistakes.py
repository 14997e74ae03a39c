"""The classic mistakes of lessons 01 to 10: softmax of rows."""

from __future__ import annotations

import functools
import math

from fused_softmax.lab.grading.formulas import (
    TILE,
    below_tile_maximum,
    filled,
    first_columns,
    first_rows,
    last_maximum,
    lines,
    logarithm,
    maximum_of_all,
    no_maximum,
    no_maximum_rounded,
    not_divided,
    one_axis,
    online,
    over_rows,
    power_of_two,
    tile_of_rows,
    tiles,
    unaligned,
)
from fused_softmax.lab.grading.mistakes import (
    Mistake,
    Trials,
    only_on_slices,
    reads_outside,
    writes_outside,
    written_again,
)

NO_MAXIMUM = Mistake(
    "the maximum is not subtracted",
    "exp overflows above 88 in float32, and inf / inf is NaN. Subtract the row's maximum first: it cancels.",
    (no_maximum, no_maximum_rounded),
)
UNFILLED = Mistake(
    "masked lanes hold 0",
    "A masked load without `other` is undefined. Lanes outside the row must hold -inf: exp(-inf) adds 0 to the sum.",
    (filled(0.0), filled(0.0, tiles), filled(0.0, lambda n: max(128, power_of_two(n)))),
)
FILLED_WITH_INF = Mistake(
    "masked lanes filled with +inf",
    "+inf becomes the maximum, and every result is NaN or 0. Fill with -inf.",
    (filled(math.inf), filled(math.inf, tiles)),
)
OF_SOFTMAX = (
    NO_MAXIMUM,
    UNFILLED,
    FILLED_WITH_INF,
    Mistake("the result is not divided by the sum", "The row must sum to 1: divide by the sum.", (not_divided,)),
    Mistake("this is log_softmax", "softmax is the exponential of it.", (logarithm,)),
    Mistake(
        "one maximum for all rows",
        "Rows far below the largest underflow to 0, and 0 / 0 is NaN. Reduce along dim 1.",
        (maximum_of_all,),
    ),
    Mistake("the sum runs over the rows", "Each row has its own sum: reduce along dim 1.", (over_rows,)),
)


def _calls_softmax(trials: Trials) -> bool:
    return not any(t.wrong for t in trials) and any(0 < t.watched.reads < t.moves[0] for t in trials)


OF_LESSON: dict[int, tuple[Mistake, ...]] = {
    1: (
        Mistake(
            "fewer elements are read than five passes read",
            "Another softmax, or an operation that contains one, does not count: write the five passes.",
            shows=_calls_softmax,
        ),
    ),
    3: (
        Mistake(
            "the row stride is taken for n_cols",
            "Row i of x begins at x_ptr + i * x_row_stride. A slice of wider rows is no contiguous tensor.",
            shows=only_on_slices(reads_outside),
        ),
        Mistake(
            "the output is written with the input's stride",
            "y has a stride of its own: row i of y begins at y_ptr + i * y_row_stride.",
            shows=only_on_slices(writes_outside),
        ),
    ),
    4: (
        Mistake(
            "no loop over rows",
            "A program does its first row and stops. Go on with row + tl.num_programs(0) while it is below n_rows.",
            (first_rows(lambda n: min(n, 2)), first_rows(lambda n: 1)),
        ),
        Mistake(
            "every program does the same rows",
            "The results are right, and each row is computed and written several times. Start at tl.program_id(0) and "
            "step by tl.num_programs(0).",
            shows=written_again,
        ),
        Mistake(
            "the last row is left out", "range ends before its second argument: n_rows.", (first_rows(lambda n: n - 1),)
        ),
    ),
    5: (
        Mistake(
            "as published: 512 columns of the row",
            "BLOCK_SIZE * VEC is 512 for every width. Columns beyond it are never read or written. Let VEC grow with "
            "n_cols.",
            (first_columns(lambda n: min(n, 512)),),
        ),
        Mistake(
            "one axis of the block is reduced, not both",
            "The block [BLOCK_SIZE, VEC] is one row: tl.max(x) and tl.sum(x) without an axis reduce all of it.",
            (one_axis(1), one_axis(2)),
        ),
    ),
    6: (
        Mistake(
            "each tile's sum is below its own maximum",
            "The tiles' sums then have different units. Subtract the whole row's maximum in the second pass.",
            (below_tile_maximum,),
        ),
        Mistake(
            "whole tiles only",
            "The columns after the last whole tile are never written. End the loop at n_cols, and mask the last tile.",
            (first_columns(lambda n: n // TILE * TILE),),
        ),
        Mistake(
            "the maximum is overwritten by each tile",
            "Keep the larger of the maximum so far and the tile's: tl.maximum.",
            (last_maximum,),
        ),
    ),
    7: (
        Mistake(
            "the running sum is not rescaled",
            "The sum so far is below the old maximum. Multiply it by exp(old maximum - new maximum).",
            (functools.partial(online, rescale=False), functools.partial(online, rescale=False, guard=False)),
        ),
        Mistake(
            "no guard for tiles of -inf",
            "As long as only -inf was seen, -inf - -inf is NaN. Subtract 0 instead of a maximum of -inf.",
            (functools.partial(online, guard=False),),
        ),
        Mistake(
            "the maximum starts at 0",
            "Rows far below 0 underflow to 0 / 0. Start at -inf.",
            (functools.partial(online, first=0.0), functools.partial(online, first=0.0, guard=False)),
        ),
    ),
    8: (
        Mistake(
            "the whole tile is reduced",
            "Without an axis all rows of the tile share one maximum and one sum. Reduce along axis 1.",
            (tile_of_rows((1, 2)),),
        ),
        Mistake(
            "the tile is reduced along its rows",
            "axis=0 gives each column a sum. A row's columns lie along axis 1.",
            (tile_of_rows(1),),
        ),
        Mistake(
            "rows beyond the last are not masked",
            "The number of rows need not be a multiple of ROWS: add rows < n_rows to the mask.",
            shows=writes_outside,
        ),
    ),
    9: (
        Mistake(
            "every CTA normalizes by its own sum",
            "Each line then sums to 1, and the row to the number of lines. Merge the lines.",
            (functools.partial(lines, how="unmerged"),),
        ),
        Mistake(
            "the numerators stay below their line's maximum",
            "Only the sums were merged. Multiply a line's exponentials by exp(line_max - row_max), too.",
            (functools.partial(lines, how="numerators"),),
        ),
        Mistake(
            "the lines' sums are added as they are",
            "Each sum is below its own line's maximum: multiply it by exp(line_max - row_max) before the addition.",
            (functools.partial(lines, how="sums"), functools.partial(lines, how="neither")),
        ),
        Mistake(
            "a line of -inf makes its row NaN",
            "Some lines hold -inf only. Raise the line's maximum to LOWEST, so that its exponentials are 0.",
            (functools.partial(lines, how="not floored"),),
        ),
    ),
    10: (
        Mistake(
            "lanes beyond the row's end hold 0",
            "A masked load without `other` is undefined. The masked lanes of the body and of the ends must hold -inf.",
            tuple(functools.partial(unaligned, how=how) for how in ("zeros", "zeros in body", "zeros in ends")),
        ),
        Mistake(
            "whole vectors only: no head, no tail",
            "The columns before the first aligned one, and those after the last whole vector, are part of the row.",
            (functools.partial(unaligned, how="body"),),
        ),
        Mistake(
            "the ends are written, but not summed",
            "The head and the tail belong to the row's maximum and to its sum, too.",
            (functools.partial(unaligned, how="ends not summed"),),
        ),
    ),
}
