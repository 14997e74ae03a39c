"""masked_softmax against float64: masks of every kind and stride, causality, rows that see nothing, gradients."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

import fused_softmax as fs
from fused_softmax.launch import masked_softmax as masked_rows
from fused_softmax.launch.launcher import RowOp
from fused_softmax.launch.masks import readable
from fused_softmax.planning.types import DEVICES, Problem

pytestmark = pytest.mark.interpreted

INF = float("inf")
SHAPES = [(2, 2, 5, 5), (1, 2, 3, 33), (2, 1, 4, 1001), (1, 1, 2, 4099), (1, 1, 2, 5000)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # the interpreter truncates bfloat16


def masks(b: int, h: int, q: int, k: int) -> dict[str, torch.Tensor | None]:
    additive = torch.randn(1, 1, q, k)
    additive[0, 0, 0, : k // 2] = -INF
    return {
        "no mask": None,
        "bool, broadcast over queries": torch.rand(b, 1, 1, k) > 0.3,
        "bool": torch.rand(b, h, q, k) > 0.3,
        "bool, broadcast over columns": torch.rand(b, h, q, 1) > 0.5,
        "bool, transposed": (torch.rand(b, 1, k, q) > 0.3).transpose(2, 3),
        "bool, every second column": (torch.rand(q, 2 * k) > 0.3)[:, ::2],
        "additive, broadcast over heads": additive,
        "additive": torch.randn(b, h, q, k).bfloat16(),
    }


KINDS = list(masks(1, 1, 2, 2))


def exact(x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool, zero: bool) -> torch.Tensor:
    z = x * scale
    if mask is not None:
        z = z.masked_fill(~mask, -INF) if mask.dtype is torch.bool else z + mask.double()
    if causal:
        z = z.masked_fill(torch.arange(x.shape[-1]) > torch.arange(x.shape[-2])[:, None], -INF)
    unseen = (z == -INF).all(-1, keepdim=True)
    y = torch.softmax(z.masked_fill(unseen, 0.0), -1)
    return y.masked_fill(unseen, 0.0 if zero else float("nan"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape, causal, kind):
    mask = masks(*shape)[kind]
    for dtype, fully_masked in ((torch.float32, "zero"), (torch.bfloat16, "nan")):
        x = (torch.randn(shape) * 2).to(dtype)
        ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
        y = fs.masked_softmax(ours, mask, scale=0.5, causal=causal, fully_masked=fully_masked)
        want = exact(theirs, mask, 0.5, causal, fully_masked == "zero")
        tolerance = TOLERANCE[dtype]
        assert y.dtype is dtype and y.is_contiguous()
        torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance / 100, equal_nan=True)
        dy = torch.randn(shape).to(dtype)
        y.backward(dy)
        want.backward(dy.double())
        is_number = ~want.isnan().any(-1, keepdim=True)  # a row of NaN has a gradient of NaN
        dx, exact_dx = (g.double().where(is_number, 0.0) for g in (ours.grad, theirs.grad))
        torch.testing.assert_close(dx, exact_dx, rtol=4 * tolerance, atol=tolerance)


@pytest.mark.parametrize("k", [16385, 49155])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("additive", [False, True], ids=["boolean", "additive"])
def test_one_mask_value_for_each_query_of_long_rows(k, causal, additive):
    """Unaligned rows, whose head and tail are read apart; some see only a head, or a few vectors."""
    mask = torch.tensor([True, False, True, True, True])[:, None]
    if additive:
        mask = torch.where(mask, torch.randn(5, 1), -INF)
    x, dy = torch.randn(5, k), torch.randn(5, k)
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    y = fs.masked_softmax(ours, mask, scale=2.0, causal=causal, fully_masked="zero")
    want = exact(theirs, mask, 2.0, causal, True)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-9)
    y.backward(dy)
    want.backward(dy.double())
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-7)


def test_a_cluster_reads_no_mask_with_a_column_stride():
    """The layout of its tile would spread a line over warps, which the merge over a cluster cannot take."""
    chosen = masked_rows.FORWARD[True].planner(Problem(32768, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"])
    assert chosen.ctas > 1
    strided = (torch.rand(6, 32768) > 0.5).t()[:, :1].expand(-1, 6), (torch.rand(32768, 4) > 0.5).t()
    for mask in (torch.rand(4, 65536) > 0.5)[:, ::2], *strided:
        read = readable(mask, chosen)
        assert torch.equal(read, mask) and read.stride(-1) in (0, 1)
    for mask in torch.ones(4, 32768), torch.ones(4, 1), torch.ones(()):
        assert readable(mask, chosen) is mask
    one_cta = replace(chosen, ctas=1)
    assert readable(strided[1], one_cta) is strided[1]


def test_hidden_columns_hide_nan_and_are_zero():
    x = torch.randn(2, 9)
    x[:, 4], x[:, 6] = float("nan"), INF
    keep = torch.ones(9, dtype=torch.bool)
    keep[4] = keep[6] = False
    y = fs.masked_softmax(x, keep)
    assert not y[:, ~keep].any()
    torch.testing.assert_close(y[:, keep], torch.softmax(x[:, keep], -1))


def test_causal_columns_are_not_read():
    """torch's is_causal: row q sees columns 0..q, counted from the top left whatever the shape."""
    for n_rows, n_cols in ((3, 700), (40, 8)):
        x = torch.randn(n_rows, n_cols)
        hidden = torch.arange(n_cols) > torch.arange(n_rows)[:, None]
        y = fs.masked_softmax(x.masked_fill(hidden, float("nan")), causal=True)
        torch.testing.assert_close(y, torch.softmax(x.masked_fill(hidden, -INF), -1))


