"""Stages the first chunks of a row's slice in shared memory, where registers have no room for them.

Registers limit how many programs share a multiprocessor, and so how many bytes are in flight. Shared memory is idle at
that time. So each thread copies its own vectors of the first chunks there asynchronously, past its registers
(cp.async), and fetches each vector when it needs it. No thread reads another thread's copies, so each thread waits only
for its own. A tile [SEGMENTS, VECTORS, VEC] says which vector is whose: a segment belongs to a warp, a vector to a
thread, as in `cluster`.

An unaligned row's head and tail are staged behind the chunks (`stage_ends`), in each CTA. A thread that asked for them
when it had read the chunks would wait for memory twice. Any thread may fetch these, so a barrier comes first.

The interpreter stages nothing: it loads these chunks as all others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import READS, load_chunks


@triton.constexpr_function
def _declare_ptx(n_bytes: int) -> str:
    return f".shared .align 16 .b8 row_staged[{n_bytes}];\nmov.u32 $0, 0;"


@triton.constexpr_function
def _copy_ptx(place: int, staged: int, threads: int) -> str:
    """$1: the address of the row's first aligned column, $2: the bytes of a CTA's slice."""
    chunk = 16 * threads
    ptx = ["{", ".reg .b32 thread, rank, slot;", ".reg .b64 source, slice, policy;"]
    ptx += ["mov.u32 thread, %tid.x;", "mov.u32 rank, %cluster_ctarank;", "mov.u32 slot, row_staged;"]
    ptx += ["mad.lo.u32 slot, thread, 16, slot;", "mul.wide.u32 slice, rank, $2;", "cvta.to.global.u64 source, $1;"]
    ptx += ["add.s64 source, source, slice;", "mul.wide.u32 slice, thread, 16;", "add.s64 source, source, slice;"]
    ptx += ["createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"]  # as `tiles.READS`
    for c in range(staged):
        at = f"[slot+{(place + c) * chunk}], [source+{c * chunk}]"
        ptx.append(f"cp.async.cg.shared.global.L2::cache_hint {at}, 16, policy;")
    return "\n".join([*ptx, "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def _fetch_ptx(place: int, threads: int) -> str:
    ptx = ["{", ".reg .b32 thread, slot;", "mov.u32 thread, %tid.x;", "mov.u32 slot, row_staged;"]
    ptx += ["mad.lo.u32 slot, thread, 16, slot;"]
    return "\n".join([*ptx, f"ld.volatile.shared.v4.b32 {{$0, $1, $2, $3}}, [slot+{place * 16 * threads}];", "}"])


@triton.constexpr_function
def _copy_ends_ptx(behind: int, vec: int) -> str:
    """$1: the address of the row's first aligned column, $2, $3: columns before it, and of whole vectors, $4: all."""
    ptx = ["{", ".reg .pred tail, inside, takes;", ".reg .b32 thread, slot, place, column, later, most, size;"]
    ptx += [".reg .b64 row, source;", "mov.u32 thread, %tid.x;", f"setp.lt.u32 takes, thread, {2 * vec};"]
    # the place within head or tail, and how many columns it has
    ptx += [f"setp.ge.u32 tail, thread, {vec};", f"sub.s32 later, thread, {vec};"]
    ptx += ["selp.b32 place, later, thread, tail;", "sub.s32 most, $4, $2;", "sub.s32 most, most, $3;"]
    ptx += ["selp.b32 most, most, $2, tail;", "setp.lt.s32 inside, place, most;"]
    # its column; a thread without one reads nothing
    ptx += ["sub.s32 column, thread, $2;", "add.s32 later, later, $3;", "selp.b32 column, later, column, tail;"]
    ptx += ["selp.b32 column, column, 0, inside;", "selp.b32 size, 4, 0, inside;"]
    ptx += ["cvta.to.global.u64 row, $1;", "mul.wide.s32 source, column, 4;", "add.s64 source, source, row;"]
    ptx += ["mov.u32 slot, row_staged;", "mad.lo.u32 slot, thread, 4, slot;"]
    ptx += [f"@takes cp.async.ca.shared.global [slot+{behind}], [source], 4, size;", "mov.u32 $0, 0;", "}"]
    return "\n".join(ptx)


