"""What the tests of softmax share: inputs, a forced regime, guarded outputs and the one rule of accuracy.

The rule: error against float64 <= 2 x torch's own error + 4 x eps x scale. Both errors are the row's largest, eps is
float32's (16-bit inputs are accumulated in float32) and scale is the row's largest result. Triton's interpreter
truncates when it stores bfloat16 where a GPU rounds, so there each element may be one bfloat16 ulp further off.
"""

from __future__ import annotations

import math
import os

import torch

from fused_softmax.launch import spatial
from fused_softmax.launch.device import describe, device_of
from fused_softmax.launch.layout import problem_of
from fused_softmax.launch.softmax import softmax_launch
from fused_softmax.planning.rows import WARP_MAX_COLS
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import REGIMES, Plan

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (1, 2, 3, 31, 32, 33, 127, 1000, 1023, 1024, 1025, 4096, 8191)
ROWS = (0, 1, 3, 17)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SENTINEL = -7.0


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def logits(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 3.0) -> torch.Tensor:
    """Normal values with an outlier planted in every row: without one, a kernel that forgets the max looks right."""
    x = torch.randn(*shape, device=device) * scale
    if x.numel():
        x[..., shape[-1] // 2] += 20.0
    return x.to(dtype)


def regimes_for(*widths: int) -> list[tuple[str, int]]:
    """Every (regime, n_cols) of these widths: the warp regime is made for rows of one warp, the others hold any."""
    return [(regime, n_cols) for n_cols in widths for regime in REGIMES if regime != "warp" or n_cols <= WARP_MAX_COLS]


def softmax_by(
    regime: str, x: torch.Tensor, y: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> torch.Tensor:
    """The shipped softmax over the rows of 2-D x with one regime forced, into y where given."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if y is None else y
    forced = plan(problem_of(x, y, batch_invariant=batch_invariant), describe(x.device), regime=regime)
    assert forced.regime == regime
    softmax_launch((x, y), forced)()
    return y


def guarded(n_rows: int, n_cols: int, dtype: torch.dtype, lead: int = 8, device: str = "cpu") -> tuple:
    """An output view inside a field of sentinels, `lead` elements before each row and 9 after, and the field."""
    field = torch.full((n_rows, lead + n_cols + 9), SENTINEL, dtype=dtype, device=device)
    return field[:, lead : lead + n_cols], field


def outside(field: torch.Tensor, n_cols: int, lead: int = 8) -> torch.Tensor:
    return torch.cat([field[:, :lead].flatten(), field[:, lead + n_cols :].flatten()])


def assert_contract(got: torch.Tensor, x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> None:
    """Same shape, dtype and NaN as torch.softmax(x, dim, dtype), contiguous, and as exact as the rule asks."""
    own = torch.softmax(x, dim, dtype=dtype)
    assert got.shape == own.shape
    assert got.dtype == own.dtype
    assert got.device == own.device
    if got.numel() == 0:
        return
    want = torch.softmax((x if dtype is None else x.to(dtype)).double(), dim)
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan), f"NaN in {int(got.isnan().sum())} places where torch has {int(nan.sum())}"

    def row_max(t: torch.Tensor) -> torch.Tensor:
        return t.masked_fill(nan, 0.0).abs().amax(dim, keepdim=True)

    error = (got.double() - want).masked_fill(nan, 0.0).abs()
    allowed = 2 * row_max(own.double() - want) + 4 * torch.finfo(torch.float32).eps * row_max(want)
    if INTERPRETED and got.dtype == torch.bfloat16:
        allowed = allowed + torch.finfo(torch.bfloat16).eps * want.masked_fill(nan, 0.0)
    worst = (error - allowed).max()
    assert worst <= 0, f"error {error.max():.3g}, {worst:.3g} above what the rule allows"


def assert_forward(got: torch.Tensor, x: torch.Tensor, log: bool) -> None:
    """softmax, or log_softmax, over dimension 1: the contract's rule, or as exact as float32 and the dtype allow."""
    if not log:
        assert_contract(got, x, 1)
        return
    want = torch.log_softmax(x.double(), 1)
    finite = want.isfinite()
    bound = 4 * torch.finfo(torch.float32).eps + 2 * torch.finfo(x.dtype).eps
    assert ((got.double() - want)[finite].abs() <= bound * (1 + want[finite].abs())).all(), x.shape
    assert torch.equal(got.double()[~finite], want[~finite])


def assert_gradient(dx: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, log: bool) -> None:
    """The gradient of softmax, or of log_softmax, over dimension 1, as exact as its dtype and its sums allow."""
    g, p = dy.double(), y.double()
    want = g - p.exp() * g.sum(1, keepdim=True) if log else p * (g - (g * p).sum(1, keepdim=True))
    terms = g if log else g * p
    scale = (p.exp() if log else p) * terms.abs().sum(1, keepdim=True) + (1 if log else p) * g.abs()
    eps, least = torch.finfo(y.dtype).eps, torch.finfo(y.dtype).smallest_normal
    relative = 2e-6 + 2 * eps + log * torch.finfo(torch.float32).eps * p.abs()  # exp(y) is as exact as y
    assert ((dx.double() - want).abs() <= relative * scale + eps * least).all(), (y.shape, y.dtype)


def between_sentinels(
    shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """An output without gaps, and all of its memory."""
    field = torch.full((math.prod(shape) + 128,), SENTINEL, dtype=dtype, device=device)
    return field[64:-64].view(shape), field


def assert_nothing_outside(*written: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Of outputs with their memory, as `between_sentinels` makes them: only the outputs were written. Fills these."""
    for out, memory in written:
        out.fill_(SENTINEL)
        assert (memory == SENTINEL).all(), "written outside the output"


def assert_planes(shape: tuple[int, int, int], dtype: torch.dtype, log: bool, device: str = "cpu") -> list[Plan]:
    """The plans of softmax over dimension 1 and of its gradient, after a check of what a call writes, and where."""
    x, dy = (torch.randn(shape, device=device).mul_(3).to(dtype) for _ in range(2))
    (y, field), (dx, of_dx) = (between_sentinels(shape, dtype, device) for _ in range(2))
    calls = ((x, y), (y, dy, dx))
    chosen = [spatial.softmax_plan(t, log, len(t) == 3, False, device_of(x)) for t in calls]
    spatial.prepare_softmax(calls[0], log, False, False)(calls[0])
    assert_forward(y.clone(), x, log)
    spatial.prepare_softmax(calls[1], log, True, False)(calls[1])
    assert_gradient(dx, y, dy, log)
    assert_nothing_outside((y, field), (dx, of_dx))
    return chosen


def edge_rows(n_cols: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Named rows of n_cols >= 3 columns: the infinities, NaN and extremes of the contract's table."""
    inf, third = float("inf"), max(n_cols // 3, 1)
    big = torch.finfo(dtype).max

    def row(*edits: tuple[slice | int, float]) -> torch.Tensor:
        x = logits(n_cols, dtype=dtype, device=device)
        for where, value in edits:
            x[where] = value
        return x

    everything = slice(None)
    return {
        "finite": row(),
        "all -inf": row((everything, -inf)),
        "-inf at the first": row((0, -inf)),
        "-inf at the last": row((-1, -inf)),
        "-inf in the first chunk": row((slice(None, third), -inf)),
        "-inf in the middle chunk": row((slice(third, 2 * third), -inf)),
        "-inf in the last chunk": row((slice(2 * third, None), -inf)),
        "only the first is finite": row((everything, -inf), (0, -3.0)),
        "only the middle is finite": row((everything, -inf), (n_cols // 2, 2.0)),
        "only the last is finite": row((everything, -inf), (-1, 5.0)),
        "+inf at the first": row((0, inf)),
        "+inf at the last": row((-1, inf)),
        "+inf among -inf": row((everything, -inf), (n_cols // 2, inf)),
        "all +inf": row((everything, inf)),
        "NaN at the first": row((0, float("nan"))),
        "NaN at the last": row((-1, float("nan"))),
        "NaN among -inf": row((everything, -inf), (n_cols // 2, float("nan"))),
        "all equal": row((everything, 3.0)),
        "largest finite": row((everything, big)),
        "lowest finite": row((everything, -big)),
        "largest beside lowest": row((everything, -big), (slice(None, 2), big)),
        "finite again": row(),
    }
