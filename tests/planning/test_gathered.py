"""Narrow rows that are moved as one piece: what their plans owe to the kernels."""

from __future__ import annotations

import doctest
import itertools

import pytest
import torch

from fused_softmax.launch.layout import problem_of
from fused_softmax.planning import gathered, piece_costs
from fused_softmax.planning.masked_softmax import plan_masked
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES, ITEMSIZE, Plan, Problem

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "interpreter")


def packed(n_cols: int, dtype: str, vec: int, backward: bool = False) -> Problem:
    return Problem(n_cols, dtype, dtype, vec, in_phase=True, backward=backward, packed=True)


def expect_whole_vectors(chosen: Plan, n_cols: int, dtype: str, regions: int) -> None:
    """A program's rows are whole vectors, hold the width, and lie in 48 KB of shared memory."""
    itemsize = ITEMSIZE[dtype]
    assert chosen.rows * n_cols * itemsize % 16 == 0
    held = chosen.vectors_per_chunk * chosen.vec
    assert n_cols <= held * chosen.chunks + 2 * chosen.vec * chosen.unaligned
    assert chosen.runs or held * chosen.unpredicated_chunks <= n_cols
    elements = chosen.rows * (held * chosen.chunks + 2 * chosen.vec * chosen.unaligned)
    assert regions * (elements * itemsize + 32) <= 48 << 10


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_programs_rows_are_whole_vectors(dtype, target):
    found = {False: set(), True: set()}
    for n_cols in range(1, 200):
        for backward in (False, True):
            vec = 1
            while vec * ITEMSIZE[dtype] < 16 and n_cols % vec == 0:
                chosen = gathered.gathered_plan(packed(n_cols, dtype, vec, backward), DEVICES[target])
                if chosen is not None:
                    assert chosen.rows * chosen.vectors_per_chunk % (32 * chosen.num_warps) == 0
                    expect_whole_vectors(chosen, n_cols, dtype, 1 + backward)
                    found[backward].add(n_cols)
                vec *= 2
    for backward, widths in found.items():
        most = gathered.MOST_COLS[gathered.BACKWARD if backward else gathered.FORWARD][ITEMSIZE[dtype]]
        assert len(widths) >= 0.8 * most and all(3 <= n_cols <= most for n_cols in widths)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scores_of_a_program_are_whole_vectors(dtype, target):
    """Under every mask, causal, and gradients: narrow ones are read as one piece, causal ones written as one."""
    some = dict.fromkeys(((m, c, b) for m in (0, 1, 2) for c in (False, True) for b in (False, True)), 0)
    for n_cols in range(3, 700):
        vec = 16 // ITEMSIZE[dtype]
        for mask, causal, backward in some:
            asked = packed(n_cols, dtype, vec if n_cols % vec == 0 else 1, backward)
            if mask == 2 and backward:  # which reads no such mask
                continue
            chosen = plan_masked(asked, DEVICES[target], mask, causal)
            assert not chosen.output_gathered or (causal and not backward)
            assert not (chosen.gathered and chosen.output_gathered)
            if chosen.gathered or chosen.output_gathered:
                expect_whole_vectors(chosen, n_cols, dtype, 1 + backward)
                some[mask, causal, backward] += 1
    fewest = {"bfloat16": 40, "float32": 20}[dtype]
    assert all(n >= fewest for (mask, _, backward), n in some.items() if not (backward and mask == 2)), some
    assert some[0, True, False] > 200


@pytest.mark.parametrize("n_cols", [63, 65])
def test_the_lanes_of_a_row_meet_the_banks_better_in_runs(n_cols):
    """16 bits: neighbors of neighboring rows share banks, the starts of runs do not."""
    chosen = gathered.gathered_plan(packed(n_cols, "bfloat16", 1), DEVICES["sm_90"])
    assert chosen.runs and chosen.vec == 1
    lanes, run = chosen.vectors_per_chunk, chosen.chunks
    assert piece_costs.wavefronts(n_cols, lanes, 1, 2, run) < piece_costs.wavefronts(n_cols, lanes, 1, 2, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n_cols", range(3, 129))
def test_chunks_without_a_predicate_lie_inside_every_row(n_cols, dtype):
    """Also of a row that is divided into runs, whose last one is short."""
    vec = 16 // ITEMSIZE[dtype]
    while n_cols % vec:
        vec //= 2
    for backward, scores, masked in itertools.product((False, True), repeat=3):
        asked = packed(n_cols, dtype, vec, backward)
        chosen = gathered.gathered_plan(asked, DEVICES["sm_90"], scores, masked and scores and not backward)
        if chosen is not None:
            lanes, held = chosen.vectors_per_chunk, chosen.chunks * chosen.vec
            step = chosen.vec if chosen.runs else lanes * chosen.vec
            last = (lanes - 1) * (held if chosen.runs else chosen.vec)  # the last lane's first column
            full = chosen.unpredicated_chunks
            assert full == 0 or last + (full - 1) * step + chosen.vec <= n_cols
            assert lanes * held >= n_cols


@pytest.mark.parametrize("itemsize", [2, 4])
def test_rows_at_vectors_are_pieces_where_they_leave_lanes_idle(itemsize):
    """Softmax of as many vectors as a power of two keeps its kernel, and scores of a multiple of 8 vectors."""
    dtype, full = {2: "bfloat16", 4: "float32"}[itemsize], 16 // itemsize
    for vectors in range(1, 16):
        asked = packed(vectors * full, dtype, full)
        softmax = gathered.gathered_plan(asked, DEVICES["sm_90"])
        assert (softmax is None) == (vectors in (1, 2, 4, 8)), vectors
        scores = gathered.gathered_plan(asked, DEVICES["sm_90"], True, True)
        assert (scores is None) == (vectors * full > {2: 80, 4: 28}[itemsize] or vectors == 8), vectors
        for chosen in (softmax, scores):
            assert chosen is None or chosen.vec * itemsize == 8


@pytest.mark.parametrize(("n_cols", "gaps"), [(13, 0), (77, 0), (77, 3)])
def test_rows_with_gaps_or_of_several_dtypes_are_read_as_rows(n_cols, gaps):
    half = torch.empty(5, n_cols + gaps, dtype=torch.bfloat16)[:, :n_cols]
    assert plan(problem_of(half, half), DEVICES["sm_90"]).gathered == (gaps == 0)
    for tensors in ((half, half.float(), half), (half.float(), half, half), (half, half, half.float())):
        assert not plan(problem_of(*tensors, backward=True), DEVICES["sm_90"]).gathered


def test_on_amd_rows_are_read_as_rows():
    assert not plan(packed(77, "bfloat16", 1), DEVICES["gfx942"]).gathered


def test_examples():
    for module, fewest in ((gathered, 2), (piece_costs, 2)):
        found = doctest.testmod(module)
        assert found.attempted >= fewest and found.failed == 0, module
