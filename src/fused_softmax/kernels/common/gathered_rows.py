"""Moves the rows of a program as one piece of memory, by way of shared memory.

Rows that follow each other without a gap are one piece, wherever each of them starts. So all threads copy the piece in
vectors of 16 bytes, whatever the width: at most a vector at either end is moved by elements. In shared memory each
thread finds its own elements, which are not vectors there: LANES neighbors of a warp share a row and take turns at VEC
elements of it. Results go back the same way.

A piece is the memory of a program's rows in one tensor, a region its copy in shared memory. A place counts elements
from the program's first row.

    memory          |row 0   |row 1   |row 2   |...     16 bytes for each thread, to shared memory and back
    shared memory   |a b c d a b c d a|b c ...          threads a..d of row 0: VEC elements each, CHUNKS times

A tile has one number for each thread of the program, and a thread's chunks are a tuple of tiles. So Triton has no
layout to choose, and numbers cross lanes by shuffles. The interpreter has no shared memory: it loads and stores the
places.
"""

from __future__ import annotations

import triton
import triton.language as tl

VECTOR_BYTES = tl.constexpr(16)
# what fills places that do not exist: 32 bits of float32, or two numbers of 16
_FILLS = {
    "-inf": {"fp32": 0xFF800000, "bf16": 0xFF80FF80, "fp16": 0xFC00FC00},
    "0": dict.fromkeys(("fp32", "bf16", "fp16"), 0),
}


@triton.constexpr_function
def region_bytes(elements: int, itemsize: int) -> int:
    """Bytes of shared memory for a piece of so many elements that starts anywhere."""
    return (elements * itemsize + 2 * 16 - 1) // 16 * 16


@triton.constexpr_function
def _declare_ptx(n_bytes: int) -> str:
    return f".shared .align 16 .b8 gathered_rows[{n_bytes}];\nmov.u32 $0, 0;"


