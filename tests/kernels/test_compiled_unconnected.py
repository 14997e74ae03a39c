"""Compiled: what Triton does not walk through is in its own representation, and not in the machine code."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from launches import BFLOAT16, FLOAT32, cross_compiled, spatial_losses, spatial_softmax_over

from fused_softmax.kernels.common.unconnected import MANY_CHUNKS, unconnected
from fused_softmax.launch.compile import Launch
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.compiled


@triton.jit
def scaled_by_sum(x_ptr, y_ptr, n_cols, CHUNKS: tl.constexpr, APPARENT: tl.constexpr):
    cols = tl.arange(0, 128)
    s = tl.zeros([128], tl.float32)
    for c in tl.static_range(CHUNKS):
        s += tl.load(x_ptr + c * n_cols + cols).to(tl.float32)
    s = unconnected(s, APPARENT, True)
    for c in tl.static_range(CHUNKS):
        tl.store(y_ptr + c * n_cols + cols, s * c)


def branches(ttir: str) -> int:
    """Branches with results."""
    return len(re.findall(r"= scf\.if ", ttir))


def instructions(sass: str) -> list[str]:
    lines = (line.strip() for line in re.sub(r"/\*.*?\*/|//.*", "", sass).splitlines())
    return [line for line in lines if line and not line.startswith(".")]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", pytest.param("sm_120", marks=pytest.mark.extended)])
def test_the_machine_code_is_the_same(target, dtype):
    x = torch.empty(4096, dtype=dtype, device="meta")
    few, many = (
        cross_compiled(Launch(scaled_by_sum, (1,), (x, x, 256), dict(CHUNKS=4, APPARENT=apparent)), target)[1]
        for apparent in (1, MANY_CHUNKS.value)
    )
    assert (branches(few["ttir"]), branches(many["ttir"])) == (0, 1)
    assert len(instructions(few["sass"])) > 20
    assert instructions(few["sass"]) == instructions(many["sass"])


def softmax_over(n_cols: int, inner: int, backward: bool) -> Launch:
    tensors = tuple(torch.empty(2, n_cols, inner, dtype=BFLOAT16, device="meta") for _ in range(2 + backward))
    ((_, launch, _),) = spatial_softmax_over(tensors, "", False, DEVICES["sm_90"])
    return launch


def loss_over(n_cols: int) -> Launch:
    name = f"cross_entropy_spatial torch.bfloat16 {n_cols} 0.0"
    return next(launch for found, launch, _ in spatial_losses("sm_90") if found == name)


@pytest.mark.parametrize(
    ("launch", "chunks", "found"),
    [
        (softmax_over(1820, 8208, False), 57, 16),  # a maximum and a sum of each of 8 groups of chunks
        (softmax_over(2700, 5004, True), 22, 2),  # a sum of each 8 chunks
        (softmax_over(20, 8192, False), 10, 0),
        (loss_over(150), 38, 2),
    ],
    ids=("softmax", "gradient", "few", "cross_entropy"),
)
def test_many_chunks_are_reduced_apart(launch, chunks, found):
    _, assembly = cross_compiled(launch, "sm_90")
    assert (launch.meta["CHUNKS"], branches(assembly["ttir"])) == (chunks, found)
