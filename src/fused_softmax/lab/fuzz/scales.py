"""The largest number that a row's gradient is made of: what its error is measured in where a difference cancels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fused_softmax.launch.launcher import device_of
from fused_softmax.launch.loss_kernels import BY_CLUSTER, ROWS_OF_PROGRAM, SHARED, size_class
from fused_softmax.torch_ops.decompositions import causally_hidden

from .draw import Case
from .exactness import EPS
from .inputs import Inputs


def upstream_bound(case: Case) -> float:
    """What |dy| hardly exceeds."""
    return {"one": 1.0, "quarter": 0.25, "zeros": 0.0}.get(case.upstream, 4.0)


def input_scale(inputs: Inputs) -> Tensor | None:
    """The largest logit over its temperature, or under its softcap: these are rounded; None where there is neither."""
    temperature, softcap = inputs.arguments.get("temperature"), inputs.arguments.get("softcap")
    if not inputs.x.numel():
        return None
    x = inputs.x.detach().double().nan_to_num(0, 0, 0).abs().amax()
    if softcap is not None:
        return 2 * x.clamp(max=softcap)
    if temperature is None:
        return None
    if isinstance(temperature, Tensor):
        return x * temperature.double().reciprocal().amax().to(x.device)
    return x / float(temperature)


def gradient_size(case: Case) -> float:
    """What the entries of a row's gradient are made of, added up; of gradients that are made of a stored output."""
    if not case.spec.full_outputs:
        return 0.0
    # dy - exp(y)*sum(dy): y is rounded too, and exp(y)*|y| adds up to the row's entropy, log(n_cols) at most
    n = case.n_cols * (2 + math.log(max(1, case.n_cols))) if case.spec.holds == "log-probability" else 1
    return n * upstream_bound(case) * abs(float(case.options.get("scale", 1.0)))


def gradient_scale(case: Case, inputs: Inputs, ref: dict[str, Tensor], bound: float | None = None) -> Tensor | None:
    """Of each row of x's gradient, broadcasting to it; None where its largest entry says it. For |dy| up to `bound`."""
    bound = upstream_bound(case) if bound is None else bound
    batched = inputs.batch_dim is not None
    y = next(iter(ref.values())).detach()
    if case.spec.full_outputs:
        dims = tuple(d + batched for d in case.dims) if y.dim() else (0,)
        p = y.exp() if case.spec.holds == "log-probability" else y
        if case.spec.holds == "log-probability":  # an error of y counts for exp(y) by its size
            p = p * (1 + y.abs())
        top = p.nan_to_num(0, 0, 0).amax(dims, keepdim=True) if y.dim() else p.nan_to_num(0, 0, 0)
        if case.spec.holds == "log-probability":
            # dy - p*sum(dy)
            n = case.n_cols
            top = torch.maximum(top * (n if case.upstream != "random" else 4 * n**0.5), torch.ones_like(top))
        scale = top * bound * abs(float(case.options.get("scale", 1.0)))
        return scale.movedim(0, inputs.batch_dim) if batched else scale  # type: ignore[arg-type]
    if case.op == "cross_entropy":
        return _of_cross_entropy(case, inputs, y) * bound
    if case.op == "token_logprobs":
        temperature = case.options.get("temperature", 1.0)
        by_rows = inputs.arguments.get("temperature")
        factor = torch.as_tensor(1.0 / float(temperature))
        if isinstance(by_rows, Tensor):
            factor = by_rows.reciprocal().amax() if by_rows.numel() else factor
        # each pick adds its upstream gradient to its column, and p times that to all
        return (factor.double() * bound * max(1, int(case.options.get("picks") or 1))).to(y.device)
    return None