@triton.constexpr_function
def _move_ptx(region: int, into: bool, itemsize: int) -> str:
    """Moves itemsize bytes between an address ($1) and a place ($2: bytes of the region) where $3 is not 0."""
    ptx = ["{", ".reg .pred there;", ".reg .b32 slot, a, b, c, d;", ".reg .b64 at;", ".reg .b16 half;"]
    ptx += ["setp.ne.u32 there, $3, 0;", "mov.u32 slot, gathered_rows;", "add.u32 slot, slot, $2;"]
    ptx += ["cvta.to.global.u64 at, $1;"]
    kind, value = {16: ("v4.b32", "{a, b, c, d}"), 4: ("b32", "a"), 2: ("b16", "half")}[itemsize]
    place = f"[slot+{region}]"
    if into and itemsize == 16:
        ptx += [f"@there cp.async.cg.shared.global {place}, [at], 16;"]
    elif into:
        ptx += [f"@there ld.global.{kind} {value}, [at];", f"@there st.shared.{kind} {place}, {value};"]
    else:
        ptx += [f"@there ld.shared.{kind} {value}, {place};", f"@there st.global.{kind} [at], {value};"]
    return "\n".join([*ptx, "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def _bulk_ptx(region: int) -> str:
    """One thread asks for a copy of $3 bytes from a place ($2: bytes of the region) to an address ($1)."""
    ptx = ["{", ".reg .pred asks, some;", ".reg .b32 slot, thread;", ".reg .b64 at;", "mov.u32 thread, %tid.x;"]
    ptx += ["setp.eq.u32 asks, thread, 0;", "setp.ne.u32 some, $3, 0;", "and.pred asks, asks, some;"]
    ptx += ["mov.u32 slot, gathered_rows;", "add.u32 slot, slot, $2;", "cvta.to.global.u64 at, $1;"]
    ptx += [f"@asks cp.async.bulk.global.shared::cta.bulk_group [at], [slot+{region}], $3;"]
    return "\n".join([*ptx, "@asks cp.async.bulk.commit_group;", "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def _access(vec: int, itemsize: int) -> tuple[str, int]:
    """(PTX's suffix of an access to VEC elements, its 32-bit words): 2, 4 or 8 bytes."""
    n_bytes = vec * itemsize
    return {2: ".u16", 4: ".b32", 8: ".v2.b32"}[n_bytes], max(1, n_bytes // 4)


@triton.constexpr_function
def _fetch_ptx(offset: int, dtype: str, vec: int, filled: str) -> str:
    """float32 $0 .. of the elements at place $vec (bytes). filled: the number where $(vec+1) is 0, or ""."""
    suffix, words = _access(vec, 4 if dtype == "fp32" else 2)
    ptx = ["{", ".reg .pred there;", f".reg .b32 slot, w<{words}>;", ".reg .b16 low, high;"]
    ptx += ["mov.u32 slot, gathered_rows;", f"add.u32 slot, slot, ${vec};"]
    if filled:
        ptx += [
            f"setp.ne.u32 there, ${vec + 1}, 0;",
            *(f"mov.b32 w{i}, {_FILLS[filled][dtype]};" for i in range(words)),
        ]
    value = "w0" if words == 1 else "{w0, w1}"
    ptx += [("@there " if filled else "") + f"ld.volatile.shared{suffix} {value}, [slot+{offset}];"]
    for i in range(words):
        if dtype == "fp32":
            ptx += [f"mov.b32 ${i}, w{i};"]
        elif dtype == "bf16":
            ptx += [f"shl.b32 ${2 * i}, w{i}, 16;"]
            ptx += [f"and.b32 ${2 * i + 1}, w{i}, 0xffff0000;"] if vec > 1 else []
        else:
            ptx += [f"mov.b32 {{low, high}}, w{i};", f"cvt.f32.f16 ${2 * i}, low;"]
            ptx += [f"cvt.f32.f16 ${2 * i + 1}, high;"] if vec > 1 else []
    return "\n".join([*ptx, "}"])


@triton.constexpr_function
def _put_ptx(offset: int, dtype: str, vec: int, predicated: bool) -> str:
    """Rounds float32 $1 .. to the dtype and writes them to place $(vec+1); where predicated, if $(vec+2) is not 0."""
    suffix, words = _access(vec, 4 if dtype == "fp32" else 2)
    ptx = ["{", ".reg .pred there;", f".reg .b32 slot, w<{words}>;", ".reg .f32 zero;", "mov.f32 zero, 0f00000000;"]
    ptx += ["mov.u32 slot, gathered_rows;", f"add.u32 slot, slot, ${vec + 1};"]
    ptx += [f"setp.ne.u32 there, ${vec + 2}, 0;"] if predicated else []
    for i in range(words):
        if dtype == "fp32":
            ptx += [f"mov.b32 w{i}, ${i + 1};"]
        else:
            to = "bf16x2" if dtype == "bf16" else "f16x2"
            ptx += [f"cvt.rn.{to}.f32 w{i}, {f'${2 * i + 2}' if vec > 1 else 'zero'}, ${2 * i + 1};"]
    value = "w0" if words == 1 else "{w0, w1}"
    ptx += [("@there " if predicated else "") + f"st.shared{suffix} [slot+{offset}], {value};"]
    return "\n".join([*ptx, "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def _put_vectors_ptx(itemsize: int, vec: int) -> str:
    """Writes a vector of 16 bytes to its place: after the result's words those of the vector, then VEC places.

    Only the first place is used. Where it is negative, nothing is written.
    """
    results, words = vec // 4, vec * itemsize // 4
    ptx = ["{", ".reg .pred there;", ".reg .b32 slot;", f"setp.ge.s32 there, ${results + words}, 0;"]
    ptx += ["mov.u32 slot, gathered_rows;", f"add.u32 slot, slot, ${results + words};"]
    values = ", ".join(f"${results + i}" for i in range(words))
    ptx += [f"@there st.shared.v{words}.b32 [slot], {{{values}}};", *(f"mov.u32 ${i}, 0;" for i in range(results))]
    return "\n".join([*ptx, "}"])


@triton.constexpr_function
def _put_vectors_constraints(itemsize: int, vec: int) -> str:
    return ",".join(["=r"] * (vec // 4) + ["r"] * (vec * itemsize // 4 + vec))


@triton.constexpr_function
def _constraints(results: str, floats: int) -> str:
    return ",".join([*results.split(), *["f"] * floats, "r", "r"])


@triton.constexpr_function
def _shuffle_ptx(lanes: int, combine: str) -> str:
    ptx = ["{", ".reg .b32 other;", "mov.b32 $0, $1;"]
    for bit in range(lanes.bit_length() - 1):
        ptx += [f"shfl.sync.bfly.b32 other, $0, {1 << bit}, 0x1f, 0xffffffff;", f"{combine}.f32 $0, $0, other;"]
    return "\n".join([*ptx, "}"])


@triton.jit
def declare_regions(BYTES: tl.constexpr, PTX: tl.constexpr):
    """Room for BYTES, of one or more regions."""
    if PTX:
        ASM: tl.constexpr = _declare_ptx(BYTES)
        tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def phase_of(ptr):
    """Elements from the last multiple of 16 bytes to ptr."""
    ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    return ((ptr.to(tl.int64) & (VECTOR_BYTES - 1)) // ITEMSIZE).to(tl.int32)


@triton.jit
def _move_edges(
    base, phase, end, REGION: tl.constexpr, ITEMSIZE: tl.constexpr, THREADS: tl.constexpr, INTO: tl.constexpr
):
    """Moves what lies outside of whole vectors: where the first one begins before the piece, or the last ends after it.

    # base: the address of the region's first byte; the piece is [phase, end), in elements
    """
    VEC: tl.constexpr = VECTOR_BYTES // ITEMSIZE
    ASM: tl.constexpr = _move_ptx(REGION, INTO, ITEMSIZE)
    if (phase > 0) | (end % VEC > 0):
        thread = tl.arange(0, THREADS)
        at = tl.where(thread < VEC, thread, end // VEC * VEC + thread - VEC)
        there = (at >= phase) & (at < end) & (thread < 2 * VEC) & ((thread >= VEC) | (phase > 0))
        operands = [base + at * ITEMSIZE, at * ITEMSIZE, there.to(tl.int32)]
        tl.inline_asm_elementwise(ASM, "=r,l,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _move(
    ptr, first, n, MOST: tl.constexpr, REGION: tl.constexpr, THREADS: tl.constexpr, INTO: tl.constexpr,
    BULK: tl.constexpr,
):  # fmt: skip
    """Moves n elements, at most MOST, between ptr + first and a region.  # first: a multiple of a vector's elements

    BULK: one thread asks for one copy of all whole vectors.
    """
    ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    VEC: tl.constexpr = VECTOR_BYTES // ITEMSIZE
    phase = phase_of(ptr)
    end = phase + n
    base = ptr.to(tl.int64) + (first - phase) * ITEMSIZE
    if BULK:
        ASM: tl.constexpr = _bulk_ptx(REGION)
        start = (phase + VEC - 1) // VEC * VEC
        whole = tl.maximum(end // VEC * VEC - start, 0)
        operands = [base + start * ITEMSIZE, start * ITEMSIZE, whole * ITEMSIZE]
        tl.inline_asm_elementwise(ASM, "=r,l,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
    else:
        VECTORS: tl.constexpr = _move_ptx(REGION, INTO, 16)
        thread = tl.arange(0, THREADS)
        for i in tl.static_range((MOST + VEC * THREADS - 1) // (VEC * THREADS)):
            at = (thread + i * THREADS) * VEC
            there = ((at >= phase) & (at + VEC <= end)).to(tl.int32)
            operands = [base + at * ITEMSIZE, at * ITEMSIZE, there]
            tl.inline_asm_elementwise(VECTORS, "=r,l,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
    _move_edges(base, phase, end, REGION, ITEMSIZE, THREADS, INTO)
    if BULK:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group.read 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def gather(ptr, first, n, MOST: tl.constexpr, REGION: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr):
    """Begins to copy the elements [first, first + n) of ptr to a region.

    first: a multiple of a vector's elements. MOST: n, at most. REGION: where it starts, in bytes, a multiple of 16.
    """
    if PTX:
        _move(ptr, first, n, MOST, REGION, THREADS, True, False)


@triton.jit
def await_gathered(PTX: tl.constexpr):
    """Waits until what all threads copied has arrived."""
    if PTX:
        tl.inline_asm_elementwise(
            "cp.async.wait_all; bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_threads(PTX: tl.constexpr):
    """Waits for all threads of the program: what they fetched may be overwritten, and what they put may be read."""
    if PTX:
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def scatter(
    ptr, first, n, MOST: tl.constexpr, REGION: tl.constexpr, THREADS: tl.constexpr, BULK: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Writes the region to the elements [first, first + n) of ptr, once all threads have put theirs.

    BULK: as one copy past the registers (Hopper's cp.async.bulk). H100: 1 to 5% less time for causal rows; few rows
    take 0.1 us more.
    """
    if PTX:
        if BULK:  # the copy sees what the threads wrote
            tl.inline_asm_elementwise(
                "fence.proxy.async.shared::cta; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
        await_threads(PTX)
        _move(ptr, first, n, MOST, REGION, THREADS, False, BULK)


@triton.jit
def fetch(
    ptr, first, place, there, OFFSET: tl.constexpr, REGION: tl.constexpr, VEC: tl.constexpr, FILL: tl.constexpr,
    FILLED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """VEC tiles of float32: the elements of ptr at `first` + place + OFFSET, from the region.

    # place, there: [THREADS]; FILL: "-inf" or "0", where not `there`. Where not FILLED, all of them are there. Rows
    that do not exist get arbitrary numbers.
    """
    DTYPE: tl.constexpr = ptr.dtype.element_ty.name
    tl.static_assert(VEC == 1 or VEC == 2 or VEC == 4, "a thread's access has at most 8 bytes")
    if PTX:
        ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        ASM: tl.constexpr = _fetch_ptx(REGION + OFFSET * ITEMSIZE, DTYPE, VEC, FILL if FILLED else "")
        CONSTRAINTS: tl.constexpr = _constraints("=f " * VEC, 0)
        operands = [(phase_of(ptr) + place) * ITEMSIZE, there.to(tl.int32)]
        if VEC == 1:
            return (tl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=tl.float32, is_pure=False, pack=1),)
        elif VEC == 2:
            return tl.inline_asm_elementwise(
                ASM, CONSTRAINTS, operands, dtype=(tl.float32, tl.float32), is_pure=False, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                ASM,
                CONSTRAINTS,
                operands,
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
    else:
        fill = -float("inf") if FILL == "-inf" else 0.0
        found = ()
        for i in tl.static_range(VEC):
            found = found + (tl.load(ptr + first + place + OFFSET + i, mask=there, other=fill).to(tl.float32),)
        return found


@triton.jit
def put(
    values, ptr, first, place, there, OFFSET: tl.constexpr, REGION: tl.constexpr, VEC: tl.constexpr,
    PREDICATED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Puts VEC tiles of float32 where `scatter` to ptr takes them from, in ptr's dtype.  # place, there: as of `fetch`

    Where not PREDICATED, all of them are there, or in rows that do not exist.
    """
    DTYPE: tl.constexpr = ptr.dtype.element_ty.name
    if PTX:
        ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        ASM: tl.constexpr = _put_ptx(REGION + OFFSET * ITEMSIZE, DTYPE, VEC, PREDICATED)
        CONSTRAINTS: tl.constexpr = _constraints("=r", VEC)
        at, real = (phase_of(ptr) + place) * ITEMSIZE, there.to(tl.int32)
        if VEC == 1:
            operands = [values[0], at, real]
        elif VEC == 2:
            operands = [values[0], values[1], at, real]
        else:
            operands = [values[0], values[1], values[2], values[3], at, real]
        tl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=tl.int32, is_pure=False, pack=1)
    else:
        for i in tl.static_range(VEC):
            tl.store(ptr + first + place + OFFSET + i, values[i].to(ptr.dtype.element_ty), mask=there)


@triton.jit
def max_of(tiles, START: tl.constexpr, N: tl.constexpr):
    """The maximum of N tiles from START on, as a tree: a chain of a thread's maxima is all that few rows wait for."""
    if N == 1:
        return tiles[START]
    else:
        return tl.maximum(max_of(tiles, START, N // 2), max_of(tiles, START + N // 2, N - N // 2))


@triton.jit
def sum_of(tiles, START: tl.constexpr, N: tl.constexpr):
    """The sum of N tiles from START on, as a tree."""
    if N == 1:
        return tiles[START]
    else:
        return sum_of(tiles, START, N // 2) + sum_of(tiles, START + N // 2, N - N // 2)


@triton.jit
def max_over_lanes(x, LANES: tl.constexpr, PTX: tl.constexpr):
    """The maximum over each LANES neighbors, in all of them.  # [THREADS]"""
    if PTX:
        ASM: tl.constexpr = _shuffle_ptx(LANES, "max")
        return tl.inline_asm_elementwise(ASM, "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
    else:
        rows = tl.reshape(x, (x.shape[0] // LANES, LANES))
        return tl.reshape(tl.max(rows, 1)[:, None] + tl.zeros_like(rows), x.shape)


@triton.jit
def sum_over_lanes(x, LANES: tl.constexpr, PTX: tl.constexpr):
    """The sum over each LANES neighbors, in all of them, with the same bits.  # [THREADS]"""
    if PTX:
        ASM: tl.constexpr = _shuffle_ptx(LANES, "add")
        return tl.inline_asm_elementwise(ASM, "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
    else:
        rows = tl.reshape(x, (x.shape[0] // LANES, LANES))
        return tl.reshape(tl.sum(rows, 1)[:, None] + tl.zeros_like(rows), x.shape)


@triton.jit
def put_vectors(value, place, there, VEC: tl.constexpr):
    """`put`s whole vectors of rows in tiles of segments.  # value, place, there: [SEGMENTS, VECTORS*VEC]

    place: elements from the region's start, of a multiple of 16 bytes at each vector. A vector is there or not.
    """
    ITEMSIZE: tl.constexpr = value.dtype.primitive_bitwidth // 8
    tl.static_assert(VEC * ITEMSIZE == VECTOR_BYTES, "a vector has 16 bytes")
    ASM: tl.constexpr = _put_vectors_ptx(ITEMSIZE, VEC)
    CONSTRAINTS: tl.constexpr = _put_vectors_constraints(ITEMSIZE, VEC)
    at = tl.where(there, place * ITEMSIZE, -1)
    tl.inline_asm_elementwise(ASM, CONSTRAINTS, [value, at], dtype=tl.int8, is_pure=False, pack=VEC)


@triton.jit
def put_elements(value, place, there):
    """`put`s single elements of rows in tiles of any shape.  # place: elements from the region's start"""
    ITEMSIZE: tl.constexpr = value.dtype.primitive_bitwidth // 8
    ASM: tl.constexpr = _put_ptx(0, value.dtype.name, 1, True)
    operands = [value.to(tl.float32), place * ITEMSIZE, there.to(tl.int32)]
    tl.inline_asm_elementwise(ASM, "=r,f,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
