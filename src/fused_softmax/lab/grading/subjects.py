"""What a lesson computes: the function's name, its arguments, the float64 reference, and the elements it may move."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_softmax.lab import reference
from fused_softmax.lab.traffic import MODELS, Model, one_read


@dataclass(frozen=True)
class Subject:
    """A lesson's function. `arguments` makes its arguments from rows x (n_rows, n_cols); `exact` takes the same."""

    function: str
    moves: Model
    arguments: Callable[[Tensor], tuple[Any, ...]] = lambda x: (x,)
    exact: Callable[..., Any] = reference.softmax
    outputs: tuple[str, ...] = ("y",)
    # relative error that is allowed in addition to the rounding of the result
    rtol: float = 4e-6
    # whether float16 and bfloat16 are tried; five passes round to them five times
    rounds_once: bool = True
    atol: float = 1e-7
    # whether a load must use the sectors that it touches
    coalesced: bool = False
    # the rows that are timed on a GPU, bfloat16
    timed: tuple[int, int] = (16384, 4096)


def subject_of(n: int) -> Subject:
    """The subject of lesson n; the default is softmax of rows, read and written once."""
    from fused_softmax.lab import lessons

    lesson = lessons.load(n)
    found = getattr(lesson, "SUBJECT", None)
    if found is not None:
        return found
    return Subject("softmax", MODELS.get(lesson.SYSTEM, one_read), rounds_once=n > 1)


# the systems of lessons that have a subject of their own, and the lessons' numbers
SUBJECTS: Mapping[str, int] = {
    "11_over_gpus": 11,
    "12_gradient": 12,
    "13_cross_entropy": 13,
    "14_masks": 14,
    "15_another_dimension": 15,
    "16_one_idea_at_a_time": 16,
}


def subject_named(system: str) -> Subject | None:
    """The subject of a lesson's system, or None: it computes softmax of rows, or is no lesson."""
    return subject_of(SUBJECTS[system]) if system in SUBJECTS else None


def inputs_of(subject: Subject) -> dict[str, Tensor]:
    """The rows that a subject is tried on, by name."""
    return {name: x for name, x in inputs().items() if subject.rounds_once or x.dtype == torch.float32}


def _random(n_rows: int, n_cols: int, seed: int) -> Tensor:
    return torch.randn(n_rows, n_cols, generator=torch.Generator().manual_seed(seed)) * 3


def inputs() -> dict[str, Tensor]:
    """Rows by name, chosen so that each classic mistake shows on one of them. Small: the interpreter is slow."""
    rising = torch.stack([torch.linspace(-4, 4, 5000), torch.linspace(-200, 0, 5000), torch.linspace(3, -9, 5000)])
    late = rising[:2].clone()
    late[:, :2500] = -math.inf
    early = rising[:2].clone()
    early[:, 2500:] = -math.inf
    special = _random(5, 300, 1)
    special[0] = -math.inf
    special[1, 7] = math.inf
    special[2, 299] = math.nan
    special[3, 100:] = -math.inf
    offsets = _random(4, 257, 2) + torch.tensor([[1000.0], [-1000.0], [300.0], [-90.0]])
    wide = _random(4, 200, 3)
    return {
        "a power of two": _random(3, 1024, 4),
        "an odd width": _random(3, 1001, 5) - 30,
        "one column": _random(3, 1, 6),
        "many short rows": _random(77, 3, 7),
        "rows far from 0": offsets,
        "rows with -inf, +inf and NaN": special,
        "rising and falling rows": rising,
        "rows that begin with -inf": late,
        "rows that end with -inf": early,
        "a slice of wider rows": wide[:, 20:110],
        "a transposed tensor": _random(90, 3, 8).T,
        "float16": _random(3, 515, 9).half(),
        "bfloat16": _random(3, 515, 10).bfloat16(),
    }


# --- arguments and references of the lessons from 12 on, from rows x --------------------------------------------------

IGNORED = -100  # a target that does not count


def upstream(x: Tensor) -> tuple[Tensor, Tensor]:
    """(dy, y): the gradient of a softmax's result, and the result."""
    # large rows are random where they lie: on the CPU that takes seconds
    on = x.device if x.numel() > 2**24 else "cpu"
    dy = torch.randn(x.shape, generator=torch.Generator(on).manual_seed(11), device=on).to(x.device, x.dtype)
    return dy, (torch.softmax(x, -1) if x.numel() > 2**24 else reference.softmax(x).to(x.dtype))


def logits_and_targets(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x, target): a finite column of each row; every third row, from the second on, does not count."""
    finite = x.isfinite()
    # the column two thirds into the finite ones, 0 where there is none
    place = (2 * finite.sum(1) // 3).clamp(min=1)
    target = ((finite.cumsum(1) == place[:, None]) & finite).to(torch.int64).argmax(1)
    if len(target) > 1:
        target[1::3] = IGNORED
    return x, target


def exact_loss(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(mean loss, its gradient) in float64."""
    counts = target != IGNORED
    index = target.clamp(min=0)[:, None]
    rows = -reference.log_softmax(x, 1).gather(1, index)[:, 0]
    dx = reference.softmax(x, 1)
    dx.scatter_add_(1, index, torch.full_like(index, -1, dtype=torch.float64))
    count = counts.sum().double()
    return rows[counts].sum() / count, torch.where(counts[:, None], dx / count, 0.0)


def seen(n_rows: int, n_cols: int) -> list[int]:
    """The number of columns that each row's query sees."""
    n_queries = min(n_rows, n_cols)
    return [n_cols - n_queries + row % n_queries + 1 for row in range(n_rows)]


def scores(x: Tensor) -> tuple[Tensor, int]:
    """(x, n_queries): as many queries as rows, and at most as many as columns."""
    return x, min(x.shape)


def exact_causal(x: Tensor, n_queries: int) -> Tensor:
    """float64 softmax of the columns that each row's query sees, and 0 elsewhere; NaN as softmax."""
    rows, cols = torch.arange(x.shape[0], device=x.device), torch.arange(x.shape[1], device=x.device)
    visible = x.shape[1] - n_queries + rows % n_queries + 1
    hidden = cols >= visible[:, None]
    return reference.softmax(x.double().masked_fill(hidden, -math.inf), 1)


def columns(x: Tensor) -> tuple[Tensor]:
    """(x transposed,): each row of x is one softmax over the first dimension."""
    return (x.T.contiguous(),)
