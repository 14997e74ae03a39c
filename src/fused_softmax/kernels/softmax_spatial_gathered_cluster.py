"""Planes (n_cols, inner) that the CTAs of a cluster share: softmax and log_softmax over n_cols.

    m = max(x);  s = sum(exp(x - m));  y = exp(x - m) / s     or   y = (x - m) - log(s)

As `softmax_spatial_gathered`, for planes that one program cannot hold. A range of the columns is one piece of memory,
too, and each CTA moves one, in vectors. It reads its columns twice, in shared memory: it reduces all positions, the
CTAs tell each other what they found (`gathered_cluster`), and it replaces its columns by results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Int32, Rows, kernel
from .common.early_start import await_previous
from .common.gathered_cluster import (
    interpreted_max_sum,
    leave_planes,
    max_sum_of,
    merge_sums,
    position_of_share,
    share_of_plane,
    sums_bytes,
    tile_of,
)
from .common.gathered_planes import fetch_columns, put_columns
from .common.gathered_ptx import region_bytes
from .common.gathered_rows import (
    await_gathered,
    declare_regions,
    gather,
    max_of,
    max_over_lanes,
    put_numbers,
    scatter,
    sum_of,
    sum_over_lanes,
)
from .common.numerics import LOWEST, exp2_affine, exp2_fma, scaled
from .common.softmax_terms import normalize


@triton.jit
def max_and_sum(x, CHUNKS: tl.constexpr, LANES: tl.constexpr, FUSED: tl.constexpr, PTX: tl.constexpr):
    """(maximum, sum of exponentials) of the columns that the lanes of a position hold."""
    m = tl.maximum(max_over_lanes(max_of(x, 0, CHUNKS), LANES, PTX), LOWEST)
    base, shift, correction = exp2_affine(m, FUSED)
    exps = ()
    for c in tl.static_range(CHUNKS):
        exps = exps + (exp2_fma(x[c], base, shift, FUSED),)
    s = sum_over_lanes(sum_of(exps, 0, CHUNKS), LANES, PTX)
    # rounded before the CTAs' sums are added up: whether a product and a sum are fused is the compiler's choice
    return m, scaled(s, correction, PTX)


@triton.jit
def softmax_of(x, m, s, CHUNKS: tl.constexpr, LOG: tl.constexpr, FUSED: tl.constexpr):
    """Results of a thread's columns, from the position's maximum and sum."""
    base, shift, by = exp2_affine(m, FUSED)
    by = by * tl.div_rn(1.0, s)
    y = ()
    for c in tl.static_range(CHUNKS):
        if LOG:
            y = y + (normalize(x[c], m, s, LOG),)
        else:
            y = y + (exp2_fma(x[c], base, shift, FUSED) * by,)
    return y


@kernel(cta_programs=True)
def softmax_spatial_gathered_cluster(
    x_ptr: Rows, y_ptr: Rows,  # both at the same distance from a multiple of 16 bytes
    n_cols: Int32,
    inner: Int32,
    LOG: tl.constexpr,
    CTAS: tl.constexpr,
    PIECE: tl.constexpr,  # elements of a CTA's piece, at most
    LANES: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr,  # chunks that all threads of a position fill
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
    DYNAMIC: tl.constexpr,  # bytes of shared memory that the launch adds, for larger pieces
):  # fmt: skip
    ROWS: tl.constexpr = sums_bytes(2)
    declare_regions(ROWS + region_bytes(PIECE, x_ptr.dtype.element_ty.primitive_bitwidth // 8), PTX, DYNAMIC)
    first, n, columns = share_of_plane(n_cols, inner, CTAS, THREADS, PTX)
    x_ptr, y_ptr = x_ptr + first, y_ptr + first
    await_previous(EARLY)
    gather(x_ptr, 0, n, PIECE, ROWS, THREADS, PTX)
    await_gathered(PTX)

    # 16 bits: exp(x - m) in one multiply-add and one exp2
    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16 and not LOG
    TILE: tl.constexpr = tile_of(CTAS, THREADS, PTX)
    rounds = tl.maximum((inner + THREADS // LANES - 1) // (THREADS // LANES), 1)  # or ptxas has two copies of all
    for k in range(0, rounds):
        at, step, exists, position = position_of_share(k, n, inner, LANES, THREADS, CTAS, PTX)
        x = fetch_columns(x_ptr, at, step, exists, columns, ROWS, "-inf", LANES, CHUNKS, UNPREDICATED, TILE, PTX)
        m, s = max_and_sum(x, CHUNKS, LANES, FUSED, PTX)
        if PTX:
            put_numbers((m, s), position, exists & (tl.arange(0, TILE) % LANES == 0), 2, 0)
        else:
            m, s = interpreted_max_sum(m, s, CTAS)
            y = softmax_of(x, m, s, CHUNKS, LOG, FUSED)
            put_columns(y, y_ptr, at, step, exists, columns, ROWS, LANES, CHUNKS, UNPREDICATED, TILE, PTX)
    if PTX:
        merge_sums(inner, 2, CTAS, THREADS)
        for k in range(0, rounds):
            at, step, exists, position = position_of_share(k, n, inner, LANES, THREADS, CTAS, PTX)
            x = fetch_columns(x_ptr, at, step, exists, columns, ROWS, "-inf", LANES, CHUNKS, UNPREDICATED, TILE, PTX)
            m, s = max_sum_of(position)
            y = softmax_of(x, m, s, CHUNKS, LOG, FUSED)
            put_columns(y, y_ptr, at, step, exists, columns, ROWS, LANES, CHUNKS, UNPREDICATED, TILE, PTX)
    scatter(y_ptr, 0, n, PIECE, ROWS, THREADS, False, PTX)
    leave_planes(PTX)
