"""Compiled: the branches of `unconnected` are in Triton's representation of a kernel, and not in its machine code."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
import triton.language as tl
from launches import BFLOAT16, FLOAT32, cross_compiled, spatial_softmax_over

from fused_softmax.kernels.common import spatial_moments
from fused_softmax.launch.compile import Launch
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.compiled

Softmax = tuple[int, int, torch.dtype, bool]  # columns, positions, dtype, whether it is a gradient


def softmax_over(of: Softmax, target: str) -> Launch:
    n_cols, inner, dtype, backward = of
    tensors = tuple(torch.empty(2, n_cols, inner, dtype=dtype, device="meta") for _ in range(2 + backward))
    ((_, launch, _),) = spatial_softmax_over(tensors, "", False, DEVICES[target])
    return launch


def compiled(of: Softmax, target: str, many: int) -> tuple[int, list[str]]:
    """(branches with results in Triton's representation, machine instructions), with `many` as MANY_CHUNKS."""
    spatial_moments.MANY_CHUNKS = tl.constexpr(many)
    _, assembly = cross_compiled(softmax_over(of, target), target)
    text = assembly["amdgcn" if target.startswith("gfx") else "sass"]
    lines = (line.strip() for line in re.sub(r"/\*.*?\*/|//.*", "", text).splitlines())
    return len(re.findall(r"= scf\.if ", assembly["ttir"])), [line for line in lines if line and line[0] != "."]


def compiled_apart(of: Softmax, target: str, many: int) -> tuple[int, list[str]]:
    """In a process of its own: Triton allows no change of a number that a kernel has been compiled with."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(compiled, of, target, many).result()


@pytest.mark.parametrize(
    ("of", "target", "found"),
    [
        ((1820, 8208, BFLOAT16, False), "sm_90", 16),  # a maximum and a sum of each of 8 groups of chunks
        ((2700, 5004, BFLOAT16, True), "sm_90", 3),  # 22 chunks
        pytest.param((1300, 5002, FLOAT32, False), "sm_90", None, marks=pytest.mark.extended),
        pytest.param((302, 1534, BFLOAT16, False), "sm_90", None, marks=pytest.mark.extended),
        pytest.param((1067, 821, BFLOAT16, False), "sm_100", None, marks=pytest.mark.extended),
        pytest.param((108, 64, BFLOAT16, False), "sm_80", None, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_the_machine_code_is_that_without_branches(of, target, found):
    branches, instructions = compiled_apart(of, target, 16)
    without, expected = compiled_apart(of, target, 1 << 20)
    assert branches - without == found if found else branches > without
    assert len(expected) > 500 and instructions == expected


@pytest.mark.parametrize(
    ("of", "target"), [((20, 8192, BFLOAT16, False), "sm_90"), ((600, 80, BFLOAT16, False), "gfx942")]
)
def test_few_chunks_and_other_targets_have_no_branches(of, target):
    branches, instructions = compiled_apart(of, target, 16)
    assert branches == 0 and len(instructions) > 100
