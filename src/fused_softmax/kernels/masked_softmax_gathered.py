"""Narrow rows of scores that start anywhere, under a mask or causal, moved as one piece of memory; and their gradient.

    z = scale*x + mask  or  z = scale*x where mask, else -inf;  y = exp(z - max(z)) / sum(exp(z - max(z)))
    dx = scale*y*(dy - sum(y*dy)), and 0 in hidden columns

As `softmax_gathered`: a program moves all its rows as one piece, and VECTORS neighbors of a warp share a row. Each
thread reads the mask of its own elements in place, while the piece is on its way. Causal query q sees columns 0..q. The
others are read with the piece, because they lie in sectors that other columns need, and are not used. A row without a
visible column has sum 0 and is NaN, or zero where ZERO. Its hidden columns have a gradient of 0: so a gradient reads a
boolean mask for rows whose sum is not finite.

A mask has strides of its own, 0 where it is broadcast, as in `masks`. Neighboring lanes read the same cache lines,
which the L1 keeps for their later accesses. It has the banks of shared memory, so the count of wavefronts in
planning/gathered.py holds for it, too. To copy masks to shared memory first would need a piece for each batch that a
program meets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.early_start import await_previous
from .common.gathered_ptx import region_bytes
from .common.gathered_rows import (
    await_gathered,
    await_threads,
    columns_of_thread,
    declare_regions,
    fetch,
    gather,
    max_of,
    max_over_lanes,
    piece_of,
    put,
    scatter,
    step_of,
    sum_of,
    sum_over_lanes,
)
from .common.mask_layouts import ADDITIVE, BOOLEAN, NO_MASK, ONE_VALUE, OWN, SHARED, elements_to
from .common.masked_rows import reciprocal
from .common.numerics import LOWEST, SCORES_OF_32_BITS, exp2_affine, exp2_fma, scaled
from .common.row_scheduler import fast_divmod, piece_of_shared_mask, seen_of
from .common.shifted_masks import elements_of
from .common.softmax_terms import gradient_term
from .common.tiles import READS, issue_loads


@triton.jit
def mask_address(
    mask_ptr, row, column, n_queries, multiplier, power, n_inner, inner_multiplier, inner_power, n_middle,
    middle_multiplier, middle_power, m_outer, m_middle, m_inner, m_query, m_col, MASK_COLS: tl.constexpr,
    MASK_ROWS: tl.constexpr, MASK_VEC: tl.constexpr,
):  # fmt: skip
    """The address of the mask of each thread's `column` of its row.  # row, column: [THREADS]

    Sizes and strides: of the kernels, each size with the numbers of `fast_divmod`. Where SHARED, batches are m_outer
    apart.
    """
    if MASK_ROWS == OWN:
        start = row * m_query
    else:
        batch, query = fast_divmod(row, n_queries, multiplier, power)
        if MASK_ROWS == SHARED:
            start = batch * m_outer + query * m_query
        else:
            group, inner = fast_divmod(batch, n_inner, inner_multiplier, inner_power)
            outer, middle = fast_divmod(group, n_middle, middle_multiplier, middle_power)
            start = outer * m_outer + middle * m_middle + inner * m_inner + query * m_query
    at = mask_ptr + start * MASK_VEC
    return at if MASK_COLS == ONE_VALUE else at + elements_to(column, m_col, MASK_COLS)


@triton.constexpr_function
def _as_words(mask_cols: int, mask_vec: int, vec: int, bits: int) -> bool:
    """Whether VEC neighbors of a mask are read as words of 4 bytes."""
    return mask_cols == 1 and mask_vec >= vec and bits < 32 and vec * bits % 32 == 0


@triton.jit
def load_elements(
    at, left, m_col, OFFSET: tl.constexpr, FULL: tl.constexpr, MASK_COLS: tl.constexpr, MASK_VEC: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """The mask of VEC neighbors, OFFSET columns after a thread's first one, as loaded: words, or elements.

    at: of `mask_address`. left: columns that are read, from the thread's first one on. FULL: all VEC are.  # [THREADS]
    """
    BITS: tl.constexpr = at.dtype.element_ty.primitive_bitwidth
    WORDS: tl.constexpr = _as_words(MASK_COLS, MASK_VEC, VEC, BITS)
    loaded = ()
    for i in tl.static_range(VEC * BITS // 32 if WORDS else 1 if MASK_COLS == ONE_VALUE else VEC):
        if WORDS:
            here = (at + OFFSET).to(tl.pointer_type(tl.int32), bitcast=True) + i
        elif MASK_COLS == ONE_VALUE:
            here = at
        else:
            here = at + elements_to(OFFSET + i, m_col, MASK_COLS)
        if FULL:
            tile = tl.load(here, eviction_policy=READS)
        else:
            tile = tl.load(here, mask=OFFSET + (0 if WORDS else i) < left, other=0, eviction_policy=READS)
        loaded = loaded + (tile,)
    return loaded


@triton.jit
def unpack_mask(
    loaded, ACCESS: tl.constexpr, TYPE: tl.constexpr, MASK_COLS: tl.constexpr, MASK_VEC: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """The mask of VEC neighbors, of the ACCESS-th `load_elements`; a boolean one is not 0 where it keeps."""
    BITS: tl.constexpr = TYPE.primitive_bitwidth
    elements = ()
    if _as_words(MASK_COLS, MASK_VEC, VEC, BITS):
        WORDS: tl.constexpr = VEC * BITS // 32
        for i in tl.static_range(WORDS):
            elements = elements + elements_of(loaded[ACCESS * WORDS + i], TYPE)
    else:
        for i in tl.static_range(VEC):
            elements = elements + (loaded[ACCESS if MASK_COLS == ONE_VALUE else ACCESS * VEC + i],)
    return elements


@triton.jit
def columns_seen(row, columns, n_queries, multiplier, power, CAUSAL: tl.constexpr):
    """The columns that each thread's row sees.  # row, result: [THREADS]"""
    if CAUSAL:
        _, query = fast_divmod(row, n_queries, multiplier, power)
        return seen_of(query, columns, CAUSAL)
    else:
        return columns


