"""What kernels over a dimension that is not the last compile to: 16-byte accesses, no spills, memory that exists."""

from __future__ import annotations

import re

import pytest
import torch
from launches import BFLOAT16, FLOAT32, as_called, cross_compiled, spatial_losses, spatial_softmax, spatial_softmax_over
from machine_code import late_loads
from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure

from fused_softmax.lab.cross_compile import compile_for, occupancy
from fused_softmax.launch import softmax, spatial
from fused_softmax.launch.compile import MOST_SPILLED
from fused_softmax.planning.lean_tiles import RANGES, lean_config
from fused_softmax.planning.spatial import resident_plan
from fused_softmax.planning.spatial_tables import PART_VECTORS
from fused_softmax.planning.types import DEVICES, MULTIPROCESSORS

pytestmark = pytest.mark.compiled

# one of each kind; the marker `extended` has all
FEW = (
    "softmax_spatial torch.bfloat16 150 4096",
    "softmax_spatial_backward torch.float32 150 4096",
    "softmax_spatial torch.float32 4096 4096",
    "softmax_spatial_backward torch.bfloat16 4096 4096",
    "softmax_spatial_skewed torch.bfloat16 150 apart",
    "softmax_spatial_skewed_backward torch.bfloat16 700 apart",
    "softmax_spatial torch.bfloat16 1600 in halves",
    "softmax_spatial_backward torch.float32 2700 in halves",
    "softmax_spatial_reduce torch.bfloat16 50257 1024",
    "softmax_spatial_merge torch.bfloat16 50257 1024",
    "softmax_spatial_finish torch.bfloat16 50257 1024",
    "cross_entropy_spatial torch.bfloat16 90 0.0",
    "cross_entropy_spatial_shared torch.bfloat16 1000 0.0",
    "cross_entropy_spatial_shared torch.bfloat16 150 0.0 apart",
    "cross_entropy_spatial_finish torch.bfloat16 40000 0.1",
    "prepare_spatial_targets torch.bfloat16 19 0.0",
    "add_partials torch.bfloat16 19 0.0",
)
BUNDLED = tuple(
    f"softmax_spatial_bundled{step} torch.{dtype} 66853 17"
    for step in ("_reduce", "_finish", "_backward_reduce", "_backward_finish") for dtype in ("bfloat16", "float32")
)  # fmt: skip


# whose threads have 8 bytes of a chunk, of 4,096 positions: by whether it is a gradient, and of sm_90
HALVES = {
    (False, False): ("bfloat16 19 ", "bfloat16 150 "),
    (False, True): ("bfloat16 19 ", "bfloat16 150 ", "bfloat16 1000 ", "bfloat16 4096 ", "float32 1000 "),
    (True, False): (),
    (True, True): ("bfloat16 19 ", "bfloat16 150 ", "bfloat16 1000 ", "float32 150 ", "float32 1000 "),
}


def barriers(launch) -> int:
    """Barriers of a program, in its PTX."""
    return compile_for(launch, "sm_90").asm["ptx"].count("bar.sync")


