"""token_logprobs against float64: log-probabilities, entropy and logsumexp, their gradients, and what is allocated."""

from __future__ import annotations

import pytest
import torch

import fused_softmax as fs
from fused_softmax import integrations as adapters
from fused_softmax.lab import reference
from fused_softmax.launch import row_statistics
from fused_softmax.losses import TokenStatistics

pytestmark = pytest.mark.interpreted

INF = float("inf")
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # the interpreter truncates bfloat16


def exact(x: torch.Tensor, ids: torch.Tensor, temperature) -> tuple[torch.Tensor, ...]:
    """(log-probabilities, entropy, logsumexp) of ids (..., K) in float64, with p*log(p) = 0 where p is."""
    z = x.double() / (temperature.double().unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature)
    log_p = reference.log_softmax(z)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e300)).sum(-1)
    return log_p.gather(-1, ids), entropy, reference.logsumexp(z)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n_cols", [1, 5, 33, 1000, 1001, 4097, 9000])
@pytest.mark.parametrize("n_ids", [1, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([0.5, 2.0, 1.3])], ids=["1", "0.7", "per row"])
def test_against_float64(n_cols, n_ids, temperature):
    for dtype in TOLERANCE if n_cols in (33, 1001) else (torch.bfloat16,):
        x = (torch.randn(3, n_cols) * 3).to(dtype)
        ids = torch.randint(0, n_cols, (3, n_ids))
        if n_cols > 2:
            x[0, 2] = -INF  # a masked token, which is not asked for
            ids[0] = torch.where(ids[0] == 2, 1, ids[0])
        ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
        got = fs.token_logprobs(ours, ids, temperature=temperature, return_entropy=True, return_logsumexp=True)
        want = exact(theirs, ids, temperature)
        for a, b in zip(got, want, strict=True):
            assert a.dtype is torch.float32
            torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)
        upstream = [torch.randn_like(b) for b in want]
        torch.autograd.backward(got, [g.float() for g in upstream])
        torch.autograd.backward(want, upstream)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=tolerance, atol=tolerance / 5)


@pytest.mark.parametrize("of", ["logprobs", "entropy", "logsumexp"])
def test_each_gradient_by_itself(of):
    x, ids = torch.randn(4, 50), torch.randint(0, 50, (4,))
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    got = fs.token_logprobs(ours, ids, return_entropy=True, return_logsumexp=True)
    want = dict(zip(("logprobs", "entropy", "logsumexp"), exact(theirs, ids.unsqueeze(-1), 1.0), strict=True))
    getattr(got, of).sum().backward()
    want[of].sum().backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=3e-5, atol=3e-6)


def test_shapes_and_what_is_returned():
    x = torch.randn(2, 3, 11)
    one, several = torch.randint(0, 11, (2, 3)), torch.randint(0, 11, (2, 3, 4)).int()
    log_p = torch.log_softmax(x, -1)
    for view in (x, x.clone().transpose(0, 1).contiguous().transpose(0, 1)):
        torch.testing.assert_close(fs.token_logprobs(view, one), log_p.gather(-1, one.unsqueeze(-1)).squeeze(-1))
        torch.testing.assert_close(fs.token_logprobs(view, several), log_p.gather(-1, several.long()))
    got = fs.token_logprobs(x, one, return_entropy=True)
    assert isinstance(got, TokenStatistics) and got.logsumexp is None and got.entropy.shape == (2, 3)
    got = fs.token_logprobs(x, several, return_logsumexp=True, temperature=torch.full((3,), 2.0))
    assert got.entropy is None and got.logprobs.shape == (2, 3, 4)
    torch.testing.assert_close(got.logsumexp, torch.logsumexp(x / 2, -1))
    torch.testing.assert_close(fs.token_logprobs(x[0, 0], torch.tensor(4)), log_p[0, 0, 4])
    assert fs.token_logprobs(x[:0], one[:0]).shape == (0, 3)
    double = fs.token_logprobs(x.double(), one)
    assert double.dtype is torch.float64


def test_many_ids_and_the_same_twice():
    x, ids = torch.randn(2, 300), torch.randint(0, 300, (2, 70))
    ids[0, :5] = 7
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    g = torch.randn(2, 70)
    fs.token_logprobs(ours, ids).backward(g)
    torch.log_softmax(theirs, -1).gather(-1, ids).backward(g)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=3e-5, atol=3e-5)


def test_torchs_formula_gathers_pick_by_pick():
    """A GPU adds what a gather of several picks sends back to one column in any order, so that bits would differ."""
    x, ids = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.tensor([[1, 1, 1, 2]] * 4)
    picked = fs.token_logprobs(x, ids)
    torch.testing.assert_close(picked, torch.log_softmax(x, -1).gather(-1, ids))
    nodes, gathers = [picked.grad_fn], []
    while nodes:
        node = nodes.pop()
        gathers += [node] if node.name() == "GatherBackward0" else []
        nodes += [following for following, _ in node.next_functions if following is not None]
    assert len(gathers) == 4 and all(node._saved_index.shape == (4, 1) for node in gathers)


