"""Subclasses of torch.nn's modules that run our kernels: same constructor, repr, attributes and (empty) state dict.

A model that was saved with torch's modules loads into these modules, and the other way round. LinearCrossEntropyLoss
holds a weight; torch has it from 2.13 on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .functional import log_softmax, softmax
from .linear_losses import linear_cross_entropy
from .losses import cross_entropy


class Softmax(torch.nn.Softmax):
    """`torch.nn.Softmax` with our kernels, over `dim` of any shape. dim=None keeps torch's guess, warning and kernel.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Softmax.html

    >>> Softmax(dim=-1)(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.dim is None else softmax(input, self.dim)


class LogSoftmax(torch.nn.LogSoftmax):
    """`torch.nn.LogSoftmax` with our kernels, over `dim` of any shape. dim=None keeps torch's guess and kernel.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.LogSoftmax.html

    >>> LogSoftmax(dim=-1)(torch.zeros(2))
    tensor([-0.6931, -0.6931])
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.dim is None else log_softmax(input, self.dim)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` with our kernels, and with `cross_entropy`'s softcap, z_loss and inplace_backward.

    The result is float32, as that of `cross_entropy`.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html

    >>> CrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([1, 3]))
    tensor(1.3863)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        softcap: float | None = None,
        z_loss: float = 0.0,
        inplace_backward: bool = False,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.softcap, self.z_loss, self.inplace_backward = softcap, z_loss, inplace_backward

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            inplace_backward=self.inplace_backward,
        )


class LinearCrossEntropyLoss(getattr(torch.nn, "LinearCrossEntropyLoss", torch.nn.Module)):  # type: ignore[misc]
    """A linear layer and the cross-entropy of its logits, by `linear_cross_entropy`: no memory for all logits.

    Args:
        in_features: H. The layer is `linear`, an `nn.Linear`. `loss.linear.weight = embedding.weight` ties it to an
            embedding.
        num_classes: V.
        bias: whether the layer has one.
        device: of the layer.
        dtype: of the layer.

    The other arguments are those of `linear_cross_entropy`.

    Shapes: input (..., H), target (...). torch's module takes `options` in place of chunk_rows and accumulate, and
    more dimensions than (V, H), which this one does not have.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.LinearCrossEntropyLoss.html

    >>> LinearCrossEntropyLoss(8, 4)(torch.zeros(2, 8), torch.tensor([1, 3]))
    tensor(1.3863, grad_fn=<LinearCrossEntropyBackward>)
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        chunk_rows: int | None = None,
        accumulate: str = "float32",
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        self.linear = torch.nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.num_classes, self.out_features, self.options = num_classes, (), None
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.softcap, self.z_loss, self.chunk_rows = softcap, z_loss, chunk_rows
        self.accumulate, self.logits_dtype = accumulate, logits_dtype

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            chunk_rows=self.chunk_rows,
            accumulate=self.accumulate,
            logits_dtype=self.logits_dtype,
        )

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, label_smoothing={self.label_smoothing}, accumulate={self.accumulate!r}"
