"""Narrow rows that start anywhere: what the machine moves for them, on each kind of device."""

from __future__ import annotations

import re

import pytest
import torch
from launches import as_called, cross_compiled, masked_launch
from planned import problem

from fused_softmax.launch.softmax import softmax_launch
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.compiled
WIDTHS = (1, 6, 13, 33, 50, 65, 77, 116, 125)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("n_cols", WIDTHS)
def test_memory_is_accessed_in_vectors(n_cols, dtype, backward):
    """All but the two edges of a program's piece: one access of each tensor that is narrower than 16 bytes."""
    chosen = plan(problem(n_cols, (dtype, dtype), backward=backward), DEVICES["sm_90"])
    if not chosen.gathered:
        assert backward or n_cols > 64
        return
    x = torch.empty(3, n_cols, dtype=getattr(torch, dtype))
    launch = softmax_launch((x,) * (3 if backward else 2), chosen, backward=backward, device=DEVICES["sm_90"])
    used, _ = cross_compiled(as_called(launch), "sm_90")
    assert used.spilled_bytes == 0 and used.shared_bytes <= 48 << 10
    vectors = -(-chosen.rows * chosen.vectors_per_chunk * chosen.chunks * chosen.vec * x.element_size() // (16 * 128))
    assert dict(used.loads) == {16: (1 + backward) * vectors, x.element_size(): 1 + backward}
    assert dict(used.stores) == {16: vectors, x.element_size(): 1}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_every_nvidia_gpu_takes_them(target):
    chosen = plan(problem(77, ("bfloat16", "bfloat16")), DEVICES[target])
    x = torch.empty(3, 77, dtype=torch.bfloat16)
    used, _ = cross_compiled(as_called(softmax_launch((x, x), chosen, device=DEVICES[target])), target)
    assert chosen.gathered and used.spilled_bytes == 0 and used.async_copies > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n_cols", [129, 257, 286, 306, 474])
def test_causal_rows_are_written_as_one_piece(n_cols, dtype):
    """No store of a warp is left but that of the edges, and the one copy that is asked for."""
    launch, chosen = masked_launch(torch.empty(4, n_cols, dtype=dtype), None, True, DEVICES["sm_90"])
    assert chosen.gathered == (chosen.chunks <= 8 and chosen.vectors_per_chunk < 32)
    if chosen.gathered:
        assert chosen.rows % chosen.vec == 0
        used, assembly = cross_compiled(as_called(launch), "sm_90")
        assert dict(used.stores) == {16: 1, dtype.itemsize: 1} and used.spilled_bytes == 0
        ptx = assembly["ptx"]
        fence, barrier, copy = (
            [m.start() for m in re.finditer(pattern, ptx)]
            for pattern in (r"fence\.proxy\.async", r"bar\.sync", r"cp\.async\.bulk\.global")
        )
        put = [m.start() for m in re.finditer(r"st\.shared\.", ptx)]
        assert max(put) < fence[-1] < barrier[-1] < copy[0], "the copy sees what all threads wrote"
