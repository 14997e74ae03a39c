"""Merges what the threads of a skewed tile have of each position (`spatial_skewed`), through shared memory.

Threads hold elements of columns that start at different phases, so their numbers are put in order of positions. One
thread merges the numbers of one position. Elements read the result of their position.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import PTX_LOG2E, exp
from .ptx_access import access_of
from .spatial_cluster import exchange_own


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
    """The position of each element, from the tile's first one on.  # [COLS, 1, INNER]"""
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
    a, b, N_VALUES: tl.constexpr, phase, before, col_stride, INVERSE: tl.constexpr, CTAS: tl.constexpr,
    VEC: tl.constexpr, UNIT: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Merges what threads have of each position, one number or two, into `spatial_totals`."""
    COLS: tl.constexpr = a.shape[0]
    INNER: tl.constexpr = a.shape[2]
    element = tl.arange(0, COLS)[:, None, None] * INNER + tl.arange(0, INNER)[None, None, :] + UNIT
    PUT: tl.constexpr = _put_ptx(N_VALUES, COLS * INNER + UNIT, VEC)
    PUTS: tl.constexpr = _put_constraints(N_VALUES, VEC)
    if N_VALUES == 1:
        tl.inline_asm_elementwise(PUT, PUTS, [element, a], dtype=tl.int32, is_pure=False, pack=VEC)
    else:
        tl.inline_asm_elementwise(PUT, PUTS, [element, a, b], dtype=tl.int32, is_pure=False, pack=VEC)
    MERGE: tl.constexpr = _merge_ptx(COLS, INNER, UNIT, N_VALUES, THREADS, CTAS == 1, INVERSE)
    step = (col_stride & (UNIT - 1)).to(tl.int32)
    tl.inline_asm_elementwise(MERGE, "=r,r,r", [before, step], dtype=tl.int32, is_pure=False, pack=1)
    if CTAS > 1:
        exchange_own(N_VALUES, CTAS, INNER, THREADS, "spatial_totals", INVERSE)


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
        _merge_threads(m, s, 2, phase, before, col_stride, INVERSE, CTAS, VEC, UNIT, THREADS)
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
    """As `merge_max_sum`, of the tile's positions in order.  # [INNER]"""
    if PTX:
        _merge_threads(m, s, 2, phase, before, col_stride, False, CTAS, VEC, UNIT, THREADS)
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
    if PTX:
        _merge_threads(d, d, 1, phase, before, col_stride, False, CTAS, VEC, UNIT, THREADS)
        GET: tl.constexpr = _get_ptx(1)
        place = _places(phase, d.shape[2], UNIT)
        return tl.inline_asm_elementwise(
            GET, "=f,r,f", [place + (place >> 4), d], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        total = tl.sum(tl.sum(_by_position(d, phase, UNIT), 0), 0)
        return _by_element(total, phase, d.shape, UNIT)
