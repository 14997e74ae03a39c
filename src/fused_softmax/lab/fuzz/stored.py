"""What a result is off by because numbers on the way to it were stored, in 16 bits as a rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .draw import Case
from .exactness import EPS
from .inputs import Inputs
from .scales import upstream_bound


def of_stored_logsumexp(case: Case, inputs: Inputs, ref: dict[str, Tensor], stored: Tensor) -> Tensor:
    """How far each entry of g*exp(x - lse) is off because lse is the stored output, as torch's is, and by its exponent.

    An error d of lse is a factor of exp(d); the output itself is judged apart. exp(z) is 2^(z*log2(e)) with the
    exponent rounded, which is a relative error of eps*|z|, and the hardware's 2^t has one of 2 eps: in a row of equal
    numbers all entries have the same.
    """
    lse, error = ref["lse"].detach().double(), stored.detach().double()
    error = (error - lse).abs().nan_to_num(0, 0, 0).expm1()
    if not case.options.get("keepdim") and case.shape:
        for d in sorted(case.dims):
            error, lse = (t.unsqueeze(d + (inputs.batch_dim is not None)) for t in (error, lse))
    if inputs.batch_dim is not None:
        error, lse = (t.movedim(0, inputs.batch_dim) for t in (error, lse))
    exponent = (inputs.x.detach().double() - lse).abs().nan_to_num(0, 0, 0)
    return ref["d_x"].detach().double().abs().nan_to_num(0, 0, 0) * (error + EPS * (exponent + 2))


def of_stored_output(
    case: Case, inputs: Inputs, ref: dict[str, Tensor], stored: Tensor, upstream: Callable[..., dict[str, Tensor]]
) -> dict[str, Tensor]:
    """How far the gradients of a softmax, masked or not, or of log_softmax are off because they are made of the stored
    output.

    In 16 bits its numbers are spaced apart, those below the least normal number by more than their own rounding: a row
    of equal numbers is then off by the same everywhere, and so is its sum. Nor has torch the same error: it stores
    dy*y, too, which then adds up to something else, and its own way of a masked one keeps its output in float32 until
    the end. The output itself is judged apart.
    """
    exact, kept = ref["y"].detach().double(), stored.detach().double()
    dy = upstream({"y": ref["y"]})["y"].detach().double()
    probe = upstream({"probe": ref["d_x"]})["probe"].detach().double() if "dd_x" in ref else None
    off: dict[str, Tensor] = {}
    for y, sign in ((exact, -1.0), (kept, 1.0)):
        for name, t in _gradients_from(case, inputs, y, dy, probe).items():
            off[name] = off[name] + sign * t if name in off else sign * t
    of_mask = ref.get("d_mask")
    if of_mask is not None:
        off["d_mask"] = _summed_to(off["d_mask"], of_mask, inputs)
    if inputs.batch_dim is not None:
        off["d_x"] = off["d_x"].movedim(0, inputs.batch_dim)
    return {name: t.abs().nan_to_num(0, 0, 0) for name, t in off.items()}


def _gradients_from(case: Case, inputs: Inputs, y: Tensor, dy: Tensor, probe: Tensor | None) -> dict[str, Tensor]:
    """The gradients from the output y, softmax(s*x + mask) or its logarithm, for the upstream dy, and theirs for the
    probe; `second_scale` has the formulas of a softmax."""
    s = float(case.options.get("scale", 1.0))
    dim = case.dims[0] + (inputs.batch_dim is not None) if y.dim() else 0
    log = case.spec.holds == "log-probability"
    p = (y.exp() if log else y).nan_to_num(0, 0, 0)

    def total(t: Tensor) -> Tensor:
        return t.sum(dim, keepdim=True)

    def centered(t: Tensor) -> Tensor:
        return t - total(t * p)

    if log:
        made = {"d_x": dy - p * total(dy)}
        if probe is not None:
            made |= {"dd_x": -total(dy) * p * centered(probe), "dd_g_y": centered(probe)}
        return made
    made = {"d_x": s * p * centered(dy), "d_mask": p * centered(dy)}
    if probe is not None:
        t = s * (probe * centered(dy) - dy * total(probe * p))
        made |= {"dd_x": s * p * centered(t), "dd_g_y": s * p * centered(probe)}
    return made


def of_store_before_scale(case: Case, name: str, ref: Tensor, roundoff: float, spacing: float) -> Tensor | None:
    """What it costs that masked_softmax's gradient of its scores z = scale*x + mask is stored before x's is made of it,
    as it is where the mask needs it too, and where rows do not fit on chip.

    Such a store is off by a part `roundoff`, or by half of the spacing of subnormal numbers, and the scale multiplies
    that.
    """
    scale = abs(float(case.options.get("scale", 1.0)))
    if name not in ("d_x", "dd_x") or scale == 1.0:
        return None
    return roundoff * ref.detach().double().abs() + scale * spacing / 2


def of_summed_rows(
    inputs: Inputs, exact: Tensor, stored: Tensor, dy: Tensor, of_mask: Tensor, roundoff: float, smallest: float
) -> Tensor:
    """What roundings do to a mask's gradient, which is a sum over the rows, and the columns, that share it.

    A row adds p*(dy - D) with D = sum(dy*p). float32's own errors are measured in what these are made of, p*|dy - D|
    and p*sum(|dy|*p), also where they cancel. A 16-bit result is made of the stored p and is itself stored before it is
    added up, to a part `roundoff` of it, or of the least normal number, `smallest`. Equal rows are off by the same, so
    that the sum of the rows is off by the sum of these, not by its square root.
    """
    if not exact.dim():
        return exact.new_zeros((), dtype=torch.float64)
    dy = dy.detach().double()
    sizes, made_of = [], []
    for y in (exact, stored):
        p = y.detach().double().nan_to_num(0, 0, 0)
        sizes.append(p * (dy - (dy * p).sum(-1, keepdim=True)).abs())
        made_of.append(p * (dy.abs() * p).sum(-1, keepdim=True))
    size = torch.maximum(*sizes)
    lost = roundoff * size.clamp(min=smallest) + 4 * EPS * (size + torch.maximum(*made_of))
    return _summed_to(lost, of_mask, inputs)


def of_second_store(case: Case, ref: Tensor, roundoff: float, smallest: float) -> Tensor | None:
    """What storing a gradient in place of the logits costs: the forward stores it for an upstream of 1, and the
    backward multiplies that by the upstream and stores it again."""
    if not case.options.get("inplace_backward") or case.upstream == "one":
        return None
    return roundoff * ref.detach().double().abs() + upstream_bound(case) * smallest


def _summed_to(of_rows: Tensor, of_mask: Tensor, inputs: Inputs) -> Tensor:
    """Of the results' shape, vmap's items first -> summed to the shape of the mask's gradient."""
    items = of_mask.shape[:1] if inputs.batch_dim is not None else ()
    own = of_mask.shape[len(items) :]
    aligned = (*items, *(1,) * (of_rows.dim() - len(items) - len(own)), *own)
    return of_rows.sum_to_size(aligned).view(of_mask.shape)
