"""Losses and statistics of rows of few columns, or some hundred: launches, and what is right.

A case is drawn by a seed. Its results lie between guards, which no launch may change.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_softmax.launch import cross_entropy, cross_entropy_gradient, loss_kernels, row_statistics
from fused_softmax.launch.compile import Launch
from fused_softmax.launch.launcher import launch_rows, row_launch
from fused_softmax.launch.layout import problem_of
from fused_softmax.launch.options import CrossEntropy, weight_facts_of
from fused_softmax.planning.gathered import ALIGNED_COLS, MOST_COLS
from fused_softmax.planning.piece_costs import LOSS, STATISTICS, STATISTICS_BACKWARD
from fused_softmax.planning.types import DEVICES, Device, Plan

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
HOPPER = DEVICES["sm_90"]
GUARD, GUARDS = 16, 7.0
KINDS = {"loss": LOSS, "loss alone": STATISTICS, "gradient": STATISTICS_BACKWARD}
OF_STATISTICS = {"statistics": STATISTICS, "gradient of statistics": STATISTICS_BACKWARD}
ALL = KINDS | OF_STATISTICS


class Checked(NamedTuple):
    """A launch; what `launch_rows` takes for it; its plan; what it writes, each with its guards; what is right there;
    and the limit on the error."""

    launch: Launch
    call: tuple[Any, ...]
    plan: Plan
    written: dict[str, Tensor]
    right: dict[str, Tensor]
    limits: dict[str, Tensor]

    def run_on(self, device: str) -> None:
        """Launches over copies of all tensors on the device, which start as these do, and copies them back."""
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def there(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            storage = t.untyped_storage()
            whole = torch.empty(0, dtype=t.dtype).set_(storage)  # type: ignore[call-overload]
            _, copy = copies.setdefault(storage.data_ptr(), (whole, whole.to(device)))
            return copy.as_strided(t.shape, t.stride(), t.storage_offset())

        op, rows, vectors, numbers, flags = self.call
        launch_rows(op, tuple(map(there, rows)), tuple(map(there, vectors)), numbers, flags)
        for whole, copy in copies.values():
            whole.copy_(copy)

    def expect_right(self) -> None:
        for name, memory in self.written.items():
            inside, want = memory[GUARD:-GUARD].double(), self.right[name].double().reshape(-1)
            assert bool((memory[:GUARD] == GUARDS).all() and (memory[-GUARD:] == GUARDS).all()), f"outside of {name}"
            limit = self.limits[name].reshape(-1)
            same = inside.isnan() & want.isnan() | (inside == want) | limit.isinf()
            wrong = ~(same | ((inside - want).abs() <= limit))
            assert not wrong.any(), (name, self.plan, inside[wrong][:4], want[wrong][:4])


def most_cols(kind: str, dtype: torch.dtype, vec: int) -> int:
    """Columns up to which rows of such a launch that start at multiples of vec elements are moved as one piece."""
    whole = vec * dtype.itemsize == 16
    return (ALIGNED_COLS if whole else MOST_COLS)[ALL[kind]][dtype.itemsize]


def _guarded(size: int, dtype: torch.dtype, shift: int = 0) -> Tensor:
    memory = torch.full((size + 2 * GUARD + shift,), GUARDS, dtype=dtype)
    return memory[shift:]


def drawn(
    kind: str, seed: int, device: Device, n_cols: int = 0, dtype: torch.dtype | None = None, n_rows: int = 0
) -> Checked:
    """A random case, planned as for HOPPER, launched as on `device`. n_cols, dtype, n_rows: where given, of these."""
    rng, given = Random(f"{kind} {seed}"), torch.Generator().manual_seed(seed)
    dtype = dtype or rng.choice((BFLOAT16, FLOAT16, FLOAT32))
    n_cols, n_rows = n_cols or max(2, round(2 ** rng.uniform(1, 9))), n_rows or rng.randint(1, 300)
    shift = rng.choice((0, 0, 1, 2, 3))
    far = rng.choice((0.0, 0.0, 0.0, 200.0, 3000.0))  # where the rounding of an exponent counts
    x = (torch.randn(n_rows * n_cols + shift, generator=given) * 3 + far).to(dtype)[shift:].view(n_rows, n_cols)
    if rng.random() < 0.3:
        x[torch.rand(x.shape, generator=given) < 0.2] = -float("inf")
        x[torch.rand(x.shape, generator=given) < 0.002] = rng.choice((float("inf"), float("nan")))
    ids = torch.randint(0, n_cols, (n_rows,), generator=given)
    make = _statistics if kind in OF_STATISTICS else _loss
    return make(kind, rng, given, x, ids, shift, device)


def _loss(
    kind: str, rng: Random, given: torch.Generator, x: Tensor, target: Tensor, shift: int, device: Device
) -> Checked:
    n_rows, n_cols = x.shape
    target[torch.rand(n_rows, generator=given) < 0.2] = -100
    smoothing, softcap = rng.choice((0.0, 0.0, 0.1)), rng.choice((None, None, 5.0))
    weight = torch.rand(n_cols, generator=given) + 0.5 if rng.random() < 0.3 else None
    if kind == "loss" and weight is not None:
        smoothing = 0.0
    z_loss, reduction = rng.choice((0.0, 0.0, 0.01)), rng.choice(("mean", "sum"))
    facts = weight_facts_of(weight, smoothing)
    op = CrossEntropy(target, weight, facts, -100, reduction, smoothing, softcap, z_loss)
    count = torch.cat((cross_entropy.counted(op, n_cols), torch.zeros(1)))
    wide = x.double().requires_grad_()
    z = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    if softcap is not None:  # a masked class stays one
        z = torch.where(wide == -float("inf"), wide.detach(), z)
    each = F.cross_entropy(
        z, target, None if weight is None else weight.double(), reduction="none", label_smoothing=smoothing
    )
    lse = torch.logsumexp(z, 1)
    each = torch.where(target == -100, 0.0, each + (z_loss * lse * lse if z_loss else 0.0))
    g = torch.randn(n_rows, generator=given) if kind == "gradient" else torch.ones(n_rows)
    divisor = count[0].double() if reduction == "mean" and kind != "loss alone" else 1.0
    (each.masked_fill(target == -100, 0.0) * g / divisor).sum().backward()
    assert wide.grad is not None
    dx = torch.where((target == -100)[:, None], 0.0, wide.grad)
    top = z.detach().amax(1)
    losses, moments, result = (
        _guarded(n_rows, FLOAT32),
        _guarded(2 * n_rows, FLOAT32),
        _guarded(x.numel(), x.dtype, shift),
    )
    inside = slice(GUARD, -GUARD)
    row_sum = torch.exp(z.detach() - top[:, None]).sum(1)
    right = {"losses": each.detach(), "moments": torch.stack((top, row_sum), 1), "dx": dx}
    of_row = 2e-6 * (1 + top.abs() + each.detach().abs()).nan_to_num(0, 0, 0)
    eps = torch.finfo(x.dtype).eps + 4e-6  # the interpreter cuts bits off
    scale = (g.double() * (weight.max().double() if weight is not None else 1.0)).abs() / divisor
    of_dx = eps * dx.abs() + 4e-6 * (scale * (1 + z_loss * lse.detach().abs()))[:, None] + 6e-8
    limits = {"losses": of_row, "moments": 4e-6 * right["moments"].abs(), "dx": of_dx}
    dx_rows = result[inside].view(x.shape)
    numbers = (op.ignore_index, *op.numbers)
    if kind == "loss alone":
        row_op, rows, flags = cross_entropy.FORWARD[op.kind.arithmetic], (x,), op.kind.flags
        vectors, names = (*op.vectors(count), losses[inside], moments[inside]), ("losses", "moments")
    elif kind == "loss":
        row_op, rows = cross_entropy.WITH_GRADIENT[op.kind.arithmetic], (x, dx_rows)
        losses_are = rng.choice((loss_kernels.EACH_ROW, loss_kernels.SUMS, loss_kernels.SUMS_OVER_COUNT))
        if not row_op.planner(problem_of(*rows), HOPPER).gathered:
            losses_are = loss_kernels.EACH_ROW
        flags = loss_kernels.with_gradient_flags(
            op.kind, reduction == "mean", keeps_upstream=True, losses=losses_are
        )  # fmt: skip
        if losses_are != loss_kernels.EACH_ROW:
            each_of = row_op.planner(problem_of(*rows), HOPPER).rows
            programs = -(-n_rows // each_of)
            losses = _guarded(programs, FLOAT32)
            over = count[0].double() if losses_are == loss_kernels.SUMS_OVER_COUNT else 1.0
            for of in (right, limits):
                padded = F.pad(of["losses"].double(), (0, programs * each_of - n_rows))
                of["losses"] = padded.view(programs, each_of).sum(1) / over
        vectors, names = (*op.vectors(count), count, losses[inside], moments[inside]), ("losses", "moments", "dx")
        upstream = rng.choice((1.0, 1.0, 2.0))
        numbers = (*numbers, upstream)
        right["dx"], limits["dx"] = right["dx"] * upstream, limits["dx"] * upstream
    else:
        row_op, rows = cross_entropy_gradient.BACKWARD, (x, dx_rows)
        flags = cross_entropy_gradient.gradient_flags(op.kind, reduction == "mean", False)
        known = right["moments"].float().reshape(-1)
        vectors, names = (*op.vectors(count), count, known, g, g, g), ("dx",)
        numbers = (op.ignore_index, 1, 0, *op.numbers)
    # the moments of a row with +inf, NaN or nothing but -inf are whatever makes its loss NaN
    odd = ~torch.isfinite(top)
    right["moments"][odd], limits["moments"][odd] = 0.0, float("inf")
    plan = row_op.planner(problem_of(*rows), HOPPER)
    launch = row_launch(row_op, rows, vectors, numbers, flags, plan, device)
    memories = {"losses": losses, "moments": moments, "dx": result}
    call = (row_op, rows, vectors, numbers, flags)
    return Checked(launch, call, plan, {n: memories[n] for n in names}, right, limits)


def _statistics(
    kind: str, rng: Random, given: torch.Generator, x: Tensor, ids: Tensor, shift: int, device: Device
) -> Checked:
    n_rows, n_cols = x.shape
    if rng.random() < 0.3:
        ids[torch.rand(n_rows, generator=given) < 0.2] = rng.choice((-1, n_cols))
    picks, entropy, of_lse = int(rng.random() < 0.6), rng.random() < 0.4, rng.random() < 0.5
    scale: float | Tensor = rng.choice((1.0, 0.5, torch.rand(n_rows, generator=given) + 0.1))
    scaled = 2 if isinstance(scale, Tensor) else int(scale != 1.0)
    wide = x.double()
    z = wide * (scale[:, None].double() if isinstance(scale, Tensor) else scale)
    lse, known = torch.logsumexp(z, 1), (ids >= 0) & (ids < n_cols)
    logs = z - lse[:, None]
    picked = torch.where(known, logs.gather(1, ids.clamp(0, n_cols - 1)[:, None])[:, 0], float("nan"))
    picked = torch.where(lse == float("inf"), float("nan"), picked)
    p = logs.exp()
    entropies = -(p * logs.clamp_min(torch.finfo(torch.float32).min)).sum(1)
    entropies = torch.where(lse.isinf(), float("nan"), entropies)
    right = {"lse": lse.detach(), "entropies": entropies.detach(), "picked": picked.detach()}
    near = 4e-6 * (1 + z.detach().amax(1).abs() + right["lse"].abs()).nan_to_num(0, 0, 0)
    of_entropy = 4 * near if scaled else 4e-6 * (1 + right["entropies"].abs().nan_to_num(0))
    limits = {"lse": near, "entropies": of_entropy, "picked": near + 2e-6 * right["picked"].abs().nan_to_num(0)}
    inside, unused = slice(GUARD, -GUARD), torch.zeros(1)
    memories = {name: _guarded(n_rows, FLOAT32) for name in right}
    by = scale if isinstance(scale, Tensor) else unused
    number = 1.0 if isinstance(scale, Tensor) else scale
    flags: tuple[tuple[str, object], ...]
    if kind == "statistics":
        names = ("lse", *("entropies",) * entropy, *("picked",) * picks)
        keeps = rng.random() < 0.5
        memories["moments"] = _guarded(2 * n_rows, FLOAT32)
        with torch.no_grad():
            top = z.amax(1)
            right["moments"] = torch.stack((top, torch.exp(z - top[:, None]).sum(1)), 1)
        relative = 4e-6 * (1 + (scaled > 0) * top.abs())  # a product with a scale is rounded
        of_moments = (relative[:, None] * right["moments"].abs()).nan_to_num(0, 0, 0)
        limits["moments"] = torch.where(torch.isfinite(top)[:, None], of_moments, float("inf"))
        names = (*names, *("moments",) * keeps)
        vectors = (memories["lse"][inside], memories["moments"][inside], memories["entropies"][inside], ids)
        vectors = (*vectors, memories["picked"][inside], by)
        flags = (("PICKS", picks), ("ENTROPY", entropy), ("RANK", False), ("SCALE", scaled), ("KEEP_MOMENTS", keeps))
        row_op, rows, numbers = row_statistics.FORWARD, (x,), (1, number)
        plan = row_op.planner(problem_of(x), HOPPER)
        launch = row_launch(row_op, rows, vectors, numbers, flags, plan, device)
        call = (row_op, rows, vectors, numbers, flags)
        return Checked(launch, call, plan, {n: memories[n] for n in names}, right, limits)
    g_picked, g_entropy, g_lse = (torch.randn(n_rows, generator=given) for _ in range(3))
    with torch.no_grad():
        top = z.amax(1).clamp(torch.finfo(torch.float32).min, torch.finfo(torch.float32).max)
        row_sum = torch.exp(z - top[:, None]).sum(1)
        e = torch.exp(z - top[:, None]) / row_sum[:, None]
        a = torch.zeros(n_rows, dtype=torch.float64)
        g = torch.where(known, g_picked, 0.0).double() if picks else torch.zeros(n_rows, dtype=torch.float64)
        a += (g_lse.double() if of_lse else 0.0) - g
        if entropy or picks:
            a = torch.where(row_sum == float("inf"), float("nan"), a)
        dz = e * a[:, None]
        # a logit times a scale is rounded, and so is the probability
        rounded = (scaled > 0) * 2.0**-23 * top.abs()[:, None] * e * a.abs()[:, None]
        if entropy:
            of_entropy = right["entropies"][:, None]
            least = torch.finfo(torch.float32).min
            log_p = (z - top[:, None] - row_sum.log()[:, None] + of_entropy).clamp_min(least)
            dz -= g_entropy.double()[:, None] * e * log_p
            rounded += (scaled > 0) * 2.0**-23 * (top * g_entropy).abs()[:, None] * e * (1 + log_p.abs())
        if picks:
            dz[torch.arange(n_rows)[known], ids[known]] += g[known]
        dx = dz * (scale[:, None].double() if isinstance(scale, Tensor) else scale)
    whole = torch.isfinite(x).all(1)  # these rows by autograd, others by the formula
    some = x[whole].double().requires_grad_()
    of_some = some * (scale[whole, None].double() if isinstance(scale, Tensor) else scale)
    log_p, at = torch.log_softmax(of_some, 1), ids[whole].clamp(0, n_cols - 1)[:, None]
    total = (torch.logsumexp(of_some, 1) * g_lse[whole]).sum() * of_lse
    total = total + (torch.where(known[whole], log_p.gather(1, at)[:, 0], 0.0) * g_picked[whole]).sum() * picks
    total = total - ((log_p.exp() * log_p).sum(1) * g_entropy[whole]).sum() * entropy
    dx[whole] = torch.autograd.grad(total, some)[0]
    eps = torch.finfo(x.dtype).eps + 4e-6  # the interpreter cuts bits off
    of_row = 1e-5 * (1 + (right["entropies"].abs().nan_to_num(0) + 30) * entropy) * 4
    result = _guarded(x.numel(), x.dtype, shift)
    moments = torch.stack((top, row_sum), 1).float().reshape(-1)
    vectors = (moments, right["entropies"].float(), g_entropy, ids, g_picked, g_lse, by if scaled == 2 else g_lse)
    flags = (("PICKS", picks), ("ENTROPY", entropy), ("LSE", of_lse), ("SCALE", scaled), ("HAS_MOMENTS", True))
    flags = (*flags, ("SHARDED", False))
    rows = (x, result[inside].view(x.shape))
    plan = row_statistics.BACKWARD.planner(problem_of(*rows), HOPPER)
    call = (row_statistics.BACKWARD, rows, vectors, (1, 0, 0, number), flags)
    launch = row_launch(*call, plan, device)
    rounded = (rounded * (scale[:, None] if isinstance(scale, Tensor) else scale)).nan_to_num(0, 0, 0)
    limits = {"dx": eps * dx.abs().nan_to_num(0) + of_row[:, None] + rounded}
    return Checked(launch, call, plan, {"dx": result}, {"dx": dx}, limits)
