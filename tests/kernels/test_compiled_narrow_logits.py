"""Compiled losses and statistics of rows of few columns: what the machine moves, and results without races."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from launches import as_called, cross_compiled
from narrow_logits import ALL, GUARD, HOPPER, KINDS, Checked, drawn, most_cols
from ptx_launches import run_launch

from fused_softmax.lab.cross_compile import compile_for
from fused_softmax.launch import cross_entropy, cross_entropy_gradient
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.compiled

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# columns and dtypes: whole rows in a thread and several of them; 2 to 16 threads a row; vectors of 8 bytes
CASES = ((2, BFLOAT16), (5, FLOAT32), (19, BFLOAT16), (51, FLOAT16), (64, FLOAT32), (150, BFLOAT16), (200, FLOAT32))


def entropies_of_large_logits(seed: int, n_cols: int, dtype: torch.dtype) -> Checked:
    """The first case of a seed that has entropies of logits of 1,000 and more, without a scale."""
    cases = (drawn("statistics", 1000 * seed + n, HOPPER, n_cols, dtype, n_rows=37) for n in range(1000))
    return next(
        of for of in cases
        if "entropies" in of.written and dict(of.call[4])["SCALE"] == 0 and of.call[1][0].float().mean() > 1000
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("n_cols", "dtype"), [(19, FLOAT16), (64, BFLOAT16), (150, FLOAT16)])
def test_entropies_of_large_logits_are_right(n_cols, dtype, seed):
    """Both sums are over the largest logit's own term, which is not exactly 1 where an exponent was rounded."""
    case = entropies_of_large_logits(seed, n_cols, dtype)
    kernel = compile_for(case.launch, "sm_90")
    run_launch(case.launch, kernel.asm["ptx"], kernel.metadata.shared, 1)
    case.expect_right()


@pytest.mark.parametrize(("n_cols", "dtype"), (*CASES, (650, BFLOAT16)))
@pytest.mark.parametrize("kind", ALL)
def test_a_machine_of_numpy_finds_no_race(kind, n_cols, dtype):
    """With rows that do not fill the last program, wherever the tensors start; each number is written once."""
    n_cols = min(n_cols, most_cols(kind, dtype, 1))
    case = drawn(kind, n_cols, HOPPER, n_cols, dtype, n_rows=37)
    assert case.plan.gathered
    kernel = compile_for(case.launch, "sm_90")
    races, written = run_launch(case.launch, kernel.asm["ptx"], kernel.metadata.shared, 1)
    assert not races
    case.expect_right()
    inside = {m[GUARD:-GUARD].data_ptr(): (name, m[GUARD:-GUARD].numel()) for name, m in case.written.items()}
    seen = {inside[t.data_ptr()][0] for t, n in written if t.data_ptr() in inside and (n == 1).all()}
    assert seen == set(case.written)
    known = set(inside)
    others = [n for t, n in written if t.data_ptr() not in known]
    # the upstream gradient that a loss keeps
    assert sum(int(np.count_nonzero(n)) for n in others) == (4 if kind == "loss" else 0)
    if kind == "loss":
        count, numbers = case.call[2][3], case.call[3]
        assert count[1] == numbers[-1]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("kind", ALL)
def test_random_rows_are_moved_in_vectors_and_hardly_spilled(kind, target):
    """Nearly all spill nothing. A few gradients of 440 columns and more spill 8 to 24 bytes."""
    for seed in range(4):
        rng = Random(f"{kind} {target} {seed}")
        dtype, vec = rng.choice((BFLOAT16, FLOAT16, FLOAT32)), rng.choice((1, 2, 4, 8))
        vec = min(vec, 16 // dtype.itemsize)
        n_cols = vec * rng.randint(1, most_cols(kind, dtype, vec) // vec)
        if n_cols < 2:
            continue
        case = drawn(kind, seed, DEVICES[target], n_cols, dtype, n_rows=64)
        if not case.plan.gathered:  # longer rows, or more elements than a thread may hold
            assert n_cols > 100
            continue
        used, _ = cross_compiled(as_called(case.launch), target)
        assert used.spilled_bytes <= (24 if n_cols >= 440 else 8), (n_cols, dtype)
        assert used.shared_bytes <= 48 << 10
        size = case.plan.rows * case.plan.vectors_per_chunk * case.plan.chunks * case.plan.vec * dtype.itemsize
        of_threads = 16 * 32 * case.plan.num_warps
        assert dict(used.loads)[16] == -(-size // of_threads)
        if "dx" in case.written:
            assert dict(used.stores)[16] == -(-size // of_threads)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_gaps_are_read_one_by_one(kind):
    """A batch of rows that are cut from wider ones has no one piece; neither has a batch-invariant call."""
    case = drawn(kind, 0, HOPPER, 19, BFLOAT16, n_rows=8)
    assert case.plan.gathered
    x = torch.empty(8, 24, dtype=BFLOAT16)[:, :19]
    ops = {
        "loss": (cross_entropy.WITH_GRADIENT["exponential"], 2),
        "loss alone": (cross_entropy.FORWARD["exponential"], 1),
        "gradient": (cross_entropy_gradient.BACKWARD, 2),
    }
    op, n = ops[kind]
    assert not op.plan((x,) * n, HOPPER, False).gathered
    assert not op.plan((x.contiguous(),) * n, HOPPER, True).gathered
    assert op.plan((x.contiguous(),) * n, HOPPER, False).gathered
