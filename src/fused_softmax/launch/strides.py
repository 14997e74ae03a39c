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


def alignment_of(n: int, full: int) -> int:
    """The largest power of two up to `full` that divides n."""
    return full if n % full == 0 else n & -n