def check(name: str, launch, target: str, chosen=None) -> None:
    used, _ = cross_compiled(launch, target)
    assert used.fits(), f"{used.shared_bytes} bytes of shared memory: {name}"
    if target.startswith("sm_"):
        assert used.spilled_bytes <= MOST_SPILLED, f"{used.spilled_bytes} bytes spilled: {name}"
    if used.num_ctas > 1:  # to know that the others' mbarriers are armed
        assert used.cluster_barriers == 1, name
    if " 4096" in name and "merge" not in name:
        # 16-bit tiles of 7 to 176 columns keep many numbers of a position, so a thread has 4 positions; and so it has
        # where tiles are those of `overlapping_tiles` or `lean_tiles`
        loads = 8 if any(of in name for of in HALVES["backward" in name, target == "sm_90"]) else 16
        stores = loads if "reduce" not in name else used.widest_store_bytes  # a few numbers for each position
        assert (used.widest_load_bytes, used.widest_store_bytes) == (loads, stores), name
    if "bundled" in name:  # whole vectors, whatever the positions are; the ends are read and written one by one
        assert used.widest_load_bytes == 16 and used.widest_store_bytes == (16 if "finish" in name else 4), name
        assert used.spilled_bytes == 0, name
    if name.startswith("cross_entropy_spatial_shared"):
        assert used.widest_load_bytes == used.widest_store_bytes == chosen.vec * (2 if "bfloat16" in name else 4), name
    if "skewed" in name:  # elements are written one by one at the ends of a column only
        itemsize = 2 if "bfloat16" in name else 4
        assert used.widest_load_bytes == used.widest_store_bytes == chosen.vec * itemsize > itemsize, name
    if name.startswith(("softmax_spatial torch.bfloat16 1600 in", "softmax_spatial torch.bfloat16 2700 in")):
        assert chosen.overlap or target not in ("sm_90", "sm_100", "sm_120"), name
    if "in halves" in name and chosen.overlap and not chosen.skewed:
        access = {chosen.vec * (2 if "bfloat16" in name else 4)}
        assert {size for size, _ in (*used.loads, *used.stores)} == access, f"{used.loads} {used.stores}: {name}"
    if name.startswith("cross_entropy_spatial_shared"):
        assert barriers(launch) <= 10, name
    elif name.startswith("cross_entropy_spatial") and target.startswith("sm_") and "apart" not in name:
        # a 16-bit loss keeps many numbers of a position, so a thread has 4 positions. A reduction writes, and a merge
        # moves, a few numbers for each position
        few = "_reduce " in name or "_merge " in name
        assert few or used.widest_load_bytes >= 8 <= used.widest_store_bytes, f"{used.loads} {used.stores}: {name}"
        # a tensor of another layout than the logits' costs a barrier and a trip through shared memory in each chunk
        assert barriers(launch) <= 40 or " 0.1" in name, name
    if name.startswith("prepare_spatial") and target.startswith("sm_"):
        assert used.widest_load_bytes == 16, f"{used.loads} {used.stores}: {name}"


@pytest.mark.parametrize(
    "name",
    [*FEW[2:8], *FEW[-4:], *BUNDLED, *(pytest.param(name, marks=pytest.mark.extended) for name in FEW[:2] + FEW[8:-4])],
)
def test_one_of_each_kind(name):
    named = {n: found for n, *found in (*spatial_softmax("sm_90"), *spatial_losses("sm_90"))}
    launch, chosen = named[name]
    check(name, launch, "sm_90", chosen)


def launch_over(n_cols: int, inner: int, dtype: torch.dtype, backward: bool, log: bool, target: str = "sm_90"):
    """(the launch of a softmax, or of a gradient, its plan), with an output that has memory of its own."""
    tensors = tuple(torch.empty(2, n_cols, inner, dtype=dtype) for _ in range(2 + backward))
    chosen = spatial.softmax_plan(tensors, log, backward, False, DEVICES[target])
    recipe = spatial.softmax_recipe(tensors, chosen, log, backward, DEVICES[target])
    (launch,) = spatial.recipe_launches(recipe, tensors)
    return as_called(launch), chosen


def launch_of_tables(n_cols: int, inner: int, dtype: torch.dtype, backward: bool, log: bool):
    """(`launch_over`'s launch, its plan, the target): of sm_90, or of sm_100 where a rule has tiles of sm_90."""
    launch, chosen = launch_over(n_cols, inner, dtype, backward, log)
    tensors = tuple(torch.empty(2, n_cols, inner, dtype=dtype, device="meta") for _ in range(2 + backward))
    lean = lean_config(spatial.problem_of(*tensors, backward=backward, log=log), DEVICES["sm_90"])
    if lean is None and (chosen.skewed or not chosen.overlap):
        return launch, chosen, "sm_90"
    return *launch_over(n_cols, inner, dtype, backward, log, "sm_100"), "sm_100"


