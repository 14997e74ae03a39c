"""Where we choose to differ from torch: the documented cases, each with the results that it excuses."""

from __future__ import annotations

import torch
from torch import Tensor

from .draw import Case
from .inputs import Inputs


def ignored_rows(case: Case, inputs: Inputs, name: str, got: Tensor) -> Tensor | None:
    """cross_entropy: an ignored row with an infinity or NaN has gradient 0; torch's is NaN."""
    if case.op != "cross_entropy" or name not in ("d_x", "again_x") or case.way in ("patch", "vmap"):
        return None
    ignored = inputs.arguments["target"] == case.options.get("ignore_index", -100)
    return ignored.unsqueeze(case.dims[0]) & (got == 0)


def hidden_columns(case: Case, inputs: Inputs, name: str, got: Tensor) -> Tensor | None:
    """masked_softmax: a fully masked row has gradient 0, for an additive mask too, where torch's is NaN."""
    if case.op != "masked_softmax" or name not in ("d_x", "again_x", "d_mask", "again_mask") or case.way == "patch":
        return None
    mask = inputs.arguments.get("mask")
    return got == 0 if mask is not None and mask.dtype is not torch.bool else None


def infinite_temperature(case: Case, inputs: Inputs, name: str, got: Tensor) -> Tensor | None:
    """token_logprobs: a logit of -inf stays hidden at an infinite temperature, where torch has -inf/inf = NaN."""
    options = case.options
    if options.get("temperature") != "inf" and options.get("temperature_of_rows") != "with_inf":
        return None
    return torch.ones_like(got, dtype=torch.bool) if bool((inputs.x == -torch.inf).any()) else None


DIFFERENCES = (ignored_rows, hidden_columns, infinite_temperature)


def excused(case: Case, inputs: Inputs, name: str, got: Tensor, own: Tensor) -> Tensor | None:
    """Which elements of a result are documented to differ from torch's NaN."""
    masks = [m for m in (difference(case, inputs, name, got) for difference in DIFFERENCES) if m is not None]
    return torch.stack([m.expand(got.shape) for m in masks]).any(0) & own.isnan() if masks else None
