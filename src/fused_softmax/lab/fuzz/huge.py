"""Tensors of more than 2^31 elements, on a GPU: rows at both ends and next to element 2^31 are judged.

No `Case` describes them: their values are drawn on the device, and the reference of all rows would not fit there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fused_softmax.lab.registry import OPS

from . import exactness
from .draw import Case
from .worker import Failure, Report

N_COLS = 32768
N_ROWS = 2**31 // N_COLS + 4096
JUDGED = 32  # rows at each place
_OPTIONS: dict[str, dict[str, Any]] = {
    "masked_softmax": {"scale": 0.5},
    "cross_entropy": {"reduction": "none", "label_smoothing": 0.1},
    "token_logprobs": {"temperature": 0.7},
}


def run_huge(
    ops: tuple[str, ...], seed: int, n_rows: int = N_ROWS, n_cols: int = N_COLS, device: str = "cuda"
) -> Report:
    """Each op forward and backward, over rows and, where an op takes any dim, over columns."""
    report = Report()
    for op in ops:
        for transposed in (False, True) if OPS[op].rows in ("dim", "dims") else (False,):
            shape = (n_cols, n_rows) if transposed else (n_rows, n_cols)
            case = Case(op, "function", "bfloat16", shape, (0 if transposed else 1,), direction="gradient", seed=seed)
            problems = list(_judge(case, n_rows, n_cols, transposed, device))
            report.cases[case.cell] += 1
            if problems:
                report.wrong[case.cell] += 1
                report.failures.append(Failure(case.to_json(), problems, case.to_json()))
            if device == "cuda":
                torch.cuda.empty_cache()
    return report


def _judge(case: Case, n_rows: int, n_cols: int, transposed: bool, device: str) -> Iterator[str]:
    spec, options = case.spec, dict(_OPTIONS.get(case.op, {}))
    g = torch.Generator(device).manual_seed(case.seed)
    x = torch.empty(case.shape, dtype=torch.bfloat16, device=device).normal_(generator=g)
    by_row = {}
    if spec.by_row and spec.by_row[0] != "mask":
        by_row[spec.by_row[0]] = torch.randint(n_cols, (n_rows,), device=device, generator=g)
    if spec.rows in ("dim", "dims"):
        options["dim"] = 0 if transposed else -1
    x.requires_grad_()
    y = spec.function(x, **by_row, **options)
    (dx,) = torch.autograd.grad(y.sum() if y.dim() == 1 else y, x, None if y.dim() == 1 else x.detach())
    y = y.detach()

    def rows(t: Tensor, at: slice) -> Tensor:
        return t.detach()[:, at] if transposed and t.dim() == 2 else t.detach()[at]

    for first in sorted({0, min(2**31 // n_cols - JUDGED // 2, n_rows - JUDGED), n_rows - JUDGED}):
        at = slice(max(0, first), max(0, first) + JUDGED)
        part, given = rows(x, at), {name: t[at] for name, t in by_row.items()}
        results = []
        for function, source in ((spec.torch_way, part.clone()), (spec.reference, part.double())):
            z = source.requires_grad_()
            own = function(z, **given, **options)
            upstream = torch.ones_like(own) if own.dim() == 1 else part.to(own.dtype)
            results.append((own.detach(), torch.autograd.grad(own, z, upstream)[0]))
        dims = case.dims
        for name, got, own, ref in zip(("y", "dx"), (rows(y, at), rows(dx, at)), *results, strict=True):
            rule = exactness.Rule(dims if got.dim() == 2 else (), roundings=2 if name == "dx" else 0)
            bad, _ = exactness.wrong(got, own.to(got.dtype), ref, rule)
            if bool(bad.any()):
                yield f"{name} of rows {at.start} to {at.stop}"