STAGGERED = (
    (2700, 8192, BFLOAT16, False, False), (2500, 8192, FLOAT32, False, True), (5632, 8192, BFLOAT16, True, False),
    (2816, 8200, BFLOAT16, False, False), (3712, 8192, FLOAT32, False, False), (1408, 8200, BFLOAT16, False, True),
    (5632, 8192, FLOAT32, False, False), (1700, 8192, BFLOAT16, True, True), (2300, 8192, FLOAT32, True, False),
    # skewed, and tiles of 128 positions that overlap
    (2481, 1147, BFLOAT16, True, False), (1800, 189, BFLOAT16, True, False), (3988, 111, BFLOAT16, False, False),
    (2671, 492, BFLOAT16, True, False), (2100, 234, BFLOAT16, True, False), (2421, 8276, BFLOAT16, True, True),
)  # fmt: skip


@pytest.mark.parametrize(
    ("n_cols", "inner", "dtype", "backward", "log"),
    [*STAGGERED[:3], *(pytest.param(*of, marks=pytest.mark.extended) for of in STAGGERED[3:])],
)
def test_as_many_programs_fit_as_the_plan_says(n_cols, inner, dtype, backward, log):
    launch, chosen = launch_over(n_cols, inner, dtype, backward, log)
    used, assembly = cross_compiled(launch, "sm_90")
    assert chosen.stagger and occupancy(used, MULTIPROCESSORS["sm_90"]).programs == chosen.fitting, used
    waits = [line for line in assembly["sass"].splitlines() if "NANOSLEEP" in line]
    loads = [line for line in assembly["sass"].splitlines() if "LDG" in line]
    assert waits and assembly["sass"].index(waits[-1]) < assembly["sass"].index(loads[0]), "a program waits first"


@pytest.mark.extended
def test_one_program_more_may_fit_than_the_cap_allows():
    launch, chosen = launch_over(1600, 189, BFLOAT16, True, False)
    used, _ = cross_compiled(launch, "sm_90")
    assert chosen.stagger and used.registers < chosen.max_registers
    assert occupancy(used, MULTIPROCESSORS["sm_90"]).programs == chosen.fitting + 1, used


@pytest.mark.parametrize("dtype", [BFLOAT16, pytest.param(torch.float16, marks=pytest.mark.extended)])
@pytest.mark.parametrize("log", [False, pytest.param(True, marks=pytest.mark.extended)])
@pytest.mark.parametrize(("inner", "programs"), [(1892, 6), (1896, 5)])  # in bundles, and as they are
def test_how_many_programs_reduce_columns_of_a_16_bit_softmax_at_a_time(inner, programs, dtype, log):
    tensors = tuple(torch.empty(1, 51966, inner, dtype=dtype, device="meta") for _ in range(2))
    found = {name.split()[0]: launch for name, launch, _ in spatial_softmax_over(tensors, "", log, DEVICES["sm_90"])}
    kernel = "softmax_spatial_bundled_reduce" if programs == 6 else "softmax_spatial_reduce"
    used, _ = cross_compiled(found[kernel], "sm_90")
    assert used.spilled_bytes == 0 and occupancy(used, MULTIPROCESSORS["sm_90"]).programs == programs