@pytest.mark.parametrize("n_cols", [33, 1001, 4097])
def test_log_probabilities_of_large_logits(n_cols):
    # log p is a small number, though logsumexp is a large one, of which float32 has the first seven digits
    x = torch.randn(3, n_cols).round_() + torch.tensor([[1e4], [-3e5], [2e6]])
    ids = x.topk(2).indices
    log_p, entropy, _ = fs.token_logprobs(x, ids, return_entropy=True, return_logsumexp=True)
    want, want_entropy, _ = exact(x, ids, 1.0)
    torch.testing.assert_close(log_p.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)


def test_infinite_rows():
    x = torch.tensor([[1.0, INF, 0.0], [-INF] * 3, [float("nan"), 0.0, 1.0], [-INF, 0.0, 1.0]])
    got = fs.token_logprobs(x, torch.tensor([0, 0, 1, 0]), return_logsumexp=True)
    torch.testing.assert_close(got.logprobs, torch.log_softmax(x, -1)[range(4), [0, 0, 1, 0]], equal_nan=True)
    torch.testing.assert_close(got.logsumexp, torch.logsumexp(x, -1), equal_nan=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("most", [row_statistics.MOST_PARTS, 2])
@pytest.mark.parametrize(("dtype", "n"), [(torch.bfloat16, 9003), (torch.float16, 9003), (torch.float32, 98563)])
def test_rows_whose_columns_several_programs_share(monkeypatch, dtype, n, most):
    """Parts of -inf, an infinity or NaN in one part, and picks in the head, in each part and in the tail.

    most: parts that are merged at a time.
    """
    monkeypatch.setattr(row_statistics, "MOST_PARTS", most)
    x = torch.randn(6 * n + 1, dtype=dtype)[1:].view(6, n)
    x[0, : n - 13], x[1], x[2, n - 4], x[3, 5], x[4, 100:] = -INF, -INF, INF, float("nan"), -INF
    ids = torch.tensor([[n - 8, n - 1], [0, 1], [0, n - 4], [1, 2], [3, 50], [4096, n - 3]])
    assert fs.plan_for(x, op="token_logprobs").part_cols > 0 and fs.plan_for(x, op="logsumexp").part_cols > 0
    got = fs.token_logprobs(x, ids, return_entropy=True, return_logsumexp=True)
    log_p = torch.log_softmax(x.double(), -1)
    torch.testing.assert_close(got.logprobs.double(), log_p.gather(-1, ids), equal_nan=True, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.logsumexp.double(), x.double().logsumexp(-1), equal_nan=True, rtol=1e-6, atol=1e-5)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e300)).sum(-1)
    assert torch.isfinite(entropy[[0, 4, 5]]).all() and torch.isnan(got.entropy[1:4]).all()
    torch.testing.assert_close(got.entropy[[0, 4, 5]].double(), entropy[[0, 4, 5]], rtol=1e-5, atol=1e-5)
    whole = x[:, 1 : 1 + n // 8 * 8]
    aligned = fs.token_logprobs(whole.clone(), ids.clamp(max=n - 1003))
    want = torch.log_softmax(whole.double(), -1).gather(-1, ids.clamp(max=n - 1003))
    torch.testing.assert_close(aligned.double(), want, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_errors():
    x, ids = torch.randn(2, 5), torch.tensor([1, 2])
    for bad in (torch.tensor([1, 5]), torch.tensor([-1, 0])):
        with pytest.raises(IndexError):
            fs.token_logprobs(x, bad)
    for wrong in (ids[:1], ids.view(1, 2), torch.zeros(2, 1, 1, dtype=torch.long)):
        with pytest.raises(ValueError, match="token_ids"):
            fs.token_logprobs(x, wrong)
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(TypeError, match="integers"):
            fs.token_logprobs(x, ids.to(dtype))
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature must be positive"):
            fs.token_logprobs(torch.zeros(2, 4), torch.tensor([1, 2]), temperature=temperature)


def test_a_rows_bits_do_not_depend_on_the_batch():
    for n_cols in (96, 5000, 9001):
        x, ids = torch.randn(5, n_cols), torch.randint(0, n_cols, (5,))
        whole = fs.token_logprobs(x, ids, return_entropy=True, return_logsumexp=True)
        for i in range(5):
            alone = fs.token_logprobs(x[i : i + 1], ids[i : i + 1], return_entropy=True, return_logsumexp=True)
            assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, whole, strict=True))