def _of_cross_entropy(case: Case, inputs: Inputs, loss: Tensor) -> Tensor:
    weight = inputs.arguments.get("weight")
    largest = loss.new_ones(()) if weight is None else weight.double().amax()
    target = inputs.arguments["target"]
    counts = target != case.options.get("ignore_index", -100)
    scale = largest
    z_loss = case.options.get("z_loss", 0.0)
    if z_loss:
        x = inputs.x.detach().double()
        cap = case.options.get("softcap")
        top = x.abs().nan_to_num(0, 0, 0).amax() if x.numel() else x.sum()
        scale = scale + 2 * z_loss * ((top.clamp(max=cap) if cap else top) + 12)
    if case.options.get("reduction", "mean") == "mean":
        total = (
            counts.sum()
            if weight is None
            else weight.double().take(target.where(counts, 0).long()).where(counts, 0.0).sum()
        )
        total = total if inputs.batch_dim is None else total / max(1, target.shape[0] if target.dim() else 1)
        scale = scale / total.double().clamp(min=1e-30)
    return scale.double()


def of_scaled_logits(case: Case, inputs: Inputs) -> Tensor | None:
    """What rounding the logits over their temperature does to an entry of their gradient; in a row's sum, twice that.

    Ours multiplies by 1/temperature, so that x/temperature is rounded once more than torch's. A difference of two
    logits is off by eps*|x/temperature| at most, and so is p relative to itself; the entries of p add up to 1.
    """
    size = input_scale(inputs)
    factor = gradient_scale(case, inputs, {"": inputs.x})
    return None if size is None or factor is None else EPS * size * factor


def second_scale(case: Case, inputs: Inputs, name: str, ref: dict[str, Tensor]) -> Tensor | None:
    """Of the gradients of the gradient, dd_x and dd_g_*, for a probe h that hardly exceeds 4: one number.

    With s the factor of x (masked_softmax's scale, token_logprobs' 1/temperature) the gradient is s*p*(dy - sum(dy*p)).
    In dy that is linear, dd_g = s*p*(h - sum(h*p)), whatever dy is. In x it brings s again:
    dd_x = s*p*(t - sum(t*p)) with t = s*(h*(dy - sum(dy*p)) - dy*sum(h*p)), where p and t are stored.
    """
    scale = gradient_scale(case, inputs, ref, 1.0 if name.startswith("dd_g") else None)
    if scale is None or not scale.numel():
        return None
    largest = 4 * scale.nan_to_num(0, 0, 0).amax()
    if name == "dd_g_loss" and case.options.get("reduction", "mean") != "none":
        # added up over all rows: their gradients may be off in the same direction, and h is random
        counts = inputs.arguments["target"] != case.options.get("ignore_index", -100)
        return largest * counts.sum().clamp(min=1).double().sqrt()
    if name == "dd_x" and case.op == "masked_softmax":
        return largest * abs(float(case.options.get("scale", 1.0)))
    if name == "dd_x" and case.op == "token_logprobs":
        factor = gradient_scale(case, inputs, ref, 1.0)
        assert factor is not None
        return largest * factor.nan_to_num(0, 0, 0)
    return largest


def of_scores(case: Case, inputs: Inputs, y: Tensor) -> Tensor | None:
    """How far masked_softmax's output y is off because its scores z = scale*x + mask are rounded; None where they are
    x.

    Each rounding moves z by half of eps(float32) of what is rounded, scale*x and the sum. With d the most that a score
    is off, p is most where its own score is z + d and the others are z - d, and least where it is the other way round.
    Scores of 3e8 are off by 32, and any p may then be 0 or 1. What the mask hides is 0 all the same.
    """
    scale, mask = float(case.options.get("scale", 1.0)), inputs.arguments.get("mask")
    added = mask is not None and mask.is_floating_point()
    if case.op != "masked_softmax" or case.dtype == "float64" or (scale == 1.0 and not added) or not y.dim():
        return None
    x = inputs.x.detach() if inputs.batch_dim is None else inputs.x.detach().movedim(inputs.batch_dim, 0)
    z = x.double() * scale
    error = z.abs() if scale != 1.0 else torch.zeros_like(z)
    if mask is not None:
        given = mask.detach()
        if inputs.in_dims.get("mask") is not None:
            given = given.view(given.shape[0], *(1,) * (z.dim() - given.dim()), *given.shape[1:])
        z = z + given.double() if added else z.masked_fill(~given, -torch.inf)
        error = error + z.abs() if added else error
    if case.options.get("causal"):
        z = z.masked_fill(causally_hidden(z), -torch.inf)
    error = EPS / 2 * error.nan_to_num(0, 0, 0)
    p, least, most = y.detach().double(), z - error, z + error
    above = (most - _log_sum_of_others(least)).sigmoid() - p
    below = p - (least - _log_sum_of_others(most)).sigmoid()
    return torch.maximum(above, below).nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)


