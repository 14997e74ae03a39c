"""FUSED_SOFTMAX_PUBLIC_TORCH=1: a torch without its private symbols, as far as a public one or nothing replaces them.

And private symbols of torch are looked up in launch/torch_private.py alone.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import fused_softmax
from fused_softmax.launch import torch_private

PACKAGE = Path(fused_softmax.__file__).parent
# attributes of Triton and of NamedTuple, which are not torch's
NOT_TORCHS = {"_init_handles", "_replace", "_fields"}
# public in spite of its name: torch documents it
DOCUMENTED = {"torch._check"}


def private_symbols(source: str) -> list[str]:
    """Each import, attribute and string of a module that names a private symbol of torch."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            found += [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.startswith("torch.")]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            text = ast.unparse(node)
            own = text.split(".")[0] in ("self", "cls") and text.count(".") == 1
            if not own and node.attr not in NOT_TORCHS and text not in DOCUMENTED:
                found.append("torch." + text.removeprefix("torch."))
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            found.append(ast.unparse(node))
    return [name for name in found if any(part.startswith("_") for part in name.split(".")) and "__" not in name]


def test_private_symbols_are_in_one_file():
    modules = [file for file in PACKAGE.rglob("*.py") if "lab" not in file.relative_to(PACKAGE).parts]
    assert len(modules) > 40
    private = {str(file.relative_to(PACKAGE)): private_symbols(file.read_text()) for file in modules}
    assert {name: found for name, found in private.items() if found}.keys() == {"launch/torch_private.py"}


@pytest.mark.parametrize(
    "line",
    [
        "from torch._subclasses import FakeTensor",
        "from torch.nn import _reduction",
        "import torch._dynamo",
        "torch._C._is_tracing()",
        "f = torch.nn._reduction.get_enum",
        "library._destroy()",
        "forward_ad._current_level",
    ],
)
def test_the_check_sees_a_private_symbol(line):
    assert private_symbols(line)
    assert not private_symbols(
        "import torch\nfrom torch import Tensor\nself._x = torch.softmax(compiled._init_handles())"
    )


CALLS = """
    import sys, warnings
    import torch, torch.nn.functional as F, fused_softmax as fs
    from fused_softmax.launch import torch_private
    assert torch_private.skip_code is None and torch_private.empty_strided_cuda is None
    assert torch_private.softmax_backward_data is torch.ops.aten._softmax_backward_data.default
    assert not torch_private.missing, torch_private.missing
    given = []
    warnings.showwarning = lambda message, *_: given.append(str(message))
    warnings.simplefilter("always")

    def both(ours, own, *tensors):
        for dtype in (torch.float32, torch.float16):
            left = [t.to(dtype).clone().requires_grad_() for t in tensors]
            right = [t.to(dtype).double().requires_grad_() for t in tensors]
            got, want = ours(*left), own(*right)
            g = torch.randn_like(want)
            got.backward(g.to(got.dtype))
            want.backward(g)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(got.double(), want, rtol=8 * eps, atol=8 * eps)
            for a, b in zip(left, right):
                torch.testing.assert_close(a.grad.double(), b.grad, rtol=16 * eps, atol=16 * eps)

    x, target = torch.randn(5, 37), torch.randint(0, 37, (5,))
    both(fs.softmax, lambda t: torch.softmax(t, -1), x)
    both(lambda t: fs.log_softmax(t, 0), lambda t: torch.log_softmax(t, 0), x)
    both(lambda t: fs.logsumexp(t, -1), lambda t: torch.logsumexp(t, -1), x)
    both(lambda t: fs.masked_softmax(t, t > -9), lambda t: torch.softmax(t, -1), x)
    both(lambda t: fs.cross_entropy(t, target), lambda t: F.cross_entropy(t, target), x)
    both(lambda t: fs.token_logprobs(t, target), lambda t: torch.log_softmax(t, -1)[range(5), target], x)
    own = torch.library.get_kernel("aten::_softmax", "CPU")
    with fs.patch():
        both(lambda t: torch.softmax(t, -1), lambda t: torch.softmax(t, -1), x)
        both(lambda t: F.cross_entropy(t, target), lambda t: F.cross_entropy(t, target), x)
    with fs.patch():
        pass
    assert torch.equal(torch.softmax(x, -1), torch.softmax(x.clone(), -1))

    # what watches a call
    batched = torch.func.vmap(lambda row: fs.softmax(row))(x)
    torch.testing.assert_close(batched, torch.softmax(x, -1))
    torch.testing.assert_close(torch.jit.trace(fs.softmax, torch.randn(2, 3))(x), torch.softmax(x, -1))
    y = fs.softmax(x.requires_grad_())
    grads = torch.eye(2).repeat_interleave(5 * 37, 1)[:, : 5 * 37].view(2, 5, 37)
    torch.autograd.grad(y, x, grads, is_grads_batched=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert fs.softmax(x.bfloat16()).dtype is torch.bfloat16
    torch.testing.assert_close(torch.compile(fs.softmax, backend="eager")(x), torch.softmax(x, -1))
    x = x.detach()

    # deprecated names of reductions: torch's warnings and errors
    del given[:]
    assert fs.cross_entropy(x, target, size_average=False) == fs.cross_entropy(x, target, reduction="sum")
    assert any("reduction='sum'" in text for text in given), given
    try:
        fs.cross_entropy(x, target, reduction="median")
    except ValueError as error:
        assert "median" in str(error)
    else:
        raise AssertionError("no error")
    said = [text for text in given if "fused_softmax" in text]
    assert not said, said
    print("right")
"""


@pytest.mark.interpreted
@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")
def test_public_torch_gives_the_same_results():
    environment = {**os.environ, "FUSED_SOFTMAX_PUBLIC_TORCH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CALLS)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout == "right\n", done.stderr[-3000:]


@pytest.mark.parametrize("error", [RuntimeError, TypeError])  # of torch 2.4, and of a torch that takes no argument so
def test_versions_are_counted_where_the_private_function_takes_one_tensor(monkeypatch, error):
    own = torch._C._increment_version

    def of_one(tensors):
        if not isinstance(tensors, torch.Tensor):
            raise error("increment_version expect a Tensor as input")
        own((tensors,))

    monkeypatch.setattr(torch._C, "_increment_version", of_one)
    found = torch_private._incremented_by_c()
    a, b = torch.zeros(2), torch.zeros(2)
    with monkeypatch.context() as patched:
        patched.setattr(torch._C, "_increment_version", own)
        found((a, b))
    assert (a._version, b._version) == (1, 1)
