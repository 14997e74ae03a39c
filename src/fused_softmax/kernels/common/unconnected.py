"""Numbers whose origin a pass of Triton does not see, so that kernels of many chunks compile faster.

For each load and store, Triton's coalescing visits all operations that are connected with it, and from each of them all
that it needs and all that need it. So its time grows faster than the square of the chunks: it was two thirds of the
time that a softmax of 8,700 columns took to compile. It does not go on from the result of a branch to what the branch
computes. So a running reduction comes out of a branch that is always taken. LLVM sees that and removes it, and the
machine code stays the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

# chunks of a kernel from which that pays
MANY_CHUNKS = tl.constexpr(16)


@triton.jit
def unconnected(x, CHUNKS: tl.constexpr, PTX: tl.constexpr):
    """x; of a kernel of CHUNKS chunks, if they are many, as if it came from elsewhere."""
    if PTX and CHUNKS >= MANY_CHUNKS:
        odd = tl.program_id(0) | 1
        result = x
        if odd != 0:  # always, which LLVM sees from its last bit, and Triton does not
            result = tl.where(odd != 2, x, 0.0)  # of x alone, Triton would make a selection without a branch
        return result
    else:
        return x