@pytest.mark.parametrize(
    ("inner", "dtype"), [(1826, BFLOAT16), pytest.param(1828, torch.float16, marks=pytest.mark.extended)]
)
@pytest.mark.parametrize("log", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_long_steps_of_gradients_that_are_read_twice(inner, dtype, log):
    tensors = tuple(torch.empty(2, 23199, inner, dtype=dtype, device="meta") for _ in range(3))
    for name, launch, chosen in spatial_softmax_over(tensors, str(inner), log, DEVICES["sm_90"]):
        assert (chosen.regime, chosen.chunks) == ("spatial_two_pass", 8)
        check(name, launch, "sm_90", chosen)


def test_a_program_of_two_indices_of_outer_stages_nothing():
    # its chunks in shared memory would be those of one index
    tensors = tuple(torch.empty(3, 600, 80, dtype=BFLOAT16) for _ in range(2))
    problem, device = spatial.problem_of(*tensors), DEVICES["sm_90"]
    chosen = resident_plan(problem, device, 32, 16, 4, recompute=True, max_registers=168, staged=11)
    assert (chosen.outers, chosen.smem_staged) == (2, 11)
    (launch,) = spatial.recipe_launches(spatial.softmax_recipe(tensors, chosen, False, False, device), tensors)
    with pytest.raises(CompilationError):
        compile_for(as_called(launch), "sm_90")


SKEWED = ((310, FLOAT32), (1650, FLOAT32), (2350, FLOAT32), (1300, BFLOAT16), (600, BFLOAT16))


@pytest.mark.parametrize(
    ("n_cols", "dtype"), [*SKEWED[:2], *(pytest.param(*of, marks=pytest.mark.extended) for of in SKEWED[2:])]
)
def test_no_load_waits_for_another(n_cols, dtype):
    # ptxas put the last chunk's load behind the maximum of the others, and the softmax took up to 1.5 times as long
    x = torch.empty(2, n_cols, 8183, dtype=dtype)
    chosen = spatial.softmax_plan((x, torch.empty_like(x)), False, False, False, DEVICES["sm_90"])
    recipe = spatial.softmax_recipe((x, x), chosen, False, False, DEVICES["sm_90"])
    (launch,) = spatial.recipe_launches(recipe, (x, x))
    loads, late = late_loads(compile_for(as_called(launch), "sm_90").asm["sass"], chosen.vec * x.itemsize)
    assert (loads, late) == (chosen.chunks - chosen.smem_staged, 0)


@pytest.mark.parametrize(("n_cols", "inner", "dtype"), [(1456, 8, BFLOAT16), (11, 318, FLOAT32)])
def test_no_load_of_a_gradient_waits_for_another(n_cols, inner, dtype):
    # without masks ptxas put half of the loads behind the first terms: 0.96 of the speed
    launch, chosen = launch_over(n_cols, inner, dtype, True, False)
    loads, late = late_loads(compile_for(launch, "sm_90").asm["sass"], chosen.vec * dtype.itemsize)
    assert loads and late == 0


@pytest.mark.parametrize(("n_cols", "inner"), [(150, 4095 * 8), (1300, 3003 * 4), (1115, 146)])
def test_a_load_of_a_softmax_has_no_mask_of_positions(n_cols, inner):
    # a masked load fills its registers first, and ptxas makes its cache policy again for each one
    launch, chosen = launch_over(n_cols, inner, FLOAT32, False, False)
    ptx = compile_for(launch, "sm_90").asm["ptx"]
    loads = re.findall(r"^\s*(@%p\d+ )?ld\.global", ptx, re.MULTILINE)
    masked = sum(bool(mask) for mask in loads)
    assert len(loads) == chosen.chunks - chosen.smem_staged and masked == chosen.chunks - chosen.unpredicated_chunks


# skewed tiles of planes: columns, positions, dtype, whether of a gradient, of log_softmax
OF_PLANES = (
    (1231, 166, BFLOAT16, False, False), (307, 201, FLOAT32, True, False), (2313, 213, FLOAT32, True, False),
    (3817, 195, BFLOAT16, False, True), (1370, 145, FLOAT32, False, True), (213, 350, BFLOAT16, True, True),
    (5006, 326, BFLOAT16, True, False), (2248, 117, FLOAT32, False, False), (307, 201, FLOAT32, True, True),
    # of those with as many registers as a cap has, the ones that spill the most
    (2746, 103, BFLOAT16, False, False), (1372, 113, FLOAT32, False, False), (4611, 117, FLOAT32, False, False),
)  # fmt: skip


@pytest.mark.parametrize(
    "of", [*OF_PLANES[:3], *(pytest.param(of, marks=pytest.mark.extended) for of in OF_PLANES[3:])], ids=str
)
def test_skewed_tiles_of_few_positions(of):
    launch, chosen, target = launch_of_tables(*of)
    assert chosen.skewed
    check(f"softmax_spatial_skewed {of[2]}", launch, target, chosen)


# each entry of the tables of runs that start at parts of a vector: of a gradient, dtype, positions' alignment, entry
OF_PARTS = [
    (backward, {2: BFLOAT16, 4: FLOAT32}[itemsize], vec, config)
    for (backward, itemsize, vec), table in PART_VECTORS.items() for config in table
]  # fmt: skip


@pytest.mark.parametrize(
    ("backward", "dtype", "vec", "config"),
    [*OF_PARTS[2:5], *(pytest.param(*of, marks=pytest.mark.extended) for of in OF_PARTS[:2] + OF_PARTS[5:])],
    ids=str,
)
def test_runs_at_parts_of_a_vector(backward, dtype, vec, config):
    launch, chosen, target = launch_of_tables(config.max_cols, 8192 + vec, dtype, backward, False)
    assert (chosen.rows, chosen.ctas, chosen.num_warps) == (config.inner, config.ctas, config.num_warps)
    assert chosen.skewed == config.skewed // dtype.itemsize
    used, _ = cross_compiled(launch, target)
    widest = chosen.vec * dtype.itemsize
    assert used.widest_load_bytes == used.widest_store_bytes == widest >= vec * dtype.itemsize
    # 128 registers and fewer keep two programs on a multiprocessor: nothing may spill so much that the cap is lost
    assert used.spilled_bytes <= MOST_SPILLED and used.fits()


# columns, positions, dtype, backward, log, bytes of an access
OVERLAPPING = (
    (1250, 8196, BFLOAT16, False, False, 8), (1024, 8194, BFLOAT16, False, False, 4),
    (2000, 324, torch.float16, False, True, 8), (4864, 8196, BFLOAT16, False, True, 8),
    (3648, 8200, BFLOAT16, False, True, 8), (8704, 8192, BFLOAT16, False, False, 8),
    (4352, 8194, FLOAT32, False, True, 8), (2000, 301, FLOAT32, False, False, 4),
    (2048, 8196, BFLOAT16, True, True, 8), (4608, 8196, torch.float16, True, False, 8),
    (13568, 1028, BFLOAT16, False, False, 8), (7680, 1026, BFLOAT16, False, False, 4),
    (14080, 1026, FLOAT32, False, False, 8), (11520, 1025, FLOAT32, False, True, 4),
    (7936, 1028, BFLOAT16, True, True, 8), (8064, 1026, BFLOAT16, True, True, 4),
    (10240, 1026, FLOAT32, True, True, 8), (7936, 1025, FLOAT32, True, False, 4),
    (4096, 8196, BFLOAT16, False, False, 8), (2688, 8194, BFLOAT16, False, True, 4),
    (1344, 8194, torch.float16, False, False, 4), (1792, 8196, BFLOAT16, True, False, 8),
    (2048, 8196, BFLOAT16, True, False, 8), (2688, 8196, BFLOAT16, True, False, 8),
    (1600, 8194, BFLOAT16, True, False, 4),
)  # fmt: skip


@pytest.mark.parametrize(
    ("n_cols", "inner", "dtype", "backward", "log", "access"),
    [*OVERLAPPING[:2], *(pytest.param(*of, marks=pytest.mark.extended) for of in OVERLAPPING[2:])],
    ids=str,
)
def test_overlapping_tiles(n_cols, inner, dtype, backward, log, access):
    launch, chosen = launch_over(n_cols, inner, dtype, backward, log)
    assert chosen.overlap or inner == 8192
    used, assembly = cross_compiled(launch, "sm_90")
    # each element in one wide access, whether it goes to registers or to shared memory
    assert {size for size, _ in (*used.loads, *used.stores)} == {access}, f"{used.loads} {used.stores}"
    copies = assembly["ptx"].count("cp.async.ca.shared.global")
    assert (copies > 0) == (chosen.smem_staged > 0) and copies % max(1, chosen.smem_staged) == 0
    assert f"], {access}, " in assembly["ptx"] or not copies
    assert used.spilled_bytes <= MOST_SPILLED and used.fits() and used.registers <= chosen.max_registers


LEAN = [
    (key, of, n_cols)
    for key, ranges in RANGES.items() for of in ranges for n_cols in (of.least, (of.least + of.most) // 2, of.most)
]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "of", "n_cols"),
    [pytest.param(*p, marks=[pytest.mark.extended] if i % 24 else []) for i, p in enumerate(LEAN)],
)
def test_lean_tiles(key, of, n_cols):
    op, itemsize, starts = key
    inner = 2048 + (starts // itemsize if starts < 32 else 0)
    launch, chosen = launch_over(n_cols, inner, FLOAT32 if itemsize == 4 else BFLOAT16, op == "gradient", bool(of.log))
    used, _ = cross_compiled(launch, "sm_90")
    assert (chosen.rows, chosen.num_warps) == (of.positions, of.num_warps)
    # each element in one wide access; at the ends of skewed columns one by one, and where columns of one program, which
    # share no positions, start anywhere
    widest = min(of.thread_bytes, starts) if of.alone else of.thread_bytes
    narrowest = itemsize if of.skewed else widest
    sizes = {size for size, _ in (*used.loads, *used.stores)}
    assert max(sizes) == widest and min(sizes) >= narrowest, f"{used.loads} {used.stores}"
    # where the cap spills much, a kernel gets a looser one
    assert used.spilled_bytes <= MOST_SPILLED and used.fits() and used.registers <= (chosen.max_registers or 255)


# tiles of short planes: columns, positions, dtype, backward, and the bytes of an access
SHORT = (
    (1115, 146, FLOAT32, False, 8), (2019, 95, FLOAT32, False, 4), (940, 190, FLOAT32, False, 8),
    (1896, 147, FLOAT32, True, 4), (258, 131, FLOAT32, True, 16), (146, 190, FLOAT32, True, 16),
    (1326, 188, BFLOAT16, False, 8), (428, 30, BFLOAT16, False, 4), (824, 190, BFLOAT16, False, 8),
    (307, 186, BFLOAT16, True, 8), (742, 190, BFLOAT16, True, 8), (276, 133, FLOAT32, False, 4),
    (1542, 148, BFLOAT16, False, 8), (301, 64, BFLOAT16, False, 8), (755, 304, BFLOAT16, False, 8),
    (461, 280, BFLOAT16, False, 4), (475, 208, BFLOAT16, True, 8), (636, 248, BFLOAT16, True, 8),
    (3388, 72, BFLOAT16, True, 8), (2876, 95, FLOAT32, False, 4), (2243, 70, FLOAT32, True, 8),
)  # fmt: skip


@pytest.mark.parametrize(
    ("n_cols", "inner", "dtype", "backward", "access", "log"),
    [
        pytest.param(*p, log, marks=[pytest.mark.extended] if i % 5 or log else [])
        for i, p in enumerate(SHORT) for log in (False, True) if not log or p[:2] != (824, 190)  # which has others
    ],
)  # fmt: skip
def test_tiles_of_short_planes(n_cols, inner, dtype, backward, access, log):
    launch, chosen = launch_over(n_cols, inner, dtype, backward, log)
    used, _ = cross_compiled(launch, "sm_90")
    assert chosen.rows in (32, 64) and not (chosen.gathered or chosen.periodic)
    # the ends of skewed columns are written one by one
    sizes = {size for size, _ in (*used.loads, *used.stores)}
    narrowest = dtype.itemsize if chosen.skewed else access
    assert max(sizes) == access and min(sizes) >= narrowest, f"{used.loads} {used.stores}"
    assert used.spilled_bytes <= MOST_SPILLED and used.fits() and used.registers <= (chosen.max_registers or 255)


@pytest.mark.parametrize(
    ("positions", "wrong"),
    [
        # 2 columns start at 8 bytes and at 16 of a sector; those of the next chunk elsewhere
        (8196, dict(inner=128, cols=2, num_warps=2, thread_bytes=8, overlaps=True)),
        # vectors of 16 bytes from units of 8: on a GPU an illegal memory access
        (8193, dict(inner=128, cols=8, num_warps=4, thread_bytes=16, skewed=8)),
    ],
)
def test_no_plan_compiles_whose_vectors_are_misaligned(positions, wrong):
    tensors = tuple(torch.empty(1, 40, positions, dtype=BFLOAT16) for _ in range(2))
    problem, device = spatial.problem_of(*tensors), DEVICES["sm_90"]
    chosen = resident_plan(problem, device, recompute=True, **wrong)
    (launch,) = spatial.recipe_launches(spatial.softmax_recipe(tensors, chosen, False, False, device), tensors)
    with pytest.raises(CompilationError) as raised:
        compile_for(as_called(launch), "sm_90")
    assert isinstance(raised.value.__cause__, CompileTimeAssertionFailure)


@pytest.mark.extended
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120", "gfx942"])
def test_all(target):
    for name, launch, chosen in (*spatial_softmax(target), *spatial_losses(target)):
        check(name, launch, target, chosen)


@pytest.mark.parametrize(("n_cols", "exponentials", "positions"), [(2, 16, 8), (5, 20, 4)])
def test_a_thread_with_whole_columns_computes_one_exponential_for_each_element(n_cols, exponentials, positions):
    """Of 2 columns, 8 positions; 5, 4. It merges its numbers with nobody's, and divides by no library function."""
    launch, chosen = launch_over(n_cols, 4096, torch.bfloat16, False, False)
    assert chosen.ctas * chosen.vectors_per_chunk == 1 and chosen.vec == 8
    ptx = compile_for(launch, "sm_90").asm["ptx"]
    assert ptx.count("ex2.approx") == exponentials and ptx.count("rcp.approx") == positions
    assert "rcp.rn" not in ptx and "div.rn" not in ptx, "a sum takes no branch"


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("dtype", "n_cols", "width", "apart", "widest"),
    [
        (BFLOAT16, 19, 56, 64, 8), (BFLOAT16, 300, 8, 64, 16), (BFLOAT16, 1000, 48, 64, 16), (BFLOAT16, 21, 57, 61, 2),
        (FLOAT32, 150, 50, 52, 8), (FLOAT32, 19, 4, 8, 16),
    ],
)  # fmt: skip
def test_crops_are_read_in_vectors(dtype, n_cols, width, apart, widest, target, log):
    """Also where a row is one vector, so that a number of the launch is 1; and CDNA has no such tiles."""
    whole = torch.empty(2, n_cols, 56, apart, dtype=dtype)
    x, y = whole[..., :width], torch.empty(2, n_cols, 56, width, dtype=dtype)
    found = softmax.cropped(x, y, 1, log, DEVICES[target])
    used, _ = cross_compiled(as_called(found.launch(x, y)), target)
    # ptxas spills where log_softmax has 88 accesses of one element
    assert used.spilled_bytes <= (64 if log and widest == 2 else 8)
    assert dict(used.loads).keys() == dict(used.stores).keys() == {widest}
    assert sum(dict(used.loads).values()) == sum(dict(used.stores).values())
    assert softmax.cropped(x, y, 1, log, DEVICES["gfx942"]) is None
