"""Softmax that transposes, from columns that are not neighbors in memory or into them: the kernels, and the copy."""

from __future__ import annotations

import random

import pytest
import torch
from cases import SENTINEL, assert_contract, assert_forward, assert_nothing_outside, edge_rows, logits

import fused_softmax as fs
from fused_softmax.launch import softmax as launch_softmax
from fused_softmax.launch import views
from fused_softmax.planning.transposed import MOST_SPLIT
from fused_softmax.planning.types import Plan

pytestmark = pytest.mark.interpreted

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# elements by which an output is out of phase, and whether it is of log_softmax: only the last formula differs
PHASES = [
    (0, False), (1, True), (2, False),
    *(pytest.param(*of, marks=pytest.mark.extended) for of in ((0, True), (1, False), (2, True))),
]  # fmt: skip


def planned(x: torch.Tensor, dim: int = -1) -> str:
    found = fs.plan_for(x, dim)
    assert isinstance(found, Plan)
    return found.regime


def drawn(pick: random.Random) -> torch.Tensor:
    """(outer, inner, n_cols), or (outer, height, width, n_cols), whose columns are not neighbors."""
    n_cols, inner, outer = round(2 * 300 ** pick.random()), round(16 * 14 ** pick.random()), pick.randint(1, 3)
    dtype, offset, more = pick.choice(DTYPES), pick.choice((0, 0, 1, 2, 8)), pick.choice((0, 0, 0, 1, 8))
    memory = torch.randn(offset + outer * n_cols * (inner + more)).mul_(3).to(dtype)
    x = memory[offset:].view(outer, n_cols, inner + more)[..., :inner]
    if inner % 4 == 0 and pick.random() < 0.5:
        return x.unflatten(2, (4, inner // 4)).permute(0, 2, 3, 1)
    return x.transpose(1, 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_random_transpositions(seed):
    pick, taken = random.Random(seed), 0
    for _ in range(6):
        x, log = drawn(pick), pick.random() < 0.5
        x[(0,) * x.dim()] = -float("inf")
        ours = fs.log_softmax if log else fs.softmax
        y = ours(x, -1)
        assert y.is_contiguous()
        assert_forward(y.flatten(0, -2), x.flatten(0, -2), log)
        assert torch.equal(ours(x[:1], -1), y[:1]), "bits depend on outer"
        kind = planned(x)
        taken += kind == "transposed"
        if kind == "transposed":
            of_one, of_all = fs.plan_for(x[:1], -1), fs.plan_for(x, -1)
            assert of_one == of_all, "the plan depends on outer"
    assert taken >= 2


def channels_last(pick: random.Random) -> torch.Tensor:
    """(outer, n_cols, inner), or (outer, n_cols, height, width), whose columns are neighbors."""
    n_cols, inner, outer = round(2 * 300 ** pick.random()), round(16 * 14 ** pick.random()), pick.randint(1, 3)
    dtype, offset = pick.choice(DTYPES), pick.choice((0, 0, 1, 2, 8))
    x = torch.randn(offset + outer * n_cols * inner).mul_(3).to(dtype)[offset:].view(outer, inner, n_cols)
    if inner % 4 == 0 and pick.random() < 0.5:
        return x.unflatten(1, (4, inner // 4)).permute(0, 3, 1, 2)
    return x.transpose(1, 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_random_channels_last(seed):
    pick, taken = random.Random(seed), 0
    for _ in range(6):
        x, log = channels_last(pick), pick.random() < 0.5
        x[(0,) * x.dim()] = -float("inf")
        ours = fs.log_softmax if log else fs.softmax
        y = ours(x, 1)
        assert y.is_contiguous()
        assert_forward(y.movedim(1, -1).flatten(0, -2), x.movedim(1, -1).flatten(0, -2), log)
        assert torch.equal(ours(x[:1], 1), y[:1]), "bits depend on outer"
        taken += planned(x, 1) == "transposed"
        if planned(x, 1) == "transposed":
            assert fs.plan_for(x[:1], 1) == fs.plan_for(x, 1), "the plan depends on outer"
    assert taken >= 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("phase", "log"), PHASES)
@pytest.mark.parametrize(("n_cols", "inner"), [(21, 64), (30, 37), (150, 40), (333, 33), (520, 32), (1301, 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_between_sentinels(n_cols, inner, dtype, phase, log):
    x = logits(2, inner, n_cols, dtype=dtype).transpose(1, 2)
    field = torch.full((2 * inner * n_cols + 128,), SENTINEL, dtype=dtype)
    y = field[64 + phase : phase - 64].view(2, n_cols, inner)
    if phase and n_cols > MOST_SPLIT[dtype.itemsize]:
        pytest.skip("copied first, as these columns start in the middle of a sector")
    assert planned(x, 1) == "transposed"
    for _ in range(2):
        assert (fs.log_softmax if log else fs.softmax)(x, 1, out=y) is y
        assert_forward(y.transpose(1, 2).flatten(0, 1), x.transpose(1, 2).flatten(0, 1), log)
        assert_nothing_outside((y, field))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_cols", [9, 70, 400])
def test_infinities_and_nan_of_channels_last(n_cols, dtype):
    rows = list(edge_rows(n_cols, dtype).values())
    x = torch.stack([rows[i % len(rows)] for i in range(2 * 40)]).view(2, 40, n_cols).transpose(1, 2)
    assert planned(x, 1) == "transposed"
    assert_contract(fs.softmax(x, 1), x, 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("phase", "log"), PHASES)
@pytest.mark.parametrize(("n_cols", "inner"), [(21, 64), (30, 37), (150, 40), (333, 32), (520, 33), (1301, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_between_sentinels(n_cols, inner, dtype, phase, log):
    x = logits(2, inner, n_cols, dtype=dtype).transpose(1, 2).contiguous().transpose(1, 2)
    field = torch.full((2 * inner * n_cols + 128,), SENTINEL, dtype=dtype)
    y = field[64 + phase : phase - 64].view(2, inner, n_cols)
    assert planned(x) == "transposed"
    for _ in range(2):
        assert (fs.log_softmax if log else fs.softmax)(x, -1, out=y) is y
        assert_forward(y.flatten(0, 1).clone(), x.flatten(0, 1), log)
        assert_nothing_outside((y, field))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_cols", [9, 70, 1400])
def test_infinities_and_nan(n_cols, dtype):
    rows = list(edge_rows(n_cols, dtype).values())
    x = torch.stack([rows[i % len(rows)] for i in range(2 * 40)]).view(2, 40, n_cols)
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert planned(x) == "transposed"
    assert_contract(fs.softmax(x, -1), x)


def test_dtypes_and_orders_that_it_does_not_take():
    x = torch.randn(2, 70, 48)
    assert planned(x.transpose(1, 2)) == "transposed"
    with fs.batch_invariant():
        assert planned(x.transpose(1, 2)) != "transposed"
    wider = x.bfloat16().transpose(1, 2)
    assert_contract(fs.softmax(wider, -1, dtype=torch.float32), wider, -1, torch.float32)
    last = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert planned(last, 1) == "transposed"
    assert_contract(fs.softmax(last.bfloat16(), 1, dtype=torch.float32), last.bfloat16(), 1, torch.float32)
    with fs.batch_invariant():
        assert planned(last, 1) != "transposed"
        assert torch.equal(fs.softmax(last, 1), fs.softmax(last.contiguous(), 1))
    padded = torch.randn(2, 48, 80)[..., :70].transpose(1, 2)  # whose rows have gaps
    assert planned(padded, 1) != "transposed"
    assert_contract(fs.softmax(padded, 1), padded, 1)
    apart = torch.empty(2, 48, 72)[..., :70]  # an output with gaps
    fs.softmax(x.transpose(1, 2), -1, out=apart)
    assert torch.allclose(apart, torch.softmax(x.transpose(1, 2), -1), rtol=1e-5, atol=1e-7)
    turned = torch.randn(4, 70, 6, 40).permute(3, 2, 0, 1)  # the output's rows follow each other in another order
    assert planned(turned) != "transposed"
    assert_contract(fs.softmax(turned, -1), turned)


@pytest.mark.parametrize("n_cols", [3, 60, 333])
@pytest.mark.parametrize("n_rows", [33, 64, 500])
def test_rows_cut_from_a_batch_have_its_bits(n_rows, n_cols):
    """Where the batch itself lies in neighbors, its first rows have the same bits alone."""
    x = torch.randn(n_cols, n_rows).bfloat16().t()
    y = fs.softmax(x, 1)
    for n in (1, 2, 7, n_rows - 1):
        assert torch.equal(fs.softmax(x[:n], 1), y[:n]), n


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((2, 300, 120), (0, 2, 1)), ((300, 301), (1, 0)), ((3, 39, 4000), (0, 2, 1)), ((2, 4000, 41), (0, 2, 1)),
        ((2, 130, 9, 32), (0, 2, 3, 1)), ((5, 3, 64, 96), (0, 3, 1, 2)), ((5, 3, 64, 96), (1, 0, 3, 2)),
    ],
    ids=str,
)  # fmt: skip
def test_the_copy(shape, order, dtype):
    x = torch.randn(shape).to(dtype).permute(order)
    assert views.tiles_of(x) is not None and views._prepare_copy(x) is not None
    assert torch.equal(views.contiguous(x), x) and views.contiguous(x).is_contiguous()


STEPPED = {
    "every second column": lambda t: t[:262144].view(128, 2048)[:, ::2],
    "every third column, not from the first": lambda t: t[1:196609].view(64, 3072)[:, 2::3],
    "one of two": lambda t: t[:140000].view(7, 10000, 2)[..., 1],
    "planes": lambda t: t[:270000].view(3, 90, 500, 2)[..., 0],
    "a vector": lambda t: t[3::5],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", STEPPED.values(), ids=STEPPED)
def test_elements_one_step_apart_are_copied(cut, dtype):
    x = cut(torch.randn(400001).to(dtype))
    assert views.step_of(x) in (2, 3, 5) and views.tiles_of(x) is None
    y = torch.full((x.numel() + 2000,), 7.0, dtype=dtype)
    views.stepped_copy_launch(x, y, views.step_of(x), views.device_of(x))()
    assert torch.equal(y[: x.numel()], x.reshape(-1)) and (y[x.numel() :] == 7).all()
    assert torch.equal(views.contiguous(x), x) and views.contiguous(x).is_contiguous()
    assert views._prepare_copy(x) is not None


def test_what_torch_copies():
    taken = (views.tiles_of(x) is not None or views.step_of(x) is not None for x in (
        torch.empty(300, 400)[:, :390], torch.empty(3, 400, 300).permute(2, 1, 0)[:, ::2],
        torch.empty(400, 4).t(), torch.empty(3, 4, 5, 6, 40).permute(4, 2, 0, 3, 1),
        torch.empty(400, 400, dtype=torch.float64).t(), torch.empty(400, dtype=torch.float64)[::2],
        torch.empty(300, 401)[:, ::2],
    ))  # fmt: skip
    assert not any(taken)


def test_large_transpositions_are_copied_by_it(monkeypatch):
    copied = []
    copy = views.contiguous
    monkeypatch.setattr(views, "contiguous", lambda x: copied.append(x.shape) or copy(x))
    x = torch.randn(2, 3000, 16)
    with fs.batch_invariant():
        wanted = fs.softmax(x.transpose(1, 2).contiguous(), -1)
        assert torch.equal(fs.softmax(x.transpose(1, 2), -1), wanted)
    y, dy = torch.softmax(torch.randn(2, 16, 3000), -1), torch.randn(2, 3000, 16).transpose(1, 2)
    found = launch_softmax.softmax_backward(dy, y, -1, torch.float32, False)
    assert torch.equal(found, launch_softmax.softmax_backward(dy.contiguous(), y, -1, torch.float32, False))
    dy = torch.randn(2, 16, 6000)[..., ::2]
    found = launch_softmax.softmax_backward(dy, y, -1, torch.float32, False)
    assert torch.equal(found, launch_softmax.softmax_backward(dy.contiguous(), y, -1, torch.float32, False))
    assert copied == [(2, 16, 3000)] * 3
    small = torch.randn(30, 20).t()
    with fs.batch_invariant():
        fs.softmax(small, -1)
    assert len(copied) == 3


GAPS = {
    "images cropped along their height": lambda t: (t.to(memory_format=torch.channels_last)[:, :, :12], 1),
    "every second image": lambda t: (t.to(memory_format=torch.channels_last)[::2], 1),
    "one image, repeated": lambda t: (t[:1].to(memory_format=torch.channels_last).expand(3, -1, -1, -1), 1),
    "two batches apart, as rows": lambda t: (t.transpose(1, 3).contiguous()[:, :3].transpose(-1, -2), 2),
    "cropped along their width": lambda t: (t[..., :6].permute(0, 2, 3, 1), -1),
    "two batches apart": lambda t: (t.transpose(1, 2).contiguous()[:, :3].mT, -1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GAPS)
@pytest.mark.parametrize("n_cols", [19, 100, 333])
def test_a_batch_of_one_is_planned_as_the_batch_is(name, n_cols, dtype):
    """Where a batch has gaps, too: its first element keeps the strides that tell."""
    x, dim = GAPS[name](torch.randn(4, n_cols, 16, 8).to(dtype))
    y = fs.log_softmax(x, dim)
    assert fs.plan_for(x[:1], dim) == fs.plan_for(x, dim)
    assert torch.equal(fs.log_softmax(x[:1], dim), y[:1])


def test_one_row_into_columns_has_the_bits_of_many():
    x, out = torch.randn(64, 100), torch.empty(100, 64).t()
    fs.softmax(x, 1, out=out)
    for i in range(0, 64, 7):
        alone = torch.empty(100, 64).t()[i : i + 1]
        assert torch.equal(fs.softmax(x[i : i + 1], 1, out=alone), out[i : i + 1])