@kernel()
def masked_softmax_gathered(
    x_ptr: Rows, y_ptr: Rows,
    mask_ptr: Vector,  # uint8 or floating, where MASK
    n_rows: Int64,  # fewer than 2^31
    n_cols: Int32,  # in units of VEC, as strides, which are n_cols
    x_stride: Int64, y_stride: Int64,
    phase: Int32,  # unused: a pointer tells its own
    n_queries: Int64,  # rows are (outer, n_middle, n_inner, n_queries); each with the numbers of `fast_divmod`
    multiplier: Int64, power: Int64,
    n_inner: Int64, inner_multiplier: Int64, inner_power: Int64,
    n_middle: Int64, middle_multiplier: Int64, middle_power: Int64,
    m_outer: Int64,  # the mask's strides, in units of MASK_VEC
    m_middle: Int64, m_inner: Int64, m_query: Int64,
    m_col: Int64,  # where STRIDED: elements
    # the order of the pieces: `piece_of_shared_mask`
    n_part: Int64,
    n_block: Int64, block_multiplier: Int64, block_power: Int64,
    n_group: Int64, group_multiplier: Int64, group_power: Int64,
    n_last: Int64, last_multiplier: Int64, last_power: Int64,
    n_shared: Int64,
    scale: Float32,  # positive
    MASK: tl.constexpr, MASK_COLS: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_VEC: tl.constexpr,
    CAUSAL: tl.constexpr, ZERO: tl.constexpr,
    ROWS: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr,  # chunks that all threads of a row fill
    RUNS: tl.constexpr,  # the chunks of a thread follow each other
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    MOST: tl.constexpr = ROWS * CHUNKS * VECTORS * VEC
    declare_regions(region_bytes(MOST, x_ptr.dtype.element_ty.primitive_bitwidth // 8), PTX)
    scale = tl.cast(scale, tl.float32)  # the interpreter makes a float64 of a subnormal number
    piece = tl.program_id(0)
    if MASK != NO_MASK and MASK_ROWS != OWN:
        piece = piece_of_shared_mask(
            n_part, n_block, block_multiplier, block_power, n_group, group_multiplier, group_power, n_last,
            last_multiplier, last_power, n_shared,
        )  # fmt: skip
    first_row, columns, first, n = piece_of(piece, n_rows, n_cols, ROWS, VEC)
    thread = tl.arange(0, THREADS)
    column = columns_of_thread(THREADS, VECTORS, VEC, CHUNKS, RUNS)
    STEP: tl.constexpr = step_of(VECTORS, VEC, RUNS)
    await_previous(EARLY)
    gather(x_ptr, first, n, MOST, 0, THREADS, PTX)

    TYPE: tl.constexpr = mask_ptr.dtype.element_ty
    ACCESSES: tl.constexpr = 0 if MASK == NO_MASK else 1 if MASK_COLS == ONE_VALUE else CHUNKS  # of a row's mask
    masks = ()
    for k in tl.static_range(ROWS * VECTORS // THREADS if ACCESSES else 0):
        row = tl.minimum(first_row + thread // VECTORS + k * (THREADS // VECTORS), n_rows - 1)
        at = mask_address(
            mask_ptr, row, column, n_queries, multiplier, power, n_inner, inner_multiplier, inner_power, n_middle,
            middle_multiplier, middle_power, m_outer, m_middle, m_inner, m_query, m_col, MASK_COLS, MASK_ROWS, MASK_VEC,
        )  # fmt: skip
        left = columns - column
        for c in tl.static_range(ACCESSES):
            masks = masks + load_elements(
                at, left, m_col, c * STEP, c < UNPREDICATED or MASK_COLS == ONE_VALUE, MASK_COLS, MASK_VEC, VEC
            )
    if ACCESSES > 0 and PTX:
        issue_loads()
    await_gathered(PTX)

    z = ()
    for k in tl.static_range(ROWS * VECTORS // THREADS):
        row = thread // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        seen = columns_seen(first_row + row, columns, n_queries, multiplier, power, CAUSAL)
        for c in tl.static_range(CHUNKS):
            found = fetch(x_ptr, first, row, column, columns, exists, c, 0, STEP, VEC, UNPREDICATED, "-inf", PTX)
            if ACCESSES > 0:
                mask = unpack_mask(masks, k * ACCESSES + c % ACCESSES, TYPE, MASK_COLS, MASK_VEC, VEC)
            for i in tl.static_range(VEC):
                z_i = found[i]
                if MASK == ADDITIVE:
                    z_i = tl.fma(z_i, scale, mask[i].to(tl.float32))
                elif MASK == BOOLEAN:
                    z_i = tl.where(mask[i] != 0, z_i, -float("inf"))
                if CAUSAL:
                    z_i = tl.where(c * STEP + column + i < seen, z_i, -float("inf"))
                z = z + (z_i,)
    await_threads(PTX)
    BITS_16: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    # z is never computed: exp(scale*(x - m)) takes one multiply-add and one exp2
    FUSED: tl.constexpr = BITS_16 and MASK != ADDITIVE
    SCALED: tl.constexpr = FUSED or MASK == ADDITIVE  # or it is already scaled
    HELD: tl.constexpr = CHUNKS * VEC
    for k in tl.static_range(ROWS * VECTORS // THREADS):
        row = thread // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        # scale is positive, so the largest x has the largest z
        m = tl.maximum(max_over_lanes(max_of(z, k * HELD, HELD), VECTORS, PTX), LOWEST)
        if not SCALED:
            m = tl.maximum(scaled(m, scale, PTX), LOWEST)
        if MASK == ADDITIVE:
            base, shift, _ = exp2_affine(m, BITS_16, None, SCORES_OF_32_BITS)
        else:
            base, shift, _ = exp2_affine(m, FUSED, scale)
        exps = ()
        for i in tl.static_range(HELD):
            if SCALED:
                exps = exps + (exp2_fma(z[k * HELD + i], base, shift, BITS_16),)
            else:
                exps = exps + (exp2_fma(scaled(z[k * HELD + i], scale, PTX), base, shift, FUSED),)
        by = reciprocal(sum_over_lanes(sum_of(exps, 0, HELD), VECTORS, PTX), ZERO, True)
        for c in tl.static_range(CHUNKS):
            y = ()
            for i in tl.static_range(VEC):
                y = y + (exps[c * VEC + i] * by,)
            put(y, y_ptr, first, row, column, columns, exists, c, 0, STEP, VEC, UNPREDICATED, PTX)
    scatter(y_ptr, first, n, MOST, 0, THREADS, False, PTX)


@kernel()
def masked_softmax_backward_gathered(
    y_ptr: Rows,  # the forward's output
    dy_ptr: Rows, dx_ptr: Rows,
    mask_ptr: Vector,  # uint8, where MASK
    n_rows: Int64,  # fewer than 2^31
    n_cols: Int32,  # in units of VEC, as strides, which are n_cols
    y_stride: Int64, dy_stride: Int64, dx_stride: Int64,
    phase: Int32,  # unused: a pointer tells its own
    n_queries: Int64,  # sizes and strides: as in `masked_softmax_gathered`
    multiplier: Int64, power: Int64,
    n_inner: Int64, inner_multiplier: Int64, inner_power: Int64,
    n_middle: Int64, middle_multiplier: Int64, middle_power: Int64,
    m_outer: Int64, m_middle: Int64, m_inner: Int64, m_query: Int64, m_col: Int64,
    scale: Float32,
    MASK: tl.constexpr,  # none, or a boolean one
    MASK_COLS: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_VEC: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr,  # chunks that all threads of a row fill
    RUNS: tl.constexpr,  # the chunks of a thread follow each other
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    MOST: tl.constexpr = ROWS * CHUNKS * VECTORS * VEC
    tl.static_assert(dy_ptr.dtype == y_ptr.dtype and dx_ptr.dtype == y_ptr.dtype, "the tensors have one dtype")
    SECOND: tl.constexpr = region_bytes(MOST, y_ptr.dtype.element_ty.primitive_bitwidth // 8)
    declare_regions(2 * SECOND, PTX)
    scale = tl.cast(scale, tl.float32)
    first_row, columns, first, n = piece_of(tl.program_id(0), n_rows, n_cols, ROWS, VEC)
    thread = tl.arange(0, THREADS)
    column = columns_of_thread(THREADS, VECTORS, VEC, CHUNKS, RUNS)
    STEP: tl.constexpr = step_of(VECTORS, VEC, RUNS)
    await_previous(EARLY)
    gather(y_ptr, first, n, MOST, 0, THREADS, PTX)
    gather(dy_ptr, first, n, MOST, SECOND, THREADS, PTX)
    await_gathered(PTX)

    y, dy = (), ()
    for k in tl.static_range(ROWS * VECTORS // THREADS):
        row = thread // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        seen = columns_seen(first_row + row, columns, n_queries, multiplier, power, CAUSAL)
        for c in tl.static_range(CHUNKS):
            of_y = fetch(y_ptr, first, row, column, columns, exists, c, 0, STEP, VEC, UNPREDICATED, "0", PTX)
            of_dy = fetch(dy_ptr, first, row, column, columns, exists, c, SECOND, STEP, VEC, UNPREDICATED, "0", PTX)
            for i in tl.static_range(VEC):
                if CAUSAL:
                    sees = c * STEP + column + i < seen
                    y, dy = y + (tl.where(sees, of_y[i], 0.0),), dy + (tl.where(sees, of_dy[i], 0.0),)
                else:
                    y, dy = y + (of_y[i],), dy + (of_dy[i],)
    await_threads(PTX)
    HELD: tl.constexpr = CHUNKS * VEC
    for k in tl.static_range(ROWS * VECTORS // THREADS):
        row = thread // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        terms = ()
        for i in tl.static_range(HELD):
            terms = terms + (gradient_term(y[k * HELD + i], dy[k * HELD + i], False),)
        d = sum_over_lanes(sum_of(terms, 0, HELD), VECTORS, PTX)
        seen = columns_seen(first_row + row, columns, n_queries, multiplier, power, CAUSAL)
        finite = tl.abs(d) < float("inf")
        if MASK != NO_MASK:
            at = mask_address(
                mask_ptr, first_row + row, column, n_queries, multiplier, power, n_inner, inner_multiplier, inner_power,
                n_middle, middle_multiplier, middle_power, m_outer, m_middle, m_inner, m_query, m_col, MASK_COLS,
                MASK_ROWS, MASK_VEC,
            )  # fmt: skip
            left = tl.where(exists & (finite == 0), columns - column, 0)
        for c in tl.static_range(CHUNKS):
            if MASK != NO_MASK:
                loaded = load_elements(at, left, m_col, c * STEP, False, MASK_COLS, MASK_VEC, VEC)
                mask = unpack_mask(loaded, 0, mask_ptr.dtype.element_ty, MASK_COLS, MASK_VEC, VEC)
            dx = ()
            for i in tl.static_range(VEC):
                dx_i = scale * y[k * HELD + c * VEC + i] * (dy[k * HELD + c * VEC + i] - d)
                if MASK != NO_MASK:
                    dx_i = tl.where(finite | (mask[i] != 0), dx_i, 0.0)
                if CAUSAL:  # 0 times an infinite sum is NaN
                    dx_i = tl.where(c * STEP + column + i < seen, dx_i, 0.0)
                dx = dx + (dx_i,)
            put(dx, dx_ptr, first, row, column, columns, exists, c, 0, STEP, VEC, UNPREDICATED, PTX)
    scatter(dx_ptr, first, n, MOST, 0, THREADS, False, PTX)
