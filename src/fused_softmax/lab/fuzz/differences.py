"""Where we choose to differ from torch: the documented cases, each with the results that it excuses, as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from .draw import Case
from .inputs import Inputs


def ignored_rows(case: Case, inputs: Inputs, name: str, got: Tensor) -> Tensor | None:
    """cross_entropy: an ignored row with an infinity or NaN, or whose logsumexp has an infinite square, has gradient 0;
    torch's is NaN."""
    if case.op != "cross_entropy" or name not in ("d_x", "again_x") or case.way in ("patch", "vmap"):
        return None
    ignored = inputs.arguments["target"] == case.options.get("ignore_index", -100)
    largest = inputs.x.detach().double().abs().amax(case.dims[0])
    ignored = ignored & ~(largest < 1e19)
    return ignored.unsqueeze(case.dims[0]) & (got == 0)


def infinite_temperature(case: Case, inputs: Inputs, name: str, got: Tensor) -> Tensor | None:
    """token_logprobs: a logit of -inf stays hidden at an infinite temperature, and one of +inf makes the logsumexp
    inf, where torch has inf/inf = NaN; only rows that hold an infinity at an infinite temperature."""
    temperature = inputs.arguments.get("temperature", 1.0)
    if case.op != "token_logprobs" or (not isinstance(temperature, Tensor) and temperature != float("inf")):
        return None
    x = inputs.x.detach() if inputs.batch_dim is None else inputs.x.detach().movedim(inputs.batch_dim, 0)
    rows = x.isinf().any(-1) & torch.as_tensor(temperature).isinf().to(x.device)
    if name in ("d_x", "again_x"):
        of_x = rows.unsqueeze(-1).expand(x.shape)
        return of_x if inputs.batch_dim is None else of_x.movedim(0, inputs.batch_dim)
    return rows.reshape((*rows.shape, *(1,) * (got.dim() - rows.dim())))


def gradient_of_nothing(case: Case, inputs: Inputs, name: str, got: Tensor) -> Tensor | None:
    """cross_entropy: a mean without a target is NaN, but no logit has a gradient, and so the gradient of the
    gradient in the upstream is 0; torch makes 0/0 of it."""
    if case.op != "cross_entropy" or name != "dd_g_loss" or case.options.get("reduction", "mean") != "mean":
        return None
    return (got == 0) & ~(inputs.arguments["target"] != case.options.get("ignore_index", -100)).any()


def overflow_of_smoothing(case: Case, inputs: Inputs, name: str, got: Tensor) -> Tensor | None:
    """cross_entropy: smoothed losses of logits whose log p, or its sum over what is added up, is beyond float32's
    largest number: infinite, where torch adds infinities of both signs, or multiplies one by 0, to NaN."""
    if case.op != "cross_entropy" or name != "loss" or not case.options.get("label_smoothing", 0.0) > 0:
        return None
    if not inputs.x.numel():
        return None
    # a logit of -inf or NaN makes another loss of its row
    x, dim = inputs.x.detach().double().nan_to_num(0, 0, 0), case.dims[0]
    if inputs.batch_dim is not None:
        x, dim = x.movedim(inputs.batch_dim, 0), dim + 1
    of_rows = (x.amax(dim, keepdim=True) - x).sum(dim)
    size = of_rows.amax() if case.options.get("reduction", "mean") == "none" else of_rows.sum()
    return got.isinf() & (size > torch.finfo(torch.float32).max)


DIFFERENCES = (ignored_rows, infinite_temperature, gradient_of_nothing, overflow_of_smoothing)


def excused(case: Case, inputs: Inputs, name: str, got: Tensor, own: Tensor) -> Tensor | None:
    """Which elements of a result are documented to differ from torch's NaN, or from its 0."""
    masks = [m for m in (difference(case, inputs, name, got) for difference in DIFFERENCES) if m is not None]
    return torch.stack([m.expand(got.shape) for m in masks]).any(0) & own.isnan() if masks else None
