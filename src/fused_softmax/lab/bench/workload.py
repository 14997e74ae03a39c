"""What a workload of the benchmark is, and the ways from a forward to the callable that is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from fused_softmax.lab import registry
from fused_softmax.lab.bench.inputs import Inputs, Scores

Call = Callable[..., Any]


def over_rows(function: Call) -> Call:
    """x -> function(x, -1)."""
    return lambda x: function(x, -1)


@dataclass(frozen=True)
class Op:
    """One workload. A result is a tensor, or a tuple of tensors named by `parts`: rows first, or one number.

    `call` turns a function with the public signature, ours or torch's, into a forward over the inputs. `gradient` turns
    a forward into a callable that takes the gradient too. `own` and `torch` are forwards that replace those of the
    registry's functions. `exact` takes float64 rows of the first `by_row` inputs (None: of all) and the other inputs
    unchanged, and returns float64 rows of every part. Where a system returns one number for a part, that number is the
    sum of the rows.
    """

    name: str
    inputs: Callable[..., Inputs]  # of (n_rows, n_cols, dtype, device, seed), and of `scores` where the case has some
    elements: Callable[..., tuple[int, int]]  # (n_rows, n_cols[, scores]) -> elements that must be (read, written)
    ceiling: Literal["copy", "read", "add"]
    # of a boolean mask, of targets or ids, and of numbers of each row, which are read too
    other_bytes: Callable[..., int] = lambda n_rows, n_cols, scores=None: 0
    of: str = ""  # the registry's op; default: the name
    call: Callable[[Call], Call] = over_rows
    gradient: Callable[[Call], Call] | None = None
    own: Call | None = None
    torch: Call | None = None
    exact: Call | None = None
    formula: Call | None = None  # the forward that torch.compile gets, where that is not torch's
    outputs: tuple[str, ...] = ()  # default: the registry's
    by_row: int | None = None
    # torch rounds intermediate results to the inputs' dtype, so its error is no bound for ours
    coarse: bool = False
    # the inputs -> the largest number that a row of the gradient is a difference of: the unit of its errors
    largest_term: Call | None = None
    # the inputs' rows -> the numbers of each row whose differences its gradient is, as float32 has them
    row_term: Call | None = None
    family: str = ""  # the results file of its records; default: `of`
    plans_gradient: bool = False  # whether the plan to show is that of the gradient
    causal: bool = False  # whether it is that of causal scores
    planned: Callable[..., Inputs] = lambda *inputs: inputs[:1]  # the inputs that the plan depends on: x, and a mask
    # over another dimension than the last: an input or a result -> its rows, by which results are judged
    as_rows: Callable[[Tensor], Tensor] = lambda t: t
    dim: int = -1

    @property
    def spec(self) -> registry.OpSpec:
        """The registry's entry."""
        return registry.OPS[self.of or self.name]

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the results."""
        return self.outputs or self.spec.outputs

    @property
    def ours(self) -> Call:
        """A new callable over the inputs that runs our kernels."""
        return self.measured(self.own or self.call(self.spec.function))

    @property
    def torch_call(self) -> Call:
        """A new callable over the inputs that runs torch's own kernels."""
        return self.measured(self._torch_forward)

    @property
    def reference(self) -> Call:
        """A callable over rows of float64 inputs."""
        return self.exact or self.measured(self.call(self.spec.reference))

    @property
    def _torch_forward(self) -> Call:
        return self.torch or self.call(self.spec.torch_way)

    def compiled(self, compile: Callable[[Call], Call]) -> Call:
        """A new callable over the inputs that runs what `compile`, such as torch.compile, makes of torch's forward."""
        return self.measured(compile(self.formula or self._torch_forward))

    def measured(self, forward: Call) -> Call:
        """The callable that is timed: the forward, or the forward with its gradient."""
        return self.gradient(forward) if self.gradient else forward

    def bytes_moved(self, n_rows: int, n_cols: int, itemsize: int, scores: Scores | None = None) -> int:
        """Bytes that any implementation must read and write: the numerator of everyone's GB/s."""
        of = (n_rows, n_cols) if scores is None else (n_rows, n_cols, scores)
        return sum(self.elements(*of)) * itemsize + self.other_bytes(*of)


def parts_of(result: Any) -> tuple[Tensor, ...]:
    """A result as a tuple of tensors."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


# --- from a forward to the timed callable ---------------------------------------------------------------------------


def through_autograd(forward: Call) -> Call:
    """(logits that need a gradient, the result's gradient) -> the logits' gradient, forward included."""

    def call(x: Tensor, dy: Tensor) -> Tensor:
        # torch.enable_grad() would add a microsecond
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        try:
            return torch.autograd.grad(forward(x), x, dy)[0]
        finally:
            torch._C._set_grad_enabled(before)

    return call


def with_gradient(loss: Call, *, overwrites: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """(logits, targets, ...) -> (mean loss, the logits' gradient) of a differentiable loss.

    A loss that overwrites its logits gets logits of its own, made at the first call and so outside of every time.
    """
    own: dict[int, Tensor] = {}

    def call(x: Tensor, target: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if overwrites:
            if x.data_ptr() not in own:
                own[x.data_ptr()] = x.clone()
            x = own[x.data_ptr()]
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = loss(leaf, target)
            (dx,) = torch.autograd.grad(value, leaf)
        return value.detach(), dx

    return call


def backward_alone(forward: Call) -> Callable[..., Tensor]:
    """(logits, ids, upstream gradients) -> gradient, of a graph that is made at the first call and kept."""
    graphs: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}

    def call(x: Tensor, ids: Tensor, *upstream: Tensor) -> Tensor:
        if x.data_ptr() not in graphs:
            # a compiled forward must not let its backward, which runs many times, overwrite its saved tensors
            with torch.enable_grad(), functorch_config.patch(donated_buffer=False):
                leaf = x.detach().requires_grad_()
                graphs[x.data_ptr()] = leaf, tuple(forward(leaf, ids))
        leaf, outputs = graphs[x.data_ptr()]
        gradients = [g.to(out.dtype) for g, out in zip(upstream, outputs, strict=True)]
        return torch.autograd.grad(outputs, leaf, gradients, retain_graph=True)[0]

    return call
