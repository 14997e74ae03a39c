"""DTensors in the public functions: sharded over rows, and sharded over the columns of a row.

Sharded over rows, each rank runs the one-GPU op on its own rows, and nothing is exchanged. Sharded over columns, as a
ColwiseParallel output layer leaves them, the op of this package runs on the dimension of the mesh that holds them.
Layouts that are neither are PyTorch's, which gathers what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_ops.outputs import TokenStatistics
from ..torch_ops.route import SHARDED
from . import sharding_rules

Op = Callable[..., Any]


class Layout(NamedTuple):
    """How a DTensor's dimension `dim` lies on its mesh. held: the mesh's dimension that it is sharded over, or None."""

    mesh: Any
    placements: tuple[Any, ...]
    dim: int
    held: int | None
    shape: torch.Size

    def where(self) -> dict[str, Any]:
        """The arguments that tell an op of this package which columns are this rank's."""
        assert self.held is not None
        return dict(group=self.mesh.get_group(self.held), vocab_size=self.shape[self.dim])

    def of_rows(self) -> tuple[Any, ...]:
        """The placements of what has no dimension `dim`."""
        from torch.distributed.tensor import Replicate, Shard

        return tuple(
            p if not p.is_shard() else Replicate() if p.dim == self.dim else Shard(p.dim - (p.dim > self.dim))
            for p in self.placements
        )

    def splits_rows(self) -> bool:
        """Whether ranks hold different rows."""
        return any(p.is_shard() for p in self.of_rows())

    def wrapped(self, local: Tensor, placements: Sequence[Any], shape: Sequence[int]) -> Tensor:
        """This rank's part of a DTensor of this shape."""
        from torch.distributed.tensor import DTensor

        stride = torch.empty(tuple(shape), device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    def local_rows(self, name: str, t: Tensor) -> Tensor:
        """This rank's part of a tensor that has a value for each row, or several."""
        from torch.distributed.tensor import DTensor

        if isinstance(t, DTensor):
            return t.redistribute(self.mesh, self.of_rows()).to_local()
        if self.splits_rows():
            raise ValueError(
                f"{name} must be a DTensor, as ranks hold different rows of the logits; make one of it with "
                "torch.distributed.tensor.distribute_tensor or DTensor.from_local"
            )
        return t


def layout_of(x: Any, dim: int) -> Layout | None:
    """The layout of a DTensor, if its placements are whole or sharded, and one mesh dimension at most splits dim."""
    from torch.distributed.tensor import Shard

    sharding_rules.register()
    held, dim = None, dim % max(1, x.dim())
    for i, p in enumerate(x.placements):
        if p.is_replicate():
            continue
        if type(p) is not Shard:
            return None
        if p.dim % x.dim() == dim:
            if held is not None:
                return None
            held = i
    return Layout(x.device_mesh, tuple(x.placements), dim, held, x.shape)


def _softmax(parallel_op: Op) -> Op:
    def handle(public: Op, x: Any, dim: Any, dtype: torch.dtype | None) -> Tensor | None:
        if type(dim) is not int or not -x.dim() <= dim < x.dim():
            return None
        layout = layout_of(x, dim)
        if layout is None:
            return None
        local = x.to_local()
        if layout.held is None:
            y = public(local, dim, dtype)
        else:
            y = parallel_op(local.movedim(layout.dim, -1), dtype=dtype, **layout.where()).movedim(-1, layout.dim)
        return layout.wrapped(y, layout.placements, layout.shape)

    return handle


def _logsumexp(parallel_op: Op) -> Op:
    def handle(public: Op, x: Any, dim: Any, keepdim: bool) -> Tensor | None:
        if type(dim) is not int or not -x.dim() <= dim < x.dim() or keepdim is not False:
            return None
        layout = layout_of(x, dim)
        if layout is None:
            return None
        local = x.to_local()
        if layout.held is None:
            lse = public(local, dim)
        else:
            # torch.logsumexp has the logits' dtype
            lse = parallel_op(local.movedim(layout.dim, -1), **layout.where()).to(x.dtype)
        shape = [n for d, n in enumerate(x.shape) if d != layout.dim]
        return layout.wrapped(lse, layout.of_rows(), shape)

    return handle


def _cross_entropy(parallel_op: Op) -> Op:
    def handle(
        public: Op, x: Any, target: Tensor, weight: Any, reduction: str, options: dict[str, Any]
    ) -> Tensor | None:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        layout = layout_of(x, 1 if x.dim() > 1 else 0) if x.dim() in (1, 2) else None
        if layout is None or (reduction == "mean" and layout.splits_rows()) or target.is_floating_point():
            return None
        local, at = x.to_local(), layout.local_rows("target", target)
        options = options | dict(reduction=reduction)
        if layout.held is None:
            loss = public(local, at, weight.full_tensor() if isinstance(weight, DTensor) else weight, **options)
        else:
            where = layout.where()
            if isinstance(weight, DTensor):
                spread = [Shard(0) if i == layout.held else Replicate() for i in range(layout.mesh.ndim)]
                weight = weight.redistribute(layout.mesh, spread).to_local()
            elif weight is not None:
                if weight.shape != (where["vocab_size"],):
                    raise RuntimeError(
                        f"cross_entropy(): weight {tuple(weight.shape)} must have one number for each of the "
                        f"{where['vocab_size']} classes"
                    )
                start = -(-where["vocab_size"] // where["group"].size()) * where["group"].rank()
                weight = weight[start : start + local.shape[-1]]
            loss = parallel_op(local, at, weight, **options, **where)
        if reduction == "none":
            return layout.wrapped(loss, layout.of_rows(), target.shape)
        summed = [Partial() if p.is_shard() else Replicate() for p in layout.of_rows()]
        return layout.wrapped(loss, summed, ())

    return handle


def _token_logprobs(parallel_op: Op) -> Op:
    def handle(public: Op, x: Any, token_ids: Tensor, temperature: Any, entropy: bool, lse: bool) -> Any:
        layout = layout_of(x, -1)
        if layout is None:
            return None
        if isinstance(temperature, Tensor) and temperature.dim():
            temperature = layout.local_rows("temperature", temperature.expand(x.shape[:-1]))
        local, ids = x.to_local(), layout.local_rows("token_ids", token_ids)
        options = dict(temperature=temperature, return_entropy=entropy, return_logsumexp=lse)
        if layout.held is None:
            found = public(local, ids, **options)
        else:
            found = parallel_op(local, ids, **options, **layout.where())
        rows = layout.of_rows()
        if isinstance(found, Tensor):
            return layout.wrapped(found, rows, token_ids.shape)
        shapes = (token_ids.shape, x.shape[:-1], x.shape[:-1])
        parts = (None if t is None else layout.wrapped(t, rows, s) for t, s in zip(found, shapes, strict=True))
        return TokenStatistics(*parts)  # type: ignore[arg-type]

    return handle


def register(softmax: Op, log_softmax: Op, logsumexp: Op, cross_entropy: Op, token_logprobs: Op) -> None:
    """Lets the public functions hand DTensors to these ops of this package."""
    sharding_rules.register_if_loaded()
    SHARDED.update(
        softmax=_softmax(softmax),
        log_softmax=_softmax(log_softmax),
        logsumexp=_logsumexp(logsumexp),
        cross_entropy=_cross_entropy(cross_entropy),
        token_logprobs=_token_logprobs(token_logprobs),
    )
