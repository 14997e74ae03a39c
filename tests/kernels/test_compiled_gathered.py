"""Narrow rows that start anywhere: what the machine moves for them, on each kind of device."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from launches import as_called, cross_compiled, masked_gradient_launch, masked_launch
from planned import problem

from fused_softmax.launch import spatial
from fused_softmax.launch.softmax import softmax_launch
from fused_softmax.planning.gathered import MOST_COLS
from fused_softmax.planning.piece_costs import BACKWARD, FORWARD
from fused_softmax.planning.planes import planes_plan
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.compiled
WIDTHS = (3, 6, 13, 33, 50, 65, 77, 116, 125)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("n_cols", WIDTHS)
def test_memory_is_accessed_in_vectors(n_cols, dtype, backward):
    """All but the two edges of a program's piece: one access of each tensor that is narrower than 16 bytes."""
    chosen = plan(problem(n_cols, (dtype, dtype), backward=backward), DEVICES["sm_90"])
    within = n_cols <= MOST_COLS[BACKWARD if backward else FORWARD][2 if "16" in dtype else 4]
    by_rows = backward and n_cols == 77  # whose last chunk is mostly empty
    assert chosen.gathered == (within and not by_rows)
    if not chosen.gathered:
        return
    x = torch.empty(3, n_cols, dtype=getattr(torch, dtype))
    launch = softmax_launch((x,) * (3 if backward else 2), chosen, backward=backward, device=DEVICES["sm_90"])
    used, _ = cross_compiled(as_called(launch), "sm_90")
    assert used.spilled_bytes == 0 and used.shared_bytes <= 48 << 10
    vectors = -(-chosen.rows * chosen.vectors_per_chunk * chosen.chunks * chosen.vec * x.element_size() // (16 * 128))
    assert dict(used.loads) == {16: (1 + backward) * vectors, x.element_size(): 1 + backward}
    assert dict(used.stores) == {16: vectors, x.element_size(): 1}


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("n_cols", "dtype"), [(24, "bfloat16"), (72, "float16"), (120, "bfloat16"), (12, "float32"), (36, "float32")]
)
def test_rows_at_vectors_that_leave_lanes_idle_move_so_too(n_cols, dtype, target):
    chosen = plan(problem(n_cols, (dtype, dtype)), DEVICES[target])
    x = torch.empty(3, n_cols, dtype=getattr(torch, dtype))
    used, _ = cross_compiled(as_called(softmax_launch((x, x), chosen, device=DEVICES[target])), target)
    assert chosen.gathered and used.spilled_bytes == 0
    assert dict(used.stores)[16] > 1 and set(dict(used.stores)) == {16, x.element_size()}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_every_nvidia_gpu_takes_them(target):
    chosen = plan(problem(77, ("bfloat16", "bfloat16")), DEVICES[target])
    x = torch.empty(3, 77, dtype=torch.bfloat16)
    used, _ = cross_compiled(as_called(softmax_launch((x, x), chosen, device=DEVICES[target])), target)
    assert chosen.gathered and used.spilled_bytes == 0 and used.async_copies > 0


PLANES = [
    *itertools.product([(2, 7), (35, 31), (300, 13)], [False], [torch.bfloat16, torch.float32], ["sm_80", "sm_90"]),
    *itertools.product([(35, 31)], [False], [torch.bfloat16], ["sm_100", "sm_120"]),
    *itertools.product([(64, 63), (1080, 5)], [True], [torch.float16], ["sm_90"]),
]


