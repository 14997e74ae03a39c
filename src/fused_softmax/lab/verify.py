"""`fused-softmax verify`: the shipped softmax against float64, every regime forced, and the rows that break kernels.

Random rows with planted outliers, rows with -inf in the first, middle and last part, rows that torch defines as NaN,
strided and empty inputs, and a file's tensors where one is given; float16, bfloat16, float32. No times, no peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fused_softmax.lab.bench.checking import Judge, WrongShape, run_poisoned
from fused_softmax.lab.bench.inputs import DTYPES, excerpt, load_tensors, rows_of_logits
from fused_softmax.lab.bench.ops import OPS
from fused_softmax.lab.plans import problem_for, run_plan
from fused_softmax.planning.types import REGIMES

WIDTHS = (1, 3, 31, 32, 33, 127, 256, 1000, 1023, 1025, 4096, 4097, 16384, 50257)
# on a GPU there is time for the widths where regimes meet and for long rows
GPU_WIDTHS = (*WIDTHS, 8192, 12289, 32768, 65536, 128256, 131072, 151936, 200019, 262144, 524288, 1048577)
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Finding:
    """One path on one input: `error` is the largest absolute difference from float64, `why` says what failed."""

    path: str
    dtype: str
    about: str
    ok: bool
    error: float
    why: str = ""


@dataclass(frozen=True)
class Check:
    """An input, a function that takes it to softmax over its last dimension, and the name of the path that it takes."""

    path: str
    dtype: str
    about: str
    x: Tensor
    call: Callable[[Tensor], Tensor]


def edge_rows(n_cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(8, n_cols): -inf at the start, middle, end; only -inf; +inf; NaN; huge values; all equal."""
    x = rows_of_logits(8, n_cols, torch.float32, device, seed=1)
    third = max(1, n_cols // 3)
    x[0, :third] = -INF
    x[1, third : 2 * third] = -INF
    x[2, n_cols - third :] = -INF
    x[3] = -INF
    x[4, n_cols // 2] = INF
    x[5, n_cols - 1] = NAN
    x[6] = torch.linspace(-60000, 60000, n_cols, device=device)
    x[7] = 1.0
    return x.to(dtype)


def forced(x: Tensor, regime: str) -> Callable[[Tensor], Tensor] | str:
    """Softmax of 2-D rows through the regime given, or the reason why the planner will not give it."""
    from fused_softmax.launch.device import Unsupported, describe
    from fused_softmax.planning.softmax import plan

    device = describe(x.device)
    if isinstance(device, Unsupported):
        return str(device)
    try:
        return run_plan()(plan(problem_for(x.shape[1], str(x.dtype).removeprefix("torch.")), device, regime=regime))
    except ValueError as error:
        return str(error)


def checks(device: torch.device, file: Path | None = None) -> Iterator[Check]:
    """All checks, small ones first."""
    import fused_softmax

    widths = GPU_WIDTHS if device.type == "cuda" else WIDTHS
    for name, dtype in DTYPES.items():
        for n_cols in widths:
            x = rows_of_logits(3, n_cols, dtype, device)
            yield Check(_chosen(x), name, f"3x{n_cols}", x, fused_softmax.softmax)
            for regime in REGIMES:
                # interpreted, one dtype is enough for the wide rows: the kernel widens to float32 at once
                if device.type == "cpu" and n_cols > 4097 and name != "bfloat16":
                    continue
                call = forced(x, regime)
                if not isinstance(call, str):
                    yield Check(f"{regime}, forced", name, f"3x{n_cols}", x, call)
                    if n_cols in (33, 1000, 4097):
                        edges = edge_rows(n_cols, dtype, device)
                        yield Check(f"{regime}, forced", name, f"edge rows of {n_cols}", edges, call)
        yield from _layouts(name, dtype, device, fused_softmax.softmax)
    for tensor_name, tensor in load_tensors(file or excerpt()).items():
        x = tensor.reshape(-1, tensor.shape[-1]).to(device)
        yield Check(_chosen(x), str(x.dtype).removeprefix("torch."), f"real: {tensor_name}", x, fused_softmax.softmax)


def _layouts(name: str, dtype: torch.dtype, device: torch.device, softmax: Callable[..., Tensor]) -> Iterator[Check]:
    wide = rows_of_logits(40, 70, dtype, device)
    views = {
        "transposed": wide.t(),
        "sliced columns": wide[:, 3:60],
        "every other column": wide[:, ::2],
        "every other row": wide[::2],
        "expanded": wide[:1].expand(5, 70),
        "no rows": wide[:0],
        "no columns": wide[:, :0],
        "three dimensions": wide.reshape(4, 10, 70),
    }
    for about, x in views.items():
        yield Check("any layout", name, about, x, softmax)
    yield Check("any layout", name, "dim=0", wide.t(), lambda x: softmax(x.t(), 0).t())


def _chosen(x: Tensor) -> str:
    import fused_softmax

    return f"{fused_softmax.plan_for(x).regime}, as planned"


def examine(check: Check) -> Finding:
    """Run one check on poisoned memory and judge it; whatever it raises is a failure."""
    try:
        y = run_poisoned(check.call, (check.x,))
        verdict = Judge(OPS["softmax"], (check.x,)).judge(y)
    except WrongShape as error:
        return Finding(check.path, check.dtype, check.about, False, INF, f"wrong shape or dtype: {error}")
    except Exception as error:
        return Finding(check.path, check.dtype, check.about, False, INF, f"{type(error).__name__}: {error}"[:200])
    return Finding(check.path, check.dtype, check.about, verdict.ok, verdict.error, verdict.why)


def summary(findings: list[Finding]) -> list[tuple[str, str, str, str]]:
    """(path, dtype, passed of all, largest error) for each path and dtype, in the order in which they were met."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.path, finding.dtype), []).append(finding)
    return [
        (path, dtype, f"{sum(f.ok for f in found)} of {len(found)}", f"{max(f.error for f in found):.1e}")
        for (path, dtype), found in sorted(groups.items())
    ]
