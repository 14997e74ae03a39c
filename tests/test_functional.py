"""What calls may say beyond softmax(x, dim): out=, and logsumexp with all of its dims. Beside torch throughout."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, dtype_id
from watched import both, close, watch

import fused_softmax as fs

pytestmark = pytest.mark.interpreted

INF = float("inf")


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    return watch(monkeypatch)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_out(ours, torchs, dtype):
    x = torch.randn(3, 5).to(dtype)
    for out in (torch.empty(3, 5, dtype=dtype), torch.empty(0, dtype=dtype), torch.empty(5, 3, dtype=dtype).t()):
        version = out._version
        assert ours(x, -1, out=out) is out
        close(out, torchs(x, -1))
        assert out._version > version
    with pytest.warns(UserWarning, match="resized"):
        wrong = torch.empty(7, dtype=dtype)
        close(ours(x, 0, out=wrong), torchs(x, 0))
    assert wrong.shape == (3, 5)
    in_place = x.clone()
    close(ours(in_place, -1, out=in_place), torchs(x, -1))
    wide = torch.empty(3, 5)
    close(ours(x, -1, dtype=torch.float32, out=wide), torchs(x, -1, dtype=torch.float32))


@both
def test_out_refuses_what_torch_refuses(ours, torchs):
    x = torch.randn(3, 5)
    grad = torch.randn(3, 5, requires_grad=True)
    cases = [(x, torch.empty(3, 5, dtype=torch.float64)), (x, torch.empty(3, 5, dtype=torch.float16)), (x, [1.0])]
    cases += [(x, torch.empty(3, 5, requires_grad=True))]
    for input, out in cases:
        with pytest.raises(Exception) as own:
            torchs(input, -1, out=out)
        with pytest.raises(own.type):
            ours(input, -1, out=out)
    assert ours(grad, -1, out=torch.empty(3, 5)).requires_grad  # torch's surprise, and so ours
    with torch.no_grad():
        close(ours(grad, -1, out=torch.empty(3, 5)), torchs(grad.detach(), -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp_over_any_dims(dtype, keepdim, calls):
    x = (torch.randn(2, 3, 4, 5) * 3).to(dtype)
    for view in (x, x.transpose(0, 3), x[:, :, ::2], x.expand(2, 3, 4, 5)):
        for dim in (0, 1, -1, (0,), (0, 1), (3, 2), (-1, 0), (1, 3), (0, 1, 2, 3), [1, 2]):
            close(fs.logsumexp(view, dim, keepdim), torch.logsumexp(view, dim, keepdim))
    assert calls == ["forward_by_kernel"] * 40


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_logsumexp_of_infinities_and_nan(dtype):
    x = torch.tensor([[1, 2, 3], [-INF] * 3, [1, INF, 2], [1, float("nan"), 2], [-INF, 0, 1]], dtype=dtype)
    torch.testing.assert_close(fs.logsumexp(x, 1), torch.logsumexp(x, 1), equal_nan=True)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    fs.logsumexp(ours, 1).sum().backward()
    torch.logsumexp(theirs, 1).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True, rtol=1e-2, atol=1e-2)


def test_logsumexp_of_odd_arguments_is_torchs():
    x = torch.randn(2, 3)
    for arguments in (
        (x, 2),
        (x, (0, 0)),
        (x, (0, -3)),
        (x, 1.0),
        (x, None),
        (x, 0, 1.5),
        (None, 0),
        (x, "0"),
        (x, ()),
    ):
        with pytest.raises(Exception) as own:
            torch.logsumexp(*arguments)
        with pytest.raises(own.type):
            fs.logsumexp(*arguments)
    for input, dim in ((torch.arange(6).view(2, 3), 1), (x.double(), 0), (torch.tensor(1.5), 0)):
        torch.testing.assert_close(fs.logsumexp(input, dim), torch.logsumexp(input, dim))
    for shape in ((0, 3), (3, 0)):
        for dim in (0, 1, (0, 1)):
            torch.testing.assert_close(fs.logsumexp(torch.empty(shape), dim), torch.logsumexp(torch.empty(shape), dim))


def test_logsumexp_out():
    x = torch.randn(4, 6)
    out = torch.empty(0)
    assert fs.logsumexp(x, 1, out=out) is out
    close(out, torch.logsumexp(x, 1))
    with pytest.raises(RuntimeError):
        fs.logsumexp(x.requires_grad_(), 1, out=torch.empty(4))
