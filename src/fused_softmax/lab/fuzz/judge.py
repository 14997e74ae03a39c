"""Runs a case by torch, by the float64 reference and by ours, and says what is wrong.

What needs no value of a tensor (errors, shapes, dtypes) is known at once. The rest is left on the device as tensors of
one element, so that many cases wait for the device once: `Outcome.flags`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fused_softmax.launch.availability import failures_raised
from fused_softmax.torch_ops.masked_softmax import takes_scale

from . import exactness, ways
from .differences import excused
from .draw import Case
from .inputs import Inputs, make, upstream_of
from .rules import overflows, overflows_in_place, rule_of


@dataclass
class Outcome:
    """What is known of a case. `flags`: name -> a tensor that is true where that is wrong."""

    case: Case
    problems: list[str] = field(default_factory=list)
    flags: dict[str, Tensor] = field(default_factory=dict)
    excess: dict[str, Tensor] = field(default_factory=dict)
    error: str = ""  # the error that torch raised, and ours too
    lost: bool = False  # a failed capture: what follows in this process may fail for that reason alone

    def found(self) -> list[str]:
        """All that is wrong; waits for the device."""
        return [*self.problems, *(name for name, flag in self.flags.items() if bool(flag))]

    def largest_excess(self) -> str:
        return ", ".join(f"{name} {float(e.nan_to_num(nan=torch.inf).amax()):.3g}" for name, e in self.excess.items())


def resolve(outcomes: list[Outcome]) -> list[list[str]]:
    """`found` of many cases, for one wait."""
    flags = [flag for o in outcomes for flag in o.flags.values()]
    known = iter(torch.stack(flags).tolist()) if flags else iter(())
    return [[*o.problems, *(name for name in list(o.flags) if next(known))] for o in outcomes]


def _attempt(call: Callable[[], dict[str, Tensor]]) -> tuple[dict[str, Tensor], Exception | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call(), None
    except (torch.cuda.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        return {}, error


@failures_raised()
def evaluate(case: Case, device: str) -> Outcome:
    """Run the case three ways and compare."""
    outcome = Outcome(case)
    inputs = make(case, device)
    upstream = upstream_of(case, device)
    # where a call writes over its input, torch has inputs of its own
    writes = case.way == "out" or case.options.get("inplace_backward", False)
    for_torch = make(case, device) if writes else inputs
    call = ways.function(case, for_torch, device, ours=False)
    own, torch_error = _attempt(lambda: ways.run(case, call, for_torch, upstream))
    twice = (
        case.direction == "gradient" and case.seed % 4 == 1 and case.way in ("function", "module", "batch_invariant")
    )
    twice = twice and not case.options.get("inplace_backward")
    _poison(inputs.x)
    with ways.around_ours(case):
        got, error = _attempt(lambda: _ours(case, inputs, device, upstream, twice))
    if case.way == "vmap" and error is not None and torch_error is None:
        # what torch's own way cannot do under vmap, ours need not either
        call = ways.function(case, inputs, device, ours=False, vmapped=True)
        _, torch_error = _attempt(lambda: ways.run(case, call, inputs, upstream))
    if torch_error is not None or error is not None:
        _compare_errors(outcome, torch_error, error)
        outcome.lost = case.way == "cuda_graph" and error is not None
        if error is not None:
            _unchanged(outcome, inputs, after_error=True)
            if writes and inputs.out is not None and for_torch.out is not None:
                outcome.flags["writes to out before its error"] &= ~for_torch.out.changed()
        return outcome
    _unchanged(outcome, inputs)
    given = make(case, device) if writes else inputs  # as they were before a call that writes over them
    ref, reference_error = _attempt(lambda: _reference(case, given, upstream))
    if reference_error is not None:
        raise RuntimeError(f"the reference of {case} failed") from reference_error
    _compare(outcome, given, got, own, ref, upstream)
    if case.seed % 4 == 0 and not writes and case.way not in ("compile", "cuda_graph"):
        _same_bits(outcome, case, inputs, device, upstream, got)
    return outcome


def _ours(case: Case, inputs: Inputs, device: str, upstream: Any, twice: bool) -> dict[str, Tensor]:
    if case.way == "cuda_graph":
        return ways.run_graph(case, inputs, upstream)
    return ways.run(case, ways.function(case, inputs, device, ours=True), inputs, upstream, twice=twice)


def _poison(like: Tensor) -> None:
    """Leave NaN in the memory that the allocator hands out next; on a CPU PyTorch's deterministic mode does that."""
    if like.is_cuda and like.numel():
        size = like.numel() * max(4, like.element_size())
        blocks = [torch.full((n // 4 + 1,), torch.nan, device=like.device) for n in (size, size // 2, size, 512)]
        del blocks


def _reference(case: Case, inputs: Inputs, upstream: Any) -> dict[str, Tensor]:
    arguments = dict(inputs.arguments)
    x = inputs.x.detach()
    if "dtype" in arguments:  # a cast comes first, whose gradient has no rounding here
        x = x.to(arguments.pop("dtype"))
    wide = Inputs(x.double(), arguments, {}, batch_dim=inputs.batch_dim, in_dims=inputs.in_dims)
    for name, t in inputs.differentiable.items():
        if name != "x":
            arguments[name] = t.detach().double().requires_grad_()
    if case.direction != "forward":
        wide.x.requires_grad_()
    spec = case.spec
    call = spec.reference if case.way != "vmap" else ways._vmap(spec.reference, inputs, False)
    return ways.run(case, call, wide, upstream)


def _compare_errors(outcome: Outcome, own: Exception | None, ours: Exception | None) -> None:
    if own is None or ours is None:
        who, error = ("ours", ours) if own is None else ("torch", own)
        outcome.problems.append(f"only {who} raises: {_told(error)}")
    elif not isinstance(ours, type(own)) and not isinstance(own, type(ours)):
        outcome.problems.append(
            f"raises {type(ours).__name__} ({str(ours)[:120]}) where torch has {type(own).__name__}"
        )
    else:
        outcome.error = type(own).__name__


def _told(error: Exception | None) -> str:
    """An error and those that it came from: the end of a failed capture raises another than the one that ended it."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < 3:
        parts.append(f"{type(cause).__name__}: {str(cause).splitlines()[0][:200] if str(cause) else ''}")
        cause = cause.__cause__ or cause.__context__
    return "; after ".join(parts)


def _unchanged(outcome: Outcome, inputs: Inputs, after_error: bool = False) -> None:
    case = outcome.case
    shared = inputs.out is not None and inputs.out.buffer is inputs.placed["x"].buffer
    for name, placed in inputs.placed.items():
        if name == "x" and not after_error and (shared or case.options.get("inplace_backward")):
            if not shared:
                outcome.flags[f"writes next to {name}"] = placed.changed_outside()
            continue
        outcome.flags[f"writes to {name}"] = placed.changed()
    if inputs.out is not None:
        changed = inputs.out.changed() if after_error else inputs.out.changed_outside()
        outcome.flags["writes to out before its error" if after_error else "writes next to out"] = changed


def _compare(
    outcome: Outcome,
    inputs: Inputs,
    got: dict[str, Tensor],
    own: dict[str, Tensor],
    ref: dict[str, Tensor],
    upstream: Any,
) -> None:
    case = outcome.case
    firsts = {name: t for name, t in got.items() if not name.startswith("again_")}
    if firsts.keys() != own.keys():
        outcome.problems.append(f"results {sorted(firsts)} where torch has {sorted(own)}")
        return
    shift = 0 if inputs.batch_dim is None else 1
    for name, y in firsts.items():
        theirs, want = own[name], ref[name]
        if y.shape != theirs.shape or y.dtype != theirs.dtype:
            outcome.problems.append(
                f"{name} is {tuple(y.shape)} {y.dtype} where torch has {tuple(theirs.shape)} {theirs.dtype}"
            )
            continue
        if not case.way == "out" and not shift and theirs.is_contiguous() and not y.is_contiguous():
            if not name.startswith("d"):
                outcome.problems.append(f"{name} has strides {y.stride()} where torch's is contiguous")
        if not name.startswith("d") and y.requires_grad != theirs.requires_grad and case.way != "cuda_graph":
            outcome.problems.append(f"{name}.requires_grad is {y.requires_grad}")
        if not y.numel():
            continue
        rule = rule_of(case, inputs, name, ref, y, firsts[case.spec.outputs[0]], upstream)
        bad, excess = exactness.wrong(y, theirs, want, rule)
        allowed = excused(case, inputs, name, y.detach(), theirs.detach())
        beyond = overflows(case, name, y.detach(), theirs.detach(), ref)
        for excuse in (allowed, beyond, overflows_in_place(case, inputs, name, y.detach())):
            bad = bad if excuse is None else bad & ~excuse
        outcome.flags[name] = bad.any()
        outcome.excess[name] = excess
    for name in got:
        if name.startswith("again_"):
            outcome.flags[f"two backwards differ in {name[6:]}"] = _bits_differ(got[name], got[f"d_{name[6:]}"])


def _bits_differ(a: Tensor, b: Tensor) -> Tensor:
    """Whether two tensors of one dtype differ in a bit; every NaN counts as one."""
    same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
    return (~same).any()


def _promises_bits(case: Case) -> bool:
    """Not where PyTorch adds with atomics on a GPU: in nll_loss2d, which patch() and options outside the kernels'
    leave to it, and in gather's gradient, which is that of token_logprobs' formula and of torch's way under patch()."""
    by_torch = case.op == "cross_entropy" and (case.way == "patch" or "odd" in case.options)
    gathers = case.op == "token_logprobs" and (
        case.direction == "double" or (case.way == "patch" and case.direction == "gradient")
    )
    return not (by_torch or gathers)


def _same_bits(
    outcome: Outcome, case: Case, inputs: Inputs, device: str, upstream: Any, got: dict[str, Tensor]
) -> None:
    """The same call again has the same bits; and a row of its own has the bits that it has among others."""
    with ways.around_ours(case):
        again, error = _attempt(lambda: _ours(case, inputs, device, upstream, False))
        if error is not None:
            outcome.problems.append(f"the second call raises {type(error).__name__}: {str(error)[:120]}")
            return
        for name, t in again.items() if _promises_bits(case) else ():
            outcome.flags[f"{name} differs from call to call"] = _bits_differ(t, got[name])
        name = case.spec.outputs[0]
        if case.direction != "forward" or not _has_rows(case, inputs):
            return
        row = case.seed // 4 % case.shape[0]
        if case.way != "batch_invariant":
            row = 0  # the first row starts where it starts among others
        alone = inputs.x.narrow(0, row, 1)
        of_rows = (*case.spec.by_row, "temperature")  # weights are a class's, whatever their number
        given = {
            key: value.narrow(0, row, 1)
            if key in of_rows and isinstance(value, Tensor) and value.dim() and value.shape[0] > 1
            else value
            for key, value in inputs.arguments.items()
        }
        one, error = _attempt(lambda: case.spec.tensors(case.spec.function(alone, **given)))
        if error is not None:
            outcome.problems.append(f"one row raises {type(error).__name__}: {str(error)[:120]}")
        else:
            outcome.flags["a row's bits depend on the batch"] = _bits_differ(one[name], got[name].narrow(0, row, 1))


def _has_rows(case: Case, inputs: Inputs) -> bool:
    if case.way not in ("function", "batch_invariant") or len(case.shape) < 2 or 0 in case.dims or not case.numel:
        return False
    if case.op == "cross_entropy" and case.options.get("reduction") != "none":
        return False
    if case.op == "masked_softmax" and not takes_scale(case.options.get("scale", 1.0)):
        return False  # the formula's, whose softmax is PyTorch's
    if case.dtype == "float64" and case.op not in ("softmax", "log_softmax"):
        return False  # PyTorch's own reductions, whose split follows from the number of rows, too
    mask: Tensor | None = inputs.arguments.get("mask")
    if mask is not None and mask.dim() not in (0, len(case.shape)):
        return False
    if case.op == "masked_softmax" and case.options.get("causal") and len(case.shape) == 2:
        return False
    if case.layout[0] in ("transposed", "channels_last", "step"):
        return False  # one index of a batch may fold where the batch does not
    if case.layout[0] == "cut" and len(case.shape) - 1 in case.dims and len(case.shape) > 2:
        return False
    # x[:1] of (2, 1, n) does not know the distance of x's rows where it is not that of the dimension of size 1
    return len(case.shape) == 2 or case.layout[0] not in ("overlapping", "expanded")
