"""How dimensions fold: which of them merge, how far they are aligned, and a tensor as planes (outer, n_cols, inner).

Sizes, strides and views alone; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

# positions of a tensor, at most: a program counts them in 31 bits, from that of its first row on
MOST_POSITIONS = 2**31 - 2**16


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


def as_planes(t: Tensor, dim: int) -> Tensor | None:
    """t as (outer, n_cols, inner) with contiguous inner, without a copy; None where it does not fold.

    An `outer` of 1 keeps the stride of the tensor that it was taken from, so that it is planned as that tensor is.
    """
    before = merge_dims([(t.shape[d], t.stride(d)) for d in range(dim) if t.shape[d] != 1])
    after = merge_dims([(t.shape[d], t.stride(d)) for d in range(dim + 1, t.dim()) if t.shape[d] != 1])
    if len(before) > 1 or len(after) > 1:
        return None
    inner, step = after[0] if after else (1, 1)
    if step != 1:
        return None
    n_cols, col = t.shape[dim], t.stride(dim) if t.shape[dim] > 1 else inner
    if before:
        outer, outer_stride = before[0]
    else:
        outer, outer_stride = 1, stride_of_one(t.stride()[:dim], inner) if dim else n_cols * inner
    return t.as_strided((outer, n_cols, inner), (outer_stride, col, 1))


def as_crops(t: Tensor, dim: int) -> Tensor | None:
    """t as (outer, n_cols, rows, width) whose rows lie apart, as those of cropped images; None where it is not so, and
    for more than MOST_POSITIONS.

    A batch of one is taken from dimensions that merge, as its stride tells: so the batch it is cut from is taken, too.
    """
    kept = [d for d in range(dim) if t.shape[d] != 1]
    before = merge_dims([(t.shape[d], t.stride(d)) for d in kept])
    if kept and any(t.stride(d) != before[0][0] * before[-1][1] for d in range(kept[0])):
        return None
    after = merge_dims([(t.shape[d], t.stride(d)) for d in range(dim + 1, t.dim()) if t.shape[d] != 1])
    if len(before) > 1 or len(after) != 2 or after[1][1] != 1:
        return None
    (rows, apart), (width, _) = after
    if apart <= width or rows * width > MOST_POSITIONS:
        return None
    n_cols, col = t.shape[dim], t.stride(dim) if t.shape[dim] > 1 else rows * apart
    outer, outer_stride = before[0] if before else (1, stride_of_one(t.stride()[:dim], n_cols * col))
    return t.as_strided((outer, n_cols, rows, width), (outer_stride, col, apart, 1))


def crops_as_planes(crops: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """(the crops of `as_crops` as (outer, n_cols, rows * width), (width, from a row to the next)).

    The positions lie where the second says, and not where the view's strides say.
    """
    outer, n_cols, rows, width = crops.shape
    planes = crops.as_strided((outer, n_cols, rows * width), (*crops.stride()[:2], 1))
    return planes, (width, crops.stride(2))


def folded(tensors: tuple[Tensor, ...], dim: int) -> tuple[Tensor, ...] | None:
    """The tensors as (outer, n_cols, inner); None where one does not fold, or inner is 1: rows have other kernels."""
    planes = tuple([p for t in tensors if (p := as_planes(t, dim)) is not None])
    return planes if len(planes) == len(tensors) and planes[0].shape[2] > 1 else None
