"""Losses, statistics and masks on a GPU: vocabulary widths, CUDA graphs, memory, bad targets, batch independence."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

import fused_softmax as fs
from fused_softmax.lab import reference

pytestmark = pytest.mark.gpu

VOCABULARIES = (100, 4096, 32000, 50257, 128256, 151936, 262144)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
OPTIONS = {
    "mean": {},
    "sum, smoothing": dict(reduction="sum", label_smoothing=0.1),
    "none, softcap, z_loss": dict(reduction="none", softcap=30.0, z_loss=1e-4),
    "weight, smoothing": dict(weight=True, label_smoothing=0.1),
}


def batch(n_cols: int, dtype: torch.dtype, n_rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n_rows, n_cols, device="cuda") * 3
    target = torch.randint(0, n_cols, (n_rows,), device="cuda")
    target[1] = -100
    return x.to(dtype), target


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", VOCABULARIES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_cross_entropy(n_cols, dtype, options):
    x, target = batch(n_cols, dtype)
    options = {**options, "weight": torch.rand(n_cols, device="cuda")} if "weight" in options else options
    for g in (1.0, 0.3):
        for inplace in (False, True):
            exact = x.double().requires_grad_()
            want = reference.cross_entropy(exact, target, **options)
            ours = x.clone().requires_grad_()
            loss = fs.cross_entropy(ours, target, inplace_backward=inplace, **options)
            torch.testing.assert_close(loss.double(), want, rtol=5e-5, atol=5e-5)
            loss.backward(torch.full_like(loss, g))
            want.backward(torch.full_like(want, g))
            largest = exact.grad.abs().max()
            error = (ours.grad.double() - exact.grad).abs().max()
            assert error <= TOLERANCE[dtype] * (2 if inplace and g != 1 else 1) * largest
            assert inplace or torch.equal(ours.detach(), x)
    with torch.no_grad():
        torch.testing.assert_close(fs.cross_entropy(x, target, **options), loss.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_rows", (65537, 131072, 300001, 1500000))
@pytest.mark.parametrize("weighted", [False, True])
def test_many_rows_are_added_up_by_programs(n_rows, weighted):
    """Independent programs add up the losses and the targets; the sums are the same in each call, and in a graph."""
    x = torch.randn(n_rows, 40, device="cuda")
    target = torch.randint(0, 40, (n_rows,), device="cuda").where(torch.rand(n_rows, device="cuda") < 0.7, -100)
    weight = torch.rand(40, device="cuda") if weighted else None
    for reduction in ("mean", "sum"):
        exact, ours = x.double().requires_grad_(), x.clone().requires_grad_()
        of_exact = None if weight is None else weight.double()
        want = F.cross_entropy(exact, target, of_exact, reduction=reduction)
        loss = fs.cross_entropy(ours, target, weight, reduction=reduction)
        torch.testing.assert_close(loss.double(), want, rtol=2e-6, atol=0.0)
        for got, of in ((loss, ours), (want, exact)):
            got.backward()
            assert of.grad is not None
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-5 * exact.grad.abs().max().item())
        with torch.no_grad():
            alone = fs.cross_entropy(x, target, weight, reduction=reduction)
            assert torch.equal(alone, fs.cross_entropy(x, target, weight, reduction=reduction))
            torch.testing.assert_close(alone, loss.detach(), rtol=1e-6, atol=0.0)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = fs.cross_entropy(x, target, weight, reduction=reduction)
            graph.replay()
            assert torch.equal(captured, alone)
    assert fs.cross_entropy(x, torch.full_like(target, -100)).isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", (130, 1000, 3000, 4096, 8192, 16384, 24576, *VOCABULARIES, 100277, 200019))
def test_every_target_is_written_last(n_cols, dtype):
    # all columns are written as if they were not the target, then the target's again, by another thread
    x = torch.randn(700, n_cols, device="cuda").to(dtype)
    if n_cols % 2:  # the last row's stride is another one, so that vectors cannot be in phase
        x = torch.randn(700, n_cols + 1, device="cuda").to(dtype)[:, :n_cols]
    target = torch.randint(0, n_cols, (700,), device="cuda")
    target[:8] = torch.tensor([0, 1, 7, 8, n_cols - 1, n_cols - 2, n_cols - 8, n_cols // 2])
    rows = torch.arange(700, device="cuda")
    for reduction in ("sum", "none"):
        ours = x.detach().clone().as_strided(x.shape, x.stride()) if x.is_contiguous() else x.detach()
        ours.requires_grad_()
        (dx,) = torch.autograd.grad(fs.cross_entropy(ours, target, reduction=reduction).sum(), ours)
        at_target = dx[rows, target].float()
        want = torch.softmax(x[rows].float(), -1)[rows, target] - 1.0
        torch.testing.assert_close(at_target, want, rtol=1e-2, atol=1e-6)
        dx[rows, target] = 0
        assert (dx >= 0).all(), "another column has the target's gradient"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", (100, 1000, 4096, 8192, 50257, 128256))
def test_numbers_at_the_end_of_the_range(n_cols, dtype):
    least, largest = torch.finfo(dtype).min, torch.finfo(dtype).max
    x = torch.randn(8, n_cols, device="cuda").to(dtype)
    x[0] = least  # as attention masks a row
    x[1] = largest
    x[2, 5:] = least
    x[3, 7] = largest
    x[4] *= 1e4
    x[5] = 6e4
    x[5, 3] = 6.1e4
    target = torch.full((8,), 7, device="cuda")
    for row, scale in ((slice(None), 1.0), (slice(None), 0.1118)):
        want = torch.softmax(x[row].double() * scale, -1)
        for y in (fs.masked_softmax(x, scale=scale), *((fs.softmax(x),) if scale == 1.0 else ())):
            # one rounding of a product near 1e5 is a hundredth, in torch as here
            torch.testing.assert_close(y.double(), want, rtol=2e-2, atol=2e-5)
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    fs.cross_entropy(ours, target, reduction="sum").backward()
    F.cross_entropy(exact, target, reduction="sum").backward()
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=2e-2, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", (100, 1000, 4096, 8192, 50257, 128256))
def test_walks_at_the_end_of_the_range(n_cols, dtype):
    # 16-bit logits take their exponentials in base 2 about a rounded number, which must lose nothing at any size
    largest = torch.finfo(dtype).max
    x = (torch.randn(12, n_cols, device="cuda") * 3).to(dtype)
    ties = torch.zeros(n_cols, dtype=torch.bool, device="cuda")
    ties[[1, 5, n_cols // 2, n_cols - 1]] = True
    for row, top in enumerate((3e3, 1.7e4, 6e4, 1.509949440e9, 2.130706432e9, 2.7e8, 1e20, -3e3, 1.0)):
        top = min(top, largest / 4)
        x[row] = torch.where(ties, top, top - abs(top) / 4)
    x[9, ::2] = -float("inf")
    x[10] = largest
    x[11] = -largest
    ids = torch.tensor([[1], [5]], device="cuda").repeat(6, 1)
    for temperature in (1.0, 0.7):
        rows = slice(0, 12 if temperature == 1.0 else 10)  # beyond the largest number there is only inf
        at = x[rows]
        got, entropy, lse = fs.token_logprobs(
            at, ids[rows], temperature=temperature, return_entropy=True, return_logsumexp=True
        )
        # the product with 1/temperature is rounded to float32, in torch as here
        z = (at.float() * (1.0 / temperature)).double()
        log_p = torch.log_softmax(z, -1)
        torch.testing.assert_close(lse.double(), z.logsumexp(-1), rtol=3e-7, atol=3e-6)
        torch.testing.assert_close(
            got.double(), log_p.gather(-1, ids[rows])[:, 0].view(got.shape), rtol=2e-5, atol=2e-5
        )
        want = -torch.where(log_p == -float("inf"), 0.0, log_p.exp() * log_p).sum(-1)
        torch.testing.assert_close(entropy.double(), want, rtol=2e-5, atol=2e-5)
    loss = fs.cross_entropy(x, ids[:, 0], reduction="none")
    want = F.cross_entropy(x.double(), ids[:, 0], reduction="none")
    torch.testing.assert_close(loss.double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", VOCABULARIES)
def test_token_logprobs(n_cols, dtype):
    x, _ = batch(n_cols, dtype)
    ids = torch.randint(0, n_cols, (5, 3), device="cuda")
    temperature = torch.linspace(0.5, 2, 5, device="cuda")
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    got = fs.token_logprobs(ours, ids, temperature=temperature, return_entropy=True, return_logsumexp=True)
    log_p = torch.log_softmax(exact / temperature.double()[:, None], -1)
    want = (
        log_p.gather(-1, ids),
        -(log_p.exp() * log_p).sum(-1),
        (exact / temperature.double()[:, None]).logsumexp(-1),
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=5e-5, atol=5e-5)
    sum(a.sum() for a in got).backward()
    sum(b.sum() for b in want).backward()
    error = (ours.grad.double() - exact.grad).abs().max()
    assert error <= TOLERANCE[dtype] * exact.grad.abs().max()


def test_ids_outside_are_nan_and_nothing_is_read():
    x = torch.randn(2, 1000, device="cuda", requires_grad=True)
    got = fs.token_logprobs(x, torch.tensor([[1, 1000], [-1, 1 << 40]], device="cuda"))
    assert got.isnan().tolist() == [[False, True], [True, True]]
    got[0, 0].backward()
    assert x.grad.isfinite().all()


def test_memory_of_token_logprobs():
    x = torch.randn(4096, 128256, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, 128256, (4096,), device="cuda")
    fs.token_logprobs(x[:2], ids[:2], return_entropy=True, return_logsumexp=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = fs.token_logprobs(x, ids, return_entropy=True, return_logsumexp=True)
    # three numbers of each row, and of each part of at most 4,096 columns
    parts = 4096 * -(-128256 // 4096) * 3 * 4
    results_and_rounding = sum(t.nbytes for t in results) + 4 * 512
    assert torch.cuda.max_memory_allocated() - before <= parts + results_and_rounding


@pytest.mark.parametrize("n_cols", [4096, 50257, 128256])
def test_a_rows_bits_do_not_depend_on_the_batch(n_cols):
    x, target = batch(n_cols, torch.bfloat16, 64)
    ids = target.clamp(0)
    whole = fs.token_logprobs(x, ids, return_entropy=True, return_logsumexp=True)
    losses = fs.cross_entropy(x, target, reduction="none")
    for n in (1, 8, 33):
        part = fs.token_logprobs(x[:n], ids[:n], return_entropy=True, return_logsumexp=True)
        assert all(torch.equal(a, b[:n]) for a, b in zip(part, whole, strict=True))
        assert torch.equal(fs.cross_entropy(x[:n], target[:n], reduction="none"), losses[:n])


def test_cuda_graph_of_a_training_step():
    x, target = batch(32000, torch.bfloat16, 64)
    x.requires_grad_()

    def step() -> torch.Tensor:
        x.grad = None
        loss = fs.cross_entropy(x, target, z_loss=1e-4) * 0.5
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        target.random_(0, 32000)
    graph.replay()
    exact = x.detach().double().requires_grad_()
    want = reference.cross_entropy(exact, target, z_loss=1e-4) * 0.5
    want.backward()
    torch.testing.assert_close(loss.double(), want, rtol=5e-5, atol=5e-5)
    assert (x.grad.double() - exact.grad).abs().max() <= 8e-3 * exact.grad.abs().max()


def test_no_host_synchronisation():
    x, target = batch(4096, torch.bfloat16)
    x.requires_grad_()
    fs.cross_entropy(x, target).backward()
    fs.token_logprobs(x, target.clamp(0), return_entropy=True).logprobs.sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fs.cross_entropy(x, target).backward()
        fs.token_logprobs(x, target.clamp(0), return_entropy=True).logprobs.sum().backward()
        fs.masked_softmax(x, target[:, None] > 5).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("bad", [5000, -1, 1 << 40])
def test_a_target_outside_is_a_device_assertion(bad, grad):
    """In a process of its own: an assertion ends the CUDA context."""
    script = textwrap.dedent(f"""
        import torch, fused_softmax as fs
        x = torch.randn(4, 4096, device="cuda", requires_grad={grad})
        fs.cross_entropy(x, torch.tensor([1, {bad}, 2, 3], device="cuda"))
        torch.cuda.synchronize()
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "device-side assert" in done.stderr and "target out of bounds" in done.stderr


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", [64, 1000, 1023, 4096, 8192, 33333, 131072])
@pytest.mark.parametrize("causal", [False, True])
def test_masked_softmax(n_cols, dtype, causal):
    x = (torch.randn(2, 3, 4, n_cols, device="cuda") * 2).to(dtype)
    keep = torch.rand(2, 1, 1, n_cols, device="cuda") > 0.3
    added = torch.randn(1, 1, 4, n_cols, device="cuda", dtype=dtype)
    hidden = torch.arange(n_cols, device="cuda") > torch.arange(4, device="cuda")[:, None]
    for mask in (None, keep, added):
        ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        z = exact * 0.5
        if mask is not None:
            z = z.masked_fill(~mask, -float("inf")) if mask is keep else z + mask.double()
        z = z.masked_fill(hidden, -float("inf")) if causal else z
        unseen = (z == -float("inf")).all(-1, keepdim=True)
        want = torch.softmax(z.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0)
        y = fs.masked_softmax(ours, mask, scale=0.5, causal=causal, fully_masked="zero")
        torch.testing.assert_close(y.double(), want, rtol=TOLERANCE[dtype], atol=1e-6)
        dy = torch.randn_like(x)
        y.backward(dy)
        want.backward(dy.double())
        error = (ours.grad.double() - exact.grad).abs().max()
        assert error <= 4 * TOLERANCE[dtype] * exact.grad.abs().max() + 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", [1000, 1024, 2047, 2048, 3000, 4096, 6001, 8192])
