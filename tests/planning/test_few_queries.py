"""Plans of causal scores of few queries: what a row sees is held, pieces start at sectors, and no order changes."""

from __future__ import annotations

import random

import pytest

from fused_softmax.planning.masked_softmax import MOST_SEEN_CHUNKS, plan_masked
from fused_softmax.planning.types import DEVICES, ITEMSIZE, Problem

ORDER = ("regime", "ctas", "warps_per_row", "vectors_per_chunk", "vec", "unaligned", "recompute")


@pytest.mark.parametrize("target", DEVICES)
def test_what_no_row_sees_is_left_out_and_nothing_else(target):
    rng, device, found = random.Random(target), DEVICES[target], 0
    for _ in range(3000):
        dtype = rng.choice(tuple(ITEMSIZE))
        n_cols, seen, packed = rng.randint(1, 2100), 1 << rng.randrange(11), rng.random() < 0.8
        vec = 16 // ITEMSIZE[dtype]
        while n_cols % vec:
            vec //= 2
        problem = Problem(n_cols, dtype, dtype, vec, in_phase=rng.random() < 0.8, packed=packed)
        few, many = (plan_masked(problem, device, 0, True, of) for of in (seen, None))
        assert all(getattr(few, name) == getattr(many, name) for name in ORDER), "a sum has one order"
        if few == many:
            continue
        found += 1
        chunk = few.vectors_per_chunk * few.vec
        held = few.chunks - few.unseen_chunks
        assert few.chunks - many.chunks in (0, 1), "an empty chunk adds zeros, too"
        assert held * chunk >= seen and held in (1, MOST_SEEN_CHUNKS) and few.unseen_chunks > 0
        assert packed and few.output_gathered and few.rows * n_cols * problem.itemsize % 32 == 0
        assert few.rows * few.vectors_per_chunk == few.num_warps * device.warp_size
        assert few.rows * (few.chunks * few.vectors_per_chunk + 2) * 16 <= 46 << 10, "shared memory"
    assert (found > 100) == (device.warp_size == 32)
