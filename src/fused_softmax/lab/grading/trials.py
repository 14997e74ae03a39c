"""One call of a graded function: its result next to float64, its accesses, and what is wrong in words."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fused_softmax.lab.grading.subjects import Subject
from fused_softmax.lab.grading.watch import Watched, watching

Outputs = tuple[Tensor, ...]


@dataclass
class Trial:
    """A call on one input. `wrong` says in words what is wrong; empty where nothing is."""

    name: str
    arguments: tuple[Any, ...]
    expected: Outputs
    outputs: Outputs | None = None
    error: str = ""
    wrong: str = ""
    watched: Watched = field(default_factory=Watched)
    moves: tuple[int, int] = (0, 0)  # elements that the model reads and writes
    rtol: float = 4e-6
    uncoalesced: bool = False  # whether it wastes most of the sectors that it touches, where that is judged

    @property
    def shape(self) -> str:
        return " x ".join(map(str, self.arguments[0].shape))


def as_tuple(result: Any) -> Outputs:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def close(y: Tensor, expected: Tensor, rtol: float, loosely: bool = False, atol: float = 1e-7) -> Tensor:
    """Where y is as exact as its dtype allows; NaN and infinities must agree."""
    eps = torch.finfo(y.dtype).eps if y.dtype.is_floating_point else 0.0
    eps = 0.0 if y.dtype in (torch.float32, torch.float64) else eps
    rtol, atol = (max(8 * eps, 1e-3), 1e-5) if loosely else (rtol + 1.01 * eps, atol)
    return torch.isclose(y.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)


def try_on(function: Callable[..., Any], subject: Subject, name: str, x: Tensor) -> Trial:
    """Call the function on one input, interpreted, and compare it with float64."""
    arguments = subject.arguments(x)
    trial = Trial(name, arguments, as_tuple(subject.exact(*arguments)), rtol=subject.rtol)
    moved = subject.moves(*arguments[0].shape)
    trial.moves = (moved.reads, moved.writes)
    kept = copy.deepcopy(arguments)
    try:
        with watching() as trial.watched:
            result = function(*arguments)
    except Exception as error:  # of the reader's own code: any
        trial.error = _reason(error)
        return trial
    if any(isinstance(a, Tensor) and not _same(a, b) for a, b in zip(arguments, kept, strict=True)):
        trial.wrong = "an input was changed"
        trial.arguments = kept
        return trial
    watched = trial.watched
    trial.uncoalesced = subject.coalesced and watched.needed > 256 and 32 * watched.sectors > 4 * watched.needed
    found = as_tuple(result)
    trial.wrong = _form(found, trial.expected, subject, arguments[0])
    if not trial.wrong:
        trial.outputs = found
        trial.wrong = _values(found, trial.expected, subject)
    return trial


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) if not a.is_floating_point() else torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join((str(error) or type(error).__name__).split())
    name = "" if text.startswith(type(error).__name__) or type(error).__name__ in text else f"{type(error).__name__}: "
    return f"{name}{text}"[:300]


def _form(found: tuple[Any, ...], expected: Outputs, subject: Subject, x: Tensor) -> str:
    if len(found) != len(expected):
        return f"{len(found)} results, and {len(expected)} are expected: {', '.join(subject.outputs)}"
    for name, y, right in zip(subject.outputs, found, expected, strict=True):
        if not isinstance(y, Tensor):
            return f"{name} is a {type(y).__name__}, and a tensor is expected"
        if y.shape != right.shape:
            return f"{name} has the shape {tuple(y.shape)}, and {tuple(right.shape)} is expected"
        if not y.dtype.is_floating_point or (name == subject.outputs[0] and len(found) == 1 and y.dtype != x.dtype):
            return f"{name} has the dtype {str(y.dtype)[6:]}, and {str(x.dtype)[6:]} is expected"
    return ""


def _values(found: Outputs, expected: Outputs, subject: Subject) -> str:
    for name, y, right in zip(subject.outputs, found, expected, strict=True):
        good = close(y, right, subject.rtol, atol=subject.atol)
        if good.all():
            continue
        bad = (~good).nonzero()
        at = tuple(bad[0].tolist())
        where = f"{name}{list(at)}" if at else name
        many = f", and {len(bad) - 1:,} more differ" if len(bad) > 1 else ""
        return f"{where} is {_number(y[at].item())}, right is {_number(right[at].item())}{many}"
    return ""


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.4g}"
