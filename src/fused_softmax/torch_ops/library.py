"""How every operator fused_softmax::<name> is defined: schema, kernel, fake kernel, autograd and vmap.

torch.compile, torch.export, torch.func and dispatch modes see the operators. Their kernels run PyTorch's own code for
calls that ours do not take, so an operator works on any device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ..launch import torch_private
from .arguments import NAMESPACE

F = TypeVar("F", bound=Callable[..., Any])


class _Library(torch.library.Library):
    """A library whose autograd kernels see forward-mode AD and torch.func. Those that torch makes drop tangents without
    a word, and are refused by torch.func."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        if dispatch_key == "Autograd":
            fn = _by_formula(op_name, fn)
        super().impl(op_name, fn, dispatch_key, **options)


library = _Library(NAMESPACE, "DEF")
# what operators run there, by name: formulas in torch's own operators, of the same arguments
_formulas: dict[str, Callable[..., Any]] = {}


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The operator of this schema, of a kernel for any device and a fake kernel, which knows shapes alone."""
    name = schema.split("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, untraced(kernel), "CompositeExplicitAutograd")
    torch_private.register_fake(library, operator(name), fake)
    return operator(name)


def operator(name: str) -> Any:
    """The operator of this name."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


_later: dict[str, str] = {}


def defined_later(prefix: str, module: str) -> None:
    """Names the module that defines the operators of this prefix: it is imported when torch.ops is asked for one."""
    _later[prefix] = module


def _define(name: str) -> None:
    """Defines what torch.ops.fused_softmax lacks, by an import, and leaves it to torch to find it."""
    for prefix, module in _later.items():
        if name.startswith(prefix):
            importlib.import_module(module)
    raise AttributeError(name)


getattr(torch.ops, NAMESPACE).__getattr__ = _define  # of a module, which is asked before the class (PEP 562)


def differentiable(
    name: str, gradients: Callable[..., Any], setup_context: Callable[..., None], formula: Callable[..., Any]
) -> None:
    """Register the gradients of an operator; autograd runs them outside of torch.compile's trace.

    formula: the operator in torch's own operators, for forward-mode AD and torch.func.
    """
    _formulas[name] = formula
    torch_private.register_autograd(library, operator(name), gradients, setup_context)


def not_differentiable(name: str, formula: Callable[..., Any] | None = None) -> None:
    """Registers that an operator, a gradient, has none: an error, where torch would warn and go on.

    formula: as in `differentiable`; without one, a tangent is an error.
    """
    if formula is not None:
        _formulas[name] = formula

    def backward(ctx: Any, *upstream: Tensor | None) -> None:
        raise RuntimeError(f"{NAMESPACE}::{name} is a gradient that cannot be differentiated")

    torch_private.register_autograd(library, operator(name), backward, None)


def _by_formula(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The autograd kernel of an operator; the operator's formula takes what torch.func or forward-mode AD
    differentiates."""
    name = (op if isinstance(op, str) else op.name()).split("::")[-1]

    def autograd(keys: Any, *args: Any, **kwargs: Any) -> Any:
        in_forward_ad = torch_private.in_forward_ad()
        if (in_forward_ad or torch_private.innermost_transform() is not None) and name in _formulas:
            return _formulas[name](*args, **kwargs)
        if in_forward_ad:
            if any(isinstance(a, Tensor) and unpack_dual(a).tangent is not None for a in (*args, *kwargs.values())):
                raise NotImplementedError(
                    f"{NAMESPACE}::{name} does not support forward-mode AD: it is a gradient without a formula"
                )
        return kernel(keys, *args, **kwargs)

    return untraced(autograd)


def batched(name: str, rule: Callable[..., tuple[Tensor, int]]) -> None:
    """Registers an operator's vmap rule, where this torch has such rules.

    The dispatcher leaves out trailing arguments that have their default: a rule has the schema's defaults too.
    """
    if torch_private.register_vmap is not None:
        torch_private.register_vmap(f"{NAMESPACE}::{name}", rule, lib=library)


def under_autocast(name: str, kernel: Callable[..., Any]) -> None:
    """Registers what an operator does under autocast on CUDA; `kernel` runs with autocast off."""

    def autocast(*args: Any, **kwargs: Any) -> Any:
        with torch_private.without_autocast():
            return kernel(*args, **kwargs)

    library.impl(name, autocast, "AutocastCUDA")


def untraced(function: F) -> F:
    """Returns function itself; torch.compile traces neither its frame nor what that calls.

    The dispatcher and autograd call our kernels and gradients from inside frames that torch.compile watches: a
    backward() in a compiled function, or the rest of one after a graph break. Dynamo would trace such a function as if
    a user had written it, and it cannot trace a launch. The mark is on the code, so a call costs nothing more;
    torch.compiler.disable would put a frame before it.
    """
    code = getattr(function, "__code__", None)
    if code is not None and torch_private.skip_code is not None:
        torch_private.skip_code(code)
    return function


def expect_in_range(dim: int, n_dims: int) -> None:
    """IndexError, torch's own, for a dim out of range."""
    bound = max(1, n_dims)
    if not -bound <= dim < bound:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-bound}, {bound - 1}], but got {dim})")


def past_batch(dim: int, n_dims: int) -> int:
    """dim of a tensor of n_dims as it counts with a batch dimension before them."""
    expect_in_range(dim, n_dims)
    return dim % n_dims + 1


def with_batch(t: Tensor, batch_dim: int | None, batch_size: int) -> Tensor:
    """t with its batch dimension first; expanded where it has none."""
    return t.expand(batch_size, *t.shape) if batch_dim is None else t.movedim(batch_dim, 0)
