"""Cross-entropy and log-probabilities of rows that are spread over ranks: ours, and others' ways, rendered faithfully.

A way is a function of (local logits, targets, shard), whose result is the mean loss, or each row's log-probability. All
ranks hold as many columns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fused_softmax as fs
from fused_softmax import parallel
from fused_softmax.launch.torch_private import all_gather_into_tensor, wait_tensor

LOSS, LOGPROBS = "cross_entropy", "token_logprobs"
OPS = (LOSS, LOGPROBS)


@dataclass(frozen=True)
class Place:
    """The ranks, and this one's columns."""

    rank: int
    ranks: int
    width: int
    mesh: Any

    @property
    def start(self) -> int:
        return self.rank * self.width


Way = Callable[[Tensor, Tensor, Place], Tensor]


@dataclass(frozen=True)
class System:
    """name: as records have it. ways: by op. compiled: what torch.compile makes of it. around: what a call runs in."""

    name: str
    ways: dict[str, Way]
    compiled: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def _ours(x: Tensor, target: Tensor, at: Place) -> Tensor:
    return parallel.cross_entropy(x, target)


def _our_logprobs(x: Tensor, target: Tensor, at: Place) -> Tensor:
    logprobs = parallel.token_logprobs(x, target)
    assert isinstance(logprobs, Tensor)
    return logprobs


# --- torch's loss_parallel, and torchtitan's loss, which widens the logits and compiles it ----------------------------


def _loss_parallel() -> AbstractContextManager[Any]:
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def _sharded(x: Tensor, at: Place) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(x, at.mesh, [Shard(x.dim() - 1)], run_check=False)


def _torchs(x: Tensor, target: Tensor, at: Place, reduction: str = "mean") -> Tensor:
    loss: Any = F.cross_entropy(_sharded(x, at), target, reduction=reduction)
    return loss.to_local()


def _torchs_logprobs(x: Tensor, target: Tensor, at: Place) -> Tensor:
    return -_torchs(x, target, at, "none")


def _torchtitans(x: Tensor, target: Tensor, at: Place) -> Tensor:
    loss: Any = F.cross_entropy(_sharded(x, at).float(), target)
    return loss.to_local()


# --- Megatron-LM: two collectives, and float32 probabilities kept -----------------------------------------------------


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    return logits, logits.max(dim=-1)[0]


def _predicted(
    logits: Tensor, target: Tensor, largest: Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = logits - largest.unsqueeze(-1)
    outside = (target < start) | (target >= stop)
    at = (target - start).masked_fill(outside, 0)
    predicted = logits.gather(1, at.unsqueeze(1)).squeeze(1).masked_fill(outside, 0.0)
    exponentials = logits.exp()
    return outside, at, torch.cat((predicted, exponentials.sum(dim=-1))), exponentials


def _loss(exponentials: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    predicted, total = both.split(both.shape[0] // 2)
    return exponentials / total.unsqueeze(-1), torch.log(total) - predicted


def _gradient(softmax: Tensor, outside: Tensor, at: Tensor, g: Tensor) -> Tensor:
    update = (~outside).float().unsqueeze(1)
    dx = softmax.scatter_add(1, at.unsqueeze(1), -update)
    return (dx * g.unsqueeze(-1)).to(torch.bfloat16)


_compiled_pieces: list[Any] = []


def _pieces(compiled: bool) -> list[Any]:
    plain: list[Any] = [_largest, _predicted, _loss, _gradient]
    if not compiled:
        return plain
    if not _compiled_pieces:
        _compiled_pieces.extend(torch.compile(piece, dynamic=False) for piece in plain)
    return _compiled_pieces


class _Megatron(torch.autograd.Function):
    """megatron.core.fusions.fused_cross_entropy: its pieces between collectives, compiled as there where `compiled`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, at: Place, compiled: bool) -> Tensor:
        largest, predicted, loss, _ = _pieces(compiled)
        logits, maxima = largest(x)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        outside, place, both, exponentials = predicted(logits, target, maxima, at.start, at.start + at.width)
        del logits
        dist.all_reduce(both)
        softmax, found = loss(exponentials, both)
        ctx.save_for_backward(softmax, outside, place)
        ctx.compiled = compiled
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return _pieces(ctx.compiled)[3](*ctx.saved_tensors, g), None, None, None


def _megatron(compiled: bool, sign: float, mean: bool) -> Way:
    def way(x: Tensor, target: Tensor, at: Place) -> Tensor:
        found = sign * _Megatron.apply(x, target, at, compiled)
        return found.mean() if mean else found

    return way


# --- all columns on every rank, and the one-GPU op --------------------------------------------------------------------


class _Gathered(torch.autograd.Function):
    """Whole rows of every rank's columns; backward takes this rank's columns of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Place) -> Tensor:
        ctx.at = at
        # the group's name is that of the default group
        group = dist.group.WORLD
        assert group is not None
        parts = wait_tensor(all_gather_into_tensor(x, at.ranks, group.group_name))
        return parts.view(at.ranks, *x.shape).transpose(0, 1).reshape(x.shape[0], -1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g[:, ctx.at.start : ctx.at.start + ctx.at.width], None


def _gathered_loss(x: Tensor, target: Tensor, at: Place) -> Tensor:
    return fs.cross_entropy(_Gathered.apply(x, at), target)


def _gathered_logprobs(x: Tensor, target: Tensor, at: Place) -> Tensor:
    logprobs = fs.token_logprobs(_Gathered.apply(x, at), target)
    assert isinstance(logprobs, Tensor)
    return logprobs


SYSTEMS = (
    System("fused_softmax", {LOSS: _ours, LOGPROBS: _our_logprobs}),
    System("torch loss_parallel", {LOSS: _torchs, LOGPROBS: _torchs_logprobs}, around=_loss_parallel),
    System("megatron", {LOSS: _megatron(False, 1.0, True), LOGPROBS: _megatron(False, -1.0, False)}),
    System("torchtitan", {LOSS: _torchtitans}, around=_loss_parallel),
    System("all_gather, one-GPU op", {LOSS: _gathered_loss, LOGPROBS: _gathered_logprobs}),
    System("fused_softmax, compiled", {LOSS: _ours, LOGPROBS: _our_logprobs}, compiled=True),
    System("megatron, pieces compiled", {LOSS: _megatron(True, 1.0, True), LOGPROBS: _megatron(True, -1.0, False)}),
    System("torchtitan, compiled", {LOSS: _torchtitans}, compiled=True, around=_loss_parallel),
    System(
        "torch loss_parallel, compiled",
        {LOSS: _torchs, LOGPROBS: _torchs_logprobs},
        compiled=True,
        around=_loss_parallel,
    ),  # fmt: skip
)
