"""The planner: its golden table, that every variant of a kernel is chosen somewhere, that every plan covers its row.

What a plan promises the kernels is checked here by brute force, from the slices as kernels/common/tiles.py cuts them,
over every alignment, dtype and device; nothing of the planner's own arithmetic is used for that.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import random
import subprocess
import sys
from pathlib import Path

import golden_plans
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from planned import DTYPES, PROMISED, compile_time, kernels, problem

from fused_softmax.launch.launcher import meta_of
from fused_softmax.launch.layout import problem_of
from fused_softmax.launch.softmax import softmax_op
from fused_softmax.planning import config_tables
from fused_softmax.planning import losses as loss_plans
from fused_softmax.planning.cross_entropy_spatial import plan_spatial_loss
from fused_softmax.planning.masked_softmax import plan_masked
from fused_softmax.planning.rows import WARP_MAX_COLS, steps_plan, warp_plan
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.spatial import plan_spatial
from fused_softmax.planning.types import (
    DEVICES,
    ITEMSIZE,
    REGIMES,
    Device,
    Plan,
    Problem,
    SpatialProblem,
    power_of_two,
)

# (target, backward, log) -> its config_tables
TABLES = {
    **{("sm_90", *which): config_tables.CLUSTER[which] for which in config_tables.CLUSTER},
    ("sm_80", False, False): config_tables.FORWARD_BLOCK,
    ("sm_80", True, False): config_tables.BACKWARD_BLOCK,
}
RANDOM = random.Random(0)
EDGES = {
    config.max_cols + by
    for table in TABLES.values()
    for configs in table.values()
    for config in configs
    for by in (-8, -1, 0, 1)
    if config.max_cols < config_tables.WIDEST
}
WIDTHS = sorted(
    {*range(1, 300), *range(300, 70000, 211), *EDGES, *(RANDOM.randrange(70000, 1 << 22) for _ in range(60))}
)


def test_golden_table():
    expected, got = golden_plans.GOLDEN.read_text(encoding="utf-8"), golden_plans.table()
    changed = list(difflib.unified_diff(expected.splitlines(), got.splitlines(), n=0, lineterm=""))
    assert not changed, "\n".join([f"plans changed; if they should, run `{golden_plans.COMMAND}`:", *changed[:40]])


def test_float16_is_planned_as_bfloat16_is():
    for n_cols in WIDTHS[::7]:
        for backward in (False, True):
            plans = {
                plan(problem(n_cols, (d, d), backward=backward), DEVICES["sm_90"]) for d in ("float16", "bfloat16")
            }
            assert len(plans) == 1


# --- every variant is chosen by some case -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chosen() -> list[tuple[Problem, Device, Plan]]:
    return list(golden_plans.chosen())


def test_every_regime_is_chosen(chosen):
    for target in ("sm_90", "sm_100"):
        for dtype in ("bfloat16", "float32"):
            for backward in (False, True):
                wanted = (target, dtype, backward)
                regimes = {p.regime for q, d, p in chosen if (d.name, q.dtype, q.backward) == wanted}
                assert regimes >= {"warp", "cluster", "two_pass"}
    assert {p.regime for q, d, p in chosen} == set(REGIMES)
    for target in ("sm_80", "gfx942"):
        assert {p.regime for q, d, p in chosen if d.name == target} == {"warp", "block", "two_pass"}


@pytest.mark.parametrize(
    "of, variants",
    [
        (lambda q, p: p.vec, {1, 2, 4, 8}),
        (lambda q, p: p.ctas, {1, 2, 4, 8, 16}),
        (lambda q, p: (p.regime, p.unaligned), {(r, edge) for r in REGIMES for edge in (False, True)}),
        (
            lambda q, p: (p.recompute, p.max_registers is None),
            {(False, True), (True, False), (True, True), (False, False)},
        ),
        (lambda q, p: (q.backward, p.recompute), {(b, r) for b in (False, True) for r in (False, True)}),
        (
            lambda q, p: (p.unaligned, unmasked_of(p)),
            {(False, "all"), *((e, k) for e in (False, True) for k in ("but two", "none"))},
        ),
        (
            lambda q, p: (q.dtype, q.out_dtype, q.backward),
            {(*(d[::-1] if b else d), b) for d in DTYPES for b in (False, True)},
        ),
        (lambda q, p: p.regime == "warp" and p.rows > 1, {False, True}),
    ],
    ids=["vec", "ctas", "edge", "recompute", "backward", "unmasked", "dtypes", "rows"],
)
def test_every_compile_time_variant_is_chosen(chosen, of, variants):
    dtypes = {("float16", "float16"): ("bfloat16", "bfloat16")}  # the same plan, see above
    wanted = {v for v in variants if not (isinstance(v, tuple) and v[:2] in dtypes)}
    assert {of(q, p) for q, _, p in chosen} == wanted


def unmasked_of(p: Plan) -> str:
    return {0: "none", p.chunks: "all"}.get(p.unpredicated_chunks, "but two")


@pytest.mark.parametrize("table", TABLES, ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_config_is_chosen_by_some_width(table, itemsize):
    target, backward, log = table
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    configs, below = TABLES[table][itemsize], config_tables.WARP_COLS[itemsize]
    for config in configs:
        assert config.max_cols > below, f"{config} comes after {below}"
        widest = 2 * below if config.max_cols == config_tables.WIDEST else config.max_cols
        got = plan(problem(widest, (dtype, dtype), backward=backward, log=log), DEVICES[target])
        assert (got.resident_chunks, got.prefetched_chunks, got.regime == "two_pass") == (
            config.resident_chunks,
            config.prefetched_chunks,
            config.resident_chunks > 0,
        ), config
        assert got.smem_staged == config.smem_staged, config
        if config.resident_chunks:
            assert (got.ctas, got.num_warps, got.chunks) == (config.ctas, config.num_warps, config.step)
            continue
        # a float32 row is kept as it is, so exp of it is computed twice at no cost in registers; short ones keep exps
        capped_cluster = config.max_registers is not None and config.ctas > 1
        kept = got.chunks <= config_tables.KEPT_EXPS and not (backward or log or capped_cluster)
        recompute = config.recompute or (itemsize == 4 and not kept)
        want = config.ctas, config.num_warps, recompute, config.max_registers
        assert (got.ctas, got.num_warps, got.recompute, got.max_registers) == want, config
        odd = plan(problem(widest - 1, (dtype, dtype), backward=backward, log=log), DEVICES[target])
        assert odd.unaligned
        assert (odd.ctas, odd.num_warps) == (config.ctas, config.unaligned_warps or config.num_warps), config
        below = config.max_cols


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_warp_config_is_chosen_by_some_width(itemsize):
    dtype, vec, below = {2: "bfloat16", 4: "float32"}[itemsize], 16 // itemsize, 0
    configs = config_tables.WARP[itemsize]
    for config in configs:
        assert below < config.max_cols, f"{config} comes after {below}"
        n_cols = below * vec + vec
        got = warp_plan(problem(n_cols, (dtype, dtype)), DEVICES["sm_90"])
        assert got is not None
        assert (got.regime, got.num_warps) == ("warp", config.num_warps), config
        assert got.rows * got.vectors_per_chunk == config.num_warps * 32 * config.rows, config
        below = config.max_cols
    assert below * vec >= WARP_MAX_COLS > configs[-2].max_cols * vec


PARTIAL = {
    "forward": (plan, config_tables.PARTIAL_FORWARD, False),
    "gradient": (plan, config_tables.PARTIAL_BACKWARD, True),
    "statistics": (loss_plans.plan_statistics, config_tables.PARTIAL_STATISTICS, False),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PARTIAL)
def test_rows_in_partial_vectors_take_as_many_threads_as_the_table_says(name, dtype):
    planner, table, backward = PARTIAL[name]
    full = 16 // ITEMSIZE[dtype]
    for vec in (v for v in table if v < full):
        fewest, most_elements = table[vec]
        for n_cols in range(vec, config_tables.PARTIAL_COLS + 1, vec):
            got = planner(Problem(n_cols, dtype, dtype, vec, backward=backward), DEVICES["sm_90"])
            units, threads = n_cols // vec, got.vectors_per_chunk
            assert (got.regime, got.num_warps, got.vec) == ("warp", config_tables.PARTIAL_WARPS, vec), got
            # a thread has as many vectors as the table asks for, and twice the threads would have fewer
            vectors = -(-units // threads)
            assert vectors >= min(fewest, units), f"{n_cols} columns in vectors of {vec}: {got}"
            assert threads in (32, power_of_two(units)) or -(-units // (2 * threads)) < fewest, got
            assert vectors <= got.chunks <= vectors + 1, got
            # widths share kernels where that costs nothing
            if threads == 32 or (name == "forward" and threads <= config_tables.PARTIAL_EVEN):
                assert got.chunks <= 4 or got.chunks % 2 == 0, got
            else:
                assert got.chunks == vectors, got
            # and as many rows as stay within the elements: with twice as many it would have more
            rows = got.rows * threads // (32 * got.num_warps)
            assert rows == 1 or rows * vectors * vec <= most_elements, got
            assert 2 * rows * vectors * vec > most_elements, got


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("in_phase", [False, True], ids=["aligned", "unaligned"])
def test_two_rows_of_17_to_32_vectors_share_a_warp(dtype, in_phase):
    """The instructions of a reduction then serve two rows. A gradient reads two tensors and is bound by memory."""
    full = 16 // ITEMSIZE[dtype]
    threads, num_warps = config_tables.WARP_HALVES[ITEMSIZE[dtype]]
    for units in (17, 20, 31, 32):
        n_cols, vec = units * full + in_phase, 1 if in_phase else full
        for log in (False, True):
            got = plan(Problem(n_cols, dtype, dtype, vec, in_phase, log=log), DEVICES["sm_90"])
            assert (got.vectors_per_chunk, got.chunks, got.num_warps) == (threads, 2, num_warps), got
            assert got.rows * threads == 32 * num_warps and got.unaligned == in_phase
        gradient = plan(Problem(n_cols, dtype, dtype, vec, in_phase, backward=True), DEVICES["sm_90"])
        assert gradient.vectors_per_chunk == 32


def test_a_masked_row_in_partial_vectors_has_warps_by_its_width():
    def planned(n_cols: int, mask: int, dtype: str = "bfloat16") -> Plan:
        return plan_masked(Problem(n_cols, dtype, dtype, 1), DEVICES["sm_90"], mask)

    # a thread has at most 32 elements, until there are 8 warps
    assert [planned(n, 1).num_warps for n in (601, 1024, 1025, 2402, 4097, 13790)] == [1, 1, 2, 4, 8, 8]
    assert [planned(n, 2).num_warps for n in (1025, 4097)] == [2, 8]
    assert planned(1025, 0).num_warps == 1  # causal rows without a mask keep their warps
    # the columns that a row sees in part have a thread each
    for vec, n_cols in itertools.product((2, 4), range(4, 64, 4)):
        assert plan_masked(Problem(n_cols, "bfloat16", "bfloat16", vec), DEVICES["sm_90"], 0).vectors_per_chunk >= vec


# --- every plan covers its row ----------------------------------------------------------------------------------------


def problems(n_cols: int):
    """Every Problem of this width: all dtypes, alignments and phases, forward and gradient."""
    for dtypes in DTYPES:
        for backward, log in ((False, False), (True, False), (True, True)):
            widest = problem(n_cols, dtypes, backward=backward, log=log)
            for vec in (v for v in (1, 2, 4, 8) if v <= widest.vec):
                for in_phase in (False, True):
                    yield dataclasses.replace(widest, vec=vec, in_phase=in_phase)


def broken(q: Problem, d: Device, p: Plan) -> str | None:
    """What is wrong with the plan, or None."""
    for name in ("rows", "ctas", "vectors_per_chunk", "vec", "num_warps"):
        value = getattr(p, name)
        if value < 1 or value & (value - 1):
            return f"{name} is {value}, and Triton's tiles are powers of two"
    if p.num_warps > d.max_warps or p.ctas > d.max_cluster:
        return "more warps or CTAs than the device has"
    if p.vectors_per_chunk * p.rows < d.warp_size * p.num_warps:
        return "threads without a lane"
    if p.regime == "warp" and p.rows % p.num_warps or p.rows > 1 and p.regime != "warp":
        return "a tile's warps have whole rows, and only a tile has several rows"
    if (
        p.warps_per_row not in (1, p.num_warps)
        or p.warps_per_row > 1
        and (p.ctas == 1 or p.vectors_per_chunk // p.warps_per_row < d.warp_size)
    ):
        return "parts are the warps of a cluster's CTA, each with a warp's lanes"
    if p.unaligned and p.vectors_per_chunk // p.warps_per_row < 2 * p.vec:
        return "head and tail need 2*vec lanes of a line"
    if p.unaligned and not q.in_phase:
        return "head and tail differ between the tensors"
    if not p.unaligned and (p.vec > q.vec or q.n_cols % p.vec):
        return "vectors that rows are not aligned to"
    if p.max_registers is not None and p.max_registers * p.num_warps * d.warp_size > d.registers:
        return "more registers than there are"
    if p.regime == "two_pass" and p.unpredicated_chunks:
        return "stream masks every chunk of a step"
    if p.smem_staged and (p.smem_staged > p.unpredicated_chunks or p.vec < q.full_vec or p.ctas == 1):
        return "only whole chunks of vectors are staged, on a cluster"
    if p.smem_staged * p.vectors_per_chunk * 16 * (2 if q.backward and p.prefetched_chunks is None else 1) > 47 << 10:
        return "more staged than a kernel may declare"
    if p.resident_chunks and p.regime != "two_pass" or p.prefetched_chunks and not (q.backward and q.log):
        return "rows that are walked twice keep chunks, and only log_softmax's gradient reads y late"
    # a row may start anywhere, so any head that is shorter than a vector
    heads = range(min(p.vec, q.n_cols + 1)) if p.unaligned else (0,)
    for vectors in {(q.n_cols - head) // p.vec for head in heads}:
        even = -(-vectors // p.ctas)
        slices = [min(even, vectors - rank * even) for rank in range(p.ctas)]
        if p.regime == "two_pass":
            if p.resident_chunks and p.resident_chunks * p.vectors_per_chunk > min(slices):
                return f"{p.resident_chunks} chunks kept, and a slice of {min(slices)} vectors"
            continue
        if sum(max(0, s) for s in slices) != vectors or max(slices) > p.vectors_per_chunk * p.chunks:
            return f"{vectors} vectors are not covered"
        if p.unpredicated_chunks and p.unpredicated_chunks * p.vectors_per_chunk > min(slices):
            return f"{p.unpredicated_chunks} chunks without a mask, and a slice of {min(slices)} vectors"
    return None if p.chunks >= 1 else "no chunks"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", DEVICES)
def test_every_plan_covers_its_row(target):
    device = DEVICES[target]
    for n_cols in WIDTHS:
        for asked in problems(n_cols):
            p = plan(asked, device)
            assert (why := broken(asked, device, p)) is None, f"{why}: {asked} on {target}: {p}"


@pytest.mark.parametrize("regime", REGIMES)
def test_a_forced_regime_covers_its_row_or_is_refused(regime):
    refused = 0
    for device in DEVICES.values():
        for n_cols in WIDTHS[::5]:
            for asked in problems(n_cols):
                try:
                    p = plan(asked, device, regime)
                except ValueError as error:
                    assert regime in str(error) and str(n_cols) in str(error)
                    refused += 1
                else:
                    assert p.regime == regime and "asked for" in p.why
                    assert (why := broken(asked, device, p)) is None, f"{why}: {asked} on {device.name}: {p}"
                    assert n_cols <= 2 * WARP_MAX_COLS or regime != "warp"
    assert refused == 0 if regime == "two_pass" else refused > 0


@pytest.mark.parametrize(
    "changed, why",
    [
        ({"chunks": 3}, "not covered"),
        ({"unpredicated_chunks": 7}, "without a mask"),
        ({"vectors_per_chunk": 96}, "powers of two"),
        ({"vectors_per_chunk": 8}, "without a lane"),
        ({"unaligned": True}, "differ between"),
        ({"ctas": 32}, "than the device has"),
        ({"warps_per_row": 2}, "parts are the warps"),
        ({"rows": 2}, "whole rows"),
        ({"smem_staged": 7}, "only whole chunks"),
        ({"resident_chunks": 1}, "walked twice keep"),
        ({"prefetched_chunks": 1}, "reads y late"),
    ],
    ids=str,
)
def test_the_check_sees_a_broken_plan(changed, why):
    asked = dataclasses.replace(problem(50256, ("bfloat16", "bfloat16")), in_phase=False)
    device = DEVICES["sm_90"]
    good = plan(asked, device)
    assert broken(asked, device, good) is None
    assert why in str(broken(asked, device, dataclasses.replace(good, **changed)))


@pytest.mark.parametrize("target", ["sm_90", "sm_80", "gfx942"])
def test_every_column_is_one_lines_and_chunks(target):
    """The slices as kernels/common/tiles.py cuts them, by column: each is a chunk of one CTA and warp, or an end."""
    device, seen = DEVICES[target], set()
    for asked, on, p in golden_plans.chosen():
        key = (
            asked.n_cols,
            p.vec,
            p.unaligned,
            p.ctas,
            p.warps_per_row,
            p.vectors_per_chunk,
            p.chunks,
            p.unpredicated_chunks,
        )
        if on.name != target or p.regime == "two_pass" or asked.n_cols > 70000 or key in seen:
            continue
        seen.add(key)
        for head in {0, 1, p.vec - 1} if p.unaligned else {0}:
            owners = columns_moved(asked.n_cols, head, p)
            assert (owners == 1).all(), f"head {head}: {asked} on {device.name}: {p}"
    assert len(seen) > 40


def columns_moved(n_cols: int, head: int, p: Plan) -> torch.Tensor:
    """How often each column of a row is loaded, by slice_of, warp_of, chunk_offsets, load_chunks and head_and_tail."""
    interior = (n_cols - head) // p.vec * p.vec
    even = -(-(interior // p.vec) // p.ctas) * p.vec
    line = p.vectors_per_chunk // p.warps_per_row * p.vec  # columns of one line in one chunk
    moved = torch.zeros(n_cols, dtype=torch.int32)
    moved[:head] += 1
    moved[head + interior :] += 1
    assert head < 2 * p.vec and n_cols - head - interior < p.vec
    for rank in range(p.ctas):
        first, width = rank * even, min(even, interior - rank * even)
        for part in range(p.warps_per_row):
            for c in range(p.chunks):
                at = c * p.warps_per_row * line + part * line
                stop = at + line if c < p.unpredicated_chunks else min(at + line, width)
                assert stop <= max(width, 0) or c >= p.unpredicated_chunks
                moved[head + first + at : head + first + max(at, stop)] += 1
    return moved


def test_an_unknown_regime_is_refused():
    with pytest.raises(ValueError, match="regime must be one of"):
        plan(problem(128, ("float32", "float32")), DEVICES["sm_90"], "fast")


# --- what a plan may not see, and how many kernels it asks for --------------------------------------------------------


def test_a_problem_knows_nothing_of_rows():
    fields = {field.name for field in dataclasses.fields(Problem)}
    assert fields == {"n_cols", "dtype", "out_dtype", "vec", "in_phase", "packed", "backward", "log"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n_cols", [1, 6, 257, 1000, 1001, 4096])
def test_one_row_is_the_problem_that_many_are(n_cols, dtype):
    asked = set()
    for n_rows in (1, 2, 1000):
        x = torch.empty(n_rows, n_cols, dtype=dtype, device="meta")
        asked.add(problem_of(x, torch.empty_like(x)))
    assert asked == {problem(n_cols, (str(dtype)[6:],) * 2)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_shifted_and_apart_are_what_tensors_can_be(dtype):
    name, n_cols = (str(dtype)[6:],) * 2, 4096
    field = torch.zeros(2, n_cols + 16, dtype=dtype)
    shifted = field[:, 1 : n_cols + 1]
    assert problem_of(shifted, shifted) == problem(n_cols, name, "shifted")
    assert problem_of(shifted, torch.empty(2, n_cols, dtype=dtype)) == problem(n_cols, name, "apart")
    invariant = problem_of(shifted, shifted, batch_invariant=True)
    assert invariant == problem(n_cols, name, "apart")


def test_meta_is_what_the_device_takes():
    asked = problem(200019, ("bfloat16", "bfloat16"))
    on_cluster = plan(asked, DEVICES["sm_90"])

    def meta_for(chosen: Plan, target: str, log: bool) -> dict:
        op, flags = softmax_op(log)
        return meta_of(op.kernel(chosen), chosen, DEVICES[target], flags)

    meta = meta_for(on_cluster, "sm_90", True)
    assert meta["PTX"] and meta["LOG"] and meta["UNALIGNED"]
    assert (meta["num_ctas"], meta["CTAS"], meta["WARPS_PER_ROW"]) == (16, 16, on_cluster.num_warps)
    assert meta["WARPS_PER_ROW"] * meta["VECTORS"] == on_cluster.vectors_per_chunk
    capped = plan(problem(262144, ("float32", "float32")), DEVICES["sm_90"])
    assert capped.max_registers is not None
    assert {meta_for(capped, "sm_90", log)["maxnreg"] for log in (False, True)} == {capped.max_registers}
    assert "ROWS" in meta and "ROWS" not in meta_for(plan(asked, DEVICES["sm_90"], "two_pass"), "sm_90", True)
    for name in ("gfx942", "interpreter"):
        meta = meta_for(plan(asked, DEVICES[name]), name, False)
        assert not meta["PTX"] and not {"num_ctas", "maxnreg"} & meta.keys()


# 200 widths each; 200 of every alignment need the kernels of aligned and of unaligned rows both
SWEEPS = {
    "the tutorial's": (range(128, 25601, 128), 40),
    "odd": ([262144 * i // 200 // 2 * 2 - 1 for i in range(1, 201)], 40),
    "whole vectors": ([262144 * i // 200 // 16 * 16 for i in range(1, 201)], 40),
    "promised": (PROMISED, 40),
    "mixed": ([1311 * i for i in range(1, 200)], 80),
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sweep", SWEEPS)
def test_widths_share_kernels(sweep, dtype, target):
    widths, most = SWEEPS[sweep]
    found = kernels(target, widths, [(dtype, dtype)], [(False, False)], ["contiguous"])
    assert len({compile_time(k.plan, DEVICES[target]) for k in found}) == len(found)
    assert 4 <= len(found) <= most


def test_planning_needs_neither_torch_nor_triton():
    folder = Path(config_tables.__file__).parent
    code = (
        "import importlib, sys, types; package = sys.modules['pure'] = types.ModuleType('pure'); "
        f"package.__path__ = [{str(folder)!r}]; "
        "plan, told = (importlib.import_module('pure.' + name) for name in ('softmax', 'types')); "
        "asked = told.Problem(50257, 'bfloat16', 'bfloat16', 1, True); "
        "print(plan.plan(asked, told.DEVICES['sm_90']).regime); "
        "print(sorted({'torch', 'triton', 'numpy'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.split("\n")[:2] == ["cluster", "[]"]


# (the planner, the least columns, the largest share of the threads' columns that may lie after the row's end)
STEPPED = {
    "statistics": (loss_plans.plan_statistics, 2048, 0.25),
    "elementwise": (loss_plans.plan_elementwise, 2048, 0.25),
    "loss": (loss_plans.plan_loss, 3072, 0.25),
}


@pytest.mark.parametrize("name", STEPPED)
@given(n_cols=st.integers(2048, 262144), dtype=st.sampled_from(["bfloat16", "float32"]), aligned=st.booleans())
def test_few_threads_have_no_column(name, n_cols, dtype, aligned):
    planner, least, share = STEPPED[name]
    assume(n_cols * ITEMSIZE[dtype] >= least * 2)
    full = 16 // ITEMSIZE[dtype]
    problem = Problem(n_cols // full * full, dtype, dtype, full) if aligned else Problem(n_cols, dtype, dtype, 1, True)
    plan = planner(problem, DEVICES["sm_90"])
    chunk = plan.ctas * plan.vectors_per_chunk * plan.vec
    few = -(-plan.chunks // 4) if name == "statistics" else 0  # a short last step has so many chunks
    whole, rest = divmod(problem.n_cols // plan.vec * plan.vec, plan.chunks * chunk)
    last = 0 if rest == 0 else few if rest <= few * chunk else plan.chunks
    assert (whole * plan.chunks + last) * chunk <= problem.n_cols / (1 - share) + full
    assert plan.regime == "two_pass" or whole + (rest > 0) == 1


def test_wide_rows_are_reduced_in_parts():
    def found(n_cols: int, dtype: str = "bfloat16", vec: int = 1, in_phase: bool = True, target: str = "sm_90"):
        return loss_plans.plan_row_statistics(Problem(n_cols, dtype, dtype, vec, in_phase), DEVICES[target])

    for n_cols in (5377, 8193, 12289, 50257, 237225):
        plan = found(n_cols)
        assert 11 <= plan.chunks <= 16 and plan.part_cols == plan.chunks * 256 < n_cols
    for n_cols in (98305, 128256, 262147, 2000003):
        plan = found(n_cols, "float32")
        assert 5 <= plan.chunks <= 8 and plan.part_cols == plan.chunks * 512 < n_cols
    for one in (found(5376), found(98304, "float32"), found(50257, in_phase=False), found(50257, target="sm_80")):
        assert one.part_cols == 0


def test_no_loss_of_unaligned_rows_has_22_vectors_per_thread():
    plan = loss_plans.plan_loss(Problem(43577, "bfloat16", "bfloat16", 1, True), DEVICES["sm_90"])
    assert (plan.chunks, plan.unpredicated_chunks, plan.max_registers) == (24, 20, 128)
    assert loss_plans.plan_loss(Problem(43576, "bfloat16", "bfloat16", 8), DEVICES["sm_90"]).chunks == 22


def test_steps_divide_a_row_evenly():
    def steps(n_cols: int, warps: int, most: int) -> tuple[int, int]:
        problem = Problem(n_cols, "bfloat16", "bfloat16", 8)
        plan = steps_plan(problem, DEVICES["sm_90"], 1, warps, most, "asked")
        return plan.chunks, -(-n_cols // (plan.chunks * plan.vectors_per_chunk * plan.vec))

    assert steps(4096, 2, 8) == (8, 1)
    assert steps(4104, 2, 8) == (5, 2)  # 9 chunks and a few columns: two steps of 5, not of 8
    assert steps(8, 4, 8) == (1, 1)


OTHER_PLANNERS = {
    "boolean mask": lambda problem, device: plan_masked(problem, device, 1),
    "additive mask": lambda problem, device: plan_masked(problem, device, 2),
    "unmasked": lambda problem, device: plan_masked(problem, device, 0),
    "loss": loss_plans.plan_loss,
    "smoothed loss": loss_plans.plan_smoothed_loss,
    "capped loss": loss_plans.plan_capped_loss,
    "loss alone": loss_plans.plan_loss_alone,
    "smoothed loss alone": loss_plans.plan_smoothed_loss_alone,
    "capped loss alone": loss_plans.plan_capped_loss_alone,
    "statistics": loss_plans.plan_statistics_of_one_id,
    "gradient of statistics": loss_plans.plan_statistics_gradient,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942", "interpreter"])
@pytest.mark.parametrize("name", OTHER_PLANNERS)
def test_plans_of_other_ops_hold_the_whole_row(name, target):
    planner, device = OTHER_PLANNERS[name], DEVICES[target]
    widths = (*range(1, 2100, 13), *(RANDOM.randrange(2100, 300_000) for _ in range(150)))
    for n_cols, dtype, lies, backward in itertools.product(
        widths, ("bfloat16", "float32"), ("aligned", "in phase", "element by element"), (False, True)
    ):
        full = 16 // ITEMSIZE[dtype]
        vec, wide = (full, n_cols * full) if lies == "aligned" else (1, n_cols)
        found = planner(Problem(wide, dtype, dtype, vec, lies == "in phase", backward and "mask" in name), device)
        if found.regime != "two_pass":
            units = wide // found.vec if found.unaligned else -(-wide // found.vec)
            assert found.ctas * found.chunks * found.vectors_per_chunk >= units, (wide, dtype, lies, backward)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("anywhere", [False, True], ids=["aligned", "unaligned"])
def test_threads_hold_logits_as_the_tables_say(anywhere, itemsize):
    dtype, full = {2: "bfloat16", 4: "float32"}[itemsize], 16 // itemsize
    planners = {
        "loss": (loss_plans.plan_loss, config_tables.LOSS_ROWS),
        "statistics": (loss_plans.plan_statistics, config_tables.STATISTICS_ROWS),
        "gradient": (loss_plans.plan_elementwise, config_tables.GRADIENT_ROWS),
    }
    seen = 0
    for planner, table in planners.values():
        below = 0
        for held in table.get((itemsize, anywhere), ()):
            assert below < held.fewest <= held.most
            below = held.most
            for n_cols in (held.fewest, held.most):
                # aligned rows have whole vectors only
                problem = Problem(n_cols - n_cols % full, dtype, dtype, full)
                if anywhere:
                    problem = Problem(n_cols, dtype, dtype, 1, True)
                elif problem.n_cols < held.fewest:
                    continue
                got = planner(problem, DEVICES["sm_90"])
                assert (got.vectors_per_chunk, got.num_warps, got.unaligned) == (held.threads, held.num_warps, anywhere)
                assert got.rows * held.threads == 32 * held.num_warps * held.rows
                assert got.chunks * got.vec * held.rows <= 128  # of a thread's registers
                seen += 1
    assert seen >= 2
    # threads of label smoothing hold less, and CDNA's warps have other numbers of threads
    smoothed = loss_plans.plan_smoothed_loss_alone(Problem(1001, dtype, dtype, 1, True), DEVICES["sm_90"])
    assert smoothed.chunks * smoothed.vec <= 40
    assert loss_plans.plan_statistics(Problem(601, dtype, dtype, full), DEVICES["gfx942"]).vectors_per_chunk >= 32


def test_plans_differ_by_the_kind_of_mask():
    def planned(n_cols: int, dtype: str, mask: int, backward: bool = False) -> Plan:
        return plan_masked(Problem(n_cols, dtype, dtype, 1, True, backward), DEVICES["sm_90"], mask)

    # loads of narrow rows wait for each other unless the compiler is told how many registers it may take
    assert [planned(371, "bfloat16", mask).max_registers for mask in (0, 1, 2)] == [None, None, 80]
    assert [planned(n_cols, "bfloat16", 2).max_registers for n_cols in (475, 640)] == [96, None]
    assert [planned(573, "bfloat16", mask).vectors_per_chunk for mask in (0, 1, 2)] == [8, 16, 8]
    # few warps with many chunks, none of them empty; an additive mask takes more registers, so more warps hold a row
    assert [planned(2555, "bfloat16", mask).num_warps for mask in (1, 2)] == [1, 2]
    assert [planned(10697, "bfloat16", mask).chunks for mask in (1, 2)] == [11, 11]
    # unaligned rows of some widths have other warps than their neighbors, or than aligned rows
    assert [planned(n_cols, "bfloat16", 1).num_warps for n_cols in (14335, 15239)] == [4, 8]
    assert [planned(n_cols, "float32", 1).num_warps for n_cols in (4189, 6147)] == [4, 8]
    assert [planned(n_cols, "float32", 2).num_warps for n_cols in (3583, 3641, 4101)] == [4, 8, 4]
    # chunks that lie inside every row need no predicate, wherever the row and its mask begin
    for n_cols in range(65, 16384, 31):
        plan = planned(n_cols, "bfloat16", 2)
        assert plan.unpredicated_chunks * plan.vectors_per_chunk <= max(0, n_cols // 8 - 2), n_cols
    # no cluster: its CTAs read an unaligned mask by elements, and those that see nothing of a causal row wait
    for mask, backward in ((0, False), (1, False), (2, False), (0, True), (1, True)):
        assert planned(8895, "float32", mask, backward).ctas == 1


def test_a_loss_of_images_has_a_plan_for_any_number_of_classes():
    """Columns that do not fit on chip are read twice. Clusters are for many positions, and not for batch invariance."""
    for device in DEVICES.values():
        for dtype in ("bfloat16", "float32"):
            for n_cols in (2, 19, 150, 600, 1000, 5000, 2**15, 2**22):
                for inner in (2, 16, 17, 36, 64, 4096):
                    problem = SpatialProblem(n_cols, inner, dtype, min(inner & -inner, 16 // ITEMSIZE[dtype]))
                    plan = plan_spatial_loss(problem, device)
                    held = plan.chunks * plan.vectors_per_chunk * plan.ctas
                    assert plan.regime == "spatial_two_pass" or held >= n_cols
                    assert plan.ctas <= device.max_cluster and (plan.ctas == 1 or inner > 16)
                    assert plan.recompute or plan.ctas == 1
                    assert plan_spatial_loss(dataclasses.replace(problem, batch_invariant=True), device).ctas == 1


def test_few_positions_are_read_in_long_runs():
    """Where positions are few, columns are neighbors in memory, and a chunk holds at least 64 bytes of them."""
    for backward in (False, True):
        for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
            for n_cols in (49, 93, 171, 400):
                for inner in (2, 3, 4, 8):
                    problem = SpatialProblem(n_cols, inner, dtype, inner & -inner, backward)
                    plan = plan_spatial(problem, DEVICES["sm_90"])
                    assert plan.regime == "spatial" and plan.rows * plan.vectors_per_chunk * itemsize >= 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_thread_of_a_loss_of_few_positions_has_some_columns_and_not_too_many(dtype):
    for n_cols in range(8, 193):
        for inner in range(2, 17):
            problem = SpatialProblem(n_cols, inner, dtype, min(inner & -inner, 16 // ITEMSIZE[dtype]))
            plan = plan_spatial_loss(problem, DEVICES["sm_90"])
            assert 4 <= plan.chunks <= 48, (problem, plan)
            assert plan.outers * plan.rows * plan.vectors_per_chunk <= plan.num_warps * 32 * 8, (problem, plan)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rounded_chunks_keep_few_predicates(dtype):
    """Rows just beyond a number of chunks, whose last slice is shorter, have a predicate at three chunks at most."""
    full, rounded = 16 // ITEMSIZE[dtype], 0
    for backward, log in itertools.product((False, True), repeat=2):
        for n_cols in (*range(81920, 82304, 24), *range(163840, 165632, 24), *range(229376, 231040, 24)):
            for vec, columns in ((full, n_cols // full * full), (1, n_cols + 1)):
                row = Problem(columns, dtype, dtype, vec, True, backward, log=log, packed=True)
                found = plan(row, DEVICES["sm_90"])
                if found.regime == "cluster" and found.chunks > 9:
                    assert found.unpredicated_chunks >= found.chunks - 3, (row, found)
                    rounded += found.unpredicated_chunks == found.chunks - 3
    assert rounded > 50
