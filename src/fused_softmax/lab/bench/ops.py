"""The workloads of the benchmark: an op of the registry or its gradient, with inputs, bytes and a ceiling.

The registry gives the public function, torch's own way and the float64 reference; an entry of OPS says how they are
called. `elements` counts what any implementation must read and write, and everyone's GB/s comes from that count.
`ceiling` names the plain pass with the same pattern: copy (one tensor in, one out), read (in only), add (two in, one
out). An op of the registry that takes only a tensor and a dimension needs no entry.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_softmax.lab import reference, registry
from fused_softmax.lab import traffic as moved
from fused_softmax.lab.bench import inputs as made
from fused_softmax.lab.bench.inputs import Inputs, heads
from fused_softmax.lab.bench.workload import Call, Op, backward_alone, over_rows, through_autograd, with_gradient
from fused_softmax.lab.plans import plan_text
from fused_softmax.launch.softmax import softmax_backward
from fused_softmax.plan_for import Fallback, plan_for
from fused_softmax.torch_ops import masked_softmax as masked

# --- how an op is called, and torch's own way where the registry's is not what its users run ------------------------
# the registry's losses and masks compute in float32; most programs do not, and round to 8 bits on the way in bfloat16


def _loss(function: Call) -> Call:
    return lambda x, target, count=None: function(x, target)


def _loss_rows(x: Tensor, target: Tensor, count: Tensor) -> Tensor:
    return reference.cross_entropy(x, target, reduction="none") / count


def _loss_rows_and_gradient(x: Tensor, target: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        rows = _loss_rows(leaf, target, count)
        return rows.detach(), torch.autograd.grad(rows.sum(), leaf)[0]


def _statistics(function: Call) -> Call:
    return lambda x, ids: function(x, ids, return_entropy=True, return_logsumexp=True)


def token_statistics(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of ids, entropy and logsumexp, as log_softmax and gather give them."""
    log_p = torch.log_softmax(x, -1)
    picked = log_p.gather(-1, ids[:, None])
    lse = x.gather(-1, ids[:, None]) - picked
    return picked[:, 0], -(log_p.exp() * log_p).sum(-1), lse[:, 0]


def _logprob_terms(x: Tensor, ids: Tensor, g_logprob: Tensor, g_entropy: Tensor, g_lse: Tensor) -> Tensor:
    """What each output gives to each logit's gradient, and the parts of an entropy's, as positive numbers."""
    log_p = torch.log_softmax(x, -1)
    p, log_p = log_p.exp(), log_p.clamp(min=torch.finfo(x.dtype).min)
    entropy = -(p * log_p).sum(-1, keepdim=True)
    g_logprob, g_entropy, g_lse = (g.abs()[:, None] for g in (g_logprob, g_entropy, g_lse))
    terms = p * (g_logprob + g_lse + g_entropy * (entropy - log_p))
    return terms.scatter_add(-1, ids[:, None], g_logprob)


def _causal_call(function: Call) -> Call:
    return lambda x, query, hidden: function(heads(x, hidden), causal=True).view_as(x)


def _causal_formula(x: Tensor, query: Tensor, hidden: Tensor) -> Tensor:
    """Without a mask tensor: the columns are compared where the scores are read."""
    after = torch.arange(x.shape[1], device=x.device) > query[:, None]
    return torch.softmax(x.masked_fill(after, -float("inf")), -1)


def _additive_call(function: Call) -> Call:
    return lambda x, query, mask: function(heads(x, mask), mask).view_as(x)


def _bias_call(function: Call) -> Call:
    return lambda x, row, bias: function(*made.biased_heads(x, row, bias)).view_as(x)


def _gradient(dy: Tensor, y: Tensor) -> Tensor:
    """The function that autograd runs for a softmax."""
    return torch._softmax_backward_data(dy, y, -1, y.dtype)


def _causal_gradient(dy: Tensor, y: Tensor, query: Tensor, hidden: Tensor) -> Tensor:
    return heads(_gradient(dy, y), hidden).masked_fill(hidden, 0.0).view_as(y)


def _causal_gradient_formula(dy: Tensor, y: Tensor, query: Tensor, hidden: Tensor) -> Tensor:
    after = torch.arange(y.shape[1], device=y.device) > query[:, None]
    return _gradient(dy, y).masked_fill(after, 0.0)


