"""The check that comes before every time: poisoned outputs, compared with float64 row by row.

A row passes when max |y - ref| <= 2 x (the same of PyTorch's own result) + 4 x eps x max |ref|, eps of y's dtype. The
gradient of a softmax is a difference y*(dy - sum(y*dy)), whose terms have float32's rounding errors. There max |ref| is
max |ref| + 2^-23/eps x max |y*dy|, and PyTorch's error is in the same unit. For log_softmax the terms are dy and
exp(y)*sum(dy), for log-probabilities what each output gives to a logit. NaN passes only where the reference is NaN,
infinities only where it has the same ones. Where PyTorch's own result is coarse (losses) ours has no such allowance,
and a gradient's absolute errors are added up too, because one large entry would hide the others. Memory that a system
forgets to write is NaN: eager allocations are filled by PyTorch's deterministic mode, those of compiled graphs come
from freed blocks that were filled before. float64 is computed in chunks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.lab.bench.workload import Op, parts_of

CHUNK = {"cuda": 2**24, "cpu": 2**21}
# bytes of references that are kept for all systems of a case, at most; larger ones are computed again for each system
KEPT = {"cuda": 2**30, "cpu": 2**27}
# eps that a statistic of a whole row (a loss, an entropy) may be off when it is summed in float32
ROW_EPS = 64
# eps of float32 that each term of a difference may be off, where a row's errors are added up
TERM_EPS = 4


class WrongShape(Exception):
    """The output's shape or dtype is not the reference's."""


@dataclass(frozen=True)
class Verdict:
    """Whether an output passed, its largest absolute error (inf where it is NaN and should not be), and why not."""

    ok: bool
    error: float
    why: str = ""


@contextmanager
def poisoned(like: Tensor, *, deterministic: bool = True) -> Iterator[None]:
    """Make fresh memory NaN: torch.empty by deterministic mode, and blocks of `like`'s size left in the allocator.

    `deterministic=False` leaves PyTorch's mode alone (torch.compile guards on it, and would compile again).
    """
    if like.is_cuda and like.is_floating_point():
        torch.cuda.empty_cache()
        blocks = [torch.full_like(like, float("nan")) for _ in range(2)]
        del blocks
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if deterministic:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _differences(y: Tensor, ref: Tensor) -> Tensor:
    y = y.double()
    same = (y == ref) | (y.isnan() & ref.isnan())
    # inf - finite is inf and NaN - anything NaN: both must fail, so both become inf
    return torch.where(same, 0.0, (y - ref).abs()).nan_to_num(nan=float("inf"), posinf=float("inf"))


def row_scales(ref: Tensor) -> Tensor:
    """Largest finite absolute value of each row, float64."""
    return torch.where(ref.isfinite(), ref.abs(), 0.0).reshape(ref.shape[0], -1).amax(-1)


class Terms(NamedTuple):
    """The numbers that each row's values are differences of: the largest, and all of a row added up, as float32 has
    them. # [rows] float64"""

    largest: Tensor
    total: Tensor


def _terms_of(terms: Tensor) -> Terms:
    return Terms(row_scales(terms), torch.where(terms.isfinite(), terms.abs(), 0.0).reshape(len(terms), -1).sum(-1))


@dataclass
class _Part:
    """PyTorch's own errors for one part of a result, and the one number."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    term: float = 0.0  # the largest number that a row's values are differences of; 0: they are no differences
    error: float = 0.0  # PyTorch's largest
    relative: float = 0.0  # the same, in units of its row's scale
    spread: float = 0.0  # its absolute errors added up over a row, in units of the row's absolute values
    total: float = 0.0

    def scales(self, ref: Tensor, terms: Terms | None) -> Tensor:
        """What a row's error is measured in: its largest value, or the terms whose difference a gradient is.

        The gradient of a cross-entropy is p - 1 at the target. Where p is almost 1, the difference is small, and its
        error is that of p. A row of zeros has no scale: any other value in it is wrong. terms: of each row.
        """
        scale = row_scales(ref)
        if terms is not None:
            return torch.where(scale > 0, scale + self._unit() * terms.largest, 0.0)
        return scale.clamp(min=1.0) if ref.dim() == 1 else self._at_least_term(scale)

    def sizes(self, ref: Tensor, terms: Terms | None) -> Tensor:
        """What a row's errors, added up, are measured in."""
        size = ref.abs().sum(-1)
        if terms is not None:
            return torch.where(size > 0, size + TERM_EPS * self._unit() * terms.total, 0.0)
        return self._at_least_term(size)

    def _unit(self) -> float:
        """float32's eps, in which the errors of terms are, over that of the result's dtype."""
        return torch.finfo(torch.float32).eps / torch.finfo(self.dtype).eps

    def _at_least_term(self, scale: Tensor) -> Tensor:
        return scale if self.term == 0.0 else torch.where(scale > 0, scale.clamp(min=self.term), 0.0)

    def learn(self, y: Tensor, ref: Tensor, terms: Terms | None, spread: bool) -> None:
        """Take a chunk of rows of PyTorch's result."""
        differences = _differences(y, ref)
        errors, scale = differences.reshape(len(ref), -1).amax(-1), self.scales(ref, terms)
        self.error = max(self.error, float(errors.max()))
        self.relative = max(self.relative, _largest(errors, scale))
        if spread:
            self.spread = max(self.spread, _largest(differences.sum(-1), self.sizes(ref, terms)))

    def limit(self, y: Tensor, coarse: bool) -> float:
        """In units of a row's scale."""
        allowed = 0.0 if coarse or y.dtype != self.dtype else 2 * self.relative
        summed = len(self.shape) < 2 and y.dtype == torch.float32
        return allowed + (ROW_EPS if summed else 4) * torch.finfo(y.dtype).eps


