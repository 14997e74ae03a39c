"""Planes in the registers of a program or a cluster: what the machine moves for them, and what they hold."""

from __future__ import annotations

import pytest
import torch
from launches import as_called, cross_compiled
from spatial_problems import periodic_plan

from fused_softmax.launch import spatial
from fused_softmax.planning.held_planes import HELD_REGISTERS, MOST_VECTORS
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.compiled
DEVICE, TARGET = DEVICES["sm_90"], "sm_90"
# (n_cols, inner): one program, clusters of 2 to 16, one to 32 lanes for a position
PLANES = [(5000, 3), (300, 251), (900, 77), (354, 122), (20000, 7), (40000, 7), (599, 129), (2500, 51)]
# planes of one program of 1, 2 and 4 warps
FEW_WARPS = [
    ((402, 5), True, torch.bfloat16), ((453, 9), True, torch.float16), ((108, 41), True, torch.bfloat16),
    ((245, 5), True, torch.bfloat16), ((51, 19), True, torch.float32), ((74, 17), True, torch.float32),
    ((1404, 3), False, torch.bfloat16), ((1906, 3), False, torch.float16), ((1023, 17), False, torch.bfloat16),
]  # fmt: skip
# gradients of few positions that few warps do not hold: of 2 and 3 CTAs
FEW_POSITIONS = [
    ((1045, 11), True, torch.float32), ((2026, 7), True, torch.float32), ((887, 10), True, torch.float32),
    ((972, 15), True, torch.bfloat16), ((1940, 10), True, torch.bfloat16), ((3941, 6), True, torch.float16),
]  # fmt: skip
# of threads that hold the most vectors, on up to 16 CTAs and up to 16 warps
MOST_HELD = [((51073, 13), torch.bfloat16), ((7393, 43), torch.float16), ((1273, 83), torch.float32)]
LEAST_SPILLED, MOST_HELD_SPILLED = 16, 24  # of a thread that holds nearly the most vectors, and of those


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", PLANES, ids=str)
def test_each_element_is_moved_once_in_vectors(shape, dtype, log):
    """Whole vectors, and one access of each tensor for both ends; no registers beyond the cap."""
    held = 0
    for n_tensors in (2, 3):
        backward = n_tensors == 3
        tensors = tuple(torch.empty(2, *shape, dtype=dtype) for _ in range(n_tensors))
        chosen = periodic_plan(spatial.problem_of(*tensors, backward=backward, log=log), DEVICE)
        if chosen is None:
            continue
        held += 1
        (launch,) = spatial.recipe_launches(spatial.softmax_recipe(tensors, chosen, log, backward, DEVICE), tensors)
        used, _ = cross_compiled(as_called(launch), TARGET)
        assert dict(used.loads) == {16: (n_tensors - 1) * chosen.chunks, dtype.itemsize: n_tensors - 1}
        assert dict(used.stores) == {16: chosen.chunks, dtype.itemsize: 1}
        most = chosen.chunks >= MOST_VECTORS[backward, dtype.itemsize] - 6
        assert used.registers <= HELD_REGISTERS and used.spilled_bytes <= (LEAST_SPILLED if most else 0)
        assert used.num_ctas == chosen.ctas and used.shared_bytes <= 48 << 10
        assert used.cluster_barriers == (chosen.ctas > 1)  # to know that the others' mbarriers are armed
    assert held, "no plan holds such a plane"


@pytest.mark.parametrize(("shape", "backward", "dtype"), FEW_WARPS)
def test_few_warps_move_each_element_once(shape, backward, dtype):
    """As above, of the softmax's own plans, whose caps on registers follow from their vectors."""
    tensors = (torch.empty(2, *shape, dtype=dtype),) * (2 + backward)
    chosen = spatial.softmax_plan(tensors, False, backward, False, DEVICE)
    assert chosen.periodic and chosen.num_warps <= 4 and chosen.ctas == 1
    check(tensors, chosen, False)


@pytest.mark.parametrize("log", [False, pytest.param(True, marks=pytest.mark.extended)])
@pytest.mark.parametrize(("shape", "backward", "dtype"), FEW_POSITIONS)
def test_gradients_of_few_positions_move_each_element_once(shape, backward, dtype, log):
    tensors = (torch.empty(2, *shape, dtype=dtype),) * (2 + backward)
    chosen = spatial.softmax_plan(tensors, log, backward, False, DEVICE)
    assert chosen.periodic and (chosen.ctas, chosen.num_warps) in {(2, 4), (3, 4)}
    check(tensors, chosen, log)


@pytest.mark.parametrize("log", [False, pytest.param(True, marks=pytest.mark.extended)])
@pytest.mark.parametrize(("shape", "dtype"), MOST_HELD)
def test_the_most_vectors_are_moved_once(shape, dtype, log):
    tensors = (torch.empty(2, *shape, dtype=dtype),) * 2
    chosen = periodic_plan(spatial.problem_of(*tensors, log=log), DEVICE)
    assert chosen.chunks == MOST_VECTORS[False, dtype.itemsize]
    check(tensors, chosen, log, MOST_HELD_SPILLED)


def check(tensors, chosen, log, most_spilled=LEAST_SPILLED):
    """One access of each vector and of both ends, no register beyond the cap, and few spills."""
    backward, dtype = len(tensors) == 3, tensors[0].dtype
    (launch,) = spatial.recipe_launches(spatial.softmax_recipe(tensors, chosen, log, backward, DEVICE), tensors)
    used, _ = cross_compiled(as_called(launch), TARGET)
    assert dict(used.loads) == {16: (1 + backward) * chosen.chunks, dtype.itemsize: 1 + backward}
    assert dict(used.stores) == {16: chosen.chunks, dtype.itemsize: 1}
    assert used.registers <= chosen.max_registers and used.spilled_bytes <= most_spilled
