"""cross_entropy against float64, every option with its gradient, and torch's contract: shapes, errors, no targets."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

import fused_softmax as fs
from fused_softmax.lab import reference
from fused_softmax.launch import cross_entropy as row_losses
from fused_softmax.launch import launcher, loss_kernels
from fused_softmax.launch.launcher import flat_launch
from fused_softmax.launch.layout import gradient_buffer
from fused_softmax.losses import cross_entropy_over

pytestmark = pytest.mark.interpreted

NAN = float("nan")
OPTIONS = {
    "plain": {},
    "smoothing": dict(label_smoothing=0.1),
    "weight": dict(weight=True),
    "weight and smoothing, summed": dict(weight=True, label_smoothing=0.2, reduction="sum"),
    "softcap": dict(softcap=5.0),
    "z_loss": dict(z_loss=1e-2),
    "all, each row": dict(weight=True, label_smoothing=0.1, softcap=4.0, z_loss=0.1, reduction="none"),
}
WIDTHS = (1, 5, 33, 1000, 1001, 4097, 9000)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # the interpreter truncates bfloat16


def batch(n_cols: int, dtype: torch.dtype = torch.float32, n_rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with an outlier, and targets of which the second is ignored."""
    x = torch.randn(n_rows, n_cols) * 3
    x[:, n_cols // 2] += 10
    target = torch.randint(0, n_cols, (n_rows,))
    target[1] = -100
    return x.to(dtype), target


def both(x: torch.Tensor, target: torch.Tensor, g: float | None = None, **options):
    """(loss, gradient) of ours and of float64's."""
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    results = []
    for logits, function in ((ours, fs.cross_entropy), (exact, reference.cross_entropy)):
        loss = function(logits, target, **options)
        upstream = (
            torch.ones_like(loss) if g is None else torch.linspace(g, g + 1, loss.numel()).view(loss.shape).to(loss)
        )
        loss.backward(upstream)
        results += [loss.detach(), logits.grad]
    return results


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("n_cols", WIDTHS)
def test_against_float64(n_cols, options):
    for dtype in TOLERANCE if n_cols in (33, 1001) else (torch.bfloat16,):
        x, target = batch(n_cols, dtype)
        given = {**options, "weight": torch.rand(n_cols) + 0.1} if "weight" in options else options
        for g in (None, -0.7):
            loss, dx, exact_loss, exact_dx = both(x, target, g, **given)
            assert loss.dtype is torch.float32 and dx.dtype is dtype
            torch.testing.assert_close(loss.double(), exact_loss, rtol=5e-5, atol=5e-5)
            torch.testing.assert_close(dx.double(), exact_dx, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 20)
        with torch.no_grad():
            torch.testing.assert_close(fs.cross_entropy(x, target, **given), loss, rtol=1e-5, atol=1e-5)
        assert torch.equal(x, x.clone()) and not dx[1].any()


def test_the_logits_are_left_alone_unless_their_place_is_asked_for():
    for inplace in (False, True):
        x, target = batch(70)
        kept = x.clone()
        logits = x.requires_grad_()
        _, _, _, exact = both(kept, target)
        fs.cross_entropy(logits, target, inplace_backward=inplace).backward()
        torch.testing.assert_close(logits.grad.double(), exact, rtol=2e-5, atol=1e-6)
        assert torch.equal(logits.detach(), logits.grad if inplace else kept)


@pytest.mark.parametrize("g", [1.0, 0.25])
def test_in_place_takes_any_upstream_gradient_and_one_backward(g):
    x, target = batch(33)
    _, dx, _, _ = both(x, target, None)
    leaf = x.clone().requires_grad_()
    loss = fs.cross_entropy(leaf * 1.0, target, inplace_backward=True)
    loss.backward(torch.tensor(g), retain_graph=True)
    torch.testing.assert_close(leaf.grad, dx * g)
    with pytest.raises(RuntimeError, match="over the logits"):
        loss.backward()
    loss = fs.cross_entropy(leaf * 1.0, target, inplace_backward=True)
    with pytest.raises(RuntimeError, match="over the logits"):
        torch.autograd.grad(loss, leaf, create_graph=True)


def test_what_needs_overwritten_logits_is_told():
    leaf = torch.randn(2, 7, requires_grad=True)
    logits = leaf * 1.0
    squares = logits * logits
    loss = fs.cross_entropy(logits, torch.tensor([1, 2]), inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + squares.sum()).backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_twice_and_its_gradient(reduction):
    x, target = batch(9)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    a, b = fs.cross_entropy(ours, target, reduction=reduction), F.cross_entropy(theirs, target, reduction=reduction)
    for g in (0.5, 1.0, 3.0):
        upstream = torch.full_like(a, g)
        got, want = (torch.autograd.grad(f, t, upstream, retain_graph=True)[0] for f, t in ((a, ours), (b, theirs)))
        torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6)
    seconds = []
    for loss, t in ((a, ours), (b, theirs)):
        (dx,) = torch.autograd.grad(loss.sum(), t, create_graph=True)
        seconds.append(torch.autograd.grad(dx.square().sum(), t)[0])
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 7, 3), (2, 7, 3, 2)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_shapes(shape, reduction):
    n_cols = shape[0] if len(shape) == 1 else shape[1]
    target = torch.randint(0, n_cols, shape[:1] + shape[2:] if len(shape) > 1 else ())
    x = torch.randn(shape)
    layouts = [x] if len(shape) < 3 else [x, x.movedim(1, -1).contiguous().movedim(-1, 1)]
    for layout in [*layouts, torch.randn(shape[::-1]).permute(*range(len(shape))[::-1])]:
        ours, theirs = (layout.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
        a, b = fs.cross_entropy(ours, target, reduction=reduction), F.cross_entropy(theirs, target, reduction=reduction)
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)
        a.sum().backward()
        b.sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-5, atol=1e-6)


