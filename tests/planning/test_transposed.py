"""Plans of the transposing kernel: what they owe to the kernel, and what they follow from."""

from __future__ import annotations

import doctest
import random

import pytest

from fused_softmax.kernels.common.gathered_ptx import region_bytes
from fused_softmax.planning import transposed
from fused_softmax.planning.piece_costs import ALIGN_BYTES, FORWARD, MOST_ELEMENTS
from fused_softmax.planning.transposed import TransposedRows, reading, transposed_plan
from fused_softmax.planning.types import DEVICES, ITEMSIZE, MULTIPROCESSORS

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "interpreter")


def drawn(pick: random.Random) -> TransposedRows:
    dtype = pick.choice(("bfloat16", "float16", "float32"))
    full = 4 if dtype == "float32" else 8
    vec = pick.choice([v for v in (1, 2, 4, 8) if v <= full])
    n_cols, neighbors = round(2 * 2000 ** pick.random()), round(2**18 ** pick.random())
    starts = vec * ITEMSIZE[dtype] * pick.choice((1, 1, 2, 4))  # `inner` may be odd where columns lie apart evenly
    return TransposedRows(n_cols, neighbors, dtype, vec, min(starts, 32), pick.randrange(full), pick.random() < 0.5)


@pytest.mark.parametrize("target", TARGETS)
def test_a_piece_has_its_room_and_its_threads(target):
    pick, found = random.Random(3), {"own": 0, "added": 0, "long": 0, "split": 0}
    for _ in range(16000 // len(TARGETS)):
        of = drawn(pick)
        chosen = transposed_plan(of, DEVICES[target])
        if chosen is None:
            continue
        found["added" if chosen.dynamic_bytes else "own"] += 1
        found["long"] += chosen.recompute
        if not of.into_rows:  # whole sectors, where columns start at them, and no plan of long rows elsewhere
            found["split"] += of.starts < transposed.SECTOR
            assert chosen.rows * of.itemsize >= transposed.SECTOR
            assert of.starts >= 16 or of.n_cols <= transposed.MOST_SPLIT[of.itemsize]
        lanes, threads, room = chosen.vectors_per_chunk, 32 * chosen.num_warps, region_bytes(chosen.piece, of.itemsize)
        assert chosen.rows * of.n_cols <= chosen.piece
        # the last place of a piece that starts 16 bytes less an element behind a vector, and the one behind it
        assert 16 - of.itemsize + chosen.piece * of.itemsize + of.itemsize <= room
        if chosen.dynamic_bytes:
            assert 48 << 10 < room <= chosen.dynamic_bytes
            assert chosen.dynamic_bytes + ALIGN_BYTES <= MULTIPROCESSORS["sm_90"].shared_per_program
        else:
            assert room <= 48 << 10
        assert chosen.rows * lanes % threads == 0 and threads <= 512 and 32 % lanes == 0
        # an access does not pass the end of a row's words, and has 8 bytes at most, at multiples of them
        columns, bytes_of_access = of.n_cols - of.odd, of.width * of.itemsize
        assert bytes_of_access <= 8 and columns % of.width == 0
        assert of.odd or all(n * of.itemsize % bytes_of_access == 0 for n in (of.n_cols, of.phase))
        assert not of.odd or bytes_of_access == 4
        if chosen.recompute:
            assert chosen.chunks * of.width == transposed.LOOP_ELEMENTS
        else:
            assert columns <= chosen.chunks * lanes * of.width
            assert chosen.unpredicated_chunks * lanes * of.width <= columns
            assert chosen.chunks * of.width <= MOST_ELEMENTS[FORWARD]
        read = reading(of, chosen.rows, chosen.num_warps)
        assert chosen.rows % (read.across * read.span * of.vec) == 0 and chosen.num_warps % read.across == 0
        assert read.pair == 1 or of.even
    hopper = target in ("sm_90", "interpreter")
    assert found["split"] > 200
    assert found["own"] > 1000 and (found["added"] > 20) == hopper and found["long"] > 20, found


def test_bits_follow_from_columns_and_the_output_alone():
    """Lanes and chunks are the same for any alignment of the input, and for any neighbors."""
    pick = random.Random(4)
    for _ in range(2000):
        of, added = drawn(pick), set()
        for vec in (1, 2, 4):
            for neighbors in (64, 1000, 1 << 18):
                other = of._replace(vec=vec, neighbors=neighbors)
                chosen = transposed_plan(other, DEVICES["sm_90"])
                if chosen is not None:
                    added.add((chosen.vectors_per_chunk, chosen.chunks, chosen.recompute, other.width, other.odd))
                # whether it is taken follows from the alignment of columns, and no part of a batch changes that
                assert (chosen is None) == (transposed_plan(of._replace(neighbors=1000), DEVICES["sm_90"]) is None)
        assert len(added) <= 1


def test_devices_without_such_a_kernel():
    of = TransposedRows(150, 4096, "bfloat16", 8, 32)
    assert transposed_plan(of, DEVICES["gfx942"]) is None
    most = {t: max(n for n in range(1000, 2600) if transposed_plan(of._replace(n_cols=n), DEVICES[t])) for t in TARGETS}
    assert most == dict.fromkeys(TARGETS, transposed.MOST_COLS)
    of = of._replace(dtype="float32", vec=4)
    most = {t: max(n for n in range(1000, 2600) if transposed_plan(of._replace(n_cols=n), DEVICES[t])) for t in TARGETS}
    assert most == {"sm_80": 1472, "sm_90": 2384, "sm_100": 1472, "sm_120": 1472, "interpreter": 2384}


def test_the_examples_of_the_planner():
    assert doctest.testmod(transposed).failed == 0