def test_causal_scores(n_cols, dtype):
    # square, so that rows see from one column to all
    for scale, spread in ((0.1118, 3.0), (3.0, 30.0)):
        x = (torch.randn(2, n_cols, n_cols, device="cuda") * spread).to(dtype)
        hidden = torch.ones(n_cols, n_cols, device="cuda", dtype=torch.bool).triu(1)
        ours = x.clone().requires_grad_()
        y = fs.masked_softmax(ours, scale=scale, causal=True)
        dy = torch.randn_like(x)
        (dx,) = torch.autograd.grad(y, ours, dy)
        for batch in range(2):
            want = torch.softmax((x[batch].double() * scale).masked_fill(hidden, -float("inf")), -1)
            torch.testing.assert_close(y[batch].double(), want, rtol=max(2 * TOLERANCE[dtype], 1e-4), atol=1e-6)
            assert not y[batch][hidden].any() and not dx[batch][hidden].any()
            # judged on the y that was saved, as its rounding is not the gradient's error
            saved = y[batch].detach().double()
            exact = scale * saved * (dy[batch].double() - (saved * dy[batch].double()).sum(-1, keepdim=True))
            torch.testing.assert_close(
                dx[batch].double(), exact, rtol=TOLERANCE[dtype], atol=1e-5 * exact.abs().max().item()
            )


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("n_cols", [1000, 2048, 3001, 4096, 6001, 8192])
@pytest.mark.parametrize("scale", [1e-3, 0.1118, 2.0, 10.0, 1e3])
def test_scaled_scores_at_the_end_of_the_range(n_cols, dtype, scale):
    # exp(scale*(x - m)) about a rounded number must neither overflow nor vanish; judged where causal rows see most
    largest = torch.finfo(dtype).max
    x = torch.randn(n_cols, n_cols, device="cuda").to(dtype)
    last = x[-12:]
    last[0] = 0.6 * largest
    last[1] = -0.6 * largest
    last[2] = 1.0
    last[2, n_cols // 2] = 0.9 * largest
    for row, near in enumerate((0.9, 1.1, -0.9, -1.1), start=3):  # on both sides of where the base changes
        top = max(min(near * 2.0**28 / scale, 0.9 * largest), -0.9 * largest)
        last[row] = top - abs(top) / 4
        last[row, [1, 7, n_cols // 3]] = top
    last[7, ::2] = -float("inf")
    last[8] = -float("inf")
    last[9, 5] = float("inf")
    last[10, 5] = float("nan")
    last[11] = largest
    scale32 = torch.tensor(scale, dtype=torch.float32).item()
    for causal in (True, False):
        z = last.double() * scale32
        if causal:
            queries = torch.arange(n_cols - 12, n_cols, device="cuda")[:, None]
            z = z.masked_fill(torch.arange(n_cols, device="cuda") > queries, -float("inf"))
        want = torch.softmax(z, -1)
        for filled in ("nan", "zero"):
            y = fs.masked_softmax(x, scale=scale, causal=causal, fully_masked=filled)[-12:]
            assert y[[9, 10]].isnan().all()
            assert not y[8].any() if filled == "zero" else y[8].isnan().all()
            for row in (0, 1, 2, 3, 4, 5, 6, 7, 11):
                finite = last[row].abs().where(last[row].isfinite(), 0.0).double().max() * scale32
                if finite > torch.finfo(torch.float32).max:
                    # scale*x is infinite: torch's is NaN, and a row of nothing but -inf is one that sees nothing
                    nothing = y[row].isnan().all() or (row == 1 and filled == "zero" and not y[row].any())
                    if nothing:
                        continue
                torch.testing.assert_close(y[row].double(), want[row], rtol=2 * TOLERANCE[dtype], atol=1e-6)


def test_rows_past_two_to_the_31():
    n_rows, n_cols = 16800, 128256
    if torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("needs 10 GB")
    x = torch.zeros(n_rows, n_cols, device="cuda", dtype=torch.bfloat16)
    x[-1].normal_()
    target = torch.full((n_rows,), -100, device="cuda")
    target[-1] = 7
    want = F.cross_entropy(x[-1:].double(), target[-1:])
    torch.testing.assert_close(fs.cross_entropy(x, target).double(), want, rtol=1e-4, atol=1e-4)
    x.requires_grad_()
    fs.cross_entropy(x, target, inplace_backward=True).backward()
    assert not x.grad[:-1].any() and x.grad[-1, 7] < 0


@pytest.mark.parametrize("n_rows", [2048, 2049, 9000, 70000])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_of_many_rows(n_rows, weighted):
    x, target = batch(7, torch.float32, n_rows)
    weight = torch.rand(7, device="cuda") if weighted else None
    want = reference.cross_entropy(x.double(), target, weight)
    leaf = x.clone().requires_grad_()
    loss = fs.cross_entropy(leaf, target, weight)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fs.cross_entropy(x, target, weight).double(), want, rtol=1e-5, atol=1e-6)
    (dx,) = torch.autograd.grad(loss, leaf)
    exact = x.double().requires_grad_()
    (dx_exact,) = torch.autograd.grad(reference.cross_entropy(exact, target, weight), exact)
    torch.testing.assert_close(dx.double(), dx_exact, rtol=1e-4, atol=1e-5 / n_rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", (26, 73, *VOCABULARIES))
@pytest.mark.parametrize("g", [1.0, 0.25])
def test_backwards_of_one_graph_have_equal_bits(n_cols, dtype, g):
    x, target = batch(n_cols, dtype)
    x.requires_grad_()
    loss = fs.cross_entropy(x, target, label_smoothing=0.1)
    upstream = torch.full_like(loss, g)
    first, second, third = (torch.autograd.grad(loss, x, upstream, retain_graph=True)[0] for _ in range(3))
    assert torch.equal(first, second) and torch.equal(second, third)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", (26, 73, *VOCABULARIES))
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 30.0, "z_loss": 1e-3}, {"reduction": "sum"}, {"label_smoothing": 0.1}], ids=str
)
def test_the_bits_of_a_gradient_do_not_depend_on_the_last_upstream_gradient(n_cols, options, dtype):
    x, target = batch(n_cols, dtype)
    x.requires_grad_()
    made, expected, last = {}, [], None  # the test before may have reported any number
    for g in (1.0, 0.3, 0.3, -0.1, -0.1, 0.3, 1.0, 1.0):
        loss = fs.cross_entropy(x, target, **options)
        written = loss.grad_fn.saved_tensors[-1]
        if written is None:
            pytest.skip("a row does not fit on chip, so backward writes its gradient")
        written = written.clone()
        first, second = (torch.autograd.grad(loss, x, torch.full_like(loss, g), retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second) and torch.equal(first, made.setdefault(g, first))
        torch.cuda.synchronize()  # then the host has seen what was reported
        expected.append(last is None or torch.equal(first, written) == (g == last))
        last = 1.0 if "label_smoothing" in options else g
    assert all(expected)
