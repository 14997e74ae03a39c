"""The ops' formulas in plain PyTorch, and their gradients written out; all of it differentiable.

These formulas run where the kernels do not: float64, probability targets, a CPU tensor, torch.func. Gradients of
gradients differentiate them. The gradients are written out because an operator's kernel runs below
autograd. 16-bit logits are widened to float32, so that the results' dtype is the kernels'; memory of the logits' size
is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor, log_softmax, logsumexp, softmax
from torch.nn.functional import cross_entropy as torchs_cross_entropy

from ..launch.layout import HALVES
from ..launch.options import CrossEntropy
from .arguments import least_positive


def widened(t: Tensor) -> Tensor:
    """t in float32 at least."""
    return t.float() if t.dtype in HALVES else t


# --- softmax, log_softmax and logsumexp: gradients, and gradients of gradients ----------------------------------------


def softmax_gradient(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """dx = y*(dy - sum(dy*y)), in dtype."""
    dy_, y_ = widened(dy), widened(y)
    return (y_ * (dy_ - (dy_ * y_).sum(dim, keepdim=True))).to(dtype)


def log_softmax_gradient(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """dx = dy - exp(y)*sum(dy), in dtype."""
    dy_ = widened(dy)
    return (dy_ - widened(y).exp() * dy_.sum(dim, keepdim=True)).to(dtype)


def softmax_double_backward(g: Tensor, dy: Tensor, y: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(the gradient in dy, in y) of dx = y*(dy - sum(dy*y)), for the upstream gradient g of dx."""
    g_, dy_, y_ = widened(g), widened(dy), widened(y)
    gy = (g_ * y_).sum(dim, keepdim=True)
    to_y = g_ * (dy_ - (dy_ * y_).sum(dim, keepdim=True)) - dy_ * gy
    return (y_ * (g_ - gy)).to(dy.dtype), to_y.to(y.dtype)


