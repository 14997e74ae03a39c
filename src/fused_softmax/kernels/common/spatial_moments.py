"""Reduces the chunks of a tile while later ones are on their way.

Chunks arrive in the order in which they were asked for. A program that waits for all of them, and computes then, moves
no bytes while it computes. So chunks are reduced in groups: the program waits for one group, and computes its
exponentials while memory sends the next. Each thread keeps a running maximum of each position (online softmax,
`numerics`), and rescales its sum once for each group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import LOWEST, exp, maximum, upcast
from .softmax_terms import gradient_term
from .spatial_staging import STAGED_GROUP, await_group, chunk_of, ends_group

# of a kernel whose running reductions are `unconnected`. With fewer the gain is small, and one of four kernels of 8
# chunks had other machine code
MANY_CHUNKS = tl.constexpr(16)


@triton.jit
def unconnected(x, CHUNKS: tl.constexpr, PTX: tl.constexpr):
    """Returns x. In a kernel of at least MANY_CHUNKS chunks it comes out of a branch that is always taken.

    So a softmax of many chunks compiles faster. For each load and store, Triton's coalescing visits all operations that
    are connected with it, and from each of them all that it needs and all that need it. It does not visit what a branch
    computes when it comes to the branch's result. LLVM removes the branch. Passes before LLVM see other code than
    without it, so whether the machine code is the same is a measurement. It was for each softmax and gradient that was
    compared, and not for all losses (docs/measurements/host-time.md), which do not use this.
    """
    if PTX and CHUNKS >= MANY_CHUNKS:
        odd = tl.program_id(0) | 1
        result = x
        if odd != 0:  # always, which LLVM sees from the last bit
            # if the branch computed nothing, Triton would turn it into a selection
            result = tl.where(odd != 2, x, 0.0)
        return result
    else:
        return x


@triton.jit
def issue_loads(PTX: tl.constexpr):
    """LOWEST, once all loads before this are issued. It waits for no data.

    ptxas put the last loads behind the first maxima, which wait for memory, so that a program waited twice. It moves no
    load over a barrier. And it moves no maximum up that starts from a number which comes from the barrier: it does not
    know that no thread votes. H200, softmax of 310 float32 columns of 8,183 positions: 0.84 of a copy before, 1.00 now.
    """
    if PTX:
        ASM: tl.constexpr = (
            "{.reg .pred vote, any; setp.ne.u32 vote, 0, 0; barrier.cta.red.or.pred any, 0, vote; "
            "selp.b32 $0, 0x7f800000, 0xff7fffff, any;}"
        )
        return tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.float32, is_pure=False, pack=1)
    else:
        return tl.full([], LOWEST, tl.float32)


@triton.jit
def _max_and_sum_of(
    m, s, x, START: tl.constexpr, END: tl.constexpr, CHUNKS: tl.constexpr, SMEM_STAGED: tl.constexpr,
    COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, RECOMPUTE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """(m, s) of the chunks before START, and those of chunks START .. END-1; the exponentials of the latter.

    CHUNKS: of the kernel.
    """
    top = chunk_of(x, START, SMEM_STAGED, COLS, INNER, VEC, PTX)
    if top.dtype == tl.float32:  # a maximum of float32 starts from m, which may come from `issue_loads`
        top = tl.maximum(m, top)
    for c in tl.static_range(START + 1, END):
        top = maximum(top, chunk_of(x, c, SMEM_STAGED, COLS, INNER, VEC, PTX), PTX)
    m_new = unconnected(tl.maximum(m, top.to(tl.float32)), CHUNKS, PTX)
    if START > 0:
        s = s * exp(m - m_new)
    exps = ()
    for c in tl.static_range(START, END):
        e = exp(upcast(chunk_of(x, c, SMEM_STAGED, COLS, INNER, VEC, PTX), PTX, RECOMPUTE) - m_new)
        s += e
        if ends_group(c - START, END - START):
            s = unconnected(s, CHUNKS, PTX)
        exps = exps + (e,)
    return m_new, s, exps


@triton.jit
def max_and_sum(
    x, CHUNKS: tl.constexpr, SMEM_STAGED: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
    RECOMPUTE: tl.constexpr, PTX: tl.constexpr, lowest=LOWEST,
):  # fmt: skip
    """(m, s, exps) of each thread's elements at each position: m = max(x), s = sum(exps), exps = exp(x - m).

    x: the chunks that are not staged. lowest: LOWEST, maybe of `issue_loads`. Where none is staged, all chunks are one
    group, and exps has an exponential of each one. Otherwise only those of the last group. In groups, tiles without
    staged chunks took up to 29% longer: ptxas asked for the later chunks after it had reduced the first.
    """
    tl.static_assert(RECOMPUTE or SMEM_STAGED == 0, "no exponential of a staged chunk is kept")
    FIRST: tl.constexpr = SMEM_STAGED if PTX else 0
    OF: tl.constexpr = STAGED_GROUP if SMEM_STAGED > 0 else CHUNKS
    m = tl.zeros(x[0].shape, tl.float32) + lowest
    s = tl.zeros(x[0].shape, tl.float32)
    exps = ()
    for g in tl.static_range((FIRST + OF - 1) // OF):
        await_group(g, SMEM_STAGED, PTX)
        m, s, _ = _max_and_sum_of(
            m, s, x, g * OF, min(FIRST, g * OF + OF), CHUNKS, SMEM_STAGED, COLS, INNER, VEC, RECOMPUTE, PTX
        )
    for g in tl.static_range((CHUNKS - FIRST + OF - 1) // OF):
        m, s, exps = _max_and_sum_of(
            m, s, x, FIRST + g * OF, min(CHUNKS, FIRST + g * OF + OF), CHUNKS, SMEM_STAGED, COLS, INNER, VEC,
            RECOMPUTE, PTX,
        )  # fmt: skip
    return m, s, exps


@triton.jit
def sum_of_terms(
    y, dy, CHUNKS: tl.constexpr, SMEM_STAGED: tl.constexpr, LOG: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
    VEC: tl.constexpr, RECOMPUTE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """d of each thread's elements at each position: sum(y*dy), or sum(dy) where LOG.

    dy: the chunks that are not staged. All chunks of y are in registers.
    """
    FIRST: tl.constexpr = SMEM_STAGED if PTX else 0
    d = tl.zeros(y[0].shape, tl.float32)
    for c in tl.static_range(CHUNKS):
        if c < FIRST and c % STAGED_GROUP == 0:
            await_group(c // STAGED_GROUP, SMEM_STAGED, PTX)
        dy_c = upcast(chunk_of(dy, c, SMEM_STAGED, COLS, INNER, VEC, PTX), PTX, RECOMPUTE)
        y_c = dy_c  # unused where LOG
        if not LOG:
            y_c = upcast(y[c], PTX, RECOMPUTE)
        d += gradient_term(y_c, dy_c, LOG)
        if ends_group(c, CHUNKS):
            d = unconnected(d, CHUNKS, PTX)
    return d
