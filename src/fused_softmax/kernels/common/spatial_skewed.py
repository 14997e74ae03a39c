"""Skewed tiles: columns that start anywhere, read and written in aligned vectors.

Where `inner` is odd, columns have different phases: elements from an address that is a multiple of a unit's UNIT
elements. A unit is a vector of VEC elements, or several, such as a sector of memory. So in a skewed tile each column
has its own first position, from which on its units are aligned:

    column 0      |........|........|........|........|            phase UNIT: starts UNIT positions before the block
    column 1         |........|........|........|........|         phase 5
    complete             ^ from here to here ^

Columns whose indices differ by a multiple of UNIT have the same phase, and so have all columns of a thread: a chunk has
a multiple of UNIT columns, or of as many as the phases repeat after. So a thread reduces its columns in its own
registers. Only the few numbers of each thread are put in order of their positions, through shared memory. A position is
complete where all columns of the tile have it. All units of a column, except the first and the last one, lie where
positions are complete, and a program writes these. So tiles overlap by 2*UNIT positions, and every unit has one writer.
The first unit of a run is the first block's.

Where columns start at multiples of UNIT/2, there are two phases, and one unit of each column is not complete: the first
one of phase UNIT, and the last one of phase UNIT/2. Tiles overlap by UNIT positions then. OVERLAP says which it is.

`inner` and strides count elements here. Vectors that lie in two columns, at the ends of a run, are written one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import PTX_LOG2E, exp
from .ptx_access import access_of
from .spatial_cluster import exchange_own


@triton.constexpr_function
def _log2(n: int) -> int:
    return n.bit_length() - 1


@triton.jit
def skewed_start(outer, column, block, outer_stride, col_stride, STEP: tl.constexpr, UNIT: tl.constexpr):
    """(offset of each column's first element in the tile, a multiple of UNIT; its phase, 1 to UNIT).

    # column, results: [COLS, 1, 1]. STEP: positions from a block to the next one
    """
    at = outer * outer_stride + column.to(tl.int64) * col_stride + block.to(tl.int64) * STEP - 1
    group = at >> _log2(UNIT)
    return group * UNIT, (at - group * UNIT).to(tl.int32) + 1


@triton.jit
def first_phase(outer, outer_stride, col_stride, CTAS: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr):
    """The phase of this CTA's first column, less 1, as a scalar."""
    rank = tl.program_id(0) % CTAS
    return ((outer * outer_stride + rank * COLS * col_stride - 1) & (UNIT - 1)).to(tl.int32)


@triton.jit
def bounds_of(block, inner, STEP: tl.constexpr, INNER: tl.constexpr, UNIT: tl.constexpr):
    """(first, end) of the positions that exist, from the block's first one on; at least -UNIT, at most 2*INNER."""
    before = block * STEP
    return tl.maximum(-before, -UNIT).to(tl.int32), tl.minimum(inner - before, 2 * INNER).to(tl.int32)


@triton.jit
def vectors_of(phase, INNER: tl.constexpr, VEC: tl.constexpr):
    """The first position of each element's vector, from the block's first position on.  # [COLS, 1, INNER]"""
    return tl.arange(0, INNER)[None, None, :] // VEC * VEC - phase


@triton.jit
def exists_of(start, first, end, VEC: tl.constexpr):
    """Whether a vector has a position that exists. start: of `vectors_of`; first, end: of `bounds_of`."""
    return (start + VEC > first) & (start < end)


@triton.jit
def existing_places(phase, start, first, end, INNER: tl.constexpr, VEC: tl.constexpr):
    """Where the elements of a column lie, from its first one in the tile on.  # [COLS, 1, INNER]

    Vectors that do not exist lie where the column's first one that exists does, so that loads of all chunks but the
    last need no mask. Gradients are slower so (docs/measurements/other-dims.md, 'Loads without masks'). start, first,
    end: of `exists_of`.
    """
    place = tl.arange(0, INNER)[None, None, :]
    nearest = tl.maximum(first + phase, 0) // VEC * VEC
    place = tl.where(exists_of(start, first, end, VEC), place, nearest + place % VEC)
    return tl.max_contiguous(tl.multiple_of(place, [1, 1, VEC]), [1, 1, INNER])


@triton.jit
def load_skewed(
    at, col_stride, column, n_cols, start, first, end, fill, CHUNKS: tl.constexpr, COLS: tl.constexpr,
    VEC: tl.constexpr, FIRST: tl.constexpr, POLICY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Chunks FIRST .. CHUNKS-1, one tile each. start: of `vectors_of`; first, end: of `bounds_of`. COLS: of a chunk.

    MASKED: vectors that do not exist are not read; else `at` has `existing_places`. Those of the last chunk are
    not read in any case. The last vector of the last column may lie half outside the tensor: `with_end` reads it.
    """
    exists = exists_of(start, first, end, VEC)
    tiles = ()
    for c in tl.static_range(FIRST, CHUNKS):
        here = at + (c * COLS) * col_stride
        if c < CHUNKS - 1 and MASKED:
            tile = tl.load(here, mask=exists, other=fill, eviction_policy=POLICY)
        elif c < CHUNKS - 1:
            tile = tl.load(here, eviction_policy=POLICY)
        else:
            whole = (start + VEC <= end) | (column < n_cols - 1 - c * COLS)
            inside = exists & (column < n_cols - c * COLS)
            tile = tl.load(here, mask=inside & whole, other=fill, eviction_policy=POLICY)
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def with_end(
    tiles, at, col_stride, column, n_cols, start, end, fill, CHUNKS: tl.constexpr, COLS: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The tiles of `load_skewed`, with the last vector of the last column, which is read one element at a time."""
    C: tl.constexpr = CHUNKS - 1
    last = tiles[C - FIRST]
    if end < INNER:
        position = start + tl.arange(0, INNER)[None, None, :] % VEC
        ends = (start < end) & (start + VEC > end) & (column == n_cols - 1 - C * COLS)
        rest = tl.load(at + (C * COLS) * col_stride, mask=ends & (position < end), other=fill)
        last = tl.where(ends, rest, last)
    complete = ()
    for c in tl.static_range(C - FIRST):
        complete = complete + (tiles[c],)
    return complete + (last,)


@triton.jit
def owned(first, phase, INNER: tl.constexpr, UNIT: tl.constexpr, OVERLAP: tl.constexpr):
    """Whether a block writes an element: its unit is complete, or the first one of a run.  # [COLS or 1, 1, INNER]"""
    unit = tl.arange(0, INNER)[None, None, :] // UNIT
    # numbers, because the interpreter of Triton 3.9 makes no mask of a truth value next to a tile of them
    later = (first != 0).to(tl.int32)
    if OVERLAP == UNIT:
        late = (phase == UNIT).to(tl.int32)
        return (unit >= late * later) & (unit < INNER // UNIT - 1 + late)
    else:
        return (unit >= later) & (unit < INNER // UNIT - 1)


@triton.jit
def has_ends(first, end, inner, outer_stride, col_stride, INNER: tl.constexpr, UNIT: tl.constexpr, VEC: tl.constexpr):
    """Whether a block of positions may write vectors that lie in two columns: the first or last one of some run."""
    tl.static_assert(UNIT % VEC == 0, "a unit has whole vectors")
    across = ((inner | outer_stride | col_stride) & (VEC - 1)) != 0
    return across & ((first == 0) | (end < INNER - UNIT))


@triton.jit
def store_skewed(
    at, value, C: tl.constexpr, col_stride, column, n_cols, own, start, first, end, CHUNKS: tl.constexpr,
    COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Writes the vectors of chunk C that lie in one column. value: in the output's dtype. own: of `owned`."""
    writes = own & (start >= first) & (start + VEC <= end)
    if C == CHUNKS - 1:
        writes = writes & (column < n_cols - C * COLS)
    tl.store(at + (C * COLS) * col_stride, value, mask=writes)


@triton.jit
def store_ends(
    at, values, C: tl.constexpr, col_stride, column, n_cols, own, start, first, end, CHUNKS: tl.constexpr,
    COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Writes the elements of chunks C .. C + len(values) - 1 in vectors that lie in two columns."""
    position = start + tl.arange(0, INNER)[None, None, :] % VEC
    writes = own & ((start < first) | (start + VEC > end)) & (position >= first) & (position < end)
    for c in tl.static_range(C, C + len(values)):
        inside = writes
        # all columns of the other chunks exist. With few pairs each compares, or a gradient takes 8 registers more
        if c == CHUNKS - 1 or (VEC == 2 and CHUNKS <= 8):
            inside = writes & (column < n_cols - c * COLS)
        tl.store(at + (c * COLS) * col_stride, values[c - C], mask=inside)


@triton.constexpr_function
def _declare_ptx(n_values: int, cols: int, inner: int, unit: int) -> str:
    """Memory for the numbers of a chunk's elements, and for those of the positions.

    All first numbers come first. A gap follows each 16 positions, against bank conflicts.
    """
    rows, totals = 4 * n_values * (cols * inner + unit), 4 * n_values * (inner + inner // 16)
    shared = f".shared .align 16 .b8 spatial_rows[{rows}];\n.shared .align 16 .b8 spatial_totals[{totals}];"
    return f"{shared}\nmov.u32 $0, 0;"


@triton.jit
def declare_skewed(
    N_VALUES: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, UNIT: tl.constexpr, PTX: tl.constexpr
):
    """Room for N_VALUES float32 of each element of a chunk, and of each position."""
    if PTX:
        ASM: tl.constexpr = _declare_ptx(N_VALUES, COLS, INNER, UNIT)
        tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _put_ptx(n_values: int, elements: int, vec: int) -> str:
    """The results are unused. After them: the places of vec elements, their first numbers, and their second ones."""
    ptx = ["{", ".reg .b32 slot, rows;", "mov.u32 rows, spatial_rows;", f"mad.lo.u32 slot, ${vec}, 4, rows;"]
    for n in range(n_values):
        values = [f"${(2 + n) * vec + k}" for k in range(vec)]
        for i in range(0, vec, 4):
            vector, some = access_of(values[i : i + 4])
            ptx += [f"st.shared{vector}.f32 [slot+{4 * (n * elements + i)}], {some};"]
    return "\n".join([*ptx, *(f"mov.u32 ${k}, 0;" for k in range(vec)), "}"])


@triton.constexpr_function
def _put_constraints(n_values: int, vec: int) -> str:
    return ",".join(["=r"] * vec + ["r"] * vec + ["f"] * (n_values * vec))


@triton.constexpr_function
def _merge_ptx(cols: int, inner: int, unit: int, n_values: int, threads: int, alone: bool, inverse: bool) -> str:
    """Merges a position's numbers: thread i position i. $1: the phase of row 0, less 1; $2: from row to row.

    alone: whether the result is final, or one of a cluster's. inverse: of the sum.
    """
    names, size, elements = ("a", "b")[:n_values], 4 * n_values, cols * inner + unit
    ptx = ["{", ".reg .pred merges;", ".reg .b32 position, phase, slot, rows, totals;", ".reg .f32 top;"]
    ptx += [f".reg .f32 {', '.join(f'{name}{r}' for r in range(cols) for name in names)};"]
    ptx += ["mov.u32 rows, spatial_rows;", f"mov.u32 totals, {'spatial_totals' if alone else 'spatial_own'};"]
    ptx += ["bar.sync 0;"]
    for k in range(-(-inner // threads)):
        ptx += ["mov.u32 position, %tid.x;", f"add.u32 position, position, {k * threads};"]
        ptx += [f"setp.lt.u32 merges, position, {inner};"]
        for r in range(cols):
            ptx += [f"mad.lo.u32 phase, $2, {r}, $1;", f"and.b32 phase, phase, {unit - 1};"]
            ptx += ["add.u32 slot, position, phase;", "mad.lo.u32 slot, slot, 4, rows;"]
            for n, name in enumerate(names):
                at = 4 * (n * elements + r * inner + 1)
                ptx += [f"@merges ld.volatile.shared.f32 {name}{r}, [slot+{at}];"]
        summed = names[-1]
        if n_values > 1:
            ptx += ["mov.f32 top, a0;", *(f"max.f32 top, top, a{r};" for r in range(1, cols))]
            for r in range(cols):
                ptx += [f"sub.f32 a{r}, a{r}, top;", f"mul.f32 a{r}, a{r}, {PTX_LOG2E};"]
                ptx += [f"ex2.approx.ftz.f32 a{r}, a{r};", f"mul.rn.f32 b{r}, b{r}, a{r};"]
        ptx += [f"add.rn.f32 {summed}0, {summed}0, {summed}{r};" for r in range(1, cols)]
        if alone and inverse:
            ptx += ["rcp.rn.f32 b0, b0;"]
        if alone:
            ptx += ["shr.u32 slot, position, 4;", "add.u32 position, position, slot;"]
        ptx += [f"mad.lo.u32 slot, position, {size}, totals;"]
        vector, merged = access_of(["top", "b0"] if n_values > 1 else ["a0"])
        ptx += [f"@merges st.shared{vector}.f32 [slot], {merged};"]
    return "\n".join([*ptx, "bar.sync 0;", "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def _get_ptx(n_values: int) -> str:
    """The place of a position, and an operand whose layout is the result's."""
    ptx = ["{", ".reg .b32 slot, totals;", "mov.u32 totals, spatial_totals;"]
    ptx += [f"mad.lo.u32 slot, ${n_values}, {4 * n_values}, totals;"]
    vector, values = access_of([f"${i}" for i in range(n_values)])
    ptx += [f"ld.volatile.shared{vector}.f32 {values}, [slot];", "}"]
    return "\n".join(ptx)


@triton.jit
def _places(phase, INNER: tl.constexpr, UNIT: tl.constexpr):
    """The position of each element, from UNIT positions before the block on.  # [COLS, 1, INNER]"""
    return (tl.arange(0, INNER)[None, None, :] + UNIT - phase) & (INNER - 1)


@triton.jit
def _by_position(x, phase, UNIT: tl.constexpr):
    """Interpreted: a tile's numbers in order of their positions.  # [COLS, CTAS, INNER]"""
    place = tl.arange(0, x.shape[2])[None, None, :] + phase - UNIT
    return tl.gather(x, tl.broadcast_to(place & (x.shape[2] - 1), x.shape), 2)


@triton.jit
def _by_element(x, phase, SHAPE: tl.constexpr, UNIT: tl.constexpr):
    """Interpreted: the reverse, of one number for each position.  # [INNER] -> [COLS, CTAS, INNER]"""
    place = tl.broadcast_to(_places(phase, SHAPE[2], UNIT), SHAPE)
    return tl.gather(tl.broadcast_to(x[None, None, :], SHAPE), place, 2)


@triton.jit
def _merge_threads(
    m, s, phase, before, col_stride, INVERSE: tl.constexpr, CTAS: tl.constexpr, VEC: tl.constexpr,
    UNIT: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Merges what threads have of each position, into `spatial_totals`."""
    COLS: tl.constexpr = m.shape[0]
    INNER: tl.constexpr = m.shape[2]
    element = tl.arange(0, COLS)[:, None, None] * INNER + tl.arange(0, INNER)[None, None, :] + UNIT
    PUT: tl.constexpr = _put_ptx(2, COLS * INNER + UNIT, VEC)
    PUTS: tl.constexpr = _put_constraints(2, VEC)
    tl.inline_asm_elementwise(PUT, PUTS, [element, m, s], dtype=tl.int32, is_pure=False, pack=VEC)
    MERGE: tl.constexpr = _merge_ptx(COLS, INNER, UNIT, 2, THREADS, CTAS == 1, INVERSE)
    step = (col_stride & (UNIT - 1)).to(tl.int32)
    tl.inline_asm_elementwise(MERGE, "=r,r,r", [before, step], dtype=tl.int32, is_pure=False, pack=1)
    if CTAS > 1:
        exchange_own(2, CTAS, INNER, THREADS, "spatial_totals", INVERSE)


@triton.jit
def _merged(m, s, phase, INVERSE: tl.constexpr, UNIT: tl.constexpr):
    """Interpreted: (maximum, sum or its inverse) of each position.  # [INNER]"""
    m, s = _by_position(m, phase, UNIT), _by_position(s, phase, UNIT)
    top = tl.max(tl.max(m, 0), 0)
    total = tl.sum(tl.sum(s * exp(m - top), 0), 0)
    if INVERSE:
        total = tl.div_rn(1.0, total)
    return top, total


@triton.jit
def merge_max_sum(
    m, s, phase, before, col_stride, INVERSE: tl.constexpr, CTAS: tl.constexpr, VEC: tl.constexpr,
    UNIT: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """(maximum, sum of exponentials or its inverse) of each element's position, from those of each thread.

    before: of `first_phase`.  # m, s: [COLS, 1, INNER], or [COLS, CTAS, INNER] interpreted
    """
    if PTX:
        _merge_threads(m, s, phase, before, col_stride, INVERSE, CTAS, VEC, UNIT, THREADS)
        GET: tl.constexpr = _get_ptx(2)
        place = _places(phase, m.shape[2], UNIT)
        return tl.inline_asm_elementwise(
            GET, "=f,=f,r,f", [place + (place >> 4), m], dtype=(tl.float32, tl.float32), is_pure=False, pack=1
        )
    else:
        top, total = _merged(m, s, phase, INVERSE, UNIT)
        return _by_element(top, phase, m.shape, UNIT), _by_element(total, phase, m.shape, UNIT)


@triton.jit
def max_sum_of_positions(
    m, s, phase, before, col_stride, CTAS: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, THREADS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """As `merge_max_sum`, of the tile's positions in order, from UNIT positions before the block on.  # [INNER]"""
    if PTX:
        _merge_threads(m, s, phase, before, col_stride, False, CTAS, VEC, UNIT, THREADS)
        GET: tl.constexpr = _get_ptx(2)
        place = tl.arange(0, m.shape[2])
        return tl.inline_asm_elementwise(
            GET, "=f,=f,r", [place + (place >> 4)], dtype=(tl.float32, tl.float32), is_pure=False, pack=1
        )
    else:
        return _merged(m, s, phase, False, UNIT)


@triton.jit
def declare_factors(INNER: tl.constexpr, PTX: tl.constexpr):
    """Room for what `to_elements` gives: four numbers of each position, and a gap after each 8 positions."""
    if PTX:
        ASM: tl.constexpr = f".shared .align 16 .b8 spatial_factors[{18 * INNER}];\nmov.u32 $0, 0;"
        tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def to_elements(a, b, c, n, phase, like, UNIT: tl.constexpr, PTX: tl.constexpr):
    """Three float32 numbers and an int32 one of each position, for each element of `like`.

    # [INNER] -> [COLS, 1, INNER], or [COLS, CTAS, INNER] interpreted
    """
    if PTX:
        AT: tl.constexpr = "{.reg .b32 at; mov.u32 at, spatial_factors; mad.lo.u32 at, "
        PUT: tl.constexpr = AT + "$1, 16, at; st.shared.v4.b32 [at], {$2, $3, $4, $5}; mov.u32 $0, 0;}"
        GET: tl.constexpr = AT + "$4, 16, at; ld.volatile.shared.v4.b32 {$0, $1, $2, $3}, [at];}"
        place = tl.arange(0, like.shape[2])
        tl.inline_asm_elementwise(
            PUT, "=r,r,f,f,f,r", [place + (place >> 3), a, b, c, n], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        place = _places(phase, like.shape[2], UNIT)
        return tl.inline_asm_elementwise(
            GET, "=f,=f,=f,=r,r,f", [place + (place >> 3), like],
            dtype=(tl.float32, tl.float32, tl.float32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        a, b = _by_element(a, phase, like.shape, UNIT), _by_element(b, phase, like.shape, UNIT)
        return a, b, _by_element(c, phase, like.shape, UNIT), _by_element(n, phase, like.shape, UNIT)


@triton.jit
def merge_sum(
    d, phase, before, col_stride, CTAS: tl.constexpr, VEC: tl.constexpr,
    UNIT: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The sum of each element's position, as `merge_max_sum`."""
    COLS: tl.constexpr = d.shape[0]
    INNER: tl.constexpr = d.shape[2]
    if PTX:
        element = tl.arange(0, COLS)[:, None, None] * INNER + tl.arange(0, INNER)[None, None, :] + UNIT
        PUT: tl.constexpr = _put_ptx(1, COLS * INNER + UNIT, VEC)
        PUTS: tl.constexpr = _put_constraints(1, VEC)
        tl.inline_asm_elementwise(PUT, PUTS, [element, d], dtype=tl.int32, is_pure=False, pack=VEC)
        MERGE: tl.constexpr = _merge_ptx(COLS, INNER, UNIT, 1, THREADS, CTAS == 1, False)
        step = (col_stride & (UNIT - 1)).to(tl.int32)
        tl.inline_asm_elementwise(MERGE, "=r,r,r", [before, step], dtype=tl.int32, is_pure=False, pack=1)
        if CTAS > 1:
            exchange_own(1, CTAS, INNER, THREADS, "spatial_totals")
        GET: tl.constexpr = _get_ptx(1)
        place = _places(phase, INNER, UNIT)
        return tl.inline_asm_elementwise(
            GET, "=f,r,f", [place + (place >> 4), d], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        total = tl.sum(tl.sum(_by_position(d, phase, UNIT), 0), 0)
        return _by_element(total, phase, d.shape, UNIT)