def test_rows_of_a_padded_vocabulary_keep_their_vectors():
    x = torch.randn(3, 1024)[:, :1001].requires_grad_()
    assert gradient_buffer(x.detach()).stride(0) == 1024
    target = torch.tensor([1, 1000, 5])
    _, _, _, exact = both(x.detach(), target)
    fs.cross_entropy(x, target).backward()
    torch.testing.assert_close(x.grad.double(), exact, rtol=2e-5, atol=1e-6)


def test_expanded_rows_are_never_overwritten():
    x = torch.randn(1, 6)
    logits = x.expand(3, 6).requires_grad_()
    fs.cross_entropy(logits, torch.tensor([0, 1, 2]), inplace_backward=True).backward()
    want = (torch.softmax(x, -1) - F.one_hot(torch.tensor([0, 1, 2]), 6)) / 3
    torch.testing.assert_close(logits.grad, want, rtol=2e-5, atol=1e-6)


def test_nothing_counts():
    for n_rows in (0, 4):
        for reduction, want in (("mean", NAN), ("sum", 0.0), ("none", torch.zeros(n_rows))):
            x = torch.randn(n_rows, 5, requires_grad=True)
            target = torch.full((n_rows,), 2).fill_(-100)
            loss = fs.cross_entropy(x, target, reduction=reduction)
            torch.testing.assert_close(loss, torch.as_tensor(want), equal_nan=True)
            loss.sum().backward()
            assert x.grad.shape == x.shape and not x.grad.nan_to_num().any()