def _masked_gradient(causal: bool = False, boolean: bool = False) -> Call:
    """What masked_softmax's backward runs where the mask needs no gradient."""

    def call(dy: Tensor, y: Tensor, query: Tensor, mask: Tensor) -> Tensor:
        kept = mask if boolean else None
        return masked._backward(heads(y, mask), heads(dy, mask), kept, 1.0, causal).view_as(y)

    return call


# most models call these, and the recorded host times are of these
_SOFTMAX, _LOG_SOFTMAX = over_rows(F.softmax), over_rows(F.log_softmax)
_BACKWARD: dict[str, Any] = dict(elements=moved.two_in_one_out, ceiling="add", plans_gradient=True)
_AUTOGRAD: dict[str, Any] = dict(
    inputs=made.logits_and_gradient, elements=moved.forward_and_backward, ceiling="add", gradient=through_autograd
)
_LOSS: dict[str, Any] = dict(
    inputs=made.logits_and_targets,
    call=_loss,
    torch=_loss(F.cross_entropy),
    by_row=2,
    coarse=True,
    largest_term=lambda x, target, count: 1.0 / count,
    other_bytes=moved.ids,
)
_LOGPROBS: dict[str, Any] = dict(call=_statistics, torch=token_statistics, coarse=True, other_bytes=moved.ids)
_DIFFERENCE: dict[str, Any] = dict(row_term=lambda dy, y, *rest: dy * y)
_SOFTMAX_BACKWARD = _BACKWARD | _DIFFERENCE
_LOG_SOFTMAX_BACKWARD = _BACKWARD | dict(
    row_term=lambda dy, y: torch.maximum(dy.abs(), y.exp() * dy.sum(-1, keepdim=True).abs())
)
_MASKED_BACKWARD = _SOFTMAX_BACKWARD | dict(by_row=3, exact=lambda dy, y, *rest: reference.softmax_backward(dy, y))
_MASKED: dict[str, Any] = dict(of="masked_softmax", planned=lambda *inputs: (heads(inputs[0], inputs[-1]),))
_UNDER_MASK: dict[str, Any] = _MASKED | dict(planned=lambda *inputs: (heads(inputs[0], inputs[-1]), inputs[-1]))

