"""The ways to compute a linear loss: ours, PyTorch's own, and the packages that have one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_softmax as fs
from fused_softmax.lab.bench.systems import Kind

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
OPS = ("linear_cross_entropy", "linear_cross_entropy_none", "linear_token_logprobs")
MEAN, NONE, LOGPROBS = OPS


@dataclass(frozen=True)
class System:
    """A way to compute an op's loss; `build` imports what it needs and returns loss(input, weight, target)."""

    name: str
    op: str
    kind: Kind
    build: Callable[[], Loss]
    package: str = ""

    def missing(self) -> str:
        if self.package and find_spec(self.package) is None:
            return f"needs the package {self.package}"
        if self.name == "F.linear_cross_entropy" and not hasattr(F, "linear_cross_entropy"):
            return f"torch {torch.__version__} has none: it needs 2.13"
        return ""


def ours(**options: Any) -> Loss:
    return lambda x, weight, target: fs.linear_cross_entropy(x, weight, target, **options)


def plain(reduction: str) -> Loss:
    return lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target, reduction=reduction)


def log_softmax(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities as most programs take them: in float32, as bfloat16 has too few digits."""
    return torch.log_softmax(F.linear(x, weight).float(), -1).gather(-1, target[:, None])[:, 0]


def _logsumexp(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """As verl's logprobs_from_logits without flash-attn: each row's logit less its logsumexp, in the logits' dtype."""
    logits = F.linear(x, weight)
    return logits.gather(-1, target[:, None])[:, 0] - torch.logsumexp(logits, -1)


def _compiled(loss: Loss) -> Callable[[], Loss]:
    def build() -> Loss:
        torch._dynamo.reset()
        return torch.compile(loss, dynamic=False, fullgraph=True)

    return build


def _torchs_chunked() -> Loss:
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda x, weight, target: F.linear_cross_entropy(x, weight, target, options=options)


def _liger(**options: Any) -> Callable[[], Loss]:
    def build() -> Loss:
        function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
        return lambda x, weight, target: function(x, weight, target, **options)

    return build


def _liger_cute(result: Loss) -> Callable[[], Loss]:
    """Liger's CuTe kernels, which hold no logits. result: of (-log-probabilities of targets, weight, target)."""

    def build() -> Loss:
        module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
        function = module.LigerFusedLinearScaledCrossEntropyFunction
        return lambda x, weight, target: result(function.apply(x, weight, target), weight, target)

    return build


def _quack(**options: Any) -> Callable[[], Loss]:
    """As its module calls it: in chunks, where all sizes are multiples of 8.

    tuned=True would time its plain products' tiles at the first call of a shape, which takes minutes.
    """

    def build() -> Loss:
        module = importlib.import_module("quack.linear_cross_entropy")

        def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            if any(size % 8 for size in (*x.shape, weight.shape[0])):
                return module.linear_cross_entropy_func(x, weight, None, target)
            return module.chunked_linear_cross_entropy(x, weight, target, tuned=False, **options)

        return loss

    return build


def _cut() -> Loss:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda x, weight, target: function(x, weight, target)


def trl() -> Loss:
    """TRL's fused head, as its trainers call it: chunks of 4,096 rows by 32,768 columns, float32 sums of gradients."""
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    return lambda x, weight, target: function.apply(
        x, weight, None, target, 1.0, 32768, None, 1.0, ("log_probs",)
    )[0]  # fmt: skip


def _token_logprobs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    found = fs.linear_token_logprobs(x, weight, target)
    assert isinstance(found, Tensor)
    return found


SYSTEMS = (
    System("fused_softmax", MEAN, "ours", lambda: ours()),
    System("fused_softmax, 4096 rows a chunk", MEAN, "ours", lambda: ours(chunk_rows=4096)),
    System('fused_softmax, accumulate="weight"', MEAN, "ours", lambda: ours(accumulate="weight")),
    System("fused_softmax, float32 logits", MEAN, "ours", lambda: ours(logits_dtype=torch.float32)),
    System("torch", MEAN, "torch", lambda: plain("mean")),
    System("torch.compile", MEAN, "peer", _compiled(plain("mean"))),
    System("F.linear_cross_entropy", MEAN, "peer", _torchs_chunked),
    System("liger", MEAN, "peer", _liger(), "liger_kernel"),
    System("liger, chunks x 16", MEAN, "peer", _liger(chunk_mem_const=16), "liger_kernel"),
    System("liger, CuTe", MEAN, "peer", _liger_cute(lambda nll, *_: nll.mean()), "cutlass"),
    System("quack", MEAN, "peer", _quack(), "quack"),
    System("quack, plain products", MEAN, "peer", _quack(use_scaled_exp=False), "quack"),
    System("cut_cross_entropy", MEAN, "peer", _cut, "cut_cross_entropy"),
    System("fused_softmax", NONE, "ours", lambda: ours(reduction="none")),
    System("torch", NONE, "torch", lambda: plain("none")),
    System("liger, CuTe", NONE, "peer", _liger_cute(lambda nll, *_: nll), "cutlass"),
    System("fused_softmax", LOGPROBS, "ours", lambda: _token_logprobs),
    System("torch", LOGPROBS, "torch", lambda: log_softmax),
    System("logsumexp, as verl", LOGPROBS, "peer", lambda: _logsumexp),
    System("liger, CuTe", LOGPROBS, "peer", _liger_cute(lambda nll, *_: -nll), "cutlass"),
    System("trl", LOGPROBS, "peer", trl, "trl"),
)
