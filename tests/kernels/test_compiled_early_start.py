"""Kernels that start before the previous one ends: what they do before they wait for it, in their machine code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launches import launches
from machine_code import before_the_wait

from fused_softmax.lab.cross_compile import compile_for
from fused_softmax.launch.compile import Launch

pytestmark = pytest.mark.compiled

# kernels of tensors that are split over ranks, which follow a collective
WAITS_FOR_NOTHING = {
    "pack_shard", "merge_loss", "merge_statistics", "loss_factors", "shard_gradient_sums", "shard_gradient",
    "log_softmax_shard",
}  # fmt: skip


def one_of_each() -> Iterator[tuple[str, Launch]]:
    seen = set()
    for name, launch, _ in launches("sm_90"):
        kind = launch.kernel.fn.__name__, launch.meta.get("WAITS"), launch.meta.get("CTAS", 1) > 1
        if kind not in seen:
            seen.add(kind)
            yield name, launch


CASES = dict(one_of_each())


def test_every_kernel_starts_early():
    kernels = {launch.kernel.fn.__name__: launch for launch in CASES.values()}
    late = {name for name, launch in kernels.items() if not launch.meta.get("launch_pdl")}
    assert late <= WAITS_FOR_NOTHING and len(kernels) - len(late) > 20, late


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_accessed_before_the_wait(name):
    """A kernel that WAITS reads its own input before: the launch in front of it started after that had been written."""
    launch = CASES[name]
    found = before_the_wait(compile_for(launch, "sm_90").asm["sass"])
    if not launch.meta.get("launch_pdl"):
        assert found is None
        return
    assert found is not None
    loads, others = found
    waits = launch.meta.get("WAITS", False)
    assert waits or not loads, loads
    assert not [o for o in others if o != "PREEXIT"], others
    assert waits or "PREEXIT" not in others