def _largest(errors: Tensor, scale: Tensor) -> float:
    return float(torch.where(errors.isfinite() & (scale > 0), errors / scale, 0.0).max())


Chunk = tuple[slice, tuple[Tensor, ...], Terms | None]  # rows, their references, and their terms


class Judge:
    """Judges outputs of one op on one set of inputs (rows first); PyTorch's own error is measured once, here."""

    def __init__(self, op: Op, inputs: tuple[Tensor, ...]) -> None:
        self.op = op
        with torch.no_grad():
            own = self._as_rows(parts_of(op.torch_call(*inputs)))
        self.inputs = (*self._as_rows(inputs[: op.by_row]), *inputs[len(inputs[: op.by_row]) :])
        term = 0.0 if op.largest_term is None else float(op.largest_term(*inputs))
        self.parts = [_Part(name, y.shape, y.dtype, term) for name, y in zip(op.parts, own, strict=True)]
        # torch's worst row, in units of that row's scale, is what every row may be twice as wrong as: with 10^6 rows
        # there is always one that torch happens to round perfectly
        few = 8 * sum(y.numel() for y in own) <= KEPT.get(self.inputs[0].device.type, KEPT["cpu"])
        self._kept = list(self._computed()) if few else None
        for rows, refs, terms in self._chunks():
            for part, y, ref in zip(self.parts, own, refs, strict=True):
                if y.dim() == 0:
                    part.total += float(ref.sum())
                else:
                    part.learn(y[rows], ref, terms, op.coarse and y.dim() > 1)
        for part, y in zip(self.parts, own, strict=True):
            if y.dim() == 0:
                part.error = abs(float(y) - part.total)
                part.relative = part.error / max(1.0, abs(part.total))
        self.torch_error = max(part.error for part in self.parts)

    def _as_rows(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self.op.as_rows(t) for t in tensors)

    def _chunks(self) -> Iterable[Chunk]:
        """All rows: those that were kept, or computed again."""
        return self._computed() if self._kept is None else self._kept

    def _computed(self) -> Iterator[Chunk]:
        """Rows, their references, and the terms of each row's differences."""
        first, by_row = self.inputs[0], self.op.by_row
        if first.numel() == 0:
            return
        sliced, shared = self.inputs[:by_row], self.inputs[by_row:] if by_row is not None else ()
        per_chunk = max(1, CHUNK.get(first.device.type, CHUNK["cpu"]) // (first.numel() // first.shape[0]))
        for start in range(0, first.shape[0], per_chunk):
            rows = slice(start, start + per_chunk)
            part = [t[rows].double() if t.is_floating_point() else t[rows] for t in sliced]
            terms = None if self.op.row_term is None else _terms_of(self.op.row_term(*part, *shared))
            yield rows, parts_of(self.op.reference(*part, *shared)), terms

    def judge(self, result: Any, *, ours: bool = False) -> Verdict:
        """Compare a result with float64; raises WrongShape. `ours` has no allowance where PyTorch's own is coarse."""
        got = self._as_rows(parts_of(result))
        if len(got) != len(self.parts):
            raise WrongShape(f"{len(got)} results for {len(self.parts)}")
        for part, y in zip(self.parts, got, strict=True):
            # a number of a row may be float32 where torch rounds it to the inputs' dtype
            exact = len(part.shape) < 2 and y.dtype == torch.float32
            if y.shape != part.shape or not (exact or y.dtype == part.dtype):
                raise WrongShape(f"{tuple(y.shape)} {y.dtype} for {tuple(part.shape)} {part.dtype}")
        worst, failed = 0.0, dict.fromkeys((part.name for part in self.parts), 0)
        coarse = ours and self.op.coarse and self.inputs[0].dtype not in (torch.float32, torch.float64)
        for rows, refs, terms in self._chunks():
            for part, y, ref in zip(self.parts, got, refs, strict=True):
                if y.dim() == 0:
                    continue
                differences = _differences(y[rows], ref)
                errors, scale = differences.reshape(len(ref), -1).amax(-1), part.scales(ref, terms)
                wrong = errors > part.limit(y, coarse) * scale
                if self.op.coarse and y.dim() > 1:
                    # rounding alone leaves a quarter of eps on average, the interpreter's truncation half
                    limit = torch.finfo(y.dtype).eps * (1 if coarse else 4) + (0.0 if coarse else 2 * part.spread)
                    wrong |= differences.sum(-1) > limit * part.sizes(ref, terms)
                worst = max(worst, float(errors.max()))
                failed[part.name] += int(wrong.sum())
        for part, y in zip(self.parts, got, strict=True):
            if y.dim() == 0:
                error = abs(float(y) - part.total)
                error = error if error == error else float("inf")
                worst = max(worst, error)
                failed[part.name] += error > part.limit(y, coarse) * max(1.0, abs(part.total))
        if not any(failed.values()):
            return Verdict(True, worst)
        why = ", ".join(
            f"{count} of {self.inputs[0].shape[0]} rows{f' of {name}' if len(self.parts) > 1 else ''}"
            for name, count in failed.items()
            if count
        )
        return Verdict(False, worst, why + (", unwritten or NaN" if worst == float("inf") else ""))


def run_poisoned(call: Callable[..., Any], inputs: tuple[Tensor, ...], *, deterministic: bool = True) -> Any:
    """Call a system on poisoned memory, without gradients, and wait until the device has finished."""
    with torch.no_grad(), poisoned(inputs[0], deterministic=deterministic):
        y = call(*inputs)
        if inputs[0].is_cuda:
            torch.cuda.synchronize(inputs[0].device)
    return y
