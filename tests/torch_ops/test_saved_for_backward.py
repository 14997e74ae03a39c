"""What cross_entropy keeps for backward: seen by hooks, freed in time, and good for two backwards of equal bits."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fused_softmax as fs

pytestmark = pytest.mark.interpreted

TARGET = torch.tensor([3, -100, 5, 0])
OPTIONS = [
    {},
    {"reduction": "sum"},
    {"label_smoothing": 0.1},
    {"weight": torch.arange(37) / 37},
    {"softcap": 5.0, "z_loss": 1e-2},
    {"reduction": "none"},
]


def logits(dtype: torch.dtype = torch.float32, n_cols: int = 37) -> torch.Tensor:
    return (torch.randn(4, n_cols) * 3).to(dtype).requires_grad_()


def gradient(x: torch.Tensor, **options) -> torch.Tensor:
    (dx,) = torch.autograd.grad(fs.cross_entropy(x, TARGET, **options).sum(), x)
    return dx


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n_cols", [37, 1024, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options) or "mean")
def test_two_backwards_have_equal_bits(options, dtype, n_cols):
    if "weight" in options:
        options = {"weight": torch.rand(n_cols)}
    x = logits(dtype, n_cols)
    loss = fs.cross_entropy(x, TARGET, **options).sum()
    first, second, third = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(3))
    assert len({g.data_ptr() for g in (first, second, third)}) == 3
    assert torch.equal(first, second) and torch.equal(first, third)
    (half,), (again,) = (torch.autograd.grad(loss, x, torch.tensor(0.5), retain_graph=True) for _ in range(2))
    assert torch.equal(half, again)


def test_a_changed_gradient_changes_no_other():
    x = logits()
    loss = fs.cross_entropy(x, TARGET)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    want = first.clone()
    first.mul_(2.0)
    (second,) = torch.autograd.grad(loss, x, retain_graph=True)
    second.zero_()
    (third,) = torch.autograd.grad(loss, x)
    assert torch.equal(third, want)


def test_hooks_see_all_that_has_the_logits_size():
    x, packed = logits(), []

    def pack(t):
        packed.append(t.numel() * t.element_size())
        return t.clone()

    want = gradient(x)
    with saved_tensors_hooks(pack, lambda t: t.clone()):
        loss = fs.cross_entropy(x, TARGET)
    assert sorted(packed)[-2:] == [x.numel() * 4] * 2  # the logits and the gradient
    for _ in range(2):
        (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert torch.equal(dx, want)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options) or "mean")
def test_offloading_to_the_cpu(options):
    x = logits()
    want = gradient(x, **options)
    with save_on_cpu():
        loss = fs.cross_entropy(x, TARGET, **options).sum()
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], want)


def memory_of_forward(run) -> list[int]:
    """The sizes of the tensors of the logits' size that are made in `run` and alive after it."""
    alive, empty = [], torch.empty

    def counted(*size, **options):
        t = empty(*size, **options)
        alive.append(weakref.ref(t.untyped_storage()))
        return t

    torch.empty = counted
    try:
        kept = run()
    finally:
        torch.empty = empty
    gc.collect()
    sizes = [ref().nbytes() for ref in alive if ref() is not None]
    del kept
    return sizes


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    x = logits()
    want = gradient(x)

    def run():
        return checkpoint(lambda x: fs.cross_entropy(x, TARGET), x, use_reentrant=reentrant)

    loss = run()
    loss.backward()
    assert torch.equal(x.grad, want)
    assert max(memory_of_forward(run), default=0) < x.numel() * 4


def test_backward_frees_what_the_forward_wrote():
    x = logits()
    loss = fs.cross_entropy(x, TARGET)
    (dx,) = torch.autograd.grad(loss, x)
    gone = weakref.ref(dx.untyped_storage())
    del dx
    gc.collect()
    assert gone() is None  # the graph, which `loss` holds, does not


def test_over_the_logits_there_is_one_backward():
    base = logits()
    x = base * 1.0
    want = gradient(base)
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = fs.cross_entropy(x, TARGET, inplace_backward=True)
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(dx, want)
    with pytest.raises(RuntimeError, match="once"):
        torch.autograd.grad(loss, x)


@pytest.mark.parametrize("upstream", [1.0, 3.0])
@pytest.mark.parametrize("apart", [lambda t: t.repeat_interleave(2, -1)[..., ::2], lambda t: t.t().contiguous().t()])
def test_over_the_logits_hooks_may_give_the_gradient_back_with_other_strides(apart, upstream):
    base = logits()
    want = gradient(base) * upstream
    with saved_tensors_hooks(lambda t: t, lambda t: apart(t) if t.dim() == 2 else t):
        loss = fs.cross_entropy(base * 1.0, TARGET, inplace_backward=True) * upstream
    torch.testing.assert_close(torch.autograd.grad(loss, base)[0], want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_images_whose_hooks_give_them_back_with_other_strides(reduction):
    x, target = torch.randn(2, 5, 4, 3, requires_grad=True), torch.randint(0, 5, (2, 4, 3))
    exact = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(torch.nn.functional.cross_entropy(exact, target, reduction=reduction).sum(), exact)
    with saved_tensors_hooks(lambda t: t, lambda t: t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t):
        loss = fs.cross_entropy(x, target, reduction=reduction).sum()
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(loss, x, retain_graph=True)[0], wanted.float())


