"""Reads the masks of rows that `gathered_rows` moves: each thread reads those of its own elements, in place.

A mask has strides of its own, 0 where it is broadcast, as in `masks`. Neighboring lanes read the same cache lines,
which the L1 keeps for their later accesses. It has the banks of shared memory, so the count of wavefronts in
planning/gathered.py holds for it, too. To copy masks to shared memory first would need a piece for each batch that a
program meets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .mask_layouts import ONE_VALUE, OWN, SHARED, elements_to
from .row_scheduler import fast_divmod
from .shifted_masks import elements_of
from .tiles import READS


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
