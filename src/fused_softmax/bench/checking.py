"""The check that comes before every time: poisoned outputs, compared with float64 row by row.

A row passes when max |y - ref| <= 2 x (the same of PyTorch's own result) + 4 x eps x max |ref|, eps of y's dtype. NaN
passes only where the reference is NaN, infinities only where it has the same ones. Memory that a system forgets to
write is NaN: eager allocations are filled by PyTorch's deterministic mode, those of compiled graphs come from freed
blocks that were filled before. float64 is computed over chunks of rows, so that memory stays bounded at any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_softmax.bench.ops import Op

CHUNK = {"cuda": 2**24, "cpu": 2**21}


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


def row_errors(y: Tensor, ref: Tensor) -> Tensor:
    """Largest absolute error of each row, float64; inf for a row with a NaN or an infinity out of place."""
    y = y.double()
    same = (y == ref) | (y.isnan() & ref.isnan())
    # inf - finite is inf and NaN - anything NaN: both must fail, so both become inf
    error = torch.where(same, 0.0, (y - ref).abs()).nan_to_num(nan=float("inf"), posinf=float("inf"))
    return error.reshape(error.shape[0], -1).amax(-1)


def row_scales(ref: Tensor) -> Tensor:
    """Largest finite absolute value of each row, float64."""
    return torch.where(ref.isfinite(), ref.abs(), 0.0).reshape(ref.shape[0], -1).amax(-1)


class Judge:
    """Judges outputs of one op on one set of inputs (rows first); PyTorch's own error is measured once, here."""

    def __init__(self, op: Op, inputs: tuple[Tensor, ...]) -> None:
        self.op, self.inputs = op, inputs
        with torch.no_grad():
            torch_output = op.torch_call(*inputs)
        self.shape, self.dtype = torch_output.shape, torch_output.dtype
        self.eps = torch.finfo(self.dtype).eps
        # torch's worst row, in units of that row's scale, is what every row may be twice as wrong as: with 10^6 rows
        # there is always one that torch happens to round perfectly
        self.torch_error, relative, scales = 0.0, 0.0, []
        for rows, ref in self._chunks():
            errors, scale = row_errors(torch_output[rows], ref), row_scales(ref)
            self.torch_error = max(self.torch_error, float(errors.max()))
            of_scale = torch.where(errors.isfinite() & (scale > 0), errors / scale, 0.0)
            relative = max(relative, float(of_scale.max()))
            scales.append(scale)
        scale = torch.cat(scales) if scales else torch.empty(0, dtype=torch.float64)
        self.limits = (2 * relative + 4 * self.eps) * scale

    def _chunks(self) -> Iterator[tuple[slice, Tensor]]:
        first = self.inputs[0]
        if first.numel() == 0:
            return
        per_chunk = max(1, CHUNK.get(first.device.type, CHUNK["cpu"]) // (first.numel() // first.shape[0]))
        for start in range(0, first.shape[0], per_chunk):
            rows = slice(start, start + per_chunk)
            part = [t[rows].double() if t.is_floating_point() else t[rows] for t in self.inputs]
            yield rows, self.op.reference(*part)

    def judge(self, y: Tensor) -> Verdict:
        """Compare an output with float64; raises WrongShape."""
        if y.shape != self.shape or y.dtype != self.dtype:
            raise WrongShape(f"{tuple(y.shape)} {y.dtype} for {tuple(self.shape)} {self.dtype}")
        worst, failed = 0.0, 0
        for rows, ref in self._chunks():
            errors = row_errors(y[rows], ref)
            worst = max(worst, float(errors.max()))
            failed += int((errors > self.limits[rows]).sum())
        if not failed:
            return Verdict(True, worst)
        unwritten = ", unwritten or NaN" if worst == float("inf") else ""
        return Verdict(False, worst, f"{failed} of {self.shape[0]} rows{unwritten}")


def run_poisoned(call: Callable[..., Tensor], inputs: tuple[Tensor, ...], *, deterministic: bool = True) -> Tensor:
    """Call a system on poisoned memory, without gradients, and wait until the device has finished."""
    with torch.no_grad(), poisoned(inputs[0], deterministic=deterministic):
        y = call(*inputs)
        if inputs[0].is_cuda:
            torch.cuda.synchronize(inputs[0].device)
    return y
