"""Which losses go to their kernels as they lie: rows that a GPU holds, which this machine's tensors only claim here."""

from __future__ import annotations

import pytest
import torch

from fused_softmax.torch_ops.route import layout_of_rows

pytestmark = pytest.mark.interpreted
IDS = torch.zeros(3, dtype=torch.int64)


@pytest.fixture(autouse=True)
def claims_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_with_one_stride_and_their_ids_are_taken(dtype):
    x = torch.zeros(3, 11, dtype=dtype)
    for rows in (x, x[:, :5], x[:, 1:2], x[:1], x.requires_grad_()):
        layout = layout_of_rows(rows, IDS[: rows.shape[0]])
        assert layout is not None
        assert layout_of_rows(rows, IDS[: rows.shape[0]]) is layout  # and where the answer is known


def test_a_layout_tells_apart_what_kernels_depend_on_and_not_the_number_of_rows():
    x = torch.zeros(3, 24)
    alike = [layout_of_rows(x[:n, :11], IDS[:n]) for n in (1, 2, 3)]
    assert alike[0] is alike[1] is alike[2] is not None
    others = [x[:, :12], x[:, 1:12], x[:, :11].contiguous(), torch.zeros(3, 24, dtype=torch.float16)[:, :11]]
    layouts = [alike[0], *(layout_of_rows(rows, IDS) for rows in others)]
    assert len({id(layout) for layout in layouts}) == len(layouts)


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
    assert None is layout_of_rows(x, ids)
    assert None is layout_of_rows(x, ids)


def test_a_tensor_that_claims_no_gpu_takes_the_longer_way(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    assert None is layout_of_rows(torch.zeros(3, 13), IDS)
