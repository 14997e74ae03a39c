"""Columns that are read in folds: which problems, and how long a fold and a part are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from fused_softmax.launch import spatial
from fused_softmax.planning.folded_columns import FEWEST_FOLDS, FILLED_FOLD, MOST_TILES, faster_as_folded, fold_of
from fused_softmax.planning.spatial import folded_plan, parts_plan
from fused_softmax.planning.spatial_tables import FOLDED_PARTS, PARTS
from fused_softmax.planning.types import DEVICES, Plan, SpatialProblem

HOPPER = DEVICES["sm_90"]
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def planes(n_cols: int, inner: int, dtype: torch.dtype, backward: bool, outer: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty((outer, n_cols, inner), dtype=dtype, device="meta") for _ in range(2 + backward))


def chosen(n_cols: int, inner: int, dtype: torch.dtype, backward: bool, invariant: bool = False) -> Plan:
    return spatial.softmax_plan(planes(n_cols, inner, dtype, backward), False, backward, invariant, HOPPER)


# what is folded, and the next case that is not: (columns, positions, dtype, gradient)
FOLDED = (
    # read twice: odd positions, and even ones from a number on
    ((66852, 17, BFLOAT16, False), (66852, 16, BFLOAT16, False)),
    ((501489, 27, BFLOAT16, True), (501489, 26, BFLOAT16, True)),
    ((400000, 66, BFLOAT16, False), (400000, 62, BFLOAT16, False)),
    ((400000, 66, FLOAT32, True), (400000, 62, FLOAT32, True)),
    ((400000, 510, FLOAT32, True), (400000, 514, FLOAT32, True)),
    ((400000, 34, FLOAT32, False), (400000, 30, FLOAT32, False)),
    # halves of sectors whose tiles are wide
    ((26308, 72, BFLOAT16, False), (42508, 56, BFLOAT16, False)),
    ((174863, 40, BFLOAT16, False), (174863, 24, BFLOAT16, False)),
    ((26308, 72, BFLOAT16, False), (26308, 72, BFLOAT16, True)),
    # in place of planes in registers whose programs fill a multiprocessor
    ((81829, 15, BFLOAT16, False), (27455, 23, BFLOAT16, False)),
    ((5134, 71, FLOAT32, False), (46380, 7, FLOAT32, False)),
    ((51139, 15, BFLOAT16, False), (54451, 12, BFLOAT16, True)),
    # in place of narrow tiles
    ((9001, 103, BFLOAT16, False), (6890, 179, BFLOAT16, False)),
    ((9355, 171, FLOAT32, False), (4643, 821, FLOAT32, False)),
    ((5935, 990, FLOAT32, False), (8381, 1334, FLOAT32, False)),
    ((5001, 202, FLOAT32, False), (4995, 202, FLOAT32, False)),
    ((6563, 90, FLOAT32, False), (6563, 58, FLOAT32, False)),
)


@pytest.mark.parametrize(("folded", "not_folded"), FOLDED, ids=str)
def test_what_is_folded(folded, not_folded):
    plan = chosen(*folded)
    assert plan.fold > 0 and plan.regime == "spatial_two_pass" and "as one" in plan.why
    assert plan.vec == 16 // folded[2].itemsize, "whole vectors, whatever the positions are"
    assert chosen(*not_folded).fold == 0


def test_what_cannot_be_folded():
    n_cols, inner = 66852, 17
    x, y = planes(n_cols, inner, BFLOAT16, False)
    assert chosen(n_cols, inner, BFLOAT16, False, invariant=True).fold == 0
    for tensors in (
        (x, y.to(FLOAT32)),  # a cast
        (torch.empty((2, n_cols, inner + 1), dtype=BFLOAT16, device="meta")[:, :, 1:], y),  # gaps
        (torch.empty((4, n_cols, inner), dtype=BFLOAT16, device="meta")[::2], y),
    ):
        assert spatial.softmax_plan(tensors, False, False, False, HOPPER).fold == 0
    problem = spatial.problem_of(x, y)
    read_twice = parts_plan(problem, HOPPER)
    fold = fold_of(problem)
    enough = FEWEST_FOLDS * fold + problem.period
    assert faster_as_folded(replace(problem, n_cols=enough), read_twice) == fold
    assert faster_as_folded(replace(problem, n_cols=enough - 1), read_twice) is None


def random_problems(seed: int, count: int) -> list[SpatialProblem]:
    pick, found = random.Random(seed), []
    while len(found) < count:
        n_cols, inner = round(2000 * 1000 ** pick.random()), round(2 * 1000 ** pick.random())
        dtype, backward = pick.choice((BFLOAT16, FLOAT32)), pick.random() < 0.5
        problem = spatial.problem_of(*planes(n_cols, inner, dtype, backward), backward=backward)
        if problem.period > 1 and n_cols > FEWEST_FOLDS * fold_of(problem) + problem.period:
            found.append(problem)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_folds_start_at_sectors_and_parts_hold_them(seed):
    for problem in random_problems(seed, 300):
        fold, tile = fold_of(problem), PARTS.n_bytes // problem.itemsize
        assert fold % problem.period == 0 and fold * problem.inner * problem.itemsize % 32 == 0, problem
        filled = [f for f in range(problem.period, fold, problem.period) if empty(f, problem, tile) <= FILLED_FOLD]
        assert not filled, f"{filled} columns fill tiles, too: {problem}"
        few = fold * problem.inner <= max(MOST_TILES * tile, problem.period * problem.inner)
        assert few and empty(fold, problem, tile) <= 2, problem
        plan = folded_plan(problem, HOPPER, fold)
        assert plan.fold == fold and plan.part_cols % (fold * plan.vectors_per_chunk * plan.chunks) == 0, problem
        least = FOLDED_PARTS[problem.backward, problem.itemsize][1]
        assert plan.part_cols >= min(fold * least, problem.n_cols - problem.period - fold), problem


def empty(fold: int, problem: SpatialProblem, tile: int) -> float:
    """Positions of whole tiles over those of a fold."""
    width = fold * problem.inner
    return -(-width // tile) * tile / width


@pytest.mark.parametrize("seed", range(3))
def test_each_element_is_in_one_fold_or_in_the_ends(seed):
    """As the kernels count them: the folds of a plane start at a sector, and its ends fit in two rows of a fold."""
    pick = random.Random(seed)
    for problem in random_problems(seed, 100):
        unit, fold, plane = 32 // problem.itemsize, fold_of(problem), problem.n_cols * problem.inner
        outer = pick.randrange(50)
        n_folds, width = (problem.n_cols - problem.period + 1) // fold, fold * problem.inner
        past = outer * plane % unit * problem.period // unit
        step = problem.inner % unit * problem.period // unit
        head = (-past * step**3 & (problem.period - 1)) * problem.inner
        ends = plane - n_folds * width
        assert (outer * plane + head) % unit == 0, "folds start at a sector"
        assert 0 <= head <= ends <= 2 * width, "the ends are a head and a tail, of two rows at most"