@pytest.mark.parametrize("shape", [(0, 1), (0, 5), (0, 0), (3, 0), (2, 3, 0), (0, 3, 4), (2, 0, 0)], ids=str)
def test_a_loss_of_nothing_is_torchs_and_waits_for_no_device(shape):
    """A wait for the device would end the capture of a CUDA graph."""
    target = torch.zeros(shape[:1] + shape[2:], dtype=torch.int64)
    weights, ignored = (None, torch.zeros(shape[1])), 0 if 0 < target.numel() else -100
    for reduction, weight, smoothing in itertools.product(("mean", "sum", "none"), weights, (0.0, 0.1, 1.0)):
        options = dict(weight=weight, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)
        for z_loss in (0.0, 0.01):
            x = torch.randn(shape, requires_grad=True)
            with torch.autograd.profiler.profile(use_kineto=False) as profile:
                loss = fs.cross_entropy(x, target, **options, z_loss=z_loss)
            (gradient,) = torch.autograd.grad(loss.sum(), x)
            torch.testing.assert_close(loss, F.cross_entropy(x, target, **options), equal_nan=True)
            assert gradient.shape == shape
            ran = {event.name for event in profile.function_events}
            assert not ran & {"aten::masked_select", "aten::nonzero", "aten::item"}


def test_ignored_rows_hide_what_is_in_them():
    x, target = batch(8)
    x[1] = NAN
    loss, dx, *_ = both(x, target)
    assert loss.isfinite() and not dx[1].any()


def test_infinite_and_missing_logits():
    x = torch.tensor([[1.0, float("inf"), 0.0], [-float("inf")] * 3, [-float("inf"), 1.0, 2.0], [NAN, 1.0, 2.0]])
    for target in ([0, 0, 0, 1], [1, 1, 1, 2]):
        t = torch.tensor(target)
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        a, b = fs.cross_entropy(ours, t, reduction="none"), F.cross_entropy(theirs, t, reduction="none")
        torch.testing.assert_close(a, b, equal_nan=True)
        a.sum().backward()
        b.sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)
        with torch.no_grad():
            torch.testing.assert_close(fs.cross_entropy(x, t, reduction="none"), b.detach(), equal_nan=True)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("n_cols", [33, 1001, 4097])
def test_the_loss_of_large_logits(n_cols, grad):
    # the loss is a small number, though logsumexp is a large one, of which float32 has the first seven digits
    x = torch.randn(3, n_cols).round_() + torch.tensor([[1e4], [-3e5], [2e6]])
    target = x.argmax(-1)
    loss = fs.cross_entropy(x.requires_grad_(grad), target, reduction="none" if not grad else "sum")
    want = F.cross_entropy(x.detach().double(), target, reduction="none" if not grad else "sum")
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=2e-6)


def test_large_logits_under_a_softcap():
    x = torch.tensor([[-1e4, 1e4, 3.0, -float("inf")]])
    loss, dx, exact, exact_dx = both(x, torch.tensor([1]), softcap=30.0)
    torch.testing.assert_close(loss.double(), exact)
    assert dx.isfinite().all() and dx[0, 3] == 0


@pytest.mark.parametrize("bad", [5, -1, -101, 1 << 40])
def test_targets_outside_are_errors(bad):
    x = torch.randn(2, 5, requires_grad=True)
    for reduction in ("mean", "none"):
        with pytest.raises(IndexError, match="out of bounds"):
            fs.cross_entropy(x, torch.tensor([1, bad]), reduction=reduction)


def test_torchs_errors():
    x, t = torch.randn(2, 5), torch.tensor([1, 2])
    cases = [
        ((x, t.int()), {}),
        ((x, t[:1]), {}),
        ((x, t.view(2, 1)), {}),
        ((x, t, torch.ones(4)), {}),
        ((x, t), dict(reduction="average")),
        ((x, t), dict(label_smoothing=1.5)),
        ((x.long(), t), {}),
        ((x, t.to("meta")), {}),
        ((x, t, torch.ones(5, device="meta")), {}),
    ]
    for arguments, options in cases:
        with pytest.raises(Exception) as own:
            F.cross_entropy(*arguments, **options)
        with pytest.raises(own.type):
            fs.cross_entropy(*arguments, **options)
    with pytest.raises(ValueError, match="softcap"):
        fs.cross_entropy(x, t, softcap=0.0)


