"""Sizes and strides of dimensions: which dimensions merge, and how far they are aligned."""

from __future__ import annotations

from collections.abc import Sequence


def merge_dims(dims: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """(size, *strides) of the fewest dimensions that visit the same elements in the same order."""
    merged: list[tuple[int, ...]] = []
    for size, *strides in dims:
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1:], strides, strict=True)):
            merged[-1] = (merged[-1][0] * size, *strides)
        else:
            merged.append((size, *strides))
    return merged


def stride_of_one(strides: Sequence[int], size: int) -> int:
    """The stride of a row of `size` elements, alone: one of those of the other dimensions, which have size 1.

    So `x[:1]` is planned as x is, whose first dimension keeps its stride there. Strides below `size` belong to
    dimensions inside of the row. Of the others torch makes those of x's own dimensions of size 1, which are smaller.
    """
    return min((s for s in strides if s >= size), default=strides[0] if strides else size)


def alignment_of(n: int, full: int) -> int:
    """The largest power of two up to `full` that divides n."""
    return full if n % full == 0 else n & -n
