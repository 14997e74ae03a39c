"""Tensors -> planes -> SpatialProblem: how a tensor and a dimension fold into (outer, n_cols, inner), and how it lies.

What `layout` is for rows. Everything here is a view or a number.
"""

from __future__ import annotations

from torch import Tensor

from ..planning.types import SpatialProblem
from .strides import alignment_of, merge_dims, stride_of_one


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
    of_one = stride_of_one(t.stride()[:dim], inner) if dim else n_cols * inner
    outer, outer_stride = before[0] if before else (1, of_one)
    return t.as_strided((outer, n_cols, inner), (outer_stride, col, 1))


def folded(tensors: tuple[Tensor, ...], dim: int) -> tuple[Tensor, ...] | None:
    """The tensors as (outer, n_cols, inner); None where one does not fold, or inner is 1: rows have other kernels."""
    planes = tuple([p for t in tensors if (p := as_planes(t, dim)) is not None])
    return planes if len(planes) == len(tensors) and planes[0].shape[2] > 1 else None


def problem_of(
    *tensors: Tensor, backward: bool = False, log: bool = False, batch_invariant: bool = False
) -> SpatialProblem:
    """The SpatialProblem of tensors (outer, n_cols, inner) with contiguous inner; the last is the output."""
    _, n_cols, inner = tensors[0].shape
    to, vec = tensors[-1], 16 // min(t.element_size() for t in tensors)
    whole_sectors = all(n * to.element_size() % 32 == 0 for n in (inner, to.stride(0), to.stride(1)))
    for t in tensors:
        vec = min(vec, *(alignment_of(n, vec) for n in (inner, t.stride(0), t.stride(1))))
        if t.data_ptr() % 16:
            vec = 1
    in_phase = _in_phase(tensors, inner)
    dtypes = [str(t.dtype).removeprefix("torch.") for t in (tensors[0], tensors[-1])]
    return SpatialProblem(
        n_cols, inner, dtypes[0], dtypes[1], vec, backward, log, batch_invariant, whole_sectors, in_phase
    )


def _in_phase(tensors: tuple[Tensor, ...], inner: int) -> bool:
    """Whether skewed tiles may hold the tensors: their runs have the same phases, and the output has memory of its own.

    Tiles overlap, so what one program writes another one may read.
    """
    first, to = tensors[0], tensors[-1]
    phases = {(t.data_ptr() % 16, t.dtype, *(n * t.element_size() % 16 for n in t.stride()[:2])) for t in tensors}
    apart = all(t.data_ptr() != to.data_ptr() or t.is_meta for t in tensors[:-1])
    return len(phases) == 1 and first.data_ptr() % 16 == 0 and apart and all(t.stride(1) >= inner for t in tensors)
