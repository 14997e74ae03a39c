"""How a kernel waits for the previous kernel of its stream, which may not have ended, and lets the next one start.

With programmatic dependent launch the device sets up a kernel while the previous one has not ended yet. In a CUDA graph
that saves about 0.3 us a call, in a stream more than 1 us (docs/measurements/few-rows.md, 'Kernels that start early').
A kernel is EARLY where it waits before its first access to memory. A kernel that WAITS is in one host function with the
kernel in front of it: it reads its own input at once, and waits only before it reads what that kernel writes. The first
kernel of such a group is not EARLY, so that all that was launched before has ended when any of the group starts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def await_previous(EARLY: tl.constexpr):
    """Waits until the previous kernel has ended and all its writes are visible; before the first access to memory."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(EARLY: tl.constexpr, MOST: tl.constexpr):
    """Lets the next kernel start, where this launch has at most MOST programs; after the loads, or nearly all.

    Not in large launches: a GPU starts half as many programs in a nanosecond where each of them says so (H100 and H200:
    0.82, not 1.65), and few bytes for each program are then slower than a copy.
    """
    if EARLY:
        if tl.num_programs(0) <= MOST:
            tl.extra.cuda.gdc_launch_dependents()


@triton.constexpr_function
def most_that_start_next(vectors: int, ctas: int) -> int:
    """Programs of a launch of softmax, at most, that let the next kernel start: rows of a warp, and wider ones.

    Measured with kernels that read rows. With more programs, or more rows in the L2, it starts no sooner, or takes
    slots. H100, us in a CUDA graph with a cold L2 and a warm one, without and with it: float32 1,024 x 256 2.72 and
    2.29, 1.49 and 1.37; 16 x 32,000 4.13 and 3.77, 2.50 and 2.40. Not for log_softmax, whose gradient takes up to 8
    registers more with it (1,000 and 128,256 bfloat16 columns).
    """
    return 256 if vectors <= 32 and ctas == 1 else 64