def test_what_is_torchs():
    x, p = torch.randn(3, 5), torch.randn(3, 5).softmax(-1)
    torch.testing.assert_close(fs.cross_entropy(x, p, label_smoothing=0.1), F.cross_entropy(x, p, label_smoothing=0.1))
    double, t = x.double().requires_grad_(), torch.tensor([0, -100, 4])
    loss = fs.cross_entropy(double, t, softcap=3.0, z_loss=0.1)
    assert loss.dtype is torch.float64
    torch.testing.assert_close(loss, reference.cross_entropy(double, t, softcap=3.0, z_loss=0.1))
    assert torch.autograd.gradcheck(lambda z: fs.cross_entropy(z, t, softcap=3.0, z_loss=0.1), double)
    per_sample = torch.func.vmap(torch.func.grad(fs.cross_entropy))(x, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(per_sample, torch.softmax(x, -1) - F.one_hot(torch.tensor([0, 1, 2]), 5))


def test_a_mean_over_another_count_is_written_once():
    x, target = batch(40)
    leaf = x.clone().requires_grad_()
    loss = cross_entropy_over(torch.tensor(7.0), leaf, target)
    loss.backward()
    summed, dx, *_ = both(x, target, reduction="sum")
    torch.testing.assert_close(loss.detach(), summed / 7)
    torch.testing.assert_close(leaf.grad, dx / 7, rtol=1e-5, atol=1e-7)


def test_more_rows_than_one_program_adds_up(monkeypatch):
    x, target = batch(600, n_rows=5)
    target[1] = -100
    weight = torch.rand(600)
    options = [dict(weight=w, reduction=how) for w in (None, weight) for how in ("mean", "sum")]
    want = [both(x, target, weight=w) for w in (None, weight)]
    alone = [fs.cross_entropy(x, target, **of) for of in options]
    monkeypatch.setattr(loss_kernels, "ONE_PROGRAM_ROWS", 2)
    monkeypatch.setattr(loss_kernels, "ONE_CTA_ROWS", 1)
    monkeypatch.setattr(loss_kernels, "ROWS_OF_PROGRAM", 2)
    programs = launched_programs(monkeypatch)
    for (loss, dx, _, _), w in zip(want, (None, weight), strict=True):
        again, dx_again, *_ = both(x, target, weight=w)
        torch.testing.assert_close((again, dx_again), (loss, dx))
    torch.testing.assert_close([fs.cross_entropy(x, target, **of) for of in options], alone)
    assert fs.cross_entropy(x, torch.full_like(target, -100)).isnan()
    assert (programs.count(("count_targets", 3)), programs.count(("reduce_losses", 3))) == (5, 7)
    assert {programs for name, programs in programs if name == "add_partials"} == {1}


def test_programs_of_few_classes_add_up_their_losses(monkeypatch):
    """300 rows take three programs, whose sums one program adds up, or two where it may not add up so many."""
    x, target = batch(6, n_rows=300)
    target[1] = -100
    want = [both(x, target, **of)[:2] for of in (dict(), dict(reduction="sum"), dict(weight=torch.ones(6)))]
    for most, names in ((3, ["add_partials"]), (2, ["reduce_losses", "reduce_losses"])):
        monkeypatch.setattr(loss_kernels, "ONE_CTA_ROWS", 1)
        monkeypatch.setattr(loss_kernels, "ONE_PROGRAM_ROWS", most)
        monkeypatch.setattr(loss_kernels, "ROWS_OF_PROGRAM", 2)
        programs = launched_programs(monkeypatch)
        again = both(x, target, reduction="sum")[:2]
        assert [name for name, _ in programs] == names
        torch.testing.assert_close(again, want[1])
        torch.testing.assert_close(both(x, target)[:2], want[0])
        torch.testing.assert_close(both(x, target, weight=torch.ones(6))[:2], want[2])
    none = torch.full_like(target, -100)
    x.requires_grad_()
    assert fs.cross_entropy(x, none).isnan() and fs.cross_entropy(x, none, reduction="sum") == 0


def launched_programs(monkeypatch):
    """(kernel, programs) of each launch of a kernel over vectors from now on."""
    found = []

    def noted(kernel, *rest):
        found.append((kernel().fn.__name__, rest[-1]))
        return flat_launch(kernel, *rest)

    monkeypatch.setattr(launcher, "flat_launch", noted)
    return found


@pytest.mark.parametrize("keeps_count", [False, True])
def test_programs_that_add_up_losses_count_targets_too(monkeypatch, keeps_count):
    monkeypatch.setattr(loss_kernels, "ONE_PROGRAM_ROWS", 10)
    monkeypatch.setattr(loss_kernels, "ONE_CTA_ROWS", 5)
    monkeypatch.setattr(loss_kernels, "ROWS_OF_PROGRAM", 7)
    losses, target, out, count = torch.rand(33), torch.arange(33) % 6 - 1, torch.empty(()), torch.full((1,), 8.0)
    programs = launched_programs(monkeypatch)
    run = row_losses.prepare_reduction(losses, 33, True, False, keeps_count)
    run((losses, target, losses, out, count), (33, 33, 4, -1))
    counts = int(((target >= 0) & (target < 4)).sum())
    torch.testing.assert_close(out, losses.sum() / counts)
    assert count.item() == (counts if keeps_count else 8.0)
    assert programs == [("count_targets", 5), ("add_partials", 1), ("reduce_losses", 5), ("reduce_losses", 1)]


def test_wide_rows_take_two_kernels(monkeypatch):
    monkeypatch.setattr(row_losses, "fits_on_chip", lambda plan: False)
    x, target = batch(1001, torch.bfloat16)
    for inplace in (False, True):
        loss, dx, exact, exact_dx = both(x, target, 2.0, softcap=9.0) if not inplace else both(x, target)
        torch.testing.assert_close(loss.double(), exact, rtol=5e-5, atol=5e-5)
        torch.testing.assert_close(dx.double(), exact_dx, rtol=1.6e-2, atol=1e-3)


def test_a_rows_bits_do_not_depend_on_the_batch():
    x, target = batch(1000, n_rows=4)
    whole = fs.cross_entropy(x, target, reduction="none")
    for i in range(4):
        assert torch.equal(fs.cross_entropy(x[i : i + 1], target[i : i + 1], reduction="none")[0], whole[i])


def test_the_module():
    x, target = batch(12)
    weight = torch.rand(12)
    ours = fs.nn.CrossEntropyLoss(weight, ignore_index=3, reduction="sum", label_smoothing=0.1)
    theirs = torch.nn.CrossEntropyLoss(weight, ignore_index=3, reduction="sum", label_smoothing=0.1)
    target = target.clamp(0)
    torch.testing.assert_close(ours(x, target), theirs(x, target), rtol=2e-5, atol=1e-6)
    theirs.load_state_dict(ours.state_dict())
    capped = fs.nn.CrossEntropyLoss(softcap=2.0, z_loss=0.1)(x, target)
    torch.testing.assert_close(capped.double(), reference.cross_entropy(x, target, softcap=2.0, z_loss=0.1))


def samples() -> list:
    (info,) = [op for op in op_db if op.name == "nn.functional.cross_entropy"]
    return list(info.sample_inputs("cpu", torch.float32, requires_grad=True))


def test_pytorchs_operator_database():
    found = samples()
    assert len(found) > 20
    for sample in found:
        logits = sample.input.detach().clone().requires_grad_()
        want = F.cross_entropy(sample.input, *sample.args, **sample.kwargs)
        got = fs.cross_entropy(logits, *sample.args, **sample.kwargs)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6, equal_nan=True)
        if not want.requires_grad:
            continue
        g = torch.randn_like(want)
        got.backward(g)
        (dx,) = torch.autograd.grad(want, sample.input, g)
        torch.testing.assert_close(logits.grad, dx.nan_to_num() if want.isnan().any() else dx, rtol=1e-4, atol=1e-6)
