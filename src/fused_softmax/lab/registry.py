"""Each op once: its public function, torch's own way, its float64 reference, how to draw its inputs, its ways in.

    spec = OPS["masked_softmax"]
    spec.function(x, **arguments)      # ours
    spec.torch_way(x, **arguments)     # a torch user's own expression, in float32 where ours computes in float32
    spec.reference(x, **arguments)     # float64, differentiable

All three take the same arguments and return a tensor, or a tuple as `outputs` names it. `draw` chooses options that
JSON can hold; `arguments` turns them into the functions' arguments. To add an op, add one entry to `OPS`: the fuzzer
draws it, and the benchmark runs it over the last dimension where it takes no other tensor. Other ops need an entry in
bench/ops.py too, with their inputs, bytes and ceiling. `LINEAR_OPS` has the losses that make their own logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import fused_softmax as fs
from fused_softmax import nn
from fused_softmax.lab import reference

from . import arguments, torch_ways

Options = dict[str, Any]
EAGER_WAYS = (
    "function", "module", "patch", "batch_invariant", "out", "autocast", "vmap", "checkpoint", "operator",
)  # fmt: skip
WAYS = (*EAGER_WAYS, "compile", "cuda_graph")


@dataclass(frozen=True)
class OpSpec:
    """One op of the softmax family. `rows` says what a row is: "dim", "dims" (several), "last" or "classes"."""

    name: str
    function: Callable[..., Any]
    torch_way: Callable[..., Any]
    reference: Callable[..., Any]
    rows: str
    outputs: tuple[str, ...]
    draw: Callable[..., Options]
    arguments: Callable[..., dict[str, Any]]
    ways: tuple[str, ...]
    module: Callable[..., Callable[[Tensor], Tensor]] | None = None
    operator: Callable[..., Any] | None = None
    # content of the outputs: a "probability" or a "log-probability" for each column, or a "statistic" for each row, in
    # float32. A gradient is computed from the first two, and is as exact as they are.
    holds: Literal["probability", "log-probability", "statistic"] = "probability"
    # arguments that may need a gradient
    differentiable: tuple[str, ...] = ()
    # arguments with a value for each row: vmap gives each item its own
    by_row: tuple[str, ...] = ()
    # whether torch's own way computes in float32 under autocast
    autocasts: bool = True

    @property
    def full_outputs(self) -> bool:
        """Whether an output has a number for each column, not for each row."""
        return self.holds != "statistic"

    def tensors(self, result: Any) -> dict[str, Tensor]:
        """The result's tensors by name."""
        parts = result if isinstance(result, tuple) else (result,)
        return {name: t for name, t in zip(self.outputs, parts, strict=False) if t is not None}


def _without(*names: str) -> tuple[str, ...]:
    return tuple(way for way in WAYS if way not in names)


def _softmax_operator(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    operator = torch.ops.fused_softmax.softmax
    return operator(x, dim) if dtype is None else operator(x, dim, dtype)


def _log_softmax_operator(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    operator = torch.ops.fused_softmax.log_softmax
    return operator(x, dim) if dtype is None else operator(x, dim, dtype)


def _logsumexp_operator(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    dims = [dim] if isinstance(dim, int) else list(dim)
    operator = torch.ops.fused_softmax.logsumexp
    return operator(x, dims, keepdim) if keepdim else operator(x, dims)


def _masked_operator(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False, fully_masked: str = "nan"
) -> Tensor:
    return torch.ops.fused_softmax.masked_softmax(x, mask, scale, causal, fully_masked == "zero")


def _cross_entropy_module(target: Tensor, **options: Any) -> Callable[[Tensor], Tensor]:
    module = nn.CrossEntropyLoss(**options)
    return lambda x: module(x, target)


@dataclass(frozen=True)
class LinearSpec:
    """A loss that makes its own logits: `of`, an op of OPS, on x @ linear_weight.T + linear_bias.

    Each result is a sum of products, so it is judged by norms and not by a row's own arithmetic: fuzz/linear.py.
    """

    name: str
    function: Callable[..., Any]
    of: str
    ways: tuple[str, ...]


LINEAR_OPS: Mapping[str, LinearSpec] = {
    spec.name: spec
    for spec in (
        LinearSpec(
            "linear_cross_entropy", fs.linear_cross_entropy, "cross_entropy",
            ("function", "module", "checkpoint", "compile"),
        ),
        LinearSpec(
            "linear_token_logprobs", fs.linear_token_logprobs, "token_logprobs", ("function", "checkpoint", "compile")
        ),
    )
}  # fmt: skip
OPS: Mapping[str, OpSpec] = {
    spec.name: spec
    for spec in (
        OpSpec(
            "softmax", fs.softmax, torch.softmax, reference.softmax, "dim", ("y",),
            arguments.draw_softmax, arguments.softmax, WAYS,
            module=lambda dim, dtype=None: nn.Softmax(dim), operator=_softmax_operator,
        ),
        OpSpec(
            "log_softmax", fs.log_softmax, torch.log_softmax, reference.log_softmax, "dim", ("y",),
            arguments.draw_softmax, arguments.softmax, WAYS,
            module=lambda dim, dtype=None: nn.LogSoftmax(dim), operator=_log_softmax_operator,
            holds="log-probability",
        ),
        OpSpec(
            "logsumexp", fs.logsumexp, torch.logsumexp, reference.logsumexp, "dims", ("lse",),
            arguments.draw_logsumexp, arguments.logsumexp, _without("module", "patch"),
            operator=_logsumexp_operator, holds="statistic",
        ),
        OpSpec(
            "masked_softmax", fs.masked_softmax, torch_ways.masked_softmax, reference.masked_softmax, "last", ("y",),
            arguments.draw_masked_softmax, arguments.masked_softmax, _without("module", "out"),
            operator=_masked_operator, differentiable=("mask",), by_row=("mask",), autocasts=False,
        ),
        OpSpec(
            "cross_entropy", fs.cross_entropy, torch_ways.cross_entropy, reference.cross_entropy, "classes", ("loss",),
            arguments.draw_cross_entropy, arguments.cross_entropy, _without("out", "operator"),
            module=_cross_entropy_module, holds="statistic", by_row=("target",),
        ),
        OpSpec(
            "token_logprobs", fs.token_logprobs, torch_ways.token_logprobs, reference.token_logprobs, "last",
            ("logprobs", "entropy", "logsumexp"),
            arguments.draw_token_logprobs, arguments.token_logprobs, _without("module", "out", "operator"),
            holds="statistic", by_row=("token_ids",), autocasts=False,
        ),
    )
}  # fmt: skip
