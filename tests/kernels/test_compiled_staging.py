"""Chunks of long rows that are staged in shared memory: each place that is fetched was copied to, and has arrived.

The interpreter stages nothing. What the copies read a GPU shows (tests/gpu/test_long_rows_gpu.py).
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from launches import as_called, cross_compiled

from fused_softmax.launch.layout import problem_of
from fused_softmax.launch.softmax import softmax_launch
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.compiled
HOPPER = DEVICES["sm_90"]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("n_cols", [250001, 262144])
def test_what_is_fetched_was_copied_and_has_arrived(n_cols: int, backward: bool):
    tensors = tuple(torch.empty(2, n_cols) for _ in range(2 + backward))
    chosen = plan(problem_of(*tensors, backward=backward), HOPPER)
    assert (chosen.smem_staged > 0) == (backward or chosen.unaligned)
    launch = softmax_launch(tensors, chosen, backward=backward, device=HOPPER)
    used, assembly = cross_compiled(as_called(launch), "sm_90")
    ptx = assembly["ptx"]
    vectors, staged = 16 * chosen.num_warps * 32, chosen.smem_staged
    copied = re.findall(r"cp\.async\.cg\S+ \[slot\+(\d+)\], \[source\+(\d+)\], 16", ptx)
    fetched = Counter(int(at) for at in re.findall(r"ld\.volatile\.shared\.v4\.b32 \{[^}]+\}, \[slot\+(\d+)\]", ptx))
    # of a gradient, dy's chunks and then y's, each for the sum and for the result; else for maximum, sum and result
    tensors_staged, passes = (2, 2) if backward else (1, 3)
    chunks = [(t * staged + c, c) for t in range(tensors_staged) for c in range(staged)]
    assert sorted((int(to), int(of)) for to, of in copied) == sorted((to * vectors, of * vectors) for to, of in chunks)
    assert fetched == {to * vectors: passes for to, _ in chunks}
    # head and tail of an unaligned gradient, up to 4 elements each, of y and of dy: behind the chunks. Each thread may
    # fetch what another one copied, so that a barrier comes between
    ends = [int(at) for at in re.findall(r"cp\.async\.ca\.shared\.global \[slot\+(\d+)\], \[source\], 4, size", ptx)]
    read = {int(at) for at in re.findall(r"@inside ld\.volatile\.shared\.f32 \S+ \[slot\+(\d+)\]", ptx)}
    behind = [len(chunks) * vectors + 4 * 8 * tensor for tensor in (0, 1)] if backward and chosen.unaligned else []
    assert ends == behind and read == set(behind)
    if staged:
        assert f"row_staged[{len(chunks) * vectors + 4 * 16 * bool(ends)}]" in ptx and used.fits()
        arrived = ptx.index("cp.async.wait_all")
        assert ptx.rindex("cp.async.c") < arrived < ptx.index("ld.volatile.shared"), "read before it has arrived"
    if ends:
        assert "bar.sync" in ptx[arrived : ptx.index("ld.volatile.shared.f32")]


# of 15 chunks ptxas moves the wait for the staged ones in front of the sums; the GPU is as fast
@pytest.mark.parametrize(("n_cols", "waits_late"), [(262144, True), (229377, True), (240001, False), (252201, True)])
def test_copies_of_a_gradient_come_first_and_their_chunks_last(n_cols: int, waits_late: bool):
    """ptxas moves other loads in front of the copies, and the first sum then waits for these; H200, 3% more time."""
    tensors = tuple(torch.empty(2, n_cols) for _ in range(3))
    chosen = plan(problem_of(*tensors, backward=True), HOPPER)
    _, assembly = cross_compiled(as_called(softmax_launch(tensors, chosen, backward=True, device=HOPPER)), "sm_90")
    sass = assembly["sass"]
    loads = [at.start() for at in re.finditer(r"\bLDG\.", sass)]
    copies = [at.start() for at in re.finditer(r"\bLDGSTS", sass)]
    barriers = [at.start() for at in re.finditer(r"\bBAR\.SYNC", sass)]
    of_ends = 2 * chosen.unaligned  # head and tail, of y and of dy
    assert len(loads) == 2 * (chosen.chunks - chosen.smem_staged) and len(copies) == 2 * chosen.smem_staged + of_ends
    assert copies[-1] < barriers[0] < loads[0]
    # sums begin with chunks in registers: products come before the first staged vector is fetched
    fetched = next(at.start() for at in re.finditer(r"\bLDS\.128", sass))
    products = len(re.findall(r"\bF(?:MUL|FMA)\b", sass[loads[-1] : fetched]))
    assert products > chosen.chunks if waits_late else chosen.chunks == 15