@pytest.mark.parametrize("n_cols", [5, 90])
@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_images_whose_hooks_give_them_back_cropped(n_cols, upstream):
    """The gradient that the forward wrote too, whose rows then lie apart: no kernel writes it again."""

    def apart(t):
        return torch.nn.functional.pad(t, (0, 3))[..., : t.shape[-1]] if t.dim() == 4 else t

    x, target = torch.randn(1, n_cols, 8, 15, requires_grad=True), torch.randint(0, n_cols, (1, 8, 15))
    exact = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(torch.nn.functional.cross_entropy(exact, target) * upstream, exact)
    with saved_tensors_hooks(lambda t: t, apart):
        loss = fs.cross_entropy(x, target) * upstream
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(loss, x, retain_graph=True)[0], wanted.float())


def hidden():
    return torch.randn(6, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True), torch.randint(0, 40, (6,))


def rows():
    return torch.randn(6, 40, requires_grad=True), torch.randint(0, 40, (6,))


WITH_VECTORS = {
    "token_logprobs": lambda: (fs.token_logprobs, (*rows(),), dict(temperature=torch.rand(6) + 0.5)),
    "linear_token_logprobs": lambda: (fs.linear_token_logprobs, hidden(), dict(temperature=torch.rand(6) + 0.5)),
    "linear_cross_entropy": lambda: (fs.linear_cross_entropy, hidden(), dict(weight=torch.rand(40))),
    "linear_cross_entropy, none": lambda: (
        fs.linear_cross_entropy, hidden(), dict(weight=torch.rand(40), reduction="none")
    ),
    "cross_entropy": lambda: (fs.cross_entropy, rows(), dict(weight=torch.rand(40), label_smoothing=0.1)),
    "cross_entropy, none": lambda: (
        fs.cross_entropy, rows(), dict(weight=torch.rand(40), label_smoothing=0.1, reduction="none")
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WITH_VECTORS)
def test_vectors_whose_hooks_give_them_back_with_other_strides(case):
    """The kernels take their addresses alone."""
    call, arguments, options = WITH_VECTORS[case]()
    leaves = [t for t in arguments if t.requires_grad]
    wanted = torch.autograd.grad(call(*arguments, **options).sum(), leaves)
    with saved_tensors_hooks(lambda t: t, lambda t: t.repeat_interleave(2, -1)[::2] if t.dim() == 1 else t):
        loss = call(*arguments, **options).sum()
    for _ in range(2):  # the second makes again what the forward wrote
        for found, want in zip(torch.autograd.grad(loss, leaves, retain_graph=True), wanted, strict=True):
            torch.testing.assert_close(found, want)


@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last))
@pytest.mark.parametrize("upstream", (1.0, 0.3))
def test_an_images_gradient_is_written_over_its_logits(upstream, layout):
    leaf = torch.randn(2, 5, 4, 3).to(memory_format=layout).requires_grad_()
    target = torch.randint(0, 5, (2, 4, 3))
    (wanted,) = torch.autograd.grad(fs.cross_entropy(leaf, target) * upstream, leaf)
    x = leaf * 1.0
    (dx,) = torch.autograd.grad(fs.cross_entropy(x, target, inplace_backward=True) * upstream, x)
    assert dx.data_ptr() == x.data_ptr()
    torch.testing.assert_close(dx, wanted)


@pytest.mark.parametrize("n_cols", [12, 13, 77])
def test_a_narrow_result_that_comes_back_in_another_dtype(n_cols):
    """y in 16 bits and dy in float32: rows of two dtypes are not moved as one piece, whose room is for one."""
    x = torch.randn(200, n_cols).bfloat16().requires_grad_()
    narrow = lambda t: t.bfloat16() if t.dtype == torch.float32 else t  # noqa: E731
    with saved_tensors_hooks(narrow, lambda t: t):
        y = fs.softmax(x, -1, dtype=torch.float32)
    dy = torch.randn_like(y)
    y.backward(dy)
    saved = y.detach().bfloat16().double()
    expected = saved * (dy.double() - (saved * dy.double()).sum(-1, keepdim=True))
    torch.testing.assert_close(x.grad.double(), expected, rtol=2**-7, atol=1e-3)
