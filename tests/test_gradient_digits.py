"""Gradients keep their digits however large the logits are, and are NaN or infinite exactly where torch's are.

Each is held to the rule of `exactness` against float64, with torch's own result in float32 beside it.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from exactness import assert_as_exact

import fused_softmax as fs
from fused_softmax.lab import torch_ways

pytestmark = pytest.mark.interpreted

INF, NAN = float("inf"), float("nan")
SIZES = [1.0, 1e3, 1e6, 1e30]
TARGET = torch.tensor([3, 0, 5])


def logits(size: float, n_cols: int = 37) -> torch.Tensor:
    """Rows about `size`, whose largest logits lie within a few units in the last place of each other."""
    x = torch.randn(3, n_cols)
    x = size + x * max(1.0, size * 2.0**-22)
    x[:, 7] = x[:, 9] = x.amax(1)
    return x


def gradient(loss_of, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    loss_of(x).backward()
    return x.grad


def assert_gradient(ours, theirs, x: torch.Tensor) -> None:
    assert_as_exact(gradient(ours, x), gradient(theirs, x), gradient(theirs, x.double()))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"weight": torch.arange(37) / 37}], ids=str)
def test_cross_entropy_in_two_kernels(size, options):
    by_row = torch.tensor([0.5, -2.0, 1.0])

    def theirs(x):
        weight = {"weight": options["weight"].to(x.dtype)} if "weight" in options else options
        return (F.cross_entropy(x, TARGET, reduction="none", **weight) * by_row).sum()

    def upstream(x):
        return F.cross_entropy(x, TARGET) * 0.3

    assert_gradient(
        lambda x: (fs.cross_entropy(x, TARGET, reduction="none", **options) * by_row).sum(), theirs, logits(size)
    )
    assert_gradient(lambda x: fs.cross_entropy(x, TARGET) * 0.3, upstream, logits(size))


@pytest.mark.parametrize("size", SIZES)
def test_log_probabilities(size):
    by_row = torch.tensor([0.5, -2.0, 1.0])

    def theirs(x):
        return (torch.log_softmax(x, -1).gather(-1, TARGET[:, None])[:, 0] * by_row).sum()

    assert_gradient(lambda x: (fs.token_logprobs(x, TARGET) * by_row).sum(), theirs, logits(size))


@pytest.mark.parametrize("size", SIZES[:3])
def test_entropy(size):
    def theirs(x):
        log_p = torch.log_softmax(x, -1)
        return -(log_p.exp() * log_p).sum()

    ours = lambda x: fs.token_logprobs(x, TARGET, return_entropy=True).entropy.sum()  # noqa: E731
    assert_gradient(ours, theirs, logits(size))


def test_ties_at_the_end_of_the_range():
    x = torch.full((3, 8), 3e38)
    x[:, 5:] = -3e38
    assert_gradient(
        lambda x: fs.token_logprobs(x, TARGET).sum() * 0.7,
        lambda x: -F.cross_entropy(x, TARGET, reduction="sum") * 0.7,
        x[:2].new_tensor(x.tolist()),
    )


@pytest.mark.parametrize("name", ["cross_entropy", "token_logprobs"])
@pytest.mark.parametrize("size", SIZES[:3])
def test_the_operators_of_a_graph(name, size):
    x, by_row = logits(size), torch.tensor([0.5, -2.0, 1.0])

    def ours(x):
        if name == "cross_entropy":
            op = torch.ops.fused_softmax.cross_entropy
            return (op(x, TARGET, None, None, -100, "none", 0.0, None, 0.0, None)[0] * by_row).sum()
        return -(torch.ops.fused_softmax.token_logprobs(x, TARGET[:, None], None, 1.0, False)[0][:, 0] * by_row).sum()

    assert_gradient(ours, lambda x: (F.cross_entropy(x, TARGET, reduction="none") * by_row).sum(), x)


# --- infinities, as torch ---------------------------------------------------------------------------------------------

ODD = {
    "+inf": [1.0, INF, 0.0, -INF, 2.0, 0.5],
    "two +inf": [1.0, INF, INF, 3.0, 2.0, 0.5],
    "all -inf": [-INF] * 6,
    "NaN": [1.0, NAN, 0.0, -INF, 2.0, 0.5],
    "some -inf": [1.0, -INF, 0.0, -INF, 2.0, 0.5],
}


@pytest.mark.parametrize("row", ODD)
@pytest.mark.parametrize("what", ["logprobs", "entropy", "logsumexp", "cross_entropy"])
def test_infinities(row, what):
    x = torch.tensor([ODD[row], [1.0, 2.0, 0.0, 1.0, 0.0, -1.0]])
    target = torch.tensor([4, 1])

    def ours(x):
        if what == "cross_entropy":
            return fs.cross_entropy(x, target, reduction="none").sum() * 0.5
        return getattr(fs.token_logprobs(x, target, return_entropy=True, return_logsumexp=True), what).sum()

    def theirs(x):
        if what == "cross_entropy":
            return F.cross_entropy(x, target, reduction="none").sum() * 0.5
        if what == "logsumexp":
            return torch.logsumexp(x, -1).sum()
        log_p = torch.log_softmax(x, -1)
        if what == "logprobs":
            return log_p.gather(-1, target[:, None]).sum()
        return -(log_p.exp() * log_p.clamp(min=-3e38)).sum()

    got, want = gradient(ours, x), gradient(theirs, x)
    torch.testing.assert_close(got, want, equal_nan=True)
    if what == "logsumexp":
        torch.testing.assert_close(gradient(lambda x: fs.logsumexp(x, -1).sum(), x), want, equal_nan=True)


@pytest.mark.parametrize(
    "values", [[3e38] * 6, [3e38, 3e38, 0, 0, 0, 0], [3e38, -3e38, 0, 0, 3e38, 1], [-3e38] * 6], ids=str
)
@pytest.mark.parametrize("target", [0, 3])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_smoothed_losses_at_the_end_of_the_range(values, target, needs_grad):
    x, t = torch.tensor([values, [1.0, 2.0, 3.0, 0.0, -1.0, 0.0]], requires_grad=needs_grad), torch.tensor([target, 1])
    for options in ({}, {"weight": torch.rand(6)}):
        for reduction in ("none", "sum"):
            got = fs.cross_entropy(x, t, label_smoothing=0.1, reduction=reduction, **options)
            want = F.cross_entropy(x, t, label_smoothing=0.1, reduction=reduction, **options)
            torch.testing.assert_close(got, want)


def test_a_smoothed_loss_keeps_its_digits():
    x = logits(1e6, 200)
    got = fs.cross_entropy(x, TARGET, label_smoothing=0.5, reduction="none")
    own = F.cross_entropy(x, TARGET, label_smoothing=0.5, reduction="none")
    want = F.cross_entropy(x.double(), TARGET, label_smoothing=0.5, reduction="none")
    assert_as_exact(got, own, want)


# rows of one program, of several warps, and of several programs; images of one program, of a cluster, and in two reads
SMOOTHED_SHAPES = [(3, 7), (3, 40), (3, 9001), (2, 50_257), (3, 19, 5, 7), (3, 150, 3, 8), (2, 600, 260), (3, 7000, 2)]
smoothed_shapes = pytest.mark.parametrize("shape", SMOOTHED_SHAPES, ids=str)
graded_or_not = pytest.mark.parametrize("graded", [False, True], ids=["loss", "gradient too"])


def assert_smoothed(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    graded: bool,
    reduction: str = "none",
    eps: float = torch.finfo(torch.float32).eps,
) -> None:
    """A smoothed loss, and its gradient where `graded`, are as exact as torch's for the same logits in float32."""
    leaves = [t.detach().clone().requires_grad_(graded) for t in (x, x.float(), x.double())]
    weights = [None] * 3 if weight is None else [weight, weight.float(), weight.double()]
    losses = [
        loss(leaf, target, w, label_smoothing=0.1, reduction=reduction)
        for loss, leaf, w in zip((fs.cross_entropy, F.cross_entropy, F.cross_entropy), leaves, weights, strict=True)
    ]
    assert_as_exact(*(loss.detach() for loss in losses), eps=eps)
    if graded:
        for loss in losses:
            loss.sum().backward()
        got, own, exact = (leaf.grad for leaf in leaves)
        assert_as_exact(got, own.to(x.dtype), exact, eps=torch.finfo(x.dtype).eps)


