"""Subclasses of torch.nn's modules that run our kernels: same constructor, repr, attributes and (empty) state dict.

A model that was saved with torch's modules loads into these modules, and the other way round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .functional import log_softmax, softmax
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