@pytest.mark.parametrize(("shape", "log", "dtype", "target"), PLANES, ids=str)
def test_small_planes_move_in_vectors(shape, log, dtype, target):
    """Forward and gradient: whole vectors but for two edges, and a thread holds little more than its columns."""
    device = DEVICES[target]
    for n_tensors in (2, 3):
        tensors = tuple(torch.empty(4, *shape, dtype=dtype) for _ in range(n_tensors))
        chosen = planes_plan(spatial.problem_of(*tensors, backward=n_tensors == 3), device)
        (launch,) = spatial.recipe_launches(
            spatial.softmax_recipe(tensors, chosen, log, n_tensors == 3, device), tensors
        )
        used, _ = cross_compiled(as_called(launch), target)
        assert used.spilled_bytes == 0 and used.shared_bytes <= 48 << 10
        if target == "sm_90":
            few = 80 if n_tensors == 3 and chosen.chunks <= 19 else 128
            assert used.registers <= (few if log or n_tensors == 3 else 44 + chosen.chunks)
        vectors = -(-chosen.piece * dtype.itemsize // (16 * 32 * chosen.num_warps))
        assert dict(used.loads) == {16: (n_tensors - 1) * vectors, dtype.itemsize: n_tensors - 1}
        assert dict(used.stores) == {16: vectors, dtype.itemsize: 1}


LARGE = [((160, 161), torch.bfloat16), ((140, 101), torch.float32), ((90, 301), torch.float16)]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), LARGE, ids=str)
def test_large_planes_move_in_vectors(shape, dtype, log):
    """Of more than the 48 KB that PTX declares: shared memory is added."""
    device, target = DEVICES["sm_90"], "sm_90"
    for n_tensors in (2, 3):
        backward = n_tensors == 3
        tensors = tuple(torch.empty(4, *shape, dtype=dtype) for _ in range(n_tensors))
        chosen = planes_plan(spatial.problem_of(*tensors, backward=backward), device)
        (launch,) = spatial.recipe_launches(spatial.softmax_recipe(tensors, chosen, log, backward, device), tensors)
        used, _ = cross_compiled(as_called(launch), target)
        assert chosen.ctas == 1 and chosen.dynamic_bytes > 48 << 10
        assert used.num_ctas == 1 and used.cluster_barriers == 0
        assert used.spilled_bytes <= 32 and used.fits()
        own = used.shared_bytes - chosen.dynamic_bytes
        assert own == 128 if chosen.dynamic_bytes else own <= 48 << 10
        vectors = -(-chosen.piece * dtype.itemsize // (16 * 32 * chosen.num_warps))
        assert dict(used.loads) == {16: (n_tensors - 1) * vectors, dtype.itemsize: n_tensors - 1}
        assert dict(used.stores) == {16: vectors, dtype.itemsize: 1}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("kind", [torch.bool, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n_cols", [16, 17, 48, 49, 63, 76, 101])
def test_masks_are_read_before_the_rows_arrive(n_cols, kind, target):
    """One access for each of a thread's, which the wait for the rows does not hold up; none spills."""
    x = torch.empty(4, n_cols, dtype=torch.bfloat16)
    launch, chosen = masked_launch(x, torch.empty(2, n_cols, dtype=kind), False, DEVICES[target])
    used, assembly = cross_compiled(as_called(launch), target)
    assert chosen.gathered and used.spilled_bytes == 0 and used.shared_bytes <= 48 << 10
    itemsize = kind.itemsize
    as_words = itemsize < 4 and launch.meta["MASK_VEC"] >= chosen.vec and chosen.vec * itemsize % 4 == 0
    loads = dict(used.loads)
    vectors = -(-chosen.rows * chosen.vectors_per_chunk * chosen.chunks * chosen.vec * x.element_size() // (16 * 128))
    expected = {16: vectors, 2: 1}
    of_mask = 4 if as_words else itemsize
    expected[of_mask] = expected.get(of_mask, 0) + chosen.chunks * chosen.vec * itemsize // of_mask
    assert loads == expected
    names = re.findall(r"^(?:[\w-]+:){4}[0-9a-f]+\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", assembly["sass"], re.M)
    reads = [i for i, name in enumerate(names) if name == "LDG"]
    waits = [i for i, name in enumerate(names) if name == "DEPBAR"]
    assert max(reads) < min(waits), "a mask is read after the rows have arrived"


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("n_cols", "mask", "causal"), [(49, 0, False), (49, 1, False), (37, 0, True), (63, 1, True)])
def test_gradients_of_masked_rows_are_written_in_vectors(n_cols, mask, causal, target):
    x = torch.empty(4, n_cols, dtype=torch.bfloat16)
    kept = torch.empty(2, n_cols, dtype=torch.bool) if mask else None
    launch, chosen = masked_gradient_launch(x, kept, causal, DEVICES[target])
    used, _ = cross_compiled(as_called(launch), target)
    assert chosen.gathered and used.spilled_bytes == 0
    assert set(dict(used.stores)) == {16, 2} and dict(used.stores)[2] == 1


# columns of a dtype, and whether causal rows of them are written as one piece
CAUSAL = [
    *((torch.bfloat16, n_cols, True) for n_cols in (72, 129, 257, 286, 306, 474)), (torch.bfloat16, 521, False),
    *((torch.float32, n_cols, True) for n_cols in (68, 129, 257, 286, 306)), (torch.float32, 474, False),
]  # fmt: skip


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("dtype", "n_cols", "gathered"), CAUSAL)
def test_causal_rows_are_written_as_one_piece(dtype, n_cols, gathered, target):
    """No store of a warp is left but that of the edges, and the one copy that is asked for, or its vectors."""
    launch, chosen = masked_launch(torch.empty(4, n_cols, dtype=dtype), None, True, DEVICES[target])
    assert chosen.output_gathered == gathered
    if not gathered:
        return
    assert chosen.rows % chosen.vec == 0
    used, assembly = cross_compiled(as_called(launch), target)
    assert used.spilled_bytes == 0 and used.shared_bytes <= 48 << 10
    ptx = assembly["ptx"]
    puts = [m.start() for m in re.finditer(r"st\.shared\.", ptx)]
    barriers = [m.start() for m in re.finditer(r"bar\.sync", ptx)]
    if DEVICES[target].copies_in_bulk:
        assert dict(used.stores) == {16: 1, dtype.itemsize: 1}
        (fence,) = (m.start() for m in re.finditer(r"fence\.proxy\.async", ptx))
        (copy,) = (m.start() for m in re.finditer(r"cp\.async\.bulk\.global", ptx))
        assert max(puts) < fence < barriers[-1] < copy, "the copy sees what all threads wrote"
    else:
        assert set(dict(used.stores)) == {16, dtype.itemsize} and dict(used.stores)[dtype.itemsize] == 1
        assert max(puts) < barriers[-1]


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("n_cols", "queries", "seen"), [(474, 30, 1), (473, 30, 1), (600, 200, 4), (133, 60, 1), (880, 27, 1)]
)
def test_causal_rows_of_few_queries_hold_what_they_see(n_cols, queries, seen, target):
    """They read a vector for each chunk that some row sees, and put one in shared memory for each chunk."""
    x = torch.empty(4, n_cols, dtype=torch.bfloat16)
    launch, chosen = masked_launch(x, None, True, DEVICES[target], queries=queries)
    assert chosen.output_gathered and chosen.chunks - chosen.unseen_chunks == seen < chosen.chunks
    assert chosen.rows * n_cols * 2 % 32 == 0, "pieces start at sectors"
    used, assembly = cross_compiled(as_called(launch), target)
    assert used.spilled_bytes == 0 and used.registers <= 64 and used.shared_bytes <= 48 << 10
    assert dict(used.loads)[16] == seen
    wide, all_puts = (len(re.findall(rf"st\.shared{kind}", assembly["ptx"])) for kind in (r"\.v4", r"\."))
    assert wide >= chosen.chunks and all_puts > wide, "vectors, and the elements outside of whole vectors"


@pytest.mark.parametrize(("dtype", "n_cols"), [(dtype, n_cols) for dtype, n_cols, gathered in CAUSAL if gathered])
def test_a_thread_puts_whole_vectors(dtype, n_cols):
    """`put_vectors` takes VEC neighbors of a thread for a vector, and knows of its first place only."""
    launch, chosen = masked_launch(torch.empty(4, n_cols, dtype=dtype), None, True, DEVICES["sm_90"])
    _, assembly = cross_compiled(as_called(launch), "sm_90")
    ttgir = assembly["ttgir"]
    of_puts = re.findall(r'inline_asm "[^"]*st\.shared\.v\d\.b32.*?-> tensor<\d+x\d+xi8, (#\w+)>', ttgir)
    assert len(of_puts) == chosen.chunks
    for layout in set(of_puts):
        (definition,) = re.findall(rf"^{layout} = (.*)$", ttgir, re.M)
        assert f"sizePerThread = [1, {chosen.vec}]" in definition and "order = [1, 0]" in definition, definition