def test_the_forward_allocates_nothing_of_the_logits_size():
    x, ids = torch.randn(2, 4096, requires_grad=True), torch.randint(0, 4096, (2,))
    sizes: list[int] = []

    def counted(allocate):
        def call(*shape, **options):
            out = allocate(*shape, **options)
            sizes.append(out.numel())
            return out

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name in ("empty", "empty_strided", "empty_like"):
            patched.setattr(torch, name, counted(getattr(torch, name)))
        fs.token_logprobs(x, ids, return_entropy=True, return_logsumexp=True)
    assert sizes and max(sizes) <= 4  # two numbers a row


def test_gradients_of_gradients_and_of_the_temperature():
    x, ids = torch.randn(2, 6, dtype=torch.float32, requires_grad=True), torch.tensor([1, 4])
    seconds = []
    for function in (fs.token_logprobs, lambda x, ids: torch.log_softmax(x, -1).gather(-1, ids[:, None])[:, 0]):
        (dx,) = torch.autograd.grad(function(x, ids).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(dx.square().sum(), x)[0])
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-6)
    temperature = torch.tensor([0.5, 2.0], requires_grad=True)
    fs.token_logprobs(x, ids, temperature=temperature).sum().backward()
    assert temperature.grad.isfinite().all() and temperature.grad.any()


def test_a_gradient_that_has_a_graph_is_as_exact_in_a_wide_row():
    """torch's own log_softmax is 0.5% off there on a CPU."""
    x, ids = torch.randint(0, 3, (1, 1_609_536)).float(), torch.tensor([[5]])
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    loss = sum(t.sum() for t in fs.token_logprobs(ours, ids, temperature=1.5, return_entropy=True)[:2])
    (dx,) = torch.autograd.grad(loss, ours, create_graph=True)
    (want,) = torch.autograd.grad(sum(t.sum() for t in exact(theirs, ids, 1.5)[:2]), theirs)
    assert (dx.double() - want).abs().sum() < 2e-5 * want.abs().sum()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_trls_selective_log_softmax(dtype):
    """TRL 0.2x: gather of log_softmax, row by row for 16-bit logits, in the logits' dtype."""
    logits = torch.randn(2, 5, 64).to(dtype)
    for index in (torch.randint(0, 64, (2, 5)), torch.randint(0, 64, (2, 5, 3))):
        got = adapters.selective_log_softmax(logits, index)
        wide = index if index.dim() == 3 else index.unsqueeze(-1)
        want = torch.log_softmax(logits, -1).gather(-1, wide).view(index.shape)
        assert got.dtype is dtype
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("n_items", [None, 9, torch.tensor(9)], ids=["own", "int", "tensor"])
def test_hugging_faces_trainer_loss(n_items):
    """As transformers' ForCausalLMLoss: labels shifted, float32, summed and divided by num_items_in_batch if given."""
    logits, labels = torch.randn(2, 6, 40), torch.randint(0, 40, (2, 6))
    labels[0, 3:] = -100
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = adapters.causal_lm_loss({"logits": ours}, labels, n_items)
    shifted = theirs[:, :-1].reshape(-1, 40)
    want = torch.nn.functional.cross_entropy(
        shifted, labels[:, 1:].reshape(-1), reduction="mean" if n_items is None else "sum"
    )
    want = want if n_items is None else want / n_items
    torch.testing.assert_close(got, want)
    got.backward()
    want.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=3e-5, atol=1e-6)


def test_what_is_on_another_device_is_refused():
    x, ids = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="same device.*token_ids is on meta"):
        fs.token_logprobs(x, ids.to("meta"))
    for shape in ((), (2,)):
        with pytest.raises(RuntimeError, match="same device.*temperature is on meta"):
            fs.token_logprobs(x, ids, temperature=torch.ones(shape, device="meta"))
    with pytest.raises(RuntimeError, match="same device.*temperature is on cpu"):
        fs.token_logprobs(x.to("meta"), ids.to("meta"), temperature=torch.ones(2))
    assert fs.token_logprobs(x.to("meta"), ids.to("meta"), temperature=torch.ones(2, device="meta")).is_meta


def test_a_returned_entropy_may_be_changed_in_place():
    logits, ids = torch.randn(3, 5, requires_grad=True), torch.tensor([1, 2, 0])
    found = fs.token_logprobs(logits, ids, return_entropy=True)
    found.entropy.mul_(0.1)
    (dx,) = torch.autograd.grad(found.entropy.sum(), logits)
    log_p = torch.log_softmax(logits, -1)
    (wanted,) = torch.autograd.grad(-0.1 * (log_p.exp() * log_p).sum(), logits)
    torch.testing.assert_close(dx, wanted)
