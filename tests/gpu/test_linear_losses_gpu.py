"""The linear losses on a GPU: accuracy of each dtype, chunks, CUDA graphs, GradScaler, autocast, torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from linear import assert_as_torch, error, layer, of_logits

import fused_softmax as fs
from fused_softmax.lab import reference, torch_ways

pytestmark = pytest.mark.gpu

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = {"odd": (300, 256, 50257), "even": (700, 256, 32000), "narrow": (5000, 64, 1000), "wide": (64, 128, 262144)}
OPTIONS = {
    "mean": {},
    "smoothed sum": dict(reduction="sum", label_smoothing=0.1, z_loss=1e-3),
    "none": dict(reduction="none"),
    "capped none": dict(reduction="none", softcap=30.0),
    "weighted": dict(weight=True),
    "weighted, smoothed": dict(weight=True, label_smoothing=0.1),
}


def targets(n_rows: int, n_cols: int) -> torch.Tensor:
    target = torch.randint(0, n_cols, (n_rows,), device="cuda")
    target[::7] = -100
    return target


def check(dtype: torch.dtype, shape: tuple[int, int, int], options: dict, bias: bool = False, **how) -> None:
    n_rows, hidden, n_cols = shape
    tensors, target = layer(n_rows, hidden, n_cols, dtype, "cuda", bias), targets(n_rows, n_cols)
    options = dict(options)
    if options.get("weight"):
        options["weight"] = torch.rand(n_cols, device="cuda") + 0.5
    by_row = options.get("reduction") == "none"
    g = torch.rand(n_rows, device="cuda") + 0.5 if by_row else torch.tensor(1.0, device="cuda")
    x, weight, linear_bias = tensors
    loss = fs.linear_cross_entropy(x, weight, target, linear_bias=linear_bias, **options, **how)
    grads = torch.autograd.grad(loss, [t for t in tensors if t is not None], g)
    exact = of_logits(lambda z: reference.cross_entropy(z, target, **options), torch.float64, tensors, g)
    wide = how.get("logits_dtype") or dtype
    own = of_logits(lambda z: torch_ways.cross_entropy(z, target, **options), wide, tensors, g)
    own = own[:1] + [t.to(dtype) for t in own[1:]]
    assert_as_torch([loss, *grads], own, exact, dtype)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_accuracy(shape, options):
    check(BFLOAT16, shape, options)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
def test_chunks_bias_and_sums(dtype):
    for how in ({}, dict(accumulate="weight"), dict(logits_dtype=FLOAT32)):
        check(dtype, (600, 256, 50257), {}, **how)
        check(dtype, (600, 256, 1000), dict(reduction="sum"), bias=True, chunk_rows=256, **how)
        check(dtype, (600, 128, 4097), dict(reduction="none"), bias=True, chunk_rows=200, **how)


def test_rows_are_left_out_and_graphs_capture_all():
    x, weight, _ = layer(8192, 1024, 50257, BFLOAT16, "cuda")
    target = torch.randint(0, 50257, (8192,), device="cuda")
    target[1000:6000] = -100

    def run() -> list[torch.Tensor]:
        loss = fs.linear_cross_entropy(x, weight, target)
        return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]

    eager = run()
    assert not eager[1][1000:6000].any()
    for got, want in zip(run(), eager, strict=True):
        assert torch.equal(got, want)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(2):
        graph.replay()
    for got, want in zip(captured, eager, strict=True):
        assert error(got, want) < 5e-3


def test_the_sum_is_held_once():
    x, weight, _ = layer(4096, 2048, 32000, BFLOAT16, "cuda")
    target = torch.randint(0, 32000, (4096,), device="cuda")
    fs.linear_cross_entropy(x, weight, target, chunk_rows=1024).backward()
    x.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fs.linear_cross_entropy(x, weight, target, chunk_rows=1024).backward()
    above = torch.cuda.max_memory_allocated() - before
    total, logits, of_input = weight.numel() * 4, 1024 * 32000 * 2, x.numel() * 2
    assert above < total + max(logits, weight.numel() * 2) + of_input + 2**24


def test_grad_scaler_and_autocast():
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(5000, 128, device="cuda")
    tokens = torch.randint(0, 5000, (512,), device="cuda")
    target = torch.randint(0, 5000, (512,), device="cuda")
    for dtype in (FLOAT16, BFLOAT16):
        found = []
        for loss_of in (fs.linear_cross_entropy, lambda h, w, t: F.cross_entropy(F.linear(h, w), t)):
            embedding.zero_grad()
            scaler = torch.amp.GradScaler("cuda", enabled=dtype is FLOAT16)
            optimizer = torch.optim.SGD(embedding.parameters(), lr=0.0)
            with torch.autocast("cuda", dtype=dtype):
                loss = loss_of(embedding(tokens), embedding.weight, target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            found.append((loss.detach().float(), embedding.weight.grad.clone()))
        (loss, grad), (own, own_grad) = found
        assert loss.dtype is FLOAT32 and grad.dtype is FLOAT32
        assert error(loss, own) < 1e-3 and error(grad, own_grad) < 2e-2


def test_compile_and_checkpoint():
    torch._dynamo.reset()
    x, weight, _ = layer(512, 256, 5003, BFLOAT16, "cuda")
    target = targets(512, 5003)

    def loss_of(x, weight):
        return fs.linear_cross_entropy(x * 2, weight, target)

    want = torch.autograd.grad(loss_of(x, weight), (x, weight))
    for way in (
        torch.compile(loss_of, fullgraph=True),
        lambda *a: torch.utils.checkpoint.checkpoint(loss_of, *a, use_reentrant=False),
    ):
        for got, own in zip(torch.autograd.grad(way(x, weight), (x, weight)), want, strict=True):
            assert error(got, own) < 1e-2


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
def test_token_logprobs(dtype):
    for n_rows, hidden, n_cols, picks in ((300, 256, 50257, 1), (500, 64, 1000, 3)):
        tensors = layer(n_rows, hidden, n_cols, dtype, "cuda")
        x, weight, _ = tensors
        ids = torch.randint(0, n_cols, (n_rows, picks), device="cuda")
        given = dict(return_entropy=True, return_logsumexp=True, temperature=0.7)
        found = fs.linear_token_logprobs(x, weight, ids, chunk_rows=128, **given)
        upstream = [torch.randn(t.shape, device="cuda") for t in found]

        def mixed(way, ids=ids, upstream=upstream, given=given):
            return lambda z: sum((t * g.to(t.dtype)).sum() for t, g in zip(way(z, ids, **given), upstream, strict=True))

        total = sum((t * g).sum() for t, g in zip(found, upstream, strict=True))
        grads = torch.autograd.grad(total, (x, weight))
        exact = of_logits(mixed(reference.token_logprobs), torch.float64, tensors, None)
        own = of_logits(mixed(torch_ways.token_logprobs), dtype, tensors, None)
        assert_as_torch(list(grads), own[1:], exact[1:], dtype)
