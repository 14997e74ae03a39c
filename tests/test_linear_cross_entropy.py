"""linear_cross_entropy against torch on all logits: loss, gradients, options, chunks, and what each gradient costs."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from cases import dtype_id
from linear import assert_as_torch, error, layer, of_logits

import fused_softmax as fs
from fused_softmax.lab import reference, torch_ways
from fused_softmax.launch import cross_entropy as launch_cross_entropy
from fused_softmax.launch import linear
from fused_softmax.launch.availability import KernelUnavailable
from fused_softmax.planning import linear_losses as planning

pytestmark = pytest.mark.interpreted

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OPTIONS = {
    "plain": {},
    "smoothed": dict(label_smoothing=0.1, z_loss=1e-3),
    "capped": dict(softcap=5.0),
    "weighted": dict(weight=True),
    "weighted, smoothed": dict(weight=True, label_smoothing=0.2),
}


def targets(n_rows: int, n_cols: int) -> torch.Tensor:
    target = torch.randint(0, n_cols, (n_rows,))
    target[2::5] = -100
    return target


def check(dtype: torch.dtype, reduction: str, options: dict, bias: bool = False, shape=(7, 16, 131), **how) -> None:
    n_rows, hidden, n_cols = shape
    tensors, target = layer(n_rows, hidden, n_cols, dtype, bias=bias), targets(n_rows, n_cols)
    options = options | dict(reduction=reduction)
    if options.get("weight"):
        options["weight"] = torch.rand(n_cols) + 0.5
    g = torch.rand(n_rows) + 0.5 if reduction == "none" else torch.tensor(3.7)
    x, weight, linear_bias = tensors
    loss = fs.linear_cross_entropy(x, weight, target, linear_bias=linear_bias, **options, **how)
    assert loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    given = [t for t in tensors if t is not None]
    grads = torch.autograd.grad(loss, given, g.to(loss.dtype))
    assert [t.dtype for t in grads] == [dtype] * len(given)
    exact = of_logits(lambda z: reference.cross_entropy(z, target, **options), torch.float64, tensors, g)
    wide = torch.float32 if how.get("logits_dtype") is torch.float32 else dtype
    own = of_logits(lambda z: torch_ways.cross_entropy(z, target, **options), wide, tensors, g)
    own = own[:1] + [t.to(dtype) for t in own[1:]]
    assert_as_torch([loss, *grads], own, exact, dtype)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_id)
def test_loss_and_gradients(dtype, reduction):
    for chunk_rows in (None, 3):
        check(dtype, reduction, {}, chunk_rows=chunk_rows)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options):
    for dtype, reduction in ((torch.float32, "mean"), (torch.bfloat16, "none"), (torch.float16, "sum")):
        check(dtype, reduction, options, bias=True, chunk_rows=4)


def test_how_the_gradient_is_summed():
    # in bfloat16 the interpreter truncates the logits' gradient: tests/gpu has that dtype
    dtype = torch.float16
    for how in (dict(accumulate="weight"), dict(logits_dtype=torch.float32), dict(logits_dtype=dtype)):
        check(dtype, "mean", {}, shape=(64, 16, 131), chunk_rows=32, **how)
        check(dtype, "sum", {}, bias=True, shape=(9, 16, 131), chunk_rows=3, **how)


@pytest.mark.parametrize("dtype", ALL_DTYPES[1:], ids=dtype_id)
def test_nothing_counts_ties_and_one_class(dtype):
    x, weight, _ = layer(4, 8, 33, dtype)
    nothing = torch.full((4,), -100)
    for reduction, want in (("mean", float("nan")), ("sum", 0.0), ("none", 0.0)):
        loss = fs.linear_cross_entropy(x, weight, nothing, reduction=reduction)
        torch.testing.assert_close(loss, torch.full(loss.shape, want), equal_nan=True)
        for grad in torch.autograd.grad(loss.sum(), (x, weight)):
            assert not grad.any() and not grad.isnan().any()
    zeros = torch.zeros_like(weight).requires_grad_()
    loss = fs.linear_cross_entropy(x, zeros, torch.tensor([0, 1, 2, 32]))
    assert abs(loss.item() - torch.tensor(33.0).log().item()) < 1e-6
    one = weight[:1].detach().requires_grad_()
    loss = fs.linear_cross_entropy(x, one, torch.zeros(4, dtype=torch.int64))
    assert loss.item() == 0.0 and not any(t.any() for t in torch.autograd.grad(loss, (x, one)))


def test_shapes_and_empty_batches():
    x, weight, _ = layer(6, 8, 20, torch.float32)
    target = targets(6, 20)
    want = fs.linear_cross_entropy(x, weight, target, reduction="none")
    batched = fs.linear_cross_entropy(x.view(2, 3, 8), weight, target.view(2, 3), reduction="none")
    assert torch.equal(batched, want.view(2, 3))
    single = fs.linear_cross_entropy(x[0], weight, target[0], reduction="none")
    assert single.shape == () and abs(single - want[0]) < 1e-5
    assert torch.equal(fs.linear_cross_entropy(x, weight, target, ignore_index=None, reduction="none"), want)
    nothing = fs.linear_cross_entropy(x[:0], weight, target[:0])
    assert nothing.isnan() and not any(t.any() for t in torch.autograd.grad(nothing, (x, weight)))
    none, ignored = weight[:0].detach().requires_grad_(), torch.full((6,), -100)
    for reduction in ("mean", "sum", "none"):
        loss = fs.linear_cross_entropy(x, none, ignored, reduction=reduction)
        torch.testing.assert_close(
            loss, F.cross_entropy(F.linear(x, none), ignored, reduction=reduction), equal_nan=True
        )
        assert not any(t.any() for t in torch.autograd.grad(loss.sum(), (x, none)))
    # strides that no product takes as they are
    strided = torch.randn(8, 40)[:, ::5].t().requires_grad_()
    loss = fs.linear_cross_entropy(strided, weight.t().contiguous().t(), torch.arange(8))
    assert error(loss, F.cross_entropy(F.linear(strided, weight).double(), torch.arange(8)).detach()) < 1e-6


def test_probabilities_are_torchs():
    x, weight, _ = layer(3, 8, 20, torch.float32)
    target = torch.rand(3, 20).softmax(-1)
    loss = fs.linear_cross_entropy(x, weight, target, label_smoothing=0.1)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, weight), target, label_smoothing=0.1))
    with pytest.raises(RuntimeError, match="ignore_index cannot be specified"):
        fs.linear_cross_entropy(x, weight, target, ignore_index=3)


def test_half_gradients_that_float16_could_not_hold():
    # the mean's gradient in most logits is below float16's normal numbers, and a GradScaler multiplies it later
    x, weight, _ = layer(64, 4, 512, torch.float16)
    target = torch.randint(0, 32, (64,))
    scale = torch.tensor(2.0**16)
    for accumulate in ("float32", "weight"):
        for chunk_rows in (None, 32):
            loss = fs.linear_cross_entropy(x, weight, target, accumulate=accumulate, chunk_rows=chunk_rows)
            grads = torch.autograd.grad(loss, (x, weight), scale)
            exact = of_logits(lambda z: reference.cross_entropy(z, target), torch.float64, (x, weight, None), scale)
            assert error(grads[0], exact[1]) < 1e-3
            assert error(grads[1], exact[2]) < 1e-3 and error(grads[1][32:], exact[2][32:]) < 1e-3


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def products(monkeypatch) -> list[tuple[int, int, int]]:
    """(rows, inner, columns) of each matrix product, as they are made from now on."""
    made: list[tuple[int, int, int]] = []

    def counting(through):
        def counted(a, b, out, *rest):
            made.append((a.shape[0], a.shape[1], b.shape[1]))
            through(a, b, out, *rest)

        return counted

    for name in ("product", "biased_product", "add_product"):
        monkeypatch.setattr(linear, name, counting(getattr(linear, name)))
    return made


LOGITS, TO_INPUT, TO_WEIGHT = (4, 8, 20), (4, 20, 8), (20, 4, 8)


def test_what_is_frozen_costs_no_product(products):
    x, weight, bias = layer(8, 8, 20, torch.float32, bias=True)
    target = targets(8, 20)

    def made(*tensors: torch.Tensor, reduction: str = "mean") -> list[tuple[int, int, int]]:
        products.clear()
        loss = fs.linear_cross_entropy(
            *tensors[:2], target, linear_bias=tensors[2], chunk_rows=4, reduction=reduction
        ).sum()  # fmt: skip
        if loss.requires_grad:
            loss.backward()
        return products

    assert made(x, weight, bias) == [LOGITS, TO_INPUT, TO_WEIGHT] * 2
    assert made(x, weight.detach(), bias.detach()) == [LOGITS, TO_INPUT] * 2
    assert made(x.detach(), weight, bias.detach()) == [LOGITS, TO_WEIGHT] * 2
    assert made(x.detach(), weight.detach(), bias) == [LOGITS] * 2
    assert made(x.detach(), weight.detach(), bias.detach()) == [LOGITS] * 2
    with torch.no_grad():
        assert made(x, weight, bias) == [LOGITS] * 2
    assert made(x, weight, bias, reduction="none") == [LOGITS] * 2 + [LOGITS, TO_INPUT, TO_WEIGHT] * 2


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_rows_are_left_out_where_that_pays(reduction, monkeypatch, products):
    x, weight, _ = layer(400, 8, 20, torch.float32)
    target = torch.randint(0, 20, (400,))
    target[50:250] = -100

    def run() -> list[torch.Tensor]:
        loss = fs.linear_cross_entropy(x, weight, target, reduction=reduction)
        return [loss, *torch.autograd.grad(loss, (x, weight), torch.ones_like(loss))]

    whole = run()
    assert {rows for rows, inner, _ in products if inner == 8} == {400}
    products.clear()
    monkeypatch.setattr(planning, "LEAVE_OUT_OPERATIONS", 0.0)
    part = run()
    assert {rows for rows, inner, _ in products if inner == 8} == {200}
    for got, want in zip(part, whole, strict=True):
        torch.testing.assert_close(got, want)
    for got, want in zip(run(), part, strict=True):
        assert torch.equal(got, want)


def test_the_sum_is_not_held_twice():
    a, b = torch.randn(9000, 5).bfloat16(), torch.randn(5, 7).bfloat16()
    out = torch.randn(9000, 7)
    want = out.double() + a.double() @ b.double()
    linear.add_product(a, b, out)
    assert error(out, want) < 1e-6


# --- autograd ---------------------------------------------------------------------------------------------------------


def test_a_graph_that_is_kept_gives_the_same_bits():
    for dtype in (torch.bfloat16, torch.float16):
        x, weight, _ = layer(6, 8, 20, dtype)
        loss = fs.linear_cross_entropy(x, weight, targets(6, 20))
        first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        kept = [t.clone() for t in first]
        for t in first:
            t.fill_(1.0)
        for again, want in zip(torch.autograd.grad(loss, (x, weight)), kept, strict=True):
            assert torch.equal(again, want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_gradient_of_the_gradient_is_an_error(reduction):
    x, weight, _ = layer(3, 8, 20, torch.float32)
    loss = fs.linear_cross_entropy(x, weight, targets(3, 20), reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_batched_upstream_gradients_of_rows():
    """autograd.grad(is_grads_batched=True) of a loss for each row, and of log-probabilities."""
    target, x = torch.tensor([1, -100, 0, 6]), torch.randn(4, 8, requires_grad=True)
    weight, bias = torch.randn(7, 8, requires_grad=True), torch.randn(7, requires_grad=True)
    ids, given = torch.randint(0, 7, (4, 2)), (x, weight, bias)
    statistics = dict(linear_bias=bias, return_entropy=True, return_logsumexp=True, chunk_rows=3)
    losses = fs.linear_cross_entropy(x, weight, target, linear_bias=bias, reduction="none", chunk_rows=3, softcap=4.0)
    for y in (losses, *fs.linear_token_logprobs(x, weight, ids, temperature=1.5, **statistics)):
        upstream = torch.randn(3, *y.shape)
        got = torch.autograd.grad(y, given, upstream, is_grads_batched=True, retain_graph=True)
        one_by_one = [torch.autograd.grad(y, given, g, retain_graph=True) for g in upstream]
        torch.testing.assert_close(list(got), [torch.stack(each) for each in zip(*one_by_one, strict=True)])


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python")
@pytest.mark.parametrize("name", ["mean", "none", "log-probabilities"])
def test_jit_trace_records_the_formula(name):
    weight, ids = torch.randn(7, 8, requires_grad=True), torch.tensor([1, 5, 0, 6])

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if name == "log-probabilities":
            return fs.linear_token_logprobs(x, weight, ids)
        return fs.linear_cross_entropy(x, weight, ids, reduction=name)

    traced = torch.jit.trace(run, (torch.randn(4, 8), weight))
    x = torch.randn(4, 8, requires_grad=True)
    torch.testing.assert_close(traced(x, weight), run(x, weight))
    got, want = (torch.autograd.grad(f(x, weight).square().sum(), (x, weight)) for f in (traced, run))
    torch.testing.assert_close(got, want)


def test_batched_upstream_gradients():
    x, weight, _ = layer(3, 8, 20, torch.float32)
    loss = fs.linear_cross_entropy(x, weight, targets(3, 20))
    g = torch.tensor([1.0, -2.0])
    batched = torch.autograd.grad(loss, x, g, is_grads_batched=True, retain_graph=True)[0]
    once = torch.autograd.grad(loss, x)[0]
    torch.testing.assert_close(batched, torch.stack((once, -2 * once)))


def test_accumulated_gradients_tied_weights_and_checkpoints():
    torch.manual_seed(1)
    embedding = torch.nn.Embedding(20, 8)
    tokens, target = torch.randint(0, 20, (5,)), targets(5, 20)

    def run(loss, checkpointed: bool) -> torch.Tensor:
        embedding.zero_grad()
        for _ in range(2):  # gradients accumulate
            hidden = embedding(tokens).sin()
            if checkpointed:
                value = torch.utils.checkpoint.checkpoint(loss, hidden, embedding.weight, use_reentrant=False)
            else:
                value = loss(hidden, embedding.weight)
            (value / 2).backward()
        return embedding.weight.grad.clone()

    want = run(lambda h, w: F.cross_entropy(F.linear(h, w), target), False)
    for checkpointed in (False, True):
        got = run(lambda h, w: fs.linear_cross_entropy(h, w, target), checkpointed)
        torch.testing.assert_close(got, want)


def test_autocast_takes_the_weights_own_dtype_for_its_gradient():
    x, weight, bias = layer(40, 8, 20, torch.float32, bias=True)
    target = targets(40, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fs.linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_rows=16)
        own = F.cross_entropy(F.linear(x, weight, bias).float(), target)
    exact = of_logits(lambda z: reference.cross_entropy(z, target), torch.float64, (x, weight, bias), None)
    assert loss.dtype is torch.float32 and abs(loss - own) < 1e-2
    for got, torchs, want in zip(
        torch.autograd.grad(loss, (x, weight, bias)),
        torch.autograd.grad(own, (x, weight, bias)),
        exact[1:],
        strict=True,
    ):
        assert got.dtype is torch.float32
        assert error(got, want) <= 3 * error(torchs, want) + 1e-3


def test_func_transforms_take_torchs_formula():
    x, weight, _ = layer(3, 8, 20, torch.float32)
    target = targets(3, 20)
    got = torch.func.grad(lambda h: fs.linear_cross_entropy(h, weight.detach(), target))(x.detach())
    want = torch.autograd.grad(F.cross_entropy(F.linear(x, weight), target), x)[0]
    torch.testing.assert_close(got, want)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compile_takes_one_operator(reduction):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def loss(x, weight, target, **how):
        return fs.linear_cross_entropy(x * 1.5, weight, target, reduction=reduction, **how).sum() * 2

    compiled = torch.compile(loss, backend=counter, fullgraph=True, dynamic=True)
    for dtype in (torch.float32, torch.float16):
        frames = []
        for n_rows in (6, 7, 9):
            x, weight, _ = layer(n_rows, 8, 20, dtype)
            target = targets(n_rows, 20)
            got = torch.autograd.grad(compiled(x, weight, target), (x, weight))
            want = torch.autograd.grad(loss(x, weight, target), (x, weight))
            for ours, own in zip(got, want, strict=True):
                torch.testing.assert_close(ours, own, rtol=3e-3, atol=1e-5)
            frames.append(counter.frame_count)
        assert len(set(frames)) == 1  # all numbers of rows share a graph
    names = [str(node.target) for node in counter.graphs[-1].graph.nodes if node.op == "call_function"]
    assert sum("linear_cross_entropy" in name for name in names) == 1, names


def test_operators_pass_opcheck():
    x, weight, _ = layer(4, 8, 20, torch.float32)
    options = (-100, "mean", 0.0, None, 0.0, torch.float32, torch.float32, "float32", 3, [True, True, False])
    torch.library.opcheck(
        torch.ops.fused_softmax.linear_cross_entropy,
        (x, weight, None, targets(4, 20), None, None, None, *options),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_a_dispatch_mode_sees_one_operator():
    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, weight, _ = layer(4, 8, 20, torch.float32)
    target = targets(4, 20)
    want = torch.autograd.grad(fs.linear_cross_entropy(x, weight, target), (x, weight))
    seen: list[str] = []
    with Names():
        loss = fs.linear_cross_entropy(x, weight, target)
    assert "fused_softmax.linear_cross_entropy.default" in seen
    for got, own in zip(torch.autograd.grad(loss, (x, weight)), want, strict=True):
        torch.testing.assert_close(got, own)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_kernels_that_do_not_compile(reduction, monkeypatch):
    def unavailable(*args, **kwargs):
        raise KernelUnavailable("a planted fault")

    monkeypatch.setattr(launch_cross_entropy, "launch_rows", unavailable)
    check(torch.float32, reduction, dict(label_smoothing=0.1), bias=True, chunk_rows=3)
