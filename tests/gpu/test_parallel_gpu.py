"""fused_softmax.parallel on the GPUs of one host, by NCCL: results, equal bits, torch.compile and CUDA graphs.

Each test starts its own processes. Most of its time goes into compiling kernels, so each takes a part that ends soon.
"""

from __future__ import annotations

import os

import pytest
import torch
from support.parallel_gpu_checks import PARTS, of_rank
from support.ranks import spawn

RANKS = 1 << (max(1, torch.cuda.device_count()).bit_length() - 1)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(RANKS < 2, reason="needs 2 GPUs")]


@pytest.fixture(autouse=True)
def without_multicast(monkeypatch):
    """NVLink multicast stays as the machine has it, which is off where its owners say so."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", os.environ.get("NCCL_NVLS_ENABLE", "0"))


@pytest.mark.parametrize("part", PARTS)
def test_on_all_gpus(part, tmp_path):
    spawn(of_rank, RANKS, tmp_path, part, backend="nccl")
