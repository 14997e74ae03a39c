"""Which losses go to their kernels as they lie: rows that a GPU holds, which this machine's tensors only claim here."""

from __future__ import annotations

import pytest
import torch

from fused_softmax.torch_ops.route import is_rows_with_ids

pytestmark = pytest.mark.interpreted
IDS = torch.zeros(3, dtype=torch.int64)


@pytest.fixture(autouse=True)
def claims_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_with_one_stride_and_their_ids_are_taken(dtype):
    x = torch.zeros(3, 11, dtype=dtype)
    for rows in (x, x[:, :5], x[:, 1:2], x[:1], x.requires_grad_()):
        assert is_rows_with_ids(rows, IDS[: rows.shape[0]])
        assert is_rows_with_ids(rows, IDS[: rows.shape[0]])  # and where the answer is known


@pytest.mark.parametrize(
    "x, ids",
    [
        (torch.zeros(3, 11)[:, ::2], IDS),
        (torch.zeros(11, 3).t(), IDS),
        (torch.zeros(3, 11, dtype=torch.float64), IDS),
        (torch.zeros(3, 11, dtype=torch.int32), IDS),
        (torch.zeros(3, 0), IDS),
        (torch.zeros(0, 5), IDS[:0]),
        (torch.zeros(3), IDS),
        (torch.zeros(3, 1, 11), IDS),
        (torch.zeros(3, 11), IDS[:2]),
        (torch.zeros(3, 11), IDS.view(3, 1)),
        (torch.zeros(3, 11), IDS.int()),
        (torch.zeros(3, 11), torch.zeros(6, dtype=torch.int64)[::2]),
        (torch.zeros(3, 11), [0, 0, 0]),
        (torch.zeros(3, 11).to_sparse(), IDS),
        ([[0.0]], IDS),
    ],
)
def test_others_take_the_longer_way(x, ids):
    assert not is_rows_with_ids(x, ids)
    assert not is_rows_with_ids(x, ids)


def test_a_tensor_that_claims_no_gpu_takes_the_longer_way(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    assert not is_rows_with_ids(torch.zeros(3, 11), IDS)