# (columns, queries, chunks that these see): all numbers of seen chunks, and queries at the ends of a chunk
FEW_QUERIES = {
    torch.bfloat16: [
        (330, 64, 1),
        (330, 65, 4),
        (330, 100, 4),
        (636, 200, 4),
        (640, 256, 4),
        (640, 64, 1),
        (473, 3, 1),
    ],
    torch.float32: [(132, 32, 1), (132, 33, 4), (161, 33, 4), (200, 100, 0), (260, 100, 4), (300, 63, 1)],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "n_cols", "queries", "seen"), [(dtype, *of) for dtype, cases in FEW_QUERIES.items() for of in cases]
)
def test_causal_rows_of_few_queries_are_those_of_many(dtype, n_cols, queries, seen):
    x = torch.randn(1, n_cols, n_cols).to(dtype)
    few = x[:, :queries].contiguous()
    chosen = masked_rows.planned_forward(few, None, True)
    assert (chosen.chunks - chosen.unseen_chunks if chosen.unseen_chunks else 0) == seen
    ours, all_rows = (fs.masked_softmax(t, causal=True, scale=0.5) for t in (few, x))
    torch.testing.assert_close(ours, all_rows[:, :queries], rtol=0, atol=0)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        ours.double(), exact(few.double(), None, 0.5, True, False), rtol=tolerance, atol=tolerance / 100
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.extended) for n in range(3, 12))])
def test_no_bit_depends_on_the_number_of_queries(seed):
    """Also of rows with infinities and NaN, whose unseen columns are NaN, too. One batch: rows keep their addresses."""
    rng = random.Random(seed)
    n_cols, dtype = rng.randint(9, 900), rng.choice((torch.bfloat16, torch.float32))
    queries = rng.randint(1, max(1, min(n_cols // 2, 70)))
    x = torch.randn(1, n_cols, n_cols).to(dtype)
    for value in (INF, -INF, float("nan")):
        x[0, rng.randrange(queries), rng.randrange(3)] = value
    few, many = (fs.masked_softmax(t, causal=True, scale=0.5) for t in (x[:, :queries].contiguous(), x))
    torch.testing.assert_close(few, many[:, :queries], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("mask_shape", [(2, 3, 4, 8), (1, 1, 4, 8), (8,), (4, 1)], ids=str)
def test_the_gradient_of_an_additive_mask(mask_shape, scale):
    x, m = torch.randn(2, 3, 4, 8), torch.randn(mask_shape)
    dy = torch.randn_like(x)
    found = []
    for function in (fs.masked_softmax, lambda x, m, scale: torch.softmax(x * scale + m, -1)):
        leaves = [x.clone().requires_grad_(), m.clone().requires_grad_()]
        found.append(torch.autograd.grad(function(*leaves, scale=scale), leaves, dy))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_rows_that_see_nothing():
    x = torch.randn(3, 6, requires_grad=True)
    keep = torch.tensor([[True], [False], [True]])
    y = fs.masked_softmax(x, keep, fully_masked="zero")
    assert not y[1].any()
    y.square().sum().backward()
    assert x.grad.isfinite().all() and not x.grad[1].any() and x.grad[0].any()
    assert fs.masked_softmax(x, keep)[1].isnan().all()


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_rows_that_do_not_fit_on_chip(causal, monkeypatch):
    """The walk in steps, forward; backward is softmax's own."""
    from fused_softmax.planning.softmax import plan

    forced = lambda problem, device, masked: plan(problem, device, regime="two_pass")  # noqa: E731
    for name in ("FORWARD", "BACKWARD"):
        ops = {
            masked: RowOp(partial(forced, masked=masked), op.kernel, backward=op.backward, alignment=op.alignment)
            for masked, op in getattr(masked_rows, name).items()
        }
        monkeypatch.setattr(masked_rows, name, ops)
    for n_cols in (33, 1001, 9000):
        x = torch.randn(2, n_cols)
        for mask in (None, torch.rand(1, n_cols) > 0.4, torch.randn(2, n_cols)):
            ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
            y = fs.masked_softmax(ours, mask, scale=0.5, causal=causal, fully_masked="zero")
            want = exact(theirs, mask, 0.5, causal, True)
            torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-7)
            dy = torch.randn_like(x)
            y.backward(dy)
            want.backward(dy.double())
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)


def test_more_batch_dimensions_than_strides_and_other_shapes():
    x = torch.randn(2, 2, 2, 2, 3, 5)
    mask = torch.rand(2, 1, 2, 1, 3, 5) > 0.4
    mask[..., 0] = True
    torch.testing.assert_close(fs.masked_softmax(x, mask), torch.softmax(x.masked_fill(~mask, -INF), -1))
    row = torch.randn(7)
    torch.testing.assert_close(fs.masked_softmax(row, row > -9), torch.softmax(row, -1))
    assert fs.masked_softmax(x[:0], mask[:1, :, :, :, :1]).shape == x[:0].shape
    turned = torch.randn(5, 4, 3).permute(2, 1, 0)
    torch.testing.assert_close(fs.masked_softmax(turned), torch.softmax(turned, -1))
    double = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: fs.masked_softmax(t, causal=True, scale=2.0), double)


def test_gradients_of_gradients():
    x = torch.randn(3, 6, requires_grad=True)
    seconds = []
    for function in (fs.masked_softmax, lambda x, scale: torch.softmax(x * scale, -1)):
        (dx,) = torch.autograd.grad(function(x, scale=0.5).square().sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(dx.square().sum(), x)[0])
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-6)


def test_errors():
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match="fully_masked"):
        fs.masked_softmax(x, fully_masked="one")
    with pytest.raises(ValueError, match="broadcast"):
        fs.masked_softmax(x, torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="broadcast"):
        fs.masked_softmax(x, torch.ones(1, 2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="causal"):
        fs.masked_softmax(x[0], causal=True)
    with pytest.raises(TypeError, match="bool or floating"):
        fs.masked_softmax(x, torch.ones(3, dtype=torch.int64))
    for mask in (torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3)):
        with pytest.raises(RuntimeError, match="device"):  # torch's own
            fs.masked_softmax(x, mask.to("meta"))