ENTRIES = (
    Op("softmax", made.one_input, moved.one_in_one_out, "copy", torch=_SOFTMAX),
    Op("log_softmax", made.one_input, moved.one_in_one_out, "copy", torch=_LOG_SOFTMAX),
    Op(
        "softmax_backward", made.softmax_gradient, of="softmax", family="softmax_backward", **_SOFTMAX_BACKWARD,
        own=lambda dy, y: softmax_backward(dy, y, -1, y.dtype, False),
        torch=_gradient, exact=reference.softmax_backward,
    ),
    Op(
        "log_softmax_backward", made.log_softmax_gradient, of="log_softmax", family="log_softmax_backward",
        **_LOG_SOFTMAX_BACKWARD,
        own=lambda dy, y: softmax_backward(dy, y, -1, y.dtype, True),
        torch=lambda dy, y: torch._log_softmax_backward_data(dy, y, -1, y.dtype),
        exact=reference.log_softmax_backward,
    ),
    Op(
        "softmax_autograd", of="softmax", **_AUTOGRAD, torch=_SOFTMAX,
        exact=lambda x, dy: reference.softmax_backward(dy, reference.softmax(x)),
    ),
    Op(
        "log_softmax_autograd", of="log_softmax", **_AUTOGRAD, torch=_LOG_SOFTMAX,
        exact=lambda x, dy: reference.log_softmax_backward(dy, reference.log_softmax(x)),
    ),
    Op(
        "cross_entropy", **_LOSS, elements=moved.one_in_one_out, ceiling="copy", gradient=with_gradient,
        exact=_loss_rows_and_gradient, outputs=("loss", "gradient"), plans_gradient=True,
    ),
    Op(
        "cross_entropy_forward", **_LOSS, of="cross_entropy", elements=moved.read_only, ceiling="read",
        exact=_loss_rows,
    ),
    Op("token_logprobs", made.logits_and_ids, moved.read_only, "read", **_LOGPROBS),
    Op(
        "token_logprobs_backward", made.logprob_gradients, moved.one_in_one_out, "copy", of="token_logprobs",
        **_LOGPROBS | dict(other_bytes=moved.ids_and_upstream), gradient=backward_alone, outputs=("gradient",),
        plans_gradient=True, row_term=_logprob_terms,
    ),
    Op(
        "masked_softmax_causal", made.causal_scores, moved.causal, "copy", **_MASKED, by_row=2, causal=True,
        call=_causal_call, torch=made.causal_softmax, formula=_causal_formula,
        exact=lambda x, query, hidden: reference.masked_softmax(x, ~hidden[query]),
    ),
    Op(
        "masked_softmax_additive", made.biased_scores, moved.additive, "copy", **_UNDER_MASK, by_row=2,
        coarse=True,  # the sum is rounded to the scores' dtype
        call=_additive_call, torch=made.biased_softmax,
        exact=lambda x, query, mask: reference.masked_softmax(x, mask[query]),
    ),
    Op(
        "masked_softmax_boolean", made.kept_scores, moved.one_in_one_out, "copy", other_bytes=moved.boolean_mask,
        **_UNDER_MASK, by_row=2,
        call=_additive_call, torch=made.kept_softmax,
        exact=lambda x, query, kept: reference.masked_softmax(x, kept[query]),
    ),
    Op(
        "masked_softmax_bias", made.scores_of_biased_heads, moved.biased, "copy",
        **_MASKED | dict(planned=made.biased_heads), by_row=2,
        coarse=True,  # the sum is rounded to the scores' dtype
        call=_bias_call, torch=made.softmax_of_biased_heads,
        exact=lambda x, row, bias: reference.masked_softmax(x, bias.flatten(0, 1)[row]),
    ),
    Op(
        "masked_softmax_causal_backward", made.causal_gradient, moved.causal_gradient, "add", **_MASKED, by_row=3,
        **_DIFFERENCE, own=_masked_gradient(causal=True), torch=_causal_gradient, formula=_causal_gradient_formula,
        exact=lambda dy, y, query, hidden: reference.softmax_backward(dy, y), plans_gradient=True,
    ),
    Op(
        "masked_softmax_additive_backward", made.biased_gradient, **_MASKED, **_MASKED_BACKWARD,
        own=_masked_gradient(), torch=lambda dy, y, *rest: _gradient(dy, y),
    ),
    Op(
        "masked_softmax_boolean_backward", made.kept_gradient, **_UNDER_MASK, **_MASKED_BACKWARD,
        own=_masked_gradient(boolean=True),
        torch=lambda dy, y, query, kept: _causal_gradient(dy, y, query, ~kept),
    ),
)  # fmt: skip


def default_workload(spec: registry.OpSpec) -> Op:
    """The workload of an op without an entry: over the last dimension. Torch rounds numbers of rows to the dtype."""
    if spec.full_outputs:
        return Op(spec.name, made.one_input, moved.one_in_one_out, "copy")
    return Op(spec.name, made.one_input, moved.read_only, "read", coarse=True)


_OTHERS = (spec for spec in registry.OPS.values() if spec.rows in ("dim", "dims"))
OPS: dict[str, Op] = {op.name: op for op in (*map(default_workload, _OTHERS), *ENTRIES)}
# a forward and its backward as a program runs them: where their host time is measured
AUTOGRAD = tuple(op.name for op in ENTRIES if op.gradient is through_autograd)


def family(op: str) -> str:
    """The results file that an op's records belong to, less its suffix."""
    return OPS[op].family or OPS[op].spec.name


def ops_named(name: str) -> tuple[str, ...]:
    """An op, a family of ops, or `all` ops except those through autograd; raises KeyError with the names there are."""
    if name == "all":
        return tuple(op for op in OPS if op not in AUTOGRAD)
    if name in OPS:
        return (name,)
    found = tuple(op for op in OPS if family(op) == name)
    if not found:
        raise KeyError(f"{name!r} is none of all, {', '.join(dict.fromkeys((*OPS, *map(family, OPS))))}")
    return found


def plan_of(entry: Op, inputs: Inputs) -> tuple[str, str]:
    """(regime, the plan in words) of our kernel for a workload; ('torch', why) where torch's own kernel runs."""
    x, *mask = entry.planned(*inputs)
    found = plan_for(
        x.detach(), entry.dim, op=entry.spec.name, mask=mask[0] if mask else None, backward=entry.plans_gradient,
        causal=entry.causal,
    )  # fmt: skip
    return ("torch", found.why) if isinstance(found, Fallback) else (found.regime, plan_text(found))
