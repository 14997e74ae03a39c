"""What an op is told next to its rows, as one value that its launches and its decomposition share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

TORCH: Any = object()  # PyTorch's own kernel runs, because ours did not compile
Flags = tuple[tuple[str, Any], ...]  # a kernel's own constexprs


class LossKind:
    """arithmetic: what a logit takes, an "exponential", more where "smoothed", and most where "capped". flags: the
    kernels' own. There is one object of each kind, so a key may hold it."""

    __slots__ = ("arithmetic", "flags")

    def __init__(self, arithmetic: str, flags: Flags) -> None:
        self.arithmetic, self.flags = arithmetic, flags


# by (weighted, smooth, capped)
LOSS_KINDS = {
    (weighted, smooth, capped): LossKind(
        "capped" if capped else "smoothed" if smooth else "exponential",
        (("WEIGHTED", weighted), ("SMOOTH", smooth), ("SOFTCAP", capped)),
    )
    for weighted in (False, True)
    for smooth in (False, True)
    for capped in (False, True)
}


def weight_facts_of(weight: Tensor | None, smoothing: float) -> Tensor | None:
    """(the sum of the weights, a class of the largest one), where a loss has both.  # [2], of the weights' dtype

    Above 2^24 the class is rounded; the kernels need its logit only as one near the others.
    """
    if weight is None or not weight.numel() or not smoothing:
        return None
    return torch.stack((weight.sum(), weight.argmax().to(weight.dtype)))


class CrossEntropy(NamedTuple):
    """The arguments of a cross-entropy next to its logits. target: (n_rows,) int64; weight: (n_cols,) float32."""

    target: Tensor
    weight: Tensor | None
    weight_facts: Tensor | None  # [2] float32, where there are weights and smoothing: `weight_facts_of`
    ignore_index: int
    reduction: str
    smoothing: float
    softcap: float | None
    z_loss: float
    denominator: Tensor | None = None  # [1] float32: the divisor of a mean, if it is not the number of targets

    @property
    def kind(self) -> LossKind:
        """The options that the launches of this loss depend on, besides its reduction."""
        return LOSS_KINDS[self.weight is not None, self.smoothing > 0.0, self.softcap is not None]

    @property
    def numbers(self) -> tuple[float, ...]:
        return (self.smoothing, 1.0 if self.softcap is None else self.softcap, self.z_loss)

    def vectors(self, unused: Any) -> tuple[Tensor, Any, Any]:
        """target, weight and weight_facts as a kernel takes them; `unused` stands where there are none."""
        weight = unused if self.weight is None else self.weight
        return self.target, weight, unused if self.weight_facts is None else self.weight_facts


def scale_flag(scale: float | Tensor) -> int:
    """How the kernels of statistics scale logits: not at all (0), by one number (1), each row by its own (2)."""
    return 2 if isinstance(scale, Tensor) else int(scale != 1.0)