def _log_sum_of_others(z: Tensor) -> Tensor:
    """For each entry the log of the row's sum of exp(z) without its own; of the largest, which is most of that sum, by
    another sum."""
    largest, top = z.max(-1, keepdim=True)
    z = z - largest  # otherwise a sum of large numbers has no digits left for its logarithm
    of_row = z.logsumexp(-1, keepdim=True)
    others = of_row + (-(z - of_row).exp()).log1p()
    return largest + others.scatter(-1, top, z.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True))


def of_summed_losses(case: Case, inputs: Inputs, ref: Tensor, gradient: bool) -> Tensor | None:
    """How far a sum of cross_entropy's losses, or what their mean is divided by, is off in float32 as it is added up.

    Each of the additions that a term goes through may round the sum by half of eps. No term is negative. Targets that
    count are counted exactly; weights are added up as the losses are, and their sum divides the gradient too.
    """
    reduction, weight = case.options.get("reduction", "mean"), inputs.arguments.get("weight")
    if case.op != "cross_entropy" or case.dtype == "float64" or reduction == "none":
        return None
    sums = (not gradient) + (reduction == "mean" and weight is not None)
    n_rows = inputs.arguments["target"].numel()
    return (
        sums
        * EPS
        / 2
        * additions(n_rows, weight is not None, inputs.x)
        * ref.detach().double().abs().nan_to_num(0, 0, 0)
    )


def of_row_sums(case: Case, inputs: Inputs, ref: Tensor) -> Tensor | None:
    """How far cross_entropy's losses are off because each row's sum of exponentials, at least 1, is rounded.

    A row's loss is (row_max - x_t) + log(row_sum) where these count, and no term is negative: their roundings are
    measured in the loss, but that of row_sum in 1, also where the loss is 0. It moves lse by d, the loss by its weight
    times d, and z_loss*lse^2 by z_loss*2*|lse|*d, at most z_loss*(1 + lse^2)*d. Equal rows are off by the same, so that
    the sum of the rows is off by the sum of these. A softcap's logits are rounded in each row too; the rule has that
    of one row.
    """
    if case.op != "cross_entropy" or case.dtype == "float64":
        return None
    reduction, weight = case.options.get("reduction", "mean"), inputs.arguments.get("weight")
    smoothing, z_loss = (float(case.options.get(name, 0.0)) for name in ("label_smoothing", "z_loss"))
    target = inputs.arguments["target"]
    counts = target != case.options.get("ignore_index", -100)
    of_target = counts.double()
    of_row = of_target * (1.0 + z_loss)
    if weight is not None:
        of_target = weight.detach().double().take(target.where(counts, 0).long()) * of_target
        of_row = (1 - smoothing) * of_target + (smoothing * weight.detach().double().mean() + z_loss) * counts
    off = 4 * EPS * of_row
    if reduction != "none":
        rows = tuple(range(inputs.batch_dim is not None, target.dim()))
        size = input_scale(inputs)
        if size is not None and reduction == "sum":
            off = off + EPS * size * of_row
        off = off.sum(rows) if rows else off
        if reduction == "mean":
            off = off / (of_target.sum(rows) if rows else of_target)
    return (off + 4 * EPS * z_loss * ref.detach().double().abs()).nan_to_num(0, 0, 0)


def additions(n_rows: int, weighted: bool, x: Tensor) -> int:
    """How many additions a loss goes through until all rows are added up: a lane's, then a tree's over the lanes."""
    way = size_class(n_rows)
    if way == SHARED:  # a program's rows, then the sums of the programs
        programs = -(-n_rows // ROWS_OF_PROGRAM)
        return -(-ROWS_OF_PROGRAM // 256) + -(-programs // 256) + 2 * (256).bit_length()
    clustered = not weighted and way == BY_CLUSTER and device_of(x).max_cluster >= 16
    lanes = 16 * 8 * 32 if clustered else 256
    return -(-n_rows // lanes) + lanes.bit_length()