def log_softmax_double_backward(g: Tensor, dy: Tensor, y: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(the gradient in dy, in y) of dx = dy - exp(y)*sum(dy), for the upstream gradient g of dx."""
    g_, dy_, p = widened(g), widened(dy), widened(y).exp()
    gp = (g_ * p).sum(dim, keepdim=True)
    total = dy_.sum(dim, keepdim=True)
    to_y = -g_ * p * total
    if y.dtype is torch.float16 and y.numel():
        # The gradient of y goes on through log_softmax's own gradient, which maps every multiple of p to 0. A row that
        # float16 cannot hold is written without its multiple of p: what is left is the gradient of the input itself.
        lost = to_y.abs().amax(dim, keepdim=True) > torch.finfo(y.dtype).max
        to_y = -(g_ - gp.where(lost, 0.0)) * p * total
    return (g_ - gp).to(dy.dtype), to_y.to(y.dtype)


def _over_rows(t: Tensor, x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """t, reduced over dim, as a shape that broadcasts over x; in float32 at least."""
    if not keepdim:
        for d in sorted(d % max(1, x.dim()) for d in dim) if dim else range(x.dim()):
            t = t.unsqueeze(d) if x.dim() else t
    return widened(t)


def _probabilities(x: Tensor, lse: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """exp(x - lse); as torch's, NaN where the whole row is -inf."""
    return (widened(x) - _over_rows(lse, x, dim, keepdim)).exp()


def logsumexp_gradient(g: Tensor, x: Tensor, lse: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """dx = g*exp(x - lse), in x's dtype."""
    return _over_rows(g, x, dim, keepdim).mul(_probabilities(x, lse, dim, keepdim)).to(x.dtype)


def logsumexp_double_backward(
    gg: Tensor, g: Tensor, x: Tensor, lse: Tensor, dims: list[int], keepdim: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(the gradient in g, in x, in lse) of dx = g*exp(x - lse), for the upstream gradient gg of dx."""
    gp = widened(gg) * _probabilities(x, lse, dims, keepdim)
    to_x = gp * _over_rows(g, x, dims, keepdim)
    reduced = [d % max(1, x.dim()) for d in dims] or list(range(x.dim()))
    to_g = gp.sum(reduced, keepdim=keepdim) if x.dim() else gp
    to_lse = -to_x.sum(reduced, keepdim=keepdim) if x.dim() else -to_x
    return to_g.to(g.dtype), to_x.to(x.dtype), to_lse.to(lse.dtype)


# --- cross_entropy ----------------------------------------------------------------------------------------------------


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """The logits, in float32 at least, as cap*tanh(logits/cap) where there is a cap; -inf stays."""
    z = widened(logits)
    if softcap is None:
        return z
    hidden = z == -float("inf")
    return (softcap * torch.tanh(z.masked_fill(hidden, 0.0) / softcap)).masked_fill(hidden, -float("inf"))


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    denominator: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of capped logits, plus z_loss*lse^2 of every row that counts.

    A mean divides by `denominator`, of one element, where there is one.
    """
    if denominator is not None and reduction == "mean":
        summed = cross_entropy(logits, target, weight, ignore_index, "sum", label_smoothing, softcap, z_loss)
        return summed / denominator.reshape(())
    z = capped(logits, softcap)
    if z.dim() == 1 and target.dim() == 0 and reduction != "none":
        # one row of two dimensions: of one dimension, torch's mean of nothing is 0 on a GPU, and NaN on a CPU
        z, target = z.unsqueeze(0), target.unsqueeze(0)
    if weight is not None and weight.is_floating_point():
        weight = weight.to(z.dtype)
    options = dict(ignore_index=ignore_index, label_smoothing=label_smoothing)
    empty, weighed_mean = z.numel() == 0, reduction == "mean" and weight is not None
    if empty and weighed_mean and label_smoothing and not target.is_floating_point():
        # 0/0. For its mean, torch selects the weights of the targets that count, and waits for their number
        return torchs_cross_entropy(z, target, weight, reduction="sum", **options) / 0.0  # type: ignore[arg-type]
    if empty or not z_loss:  # without a row or a class, no row has a penalty
        return torchs_cross_entropy(z, target, weight, reduction=reduction, **options)  # type: ignore[arg-type]
    penalty = z_loss * logsumexp(z, dim=0 if z.dim() == 1 else 1) ** 2
    loss = torchs_cross_entropy(z, target, weight, reduction="none", **options)  # type: ignore[arg-type]
    if target.is_floating_point():
        loss = loss + penalty
        return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
    counts = target != ignore_index
    loss = loss + penalty.where(counts, 0.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    of_row = torch.ones_like(loss) if weight is None else weight[target.where(counts, 0)]
    total = of_row.where(counts, 0.0).sum()
    # torch divides each part of a loss by 0, and one part is 0/0
    return torch.where(total == 0.0, float("nan"), loss.sum() / total)


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of losses and statistics of logits x."""
    return x.dtype if x.dtype is torch.float64 else torch.float32


def no_moments(x: Tensor) -> Tensor:
    """Zeros for each row's (row_max, row_sum), where no kernel ran: the formulas need none."""
    return x.new_zeros((x.shape[0], 2), dtype=result_dtype(x))


def cross_entropy_of_rows(x: Tensor, op: CrossEntropy) -> Tensor:
    return cross_entropy(
        x, op.target, op.weight, op.ignore_index, op.reduction, op.smoothing, op.softcap, op.z_loss, op.denominator
    )


def moments_of(z: Tensor) -> Tensor:
    """(row_max, row_sum) of each row of z, (n_rows, 2), as the kernels keep them: row_max is finite or NaN."""
    if not z.numel():
        return no_moments(z)
    row_max = z.amax(1, keepdim=True).clamp(min=torch.finfo(z.dtype).min)
    return torch.cat((row_max, (z - row_max).exp().sum(1, keepdim=True)), 1)


def losses_of_rows(x: Tensor, op: CrossEntropy) -> tuple[Tensor, Tensor]:
    """(each row's loss, its moments), in float32 at least."""
    each = op._replace(reduction="none", denominator=None)
    return cross_entropy_of_rows(x, each), moments_of(capped(x, op.softcap))


def cross_entropy_gradient(g: Tensor, x: Tensor, op: CrossEntropy) -> Tensor:
    """The gradient of `cross_entropy_of_rows` in x, for the upstream gradient g of its result; in x's dtype.

    With p = softmax(z), w the weights, t the target and C columns:
        dz = p*((1 - eps)*w_t + eps/C*sum(w) + 2*z_loss*lse) - eps/C*w - [j = t]*(1 - eps)*w_t
    """
    if not x.shape[1]:  # no target has a column
        return x.clone()
    z = capped(x, op.softcap)
    counts = (op.target != op.ignore_index).unsqueeze(1)
    at = op.target.unsqueeze(1).where(counts, 0)
    weight = z.new_ones(z.shape[1]) if op.weight is None else op.weight.to(z.dtype)
    w_target, spread = weight[at], op.smoothing / z.shape[1] * weight
    factor = (1.0 - op.smoothing) * w_target + spread.sum()
    if op.z_loss:
        factor = factor + 2.0 * op.z_loss * logsumexp(z, 1, keepdim=True)
    dz = (softmax(z, 1) * factor - spread).scatter_add(1, at, -(1.0 - op.smoothing) * w_target)
    if op.softcap is not None:
        # 1 - tanh(u)^2 = 1/cosh(u)^2, which keeps its digits where tanh is nearly 1
        u = (widened(x) / op.softcap).clamp(-40.0, 40.0)
        dz = (dz * u.cosh().reciprocal().square()).masked_fill(z == -float("inf"), 0.0)
    if op.reduction == "mean":
        total = w_target.where(counts, 0.0).sum() if op.denominator is None else op.denominator.reshape(())
        # torch divides each part of a loss by 0, and the part with the target's weight is 0/0
        nothing = (total == 0.0) & ((w_target == 0.0) & counts).any()
        g = g / total.masked_fill(nothing, float("nan"))
    # twice: a row that does not count adds nothing to the gradient of this gradient either, whatever g is divided by
    return (dz * g.reshape(-1, 1).where(counts, 0.0)).where(counts, 0.0).to(x.dtype)


# --- token_logprobs ---------------------------------------------------------------------------------------------------


def statistics(
    logits: Tensor, token_ids: Tensor | None, scale: float | Tensor, entropy: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """(log-probabilities of token_ids, entropy, lse) of logits*scale over the last dim.

    token_ids: (..., n_picks), or (...,) for one id a row; the log-probabilities have its shape.
    """
    z = capped(logits, None) * _by_row(scale)
    lse = logsumexp(z, -1)
    log_p = log_softmax(z, -1)
    picked = None if token_ids is None else _gathered(log_p, token_ids)
    entropies = -(log_p.exp() * _bounded(log_p)).sum(-1) if entropy else None
    return picked, entropies, lse


def _gathered(log_p: Tensor, token_ids: Tensor) -> Tensor:
    if token_ids.dim() < log_p.dim():
        return log_p.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    # pick by pick, as in `statistics_gradient`: PyTorch's gradient of a gather adds to one place in any order, too
    return torch.cat([log_p.gather(-1, of_pick) for of_pick in token_ids.split(1, -1)], -1)


def _bounded(log_p: Tensor) -> Tensor:
    """log(p) as a factor of p: 0*log(0) is 0, and so is its gradient, whatever it is multiplied by.

    exp(-1e4) is 0 in float64 too; the dtype's least number would become infinite by an upstream gradient above 1.
    """
    return log_p.clamp(min=-1e4)


def statistics_and_moments(
    x: Tensor, token_ids: Tensor | None, scale: float | Tensor, entropy: bool
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """(log-probabilities, entropy, lse, moments) of rows x*scale, as `launch.row_statistics.statistics` has them."""
    picked, entropies, lse = statistics(x, token_ids, scale, entropy)
    return picked, entropies, lse, moments_of(capped(x, None) * _by_row(scale))


def _by_row(scale: float | Tensor) -> float | Tensor:
    """The scale as it broadcasts to (..., n_cols); 0, which an infinite temperature gives, is the least number."""
    if not isinstance(scale, Tensor):
        return scale
    return scale.masked_fill(scale == 0.0, least_positive(scale.dtype)).unsqueeze(-1)


def _log_softmax(z: Tensor) -> Tensor:
    """log_softmax over the last dimension, with as many digits for a million columns as for a thousand.

    torch's kernels add the terms of a row one after the other in each thread: 1,609,536 logits of three values in
    float32 have a p that is 0.5% off on a CPU. Its sum adds in pairs.
    """
    if z.shape[-1] == 0:
        return log_softmax(z, -1)
    below = z - z.detach().amax(-1, keepdim=True)
    return below - logsumexp(below, -1, keepdim=True)


def statistics_gradient(
    g_picked: Tensor | None,
    g_entropy: Tensor | None,
    g_lse: Tensor | None,
    x: Tensor,
    ids: Tensor | None,
    scale: float | Tensor,
) -> Tensor:
    """The gradient of `statistics` in x, (..., n_cols), for the upstream gradients that there are; in x's dtype."""
    by_row = _by_row(scale)
    z = capped(x, None) * by_row
    log_p = _log_softmax(z)
    p, dz = log_p.exp(), torch.zeros_like(log_p)
    if g_lse is not None:
        # in a row with +inf, torch.logsumexp has a gradient where log_softmax is NaN
        lse = logsumexp(z, -1, keepdim=True)
        dz = dz + p.where(lse != float("inf"), (z - lse).exp()) * g_lse.unsqueeze(-1)
    if g_picked is not None and ids is not None:
        if ids.dim() < p.dim():
            g_picked, ids = g_picked.unsqueeze(-1), ids.unsqueeze(-1)
        g_picked = g_picked.to(p.dtype)
        dz = dz - p * g_picked.sum(-1, keepdim=True)
        # pick by pick: a row may name a token twice, and a GPU adds two numbers to one place in any order
        for of_pick, g_of_pick in zip(ids.split(1, -1), g_picked.split(1, -1), strict=True):
            dz = dz.scatter_add(-1, of_pick, g_of_pick)
    if g_entropy is not None:
        log_p = _bounded(log_p)
        dz = dz - g_entropy.unsqueeze(-1) * p * (log_p - (p * log_p).sum(-1, keepdim=True))
    return (dz * by_row).to(x.dtype)


# --- masked_softmax ---------------------------------------------------------------------------------------------------


def scaled(z: Tensor, scale: float) -> Tensor:
    """z*scale, also of a positive scale that z's dtype holds only as 0 or as a subnormal number of few digits.

    Two factors then: -inf stays -inf, and the largest finite z keeps its digits.
    """
    limits = torch.finfo(z.dtype)
    if not 0.0 < scale < limits.tiny:
        return z * scale
    first = limits.tiny**0.5
    return z * first * max(scale / first, least_positive(z.dtype))


def masked_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    """softmax(scale*x) over the last dimension of the visible columns; `zero`: 0, not NaN, for a row without any."""
    z = scaled(widened(x), scale)
    if mask is not None:
        z = z.masked_fill(~mask, -float("inf")) if mask.dtype is torch.bool else z + mask.to(z.dtype)
    if causal:
        z = z.masked_fill(causally_hidden(x), -float("inf"))
    if zero and z.shape[-1:].numel():
        unseen = (z == -float("inf")).all(-1, keepdim=True)
        return softmax(z.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0).to(x.dtype)
    return softmax(z, -1).to(x.dtype)


def masked_softmax_gradient(y: Tensor, dy: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """The gradient of `masked_softmax` in x from its result y, whose dtype it has.

    It is exactly 0 where the boolean mask or causality hides, also in a row of NaN, as masked_fill has it.
    """
    y_, dy_ = widened(y), widened(dy)
    dz = hide_gradient((y_ * (dy_ - (y_ * dy_).sum(-1, keepdim=True))).to(y.dtype), mask, causal)
    return dz if scale == 1.0 else dz * scale


def hide_gradient(dz: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """dz with 0 where the boolean mask or causality hides."""
    if mask is not None:
        dz = dz.masked_fill(~mask, 0.0)
    return dz.masked_fill(causally_hidden(dz), 0.0) if causal else dz


def causally_hidden(x: Tensor) -> Tensor:
    """Where query q, of x (..., Q, K), does not see column k: k > q."""
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)


OVERWRITTEN = (
    "cross_entropy(inplace_backward=True) wrote the gradient over the logits: one can go backward through it once, "
    "for one upstream gradient, and not differentiate its gradient"
)