@pytest.mark.sampled(3)
@graded_or_not
@pytest.mark.parametrize("reduction", ["none", "mean"])
@smoothed_shapes
def test_classes_without_weight_may_have_any_logit(shape, reduction, graded):
    """A sum of w*(z - r) with such a logit as its reference r has no digit left: it was wrong by up to 1e30."""
    n_cols = shape[1]
    hidden = [0, n_cols // 2 + 1]
    x, weight = torch.randn(shape), torch.rand(n_cols) + 0.1
    x[:, hidden], weight[hidden] = torch.finfo(x.dtype).min, 0.0
    target = torch.randint(0, n_cols, (shape[0], *shape[2:]))
    assert_smoothed(x, target, weight, graded, reduction=reduction)


@pytest.mark.sampled(3)
@graded_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@smoothed_shapes
def test_only_few_classes_may_be_visible(shape, dtype, graded):
    """None of the first, the middle and the last, which a program would try for its reference."""
    n_cols = shape[1]
    x, weight = torch.full(shape, torch.finfo(dtype).min, dtype=dtype), torch.zeros(n_cols)
    visible = torch.tensor([1, n_cols // 3, n_cols - 2])
    x[:, visible], weight[visible] = torch.randn(shape[0], 3, *shape[2:]).to(dtype), torch.tensor([1.0, 0.5, 0.7])
    target = visible[torch.randint(0, 3, (shape[0], *shape[2:]))]
    assert_smoothed(x, target, weight.to(dtype), graded)


@graded_or_not
@smoothed_shapes
def test_the_first_and_the_last_class_may_be_hidden(shape, graded):
    """Without weights, the first logit as the reference was 4% off in rows of 128,256 float32 columns."""
    x = torch.randn(shape)
    x[:, [0, -1]] = -1e9
    target = torch.randint(1, shape[1] - 1, (shape[0], *shape[2:]))
    # a sum that holds -1e9 loses the digits of what is added to it
    assert_smoothed(x, target, None, graded, eps=2**-21)


@pytest.mark.parametrize("n_cols", [1000, 50_257])
def test_only_the_target_may_be_left_as_a_reference(n_cols):
    """A loss of rows without a gradient takes the target's logit too: the three that a program tries are hidden."""
    x = torch.randn(3, n_cols)
    x[:, [0, (n_cols - 1) // 2, -1]] = -1e9
    assert_smoothed(x, torch.tensor([1, 2, n_cols - 2]), None, False, eps=2**-21)


def test_a_smoothed_gradient_over_the_logits_where_classes_are_hidden():
    """The values; a program that overwrites another's logit too early shows on a GPU only."""
    x, target = torch.randn(2, 600, 260), torch.randint(1, 599, (2, 260))
    x[:, [0, 300]] = -1e9
    exact = x.double().requires_grad_()
    F.cross_entropy(exact, target, label_smoothing=0.1).backward()
    leaf = x.clone().requires_grad_()
    fs.cross_entropy(leaf * 1.0, target, label_smoothing=0.1, inplace_backward=True).backward()
    torch.testing.assert_close(leaf.grad, exact.grad.float())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_of_weights_that_are_all_zero(smoothing):
    x, weight = torch.randn(3, 8), torch.rand(8)
    weight[TARGET] = 0.0
    theirs = lambda x: F.cross_entropy(x, TARGET, weight, label_smoothing=smoothing)  # noqa: E731
    ours = lambda x: fs.cross_entropy(x, TARGET, weight, label_smoothing=smoothing)  # noqa: E731
    assert ours(x).isnan() and theirs(x).isnan()
    assert fs.cross_entropy(x, TARGET, weight, label_smoothing=smoothing, z_loss=1e-4).isnan()
    assert torch.equal(gradient(ours, x).isfinite(), gradient(theirs, x).isfinite())


@pytest.mark.parametrize(
    "options", [{"z_loss": 1.0}, {"label_smoothing": 0.5}, {"softcap": 0.1, "z_loss": 0.01}], ids=str
)
@pytest.mark.parametrize("upstream", [1.0, 0.0])
def test_a_mean_of_weights_that_are_all_zero_has_no_second_gradient(options, upstream):
    x, weight = torch.randn(3, 8), torch.rand(8)
    weight[TARGET] = 0.0
    results = []
    for function in (fs.cross_entropy, torch_ways.cross_entropy):
        leaf, g = x.clone().requires_grad_(), torch.tensor(upstream, requires_grad=True)
        (dx,) = torch.autograd.grad(function(leaf, TARGET, weight=weight, **options), leaf, g, create_graph=True)
        results.append((dx, *torch.autograd.grad(dx, (leaf, g), torch.randn(dx.shape))))
    for ours, theirs in zip(*results, strict=True):
        assert ours.isnan().all() and theirs.isnan().all()


def test_a_mean_of_one_row_that_does_not_count_is_nan_on_every_device(monkeypatch):
    """Of logits of one dimension torch's is 0 on a GPU: it is asked for a batch of one."""
    real, seen = F.cross_entropy, []
    monkeypatch.setattr(
        F, "cross_entropy", lambda z, *rest, **options: (seen.append(z.dim()), real(z, *rest, **options))[1]
    )
    x, ignored = torch.randn(5, dtype=torch.float64), torch.tensor(-100)
    for z_loss in (0.0, 0.1):
        assert fs.cross_entropy(x, ignored, z_loss=z_loss).isnan()
        assert torch_ways.cross_entropy(x, ignored, z_loss=z_loss).isnan()
        losses = fs.cross_entropy(x, ignored, reduction="none", z_loss=z_loss)
        assert losses.shape == () and losses == 0.0
    assert seen[0] == 2 and seen[1] == 2


# --- softcap and scales of every size ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [1e-30, 0.5, 5.0, 30.0, 1e4, 1e6, 1e7, 1e20, 3e38, 1e39, 1e300])
def test_softcap_keeps_its_digits(cap):
    x = torch.randn(3, 200) * 4
    x[0, :4] = torch.tensor([0.0, -INF, 80.0, -80.0])

    def exact(x):
        hidden = x == -INF
        z = cap * torch.tanh(x.masked_fill(hidden, 0.0) / cap)
        return F.cross_entropy(z.masked_fill(hidden, -INF), TARGET, reduction="none")

    for reduction in ("none", "mean"):
        got = fs.cross_entropy(x, TARGET, softcap=cap, reduction=reduction)
        want = exact(x.double())
        want = want.mean() if reduction == "mean" else want
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    got = gradient(lambda x: fs.cross_entropy(x, TARGET, softcap=cap, reduction="none").sum(), x)
    want = gradient(lambda x: exact(x).sum(), x.double()).nan_to_num()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)


def test_the_slope_of_a_softcap_keeps_its_digits_near_the_cap():
    x = torch.tensor([[4.0, 7.0, 8.0, 8.0, -8.0, 0.0]])
    got = gradient(lambda x: fs.cross_entropy(x, torch.tensor([0]), softcap=1.0), x)
    want = gradient(lambda x: F.cross_entropy(torch.tanh(x), torch.tensor([0])), x.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("n_cols", [4, 5, 6, 8, 1000, 9000])
@pytest.mark.parametrize("temperature", [INF, 1e300, torch.tensor([INF, 1.0]), torch.tensor([1e39, 1.0])], ids=str)
def test_an_infinite_temperature(n_cols, temperature):
    x = torch.randn(2, n_cols) * 100
    x.requires_grad_()
    got = fs.token_logprobs(
        x, torch.tensor([1, 2]), temperature=temperature, return_entropy=True, return_logsumexp=True
    )
    for value, sign in zip(got, (-1, 1, 1), strict=True):
        torch.testing.assert_close(value[0].item(), sign * math.log(n_cols), rtol=1e-6, atol=0.0)
    (dx,) = torch.autograd.grad(sum(v.sum() for v in got), x)
    assert dx[0].abs().max() < 1e-43 and dx.isfinite().all()


def test_an_infinite_temperature_leaves_hidden_columns_hidden():
    x = torch.randn(2, 6)
    x[:, 3:] = -INF
    got = fs.token_logprobs(x, torch.tensor([1, 4]), temperature=INF, return_logsumexp=True)
    assert got.logprobs.tolist() == pytest.approx([-math.log(3.0), -INF])
    assert got.logsumexp.tolist() == pytest.approx([math.log(3.0)] * 2)


@pytest.mark.parametrize("scale", [1e-300, 1e-50, 1e-42, 1e-39])
@pytest.mark.parametrize("operator", [False, True])
def test_the_largest_scores_at_scales_that_are_no_normal_numbers(scale, operator):
    x = torch.tensor([[3.4e38, -3.4e38, 0.0, -INF, 3.3e38]])
    ours = (lambda: torch.ops.fused_softmax.masked_softmax(x, None, scale, False, False)) if operator else None
    y = ours() if ours else fs.masked_softmax(x, scale=scale)
    torch.testing.assert_close(y.double(), torch.softmax(x.double() * scale, -1), rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("scale", [-0.5, 0.0, -0.0, -1e-50, -INF, INF, float("nan")])
@pytest.mark.parametrize("masked", [False, True])
def test_the_operator_called_by_hand_with_any_scale(scale, masked):
    x = torch.randn(3, 11)
    mask = torch.randn(3, 11) if masked else None
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = torch.ops.fused_softmax.masked_softmax(ours, mask, scale, False, False)
    want = torch_ways.masked_softmax(theirs, mask, scale=scale)
    torch.testing.assert_close(y, want, equal_nan=True)
    dy = torch.randn(3, 11)
    dx, d_want = torch.autograd.grad(y, ours, dy)[0], torch.autograd.grad(want, theirs, dy)[0]
    torch.testing.assert_close(dx, d_want, equal_nan=True)


@pytest.mark.parametrize("scale", [1e-300, 1e-50, 1e-44, 1e-39])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["no mask", "boolean", "additive"])
def test_scales_that_are_no_normal_numbers(scale, dtype, kind):
    x = torch.randn(3, 11).to(dtype)
    x[0, 2], x[1, 5] = -INF, 3e38
    mask = {"no mask": None, "boolean": torch.rand(3, 11) > 0.3, "additive": torch.randn(3, 11)}[kind]
    z = x.double() * scale
    if mask is not None:
        z = z.masked_fill(~mask, -INF) if kind == "boolean" else z + mask.double()
    tolerance = 1e-6 if dtype is torch.float32 else 1.6e-2
    for leaf in (x, x.double()):
        y = fs.masked_softmax(leaf, mask, scale=scale)
        torch.testing.assert_close(y.double(), torch.softmax(z, -1), rtol=tolerance, atol=0.0)
