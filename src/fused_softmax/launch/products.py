"""Matrix products by cuBLAS, into memory that is given: 16-bit factors may have a float32 product, also as a sum.

A sum in float32 must not be held twice. torch.addmm with out_dtype allocates its result, except where its out is its
input. Where this torch does not take that, the sum is made in pieces of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .availability import is_device_error

# rows of a piece where a product cannot be added in place
PIECE_ROWS = 4096
_refused: list[str] = []  # what torch said where it does not add in place


def _has_out_dtype(t: Tensor) -> bool:
    """Whether torch multiplies 16-bit matrices into float32 on t's device; from torch 2.8 on, with cuBLAS alone."""
    return t.is_cuda and torch.version.hip is None


def product(a: Tensor, b: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """out = alpha * a @ b; out has the factors' dtype, or float32."""
    if out.dtype is not a.dtype and not _has_out_dtype(a):
        a, b = a.to(out.dtype), b.to(out.dtype)
    if alpha != 1.0:
        out.zero_()
        add_product(a, b, out, alpha)
    elif out.dtype is a.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def biased_product(a: Tensor, b: Tensor, out: Tensor, bias: Tensor) -> None:
    """out = a @ b + bias, rounded once where out is contiguous; all of one dtype. bias: (n_columns,)."""
    torch.addmm(bias, a, b, out=out)


def add_product(a: Tensor, b: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """out += alpha * a @ b, in out's dtype, as `product`."""
    if out.dtype is a.dtype:
        out.addmm_(a, b, alpha=alpha)
    elif not _has_out_dtype(a):
        for piece, rows in zip(out.split(PIECE_ROWS), a.split(PIECE_ROWS), strict=True):
            piece.addmm_(rows.to(out.dtype), b.to(out.dtype), alpha=alpha)
    elif not _add_in_place(a, b, out, alpha):
        for piece, rows in zip(out.split(PIECE_ROWS), a.split(PIECE_ROWS), strict=True):
            piece.add_(torch.mm(rows, b, out_dtype=out.dtype), alpha=alpha)


def _add_in_place(a: Tensor, b: Tensor, out: Tensor, alpha: float) -> bool:
    """Whether out += a @ b was done by one product; torch says so the first time."""
    if _refused:
        return False
    try:
        torch.addmm(out, a, b, out.dtype, alpha=alpha, out=out)
    except (RuntimeError, TypeError) as error:
        if is_device_error(error):
            raise
        _refused.append(str(error))
    return not _refused
