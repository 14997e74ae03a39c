"""How a kernel waits for the previous kernel of its stream, where the device may start it before that one has ended.

With programmatic dependent launch the device sets up a kernel while the previous one has not ended yet. In a CUDA graph
that saves about 0.3 us for each call, in a stream more than 1 us (docs/measurements.md, 'Kernels that start early').
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
