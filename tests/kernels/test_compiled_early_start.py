"""Kernels that start before the previous one ends: what they do before they wait for it, in their machine code."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from launches import as_called, launches, masked_launch, spatial_softmax
from machine_code import around_the_wait, starts_of_the_next

from fused_softmax.lab.cross_compile import compile_for
from fused_softmax.launch.compile import Launch
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.compiled

# the first kernels of launches that read their own input before they wait; and kernels of tensors that are split over
# ranks, which follow a collective
NOT_EARLY = {
    "count_targets", "prepare_spatial_targets", "row_statistics_parts", "softmax_spatial_reduce",
    "softmax_spatial_backward_reduce", "softmax_spatial_bundled_reduce", "softmax_spatial_bundled_backward_reduce",
    "pack_shard", "merge_loss", "merge_statistics", "loss_factors", "shard_gradient_sums", "shard_gradient",
    "log_softmax_shard",
}  # fmt: skip
# what decides how a kernel reads memory, besides the number of its CTAs
READS = (
    "WAITS", "MASK", "MASK_COLS", "SMEM_STAGED", "UNALIGNED", "SCALE", "RANK", "ENTROPY", "PICKS", "MEAN", "SMOOTH",
    "UNLESS_WRITTEN", "UNLESS_ONE", "HAS_COUNT", "WEIGHTED", "INPLACE", "SHARDED", "LSE", "LOG",
)  # fmt: skip


def one_value_masks() -> Iterator[tuple[str, Launch]]:
    """Masks of one value for each row, which a kernel reads before the row."""
    for n_cols in (64, 1024, 50257, 2097152):
        for dtype in (torch.bool, torch.bfloat16):
            x, mask = torch.empty(4, n_cols, dtype=torch.bfloat16), torch.empty(2, 1, dtype=dtype).expand(2, n_cols)
            yield (
                f"masked_softmax by one {dtype} {n_cols}",
                as_called(masked_launch(x, mask, False, DEVICES["sm_90"])[0]),
            )


LAUNCHES = [*((name, launch) for name, launch, _ in launches("sm_90")), *one_value_masks()]


def one_of_each() -> dict[str, Launch]:
    found, seen = {}, set()
    for name, launch in LAUNCHES:
        flags = tuple(bool(launch.meta.get(flag, 0)) for flag in READS)
        kind = launch.kernel.fn.__name__, launch.meta.get("CTAS", 1) > 1, flags
        if kind not in seen:
            seen.add(kind)
            assert name not in found
            found[name] = launch
    return found


CASES = one_of_each()


def test_every_kernel_starts_early():
    for name, launch in LAUNCHES:
        assert launch.meta.get("launch_pdl", False) == (launch.kernel.fn.__name__ not in NOT_EARLY), name
    assert {launch.kernel.fn.__name__ for _, launch in LAUNCHES} > NOT_EARLY


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_accessed_before_the_wait(name):
    """A kernel that WAITS reads its own input before: all that was launched before its host function has ended."""
    launch = CASES[name]
    asm = compile_for(launch, "sm_90").asm
    found = around_the_wait(asm["sass"])
    if not launch.meta.get("launch_pdl"):
        assert found is None
        return
    assert found is not None
    loads, others, loads_after = found
    waits = launch.meta.get("WAITS", False)
    assert waits or not loads, loads
    assert not [o for o in others if o != "PREEXIT"], others
    assert waits or "PREEXIT" not in others
    assert loads_after > 0
    if not waits:  # every CTA waits: no branch leads around it
        before = asm["ptx"].split(".entry")[1].split("griddepcontrol.wait")[0]
        assert not re.search(r"^\s*(@%?\w+\s+bra|\$L__BB(?!\w*_0:))", before, re.MULTILINE), before


BUNDLED = [(name, launch) for name, launch, _ in spatial_softmax("sm_90") if "bundled" in name and "finish" in name]


@pytest.mark.parametrize(("name", "launch"), BUNDLED, ids=[name for name, _ in BUNDLED])
def test_only_the_input_is_read_before_the_wait_where_columns_are_in_bundles(name, launch):
    """What the kernel in front writes, the numbers of the planes, is read behind the wait: all loads in front are
    vectors of the tile."""
    found = around_the_wait(compile_for(launch, "sm_90").asm["sass"])
    assert found is not None
    n_tensors = 2 if "backward" in name else 1
    assert len(found[0]) == n_tensors * launch.meta["CHUNKS"] and all(".128" in load for load in found[0]), found[0]


SOFTMAX = [
    (launch.kernel.fn.__name__, name) for name, launch in CASES.items()
    if launch.kernel.fn.__name__ in ("softmax_resident", "softmax_backward_resident")
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "name"), SOFTMAX)
def test_a_small_softmax_starts_the_next_kernel_once_its_loads_are_under_way(kernel, name):
    """The condition is the number of its programs, which no kernel knows when it is compiled."""
    found = starts_of_the_next(compile_for(CASES[name], "sm_90").asm["sass"])
    if CASES[name].meta["LOG"]:
        assert found == []
        return
    ((conditional, waits, loads, stores),) = found
    assert conditional and waits == 1 and stores > 0
    assert loads == 0 or (kernel == "softmax_backward_resident" and loads <= 2)  # of head and tail


def test_both_kernels_of_softmax_are_looked_at():
    assert {(kernel, CASES[name].meta["LOG"]) for kernel, name in SOFTMAX} == {
        (kernel, log) for kernel in ("softmax_resident", "softmax_backward_resident") for log in (False, True)
    }


def test_code_of_another_order_is_seen():
    line = "a:b:c:d:0 {} ;"
    wait, load, store = (line.format(code) for code in ("ACQBULK", "LDG.E R0, [R2]", "STG.E [R2], R0"))
    assert starts_of_the_next("\n".join((wait, load, line.format("@P0 PREEXIT"), store))) == [(True, 1, 0, 1)]
    assert starts_of_the_next("\n".join((line.format("PREEXIT"), wait, load, store))) == [(False, 0, 1, 1)]
