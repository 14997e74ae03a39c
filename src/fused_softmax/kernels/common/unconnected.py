"""Running reductions that Triton's coalescing does not look into, so that softmaxes of many chunks compile faster.

A running maximum or sum comes out of a branch that is always taken. For each load and store, coalescing visits all
operations that are connected with it, and from each of them all that it needs and all that need it. It does not visit
what a branch computes when it comes to the branch's result. LLVM removes the branch. Passes before LLVM see other code
than without it, so whether the machine code is the same is a measurement. It was for each softmax and gradient that was
compared, and not for all losses (docs/measurements/host-time.md), which do not use this.
"""

from __future__ import annotations

import triton
import triton.language as tl

# of a kernel. With fewer the gain is small, and one of four kernels of 8 chunks had other machine code
MANY_CHUNKS = tl.constexpr(16)


@triton.jit
def unconnected(x, CHUNKS: tl.constexpr, PTX: tl.constexpr):
    """Returns x. In a kernel of at least MANY_CHUNKS chunks it comes out of a branch."""
    if PTX and CHUNKS >= MANY_CHUNKS:
        odd = tl.program_id(0) | 1
        result = x
        if odd != 0:  # always, which LLVM sees from the last bit
            # if the branch computed nothing, Triton would turn it into a selection
            result = tl.where(odd != 2, x, 0.0)
        return result
    else:
        return x
