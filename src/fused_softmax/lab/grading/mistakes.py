"""The classic mistakes: what each computes, or how it shows, and a hint. The grader names the first that fits.

`gives` are formulas of a mistake's result. A mistake fits if one of them gives what the file gave, on every input where
either is wrong. `shows` reads the trials themselves, for mistakes that are seen in the accesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fused_softmax.lab.grading.trials import Trial, as_tuple, close

Trials = Sequence[Trial]
Formula = Callable[..., Any]


@dataclass(frozen=True)
class Mistake:
    """A mistake by name, with its hint. `gives`: its formulas, of the function's arguments. `shows`: its trace."""

    name: str
    hint: str
    gives: tuple[Formula, ...] = ()
    shows: Callable[[Trials], bool] | None = None

    def fits(self, trials: Trials) -> bool:
        """Whether the trials are what this mistake would give."""
        if self.shows is not None:
            return self.shows(trials)
        return any(_explains(formula, trials) for formula in self.gives)


def _explains(formula: Formula, trials: Trials) -> bool:
    explained = 0
    for trial in trials:
        if trial.outputs is None:
            if trial.error or trial.wrong:
                return False
            continue
        with torch.no_grad():
            said = as_tuple(formula(*trial.arguments))
        # where the right result is NaN, how a mistake spreads it is not compared
        for y, wrong, right in zip(trial.outputs, said, trial.expected, strict=True):
            if not bool((close(y, wrong, trial.rtol, loosely=True) | right.isnan()).all()):
                return False
        explained += bool(trial.wrong)
    return explained > 0


def find(mistakes: Sequence[Mistake], trials: Trials) -> Mistake | None:
    """The first mistake that fits, or None."""
    return next((mistake for mistake in mistakes if mistake.fits(trials)), None)


# --- traces that several mistakes leave -----------------------------------------------------------------------------


def writes_outside(trials: Trials) -> bool:
    return any(t.watched.writes_outside for t in trials)


def reads_outside(trials: Trials) -> bool:
    return any(t.watched.reads_outside for t in trials)


def only_on_slices(trace: Callable[[Trials], bool]) -> Callable[[Trials], bool]:
    """A trace that the slice of wider rows shows, and no other input."""

    def shows(trials: Trials) -> bool:
        sliced = [t for t in trials if "slice" in t.name]
        return trace(sliced) and not trace([t for t in trials if t not in sliced])

    return shows


def nothing_written(trials: Trials) -> bool:
    ran = [t for t in trials if t.watched.launches and not t.error]
    return bool(ran) and not any(t.watched.writes for t in ran)


def written_again(trials: Trials) -> bool:
    return any(t.watched.rewritten for t in trials)


def raised(*texts: str) -> Callable[[Trials], bool]:
    """The first error holds one of these texts."""

    def shows(trials: Trials) -> bool:
        errors = [t.error for t in trials if t.error]
        return bool(errors) and any(text in errors[0] for text in texts)

    return shows


def sixteen_bits_only(trials: Trials) -> bool:
    wrong = [t for t in trials if t.wrong]
    return bool(wrong) and all(t.arguments[0].dtype in (torch.float16, torch.bfloat16) for t in wrong)


def more_reads(trials: Trials) -> bool:
    return any(t.watched.reads > t.moves[0] for t in trials if not t.error)


def fewer_writes(trials: Trials) -> bool:
    return any(t.watched.writes < t.moves[1] for t in trials if not t.error)


# --- of every kernel: these come after a lesson's own ---------------------------------------------------------------

TRACES = (
    Mistake("nothing is written", "The kernel ends without a tl.store.", shows=nothing_written),
    Mistake(
        "the store reaches outside of the output",
        "Give tl.store the mask of the lanes that lie inside. On a GPU these lanes overwrite other rows or other "
        "tensors, without an error.",
        shows=writes_outside,
    ),
    Mistake(
        "the load reaches outside of its tensor",
        "Give tl.load the mask of the lanes that lie inside, and a value for the others.",
        shows=reads_outside,
    ),
    Mistake(
        "a block of a size that is no power of two",
        "tl.arange and tl.full need a constexpr size that is a power of two: use the block, and a mask.",
        shows=raised("power of 2", "power of two", "arange's"),
    ),
    Mistake(
        "exp of 16-bit numbers",
        "tl.exp takes float32: convert what tl.load gives with .to(tl.float32).",
        shows=raised("Expected dtype ['fp32', 'fp64']", "expected dtype"),
    ),
    Mistake(
        "a name that is not defined",
        "The core must define every name that the lines after it use.",
        shows=raised("is not defined", "referenced before assignment", "cannot access local variable"),
    ),
    Mistake(
        "shapes that do not match",
        "Write the shapes next to the lines. A reduced axis comes back with [:, None] or [None, :].",
        shows=raised("broadcast", "ncompatible", "shape mismatch", "could not be broadcast"),
    ),
    Mistake(
        "16-bit arithmetic",
        "Only float16 and bfloat16 are wrong: convert to float32 after the load, and round once, in the store.",
        shows=sixteen_bits_only,
    ),
    Mistake(
        "elements are written more than once",
        "Two programs, or two steps of a loop, store the same elements. Give each its own.",
        shows=written_again,
    ),
    Mistake(
        "elements are never written",
        "The stores do not cover the output: count the columns and the rows.",
        shows=fewer_writes,
    ),
    Mistake(
        "more is read than needed",
        "The result may be right, but the kernel reads elements again. Each read costs as much as the write.",
        shows=more_reads,
    ),
)