@triton.constexpr_function
def _fetch_end_ptx(behind: int) -> str:
    ptx = ["{", ".reg .pred inside;", ".reg .b32 slot;", "setp.ge.s32 inside, $1, 0;", "mov.u32 slot, row_staged;"]
    ptx += ["mad.lo.u32 slot, $1, 4, slot;", "mov.f32 $0, 0f00000000;"]
    return "\n".join([*ptx, f"@inside ld.volatile.shared.f32 $0, [slot+{behind}];", "}"])


@triton.jit
def declare_staging(PLACES: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr, ENDS: tl.constexpr = 0):
    """Room for PLACES vectors of each of a CTA's threads, and behind them for ENDS float32."""
    if PLACES > 0 and PTX:
        ASM: tl.constexpr = _declare_ptx(16 * PLACES * THREADS + 4 * ENDS)
        tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def stage(row, slice, PLACE: tl.constexpr, SMEM_STAGED: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr):
    """Begins to copy the first SMEM_STAGED chunks of each CTA's slice to its places from PLACE on.

    # row: pointer to the row's first aligned column; slice: elements of each slice, except the last
    """
    if SMEM_STAGED > 0 and PTX:
        ASM: tl.constexpr = _copy_ptx(PLACE, SMEM_STAGED, THREADS)
        n_bytes = slice * (row.dtype.element_ty.primitive_bitwidth // 8)
        tl.inline_asm_elementwise(ASM, "=r,l,r", [row.to(tl.int64), n_bytes], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def await_staged(SMEM_STAGED: tl.constexpr, PTX: tl.constexpr):
    """Waits until this thread's copies have arrived."""
    if SMEM_STAGED > 0 and PTX:
        tl.inline_asm_elementwise("cp.async.wait_all; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_unstaged(
    at, width, SEGMENTS: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, VECTORS: tl.constexpr,
    VEC: tl.constexpr, fill, WARPS_PER_ROW: tl.constexpr, SMEM_STAGED: tl.constexpr, PTX: tl.constexpr,
    POLICY: tl.constexpr = READS,
):  # fmt: skip
    """The chunks of the slice that are not staged, as `load_chunks` returns them."""
    FIRST: tl.constexpr = SMEM_STAGED if PTX else 0
    return load_chunks(at, width, SEGMENTS, CHUNKS, UNPREDICATED, VECTORS, VEC, fill, WARPS_PER_ROW, POLICY, FIRST)


@triton.jit
def chunk_of(
    tiles, C: tl.constexpr, PLACE: tl.constexpr, SMEM_STAGED: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr
):
    """Chunk C of the slice, from its place in shared memory or from `load_unstaged`'s tiles."""
    if not PTX:
        return tiles[C]
    elif C < SMEM_STAGED:
        # the operand is a tile that is in registers anyway: its layout tells which thread holds which vector
        VEC: tl.constexpr = 128 // tiles[0].dtype.primitive_bitwidth
        ASM: tl.constexpr = _fetch_ptx(PLACE + C, THREADS)
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r,r,r", [tiles[0]], dtype=tiles[0].dtype, is_pure=False, pack=VEC
        )
    else:
        return tiles[C - SMEM_STAGED]


@triton.jit
def stage_ends(
    row, head, interior, n_cols, FIRST: tl.constexpr, PLACES: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr
):
    """Begins to copy a float32 row's head and tail behind PLACES vectors of each thread, from number FIRST on.

    # row: pointer to the first aligned column; head, interior: as `span_of`. All scalars
    """
    tl.static_assert(row.dtype.element_ty == tl.float32)
    ASM: tl.constexpr = _copy_ends_ptx(16 * PLACES * THREADS + 4 * FIRST, VEC)
    args = [row.to(tl.int64), head, interior, n_cols]
    tl.inline_asm_elementwise(ASM, "=r,l,r,r,r", args, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def staged_end(place, inside, FIRST: tl.constexpr, PLACES: tl.constexpr, THREADS: tl.constexpr):
    """Head and tail as `stage_ends` placed them, 0 where not `inside`; after `await_staged` and a barrier.

    # place: as of `head_and_tail`, inside: a tile
    """
    ASM: tl.constexpr = _fetch_end_ptx(16 * PLACES * THREADS + 4 * FIRST)
    at = tl.where(inside, place, -1)
    return tl.inline_asm_elementwise(ASM, "=&f,r", [at], dtype=tl.float32, is_pure=False, pack=1)
