"""PyTorch's operator database through patch(): every sample of every op that ends in a softmax, forward and backward.

Each sample runs three times: by torch, by torch under patch(), and by torch in float64, which judges the other two.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from cases import DTYPES, dtype_id
from exactness import assert_as_exact
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map

import fused_softmax as fs
from fused_softmax.launch import softmax as rows

pytest.importorskip("expecttest")  # torch's own tests import it
from torch.testing._internal.common_methods_invocations import op_db

pytestmark = pytest.mark.interpreted

# op -> how many samples of a dtype must have reached our kernels: fewer, and this file tests torch against itself
NAMES = {
    "softmax": 7,
    "log_softmax": 7,
    "nn.functional.softmin": 7,
    "masked.softmax": 20,
    "masked.log_softmax": 20,
    "masked.softmin": 20,
    "_softmax_backward_data": 3,
    "nn.functional.cross_entropy": 20,
    "nn.functional.scaled_dot_product_attention": 10,
}
ATTENTION = "nn.functional.scaled_dot_product_attention"
# what many steps in the input's own dtype are made of is judged by that dtype's eps
COMPOSED = {"nn.functional.cross_entropy", ATTENTION, "masked.softmax", "masked.log_softmax", "masked.softmin"}


def samples(name: str, dtype: torch.dtype, device: str) -> Iterator[tuple]:
    """(op, arguments, keyword arguments) with leaves that require gradients where the op has them."""
    for op in op_db:
        if op.name != name or dtype not in op.dtypes:
            continue
        for sample in op.sample_inputs(device, dtype, requires_grad=op.supports_autograd):
            # a dropout mask drawn for float64 is another one
            if not sample.kwargs.get("dropout_p"):
                yield op.op, (sample.input, *sample.args), sample.kwargs


def in_float64(arguments):
    def upcast(leaf):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.detach().double().requires_grad_(leaf.requires_grad)
        return torch.float64 if leaf in DTYPES else leaf

    return tree_map(upcast, arguments)


def run(function, arguments: tuple, kwargs: dict, cotangent: torch.Tensor | None) -> list[torch.Tensor]:
    """The result, and the gradient of every leaf that has one."""
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")
        y = function(*arguments, **kwargs)
        leaves = [t for t in tree_flatten((arguments, kwargs))[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        if not leaves or not y.requires_grad:
            return [y.detach()]
        dy = torch.ones_like(y) if cotangent is None else cotangent.to(y.dtype)
        gradients = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    return [y.detach(), *(g for g in gradients if g is not None)]


def check_samples(name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []
    for entry in ("softmax_forward", "softmax_backward"):
        kernel = getattr(rows, entry)
        monkeypatch.setattr(rows, entry, lambda *a, k=kernel, e=entry: (reached.append(e), k(*a))[1])
    count = 0
    for function, arguments, kwargs in samples(name, dtype, device):
        try:
            cotangent = torch.randn_like(run(function, arguments, kwargs, None)[0], dtype=torch.float32)
        except RuntimeError as refusal:
            # torch 2.11 on CUDA refuses its own sample of a float16 gradient from float32: nothing to compare with
            assert name == "_softmax_backward_data" and "expected scalar type" in str(refusal), refusal
            continue
        own = run(function, arguments, kwargs, cotangent)
        before = len(reached)
        with fs.patch():
            got = run(function, arguments, kwargs, cotangent)
        count += len(reached) > before
        want = run(function, *in_float64((arguments, kwargs)), cotangent)
        assert len(got) == len(own) == len(want)
        eps = torch.finfo(dtype if name in COMPOSED else torch.float32).eps
        inputs = [t for t in tree_flatten(arguments)[0] if isinstance(t, torch.Tensor) and t.is_floating_point()]
        largest = max((t.abs().max().item() for t in (*inputs, cotangent) if t.numel()), default=0.0)
        for mine, theirs, exact in zip(got, own, want, strict=True):
            # a gradient is made of the cotangent, attention's also of queries and keys
            scale = largest if mine is not got[0] or name == ATTENTION else None
            assert_as_exact(mine, theirs, exact, eps=eps, scale=scale, bfloat16_stores=2)
    assert count >= NAMES[name], f"only {count} samples reached our kernels"
    assert "softmax_backward" in reached
    assert "softmax_forward" in reached or name == "_softmax_backward_data"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("name", NAMES)
def test_samples(name, dtype, monkeypatch):
    check_samples(name, dtype, "cpu", monkeypatch)
