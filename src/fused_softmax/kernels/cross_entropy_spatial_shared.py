"""Cross-entropy of (outer, n_cols, inner) as it lies, where one thread computes what a position's elements share.

The formulas are those of `cross_entropy_spatial`: loss and gradient in one pass. There each thread computes the
target, the logarithm and the factors of every position that it has elements of. Here one thread computes them for each
position. It reads the target while the columns arrive. Shared memory gives the numbers to the position's elements.

Columns that start anywhere are in skewed tiles (`spatial_skewed`), so that reads and writes are aligned vectors. Where
they start at multiples of UNIT, the tiles do not overlap: each column has phase UNIT, and starts in its block.

The gradient has memory of its own, whose columns have the phases of the logits'. `cross_entropy_spatial` has the code
for label smoothing, for a gradient in place, for cropped images, and for programs that loop over their work.
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.cross_entropy_terms import (
    coefficients,
    cross_entropy_term,
    kept_or_zero,
    reduced_losses,
    row_loss,
    targets_at,
    upcast_kept,
)
from .common.early_start import await_previous
from .common.logits import capped, logsumexp, rounding_residual
from .common.numerics import exp, exp2_affine, maximum, reciprocal_of_sum, upcast
from .common.skewed_merge import declare_factors, declare_skewed, max_sum_of_positions, to_elements
from .common.spatial_cluster import declare_exchange, share_of
from .common.spatial_moments import issue_loads
from .common.spatial_skewed import (
    bounds_of,
    existing_places,
    first_phase,
    has_ends,
    load_skewed,
    owned,
    skewed_start,
    store_ends,
    store_skewed,
    vectors_of,
    with_end,
)
from .common.spatial_tiles import near
from .common.tiles import READS


@kernel(asserts=True, cta_programs=True)
def cross_entropy_spatial_shared(
    x_ptr: Rows, dx_ptr: Rows,
    target_ptr: Vector,  # [outer, inner] int64; or fewer bits, as `prepare_spatial_targets` writes them
    weight_ptr: Vector,  # [n_cols] float32, where WEIGHTED
    weight_facts_ptr: Vector,  # as all launches of a loss have it; unused, as are n_outer and `smoothing`, which is 0
    count_ptr: Vector,  # [1] float32, where MEAN: the loss's denominator
    g_ptr: Vector,  # the upstream gradient, float32: [1] where UPSTREAM is 1, [outer, inner] where it is 2
    loss_ptr: Vector,  # float32: [outer, inner] where LOSS is 1, a sum for each program where it is 2
    n_outer: Int64,
    n_cols: Int32,
    inner: Int64,
    n_blocks: Int32,
    x_outer: Int64, x_col: Int64, dx_outer: Int64, dx_col: Int64,
    ignore_index: Int64,
    smoothing: Float32, cap: Float32, z_loss: Float32,
    LOSS: tl.constexpr, GRADIENT: tl.constexpr, UPSTREAM: tl.constexpr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr,
    SOFTCAP: tl.constexpr, WAITS: tl.constexpr, TRIGGER: tl.constexpr, CTAS: tl.constexpr, COLS: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, OVERLAP: tl.constexpr, CHUNKS: tl.constexpr,
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY and not WAITS)
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    declare_exchange(CTAS, 2, INNER, PTX)
    declare_skewed(2, COLS, INNER, UNIT, PTX)
    if GRADIENT:
        declare_factors(INNER, PTX)
    pid, column = share_of(tl.program_id(0), CTAS, COLS, PTX)
    outer, block = (pid // n_blocks).to(tl.int64), (pid % n_blocks).to(tl.int64)
    STEP: tl.constexpr = CTAS * COLS  # columns of a chunk
    BLOCK: tl.constexpr = INNER - OVERLAP  # positions from a block to the next one
    x_col, dx_col = near(x_col, NEAR), near(dx_col, NEAR)
    SKEWED: tl.constexpr = OVERLAP > 0
    AHEAD: tl.constexpr = UNIT if SKEWED else 0  # positions of a tile in front of its block
    SHIFT: tl.constexpr = UNIT - AHEAD  # positions between the start that `skewed_start` gives and the tile's first one
    x_start, phase = skewed_start(outer, column, block, x_outer, x_col, BLOCK, UNIT)
    in_front = phase - SHIFT  # positions of a column in front of its block
    start = vectors_of(in_front, INNER, VEC)
    first, end = bounds_of(block, inner, BLOCK, INNER, AHEAD)
    x_at = x_ptr + x_start + SHIFT + existing_places(in_front, start, first, end, INNER, VEC)
    x = load_skewed(x_at, x_col, column, n_cols, start, first, end, -float("inf"), CHUNKS, STEP, VEC, 0, READS, False)
    lowest = issue_loads(PTX)
    if WAITS:  # the logits are on their way
        tl.extra.cuda.gdc_wait()
    # a thread has a position here, and reads its target while the logits arrive
    position = tl.arange(0, INNER) - AHEAD
    exists = (position >= first) & (position < end)
    at = outer * inner + block * BLOCK + position
    target = targets_at(target_ptr + at, exists, ignore_index, n_cols)
    counts = target >= 0
    w_target = 1.0
    if WEIGHTED:
        w_target = tl.load(weight_ptr + target, mask=counts, other=0.0)
    count = 1.0  # read now, because loads stay behind the barriers of the merge
    if MEAN:
        count = tl.load(count_ptr)
    leads = (position >= 0) & (position < BLOCK) & exists  # whether the thread writes the position's loss
    first_cta = True
    if CTAS > 1 and PTX:
        first_cta = tl.program_id(0) % CTAS == 0
        leads = leads & first_cta
    if LOSS > 0:
        from_target = x_ptr + outer * x_outer + block * BLOCK + position + target.to(tl.int64) * x_col
        x_target = tl.load(from_target, mask=counts & leads, other=0.0).to(tl.float32)
    if SKEWED:
        x = with_end(x, x_at, x_col, column, n_cols, start, end, -float("inf"), CHUNKS, STEP, INNER, VEC, 0)

    # softcap is monotonic: the largest logit gives the largest z
    m = x[0]
    for c in tl.static_range(1, CHUNKS):
        m = maximum(m, x[c], PTX)
    m = tl.maximum(capped(m, cap, SOFTCAP), lowest)
    s = tl.zeros(x[0].shape, tl.float32)
    for c in tl.static_range(CHUNKS):
        s += exp(capped(upcast(x[c], PTX, True), cap, SOFTCAP) - m)
    before = first_phase(outer, x_outer, x_col, CTAS, COLS, UNIT)
    top, total = max_sum_of_positions(m, s, phase, before, x_col, CTAS, VEC, UNIT, THREADS, PTX)
    lse = logsumexp(top, total, True)

    if LOSS > 0:
        residual = rounding_residual(lse, top, total, True)
        nll = lse - capped(x_target, cap, SOFTCAP) + residual
        loss = row_loss(nll, lse, residual, w_target, n_cols, 0.0, 0.0, smoothing, n_cols, z_loss, False, True)
        loss = tl.where(counts & leads, loss, 0.0)

    if GRADIENT:
        g = 1.0
        if UPSTREAM == 1:
            g = tl.load(g_ptr)
        elif UPSTREAM == 2:
            g = tl.load(g_ptr + at, mask=exists & counts, other=0.0)
        if MEAN:
            g = g / count
        # a position that does not count: logits of 0, and factors of 0
        FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16
        a, b, factor = coefficients(g, lse, w_target, n_cols, smoothing, n_cols, z_loss, False, True)
        top = tl.where(counts, top, 0.0)
        _, _, by = exp2_affine(top, FUSED)
        a = tl.where(counts, a * by * reciprocal_of_sum(total, PTX, PTX), 0.0)
        top, a, b, target = to_elements(top, a, b + tl.zeros_like(a), target, phase, m, UNIT, PTX)
        base, shift, _ = exp2_affine(top, FUSED)
        selector = kept_or_zero(target >= 0)
        own = owned(first, phase, INNER, UNIT, OVERLAP)
        dx_start, _ = skewed_start(outer, column, block, dx_outer, dx_col, BLOCK, UNIT)
        dx_at = dx_ptr + dx_start + SHIFT + tl.arange(0, INNER)[None, None, :]
        ends = has_ends(first, end, inner, dx_outer, dx_col, INNER, UNIT, VEC)
        GROUP: tl.constexpr = 2 if THREADS >= 256 else 1  # chunks, as `softmax_spatial_skewed` has them; not varied
        for k in tl.static_range((CHUNKS + GROUP - 1) // GROUP):
            if n_cols > k * GROUP * STEP:  # always, which the compiler does not know
                written = ()
                for c in tl.static_range(k * GROUP, min(CHUNKS, k * GROUP + GROUP)):
                    here = column + c * STEP
                    dx = cross_entropy_term(
                        upcast_kept(x[c], selector, PTX), tl.where(here == target, b, 0.0), here, base, shift, a,
                        factor, weight_ptr, cap, here < n_cols, WEIGHTED, False, SOFTCAP, FUSED,
                    ).to(dx_ptr.dtype.element_ty)  # fmt: skip
                    store_skewed(dx_at, dx, c, dx_col, column, n_cols, own, start, first, end, CHUNKS, STEP, INNER, VEC)
                    written = written + (dx,)
                if SKEWED:
                    if ends:
                        store_ends(
                            dx_at, written, k * GROUP, dx_col, column, n_cols, own, start, first, end, CHUNKS, STEP,
                            INNER, VEC,
                        )  # fmt: skip

    # last, so that no gradient waits for the sum
    if LOSS == 1:
        tl.store(loss_ptr + at, loss, mask=leads)
    elif LOSS == 2:
        tl.store(loss_ptr + pid, reduced_losses(loss, count, MEAN), mask=first_cta)
