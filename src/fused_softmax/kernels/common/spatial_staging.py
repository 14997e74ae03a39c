"""Stages chunks of a tile in shared memory, where registers have no room for them.

Registers limit how many programs share a multiprocessor, and so how many bytes are in flight. Shared memory is idle at
that time. So the first chunks of a tile are copied there asynchronously, past the registers (cp.async), 4, 8 or 16
bytes for each element of a tensor of addresses. After `await_group` every thread fetches the elements that it holds of
a chunk of that group, in the layout of a tile that is in registers. It reads them again instead of keeping them.

The interpreter stages nothing: it loads these chunks as all others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ptx_access import access_of

# chunks that are awaited, and reduced, together
STAGED_GROUP = tl.constexpr(8)


@triton.constexpr_function
def ends_group(chunk: int, chunks: int) -> bool:
    """Whether it is the last chunk of a group, or of all `chunks`."""
    return chunk % STAGED_GROUP.value == STAGED_GROUP.value - 1 or chunk == chunks - 1


@triton.constexpr_function
def _declare_ptx(n_bytes: int) -> str:
    return f".shared .align 16 .b8 spatial_staged[{n_bytes}];\nmov.u32 $0, 0;"


@triton.constexpr_function
def _copy_ptx(start: int, n_bytes: int) -> str:
    """$1: the address; $2: which n_bytes of the chunk; $3: n_bytes, or 0 where nothing is read."""
    through = "cg" if n_bytes == 16 else "ca"
    ptx = ["{", ".reg .b32 slot, staged;", ".reg .b64 source, policy;", "mov.u32 staged, spatial_staged;"]
    ptx += [f"mad.lo.u32 slot, $2, {n_bytes}, staged;", "cvta.to.global.u64 source, $1;"]
    ptx += ["createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"]  # as `tiles.READS`
    ptx += [f"cp.async.{through}.shared.global.L2::cache_hint [slot+{start}], [source], {n_bytes}, $3, policy;"]
    return "\n".join([*ptx, "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def _fetch_ptx(start: int, itemsize: int, vec: int) -> str:
    """After the words of the result: the element of the chunk."""
    words = vec * itemsize // 4
    ptx = ["{", ".reg .b32 slot, staged;", "mov.u32 staged, spatial_staged;"]
    ptx += [f"mad.lo.u32 slot, ${words}, {itemsize}, staged;"]
    vector, to = access_of([f"${i}" for i in range(words)])
    return "\n".join([*ptx, f"ld.volatile.shared{vector}.b32 {to}, [slot+{start}];", "}"])


@triton.constexpr_function
def _fetch_constraints(itemsize: int, vec: int) -> str:
    words = vec * itemsize // 4
    return ",".join(["=r"] * words + ["r"] * (vec + words))


@triton.jit
def declare_staging(
    SMEM_STAGED: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr
):
    """Room for SMEM_STAGED chunks."""
    if SMEM_STAGED > 0 and PTX:
        ASM: tl.constexpr = _declare_ptx(SMEM_STAGED * COLS * INNER * DTYPE.primitive_bitwidth // 8)
        tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def copy_vectors(at, slot, n_bytes, START: tl.constexpr, BYTES: tl.constexpr):
    ASM: tl.constexpr = _copy_ptx(START, BYTES)
    tl.inline_asm_elementwise(ASM, "=r,l,r,r", [at, slot, n_bytes], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def commit_group(C: tl.constexpr, SMEM_STAGED: tl.constexpr):
    """Ends a group of copies, if chunk C is the last one of a group."""
    if ends_group(C, SMEM_STAGED):
        tl.inline_asm_elementwise(
            "cp.async.commit_group; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def stage(
    ptr, outer, col_stride, outer_stride, first, column, inner, SMEM_STAGED: tl.constexpr,
    STEP: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Begins to copy the first SMEM_STAGED chunks, in groups of STAGED_GROUP.  # column: of chunk 0, [COLS, 1, 1]

    STEP: columns between two chunks. All columns of these chunks exist. A vector is 4, 8 or 16 bytes.
    """
    if SMEM_STAGED > 0 and PTX:
        VECTORS: tl.constexpr = INNER // VEC
        BYTES: tl.constexpr = VEC * (ptr.dtype.element_ty.primitive_bitwidth // 8)
        vector = tl.arange(0, VECTORS)[None, None, :]
        slot = tl.arange(0, COLS)[:, None, None] * VECTORS + vector
        n_bytes = tl.where(vector < inner - first, BYTES, 0) + slot * 0
        at = (ptr + (outer * outer_stride + first) * VEC).to(tl.int64)
        at = at + (column.to(tl.int64) * col_stride + vector) * BYTES
        tl.static_assert(at.shape[1] == 1, "a program stages chunks of one index of `outer`")
        for c in tl.static_range(SMEM_STAGED):
            copy_vectors(at + (c * STEP * BYTES) * col_stride, slot, n_bytes, c * COLS * VECTORS * BYTES, BYTES)
            commit_group(c, SMEM_STAGED)


@triton.jit
def stage_skewed(
    ptr, column_start, phase, col_stride, first, end, SMEM_STAGED: tl.constexpr, STEP: tl.constexpr,
    COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`stage` for a skewed tile.  # column_start, phase: of `skewed_start`; first, end: of `bounds_of`

    Strides count elements. Vectors that lie in two columns are copied whole: no staged chunk has the last column.
    """
    if SMEM_STAGED > 0 and PTX:
        VECTORS: tl.constexpr = INNER // VEC
        ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        BYTES: tl.constexpr = VEC * ITEMSIZE
        vector = tl.arange(0, VECTORS)[None, None, :]
        slot = tl.arange(0, COLS)[:, None, None] * VECTORS + vector
        start = vector * VEC - phase
        n_bytes = tl.where((start + VEC > first) & (start < end), BYTES, 0)
        at = (ptr + column_start).to(tl.int64) + vector * BYTES
        for c in tl.static_range(SMEM_STAGED):
            copy_vectors(at + (c * STEP * ITEMSIZE) * col_stride, slot, n_bytes, c * COLS * VECTORS * BYTES, BYTES)
            commit_group(c, SMEM_STAGED)


@triton.constexpr_function
def _await_ptx(later: int) -> str:
    return f"cp.async.wait_group {later}; bar.sync 0; mov.u32 $0, 0;"


@triton.jit
def await_group(G: tl.constexpr, SMEM_STAGED: tl.constexpr, PTX: tl.constexpr):
    """Waits until all threads' copies of group G, of STAGED_GROUP chunks, have arrived."""
    if SMEM_STAGED > 0 and PTX:
        ASM: tl.constexpr = _await_ptx((SMEM_STAGED - 1) // STAGED_GROUP - G)
        tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def chunk_of(
    tiles, C: tl.constexpr, SMEM_STAGED: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Chunk C, from shared memory or from the tiles of those that are not staged."""
    if not PTX:
        return tiles[C]
    elif C < SMEM_STAGED:
        # the operand is a tile that is in registers anyway: its layout tells which thread holds which elements
        element = tl.arange(0, COLS)[:, None, None] * INNER + tl.arange(0, INNER)[None, None, :]
        ITEMSIZE: tl.constexpr = tiles[0].dtype.primitive_bitwidth // 8
        ASM: tl.constexpr = _fetch_ptx(C * COLS * INNER * ITEMSIZE, ITEMSIZE, VEC)
        CONSTRAINTS: tl.constexpr = _fetch_constraints(ITEMSIZE, VEC)
        return tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, [element, tiles[0]], dtype=tiles[0].dtype, is_pure=False, pack=VEC
        )
    else:
        return tiles[C - SMEM_STAGED]
