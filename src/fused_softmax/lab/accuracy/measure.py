"""The largest error of each op against float64, in units in the last place (ULP): ours, and torch's own way's.

A cell is an op, a dtype and a class of widths. Its inputs are drawn from a seed: `EACH` widths, half of them odd, and
at each width every kind of values in `KINDS`. The op's options change with the width. Ours, torch's own way and the
float64 reference get the same inputs and the same upstream gradients. An error is measured in ULP of the result's
dtype, as `UNITS` says.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from fused_softmax.lab.fuzz.values import values
from fused_softmax.lab.registry import OPS, OpSpec
from fused_softmax.launch.device import device_here

# of a float64, viewed as an integer
_EXPONENT_BITS = 0x7FF0000000000000
FLOAT32_TINY = torch.finfo(torch.float32).smallest_normal
WIDTH_CLASSES = ((1, 64), (65, 1024), (1025, 8192), (8193, 65536), (65537, 262144), (262145, 1048576))
DTYPES = ("bfloat16", "float16", "float32")
KINDS = ("normal", "logits", "wide", "offset")
EACH = 4
# of a cell; the interpreter takes about a millisecond for each program of a kernel
ELEMENTS, INTERPRETED_ELEMENTS = 2**22, 2**12
INTERPRETED_WIDEST = 65536

UNITS = {
    "value": "ULP at the element's own reference value",
    "log": "ULP at the element's own reference value, and at least float32's at 1 (1.2e-7): "
    "the logarithm of a sum close to 1 is as exact as that sum",
    "row": "ULP at the row's largest reference value, or at the largest term that the row's gradients are differences "
    "of, where that is larger: where a difference cancels, its own ULP says nothing",
}
OUTPUT_UNITS = {"probability": "value", "log-probability": "log", "statistic": "log"}
GRADIENT = "gradient"
LOG_UNIT = torch.finfo(torch.float32).eps

# of ops that take more than a dimension
_OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "masked_softmax": (
        {},
        {"mask": "bool", "scale": 0.125},
        {"mask": "", "fully_masked": "zero"},
        {"causal": True, "scale": 0.3},
    ),
    "cross_entropy": ({}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"softcap": 30.0, "z_loss": 1e-4}),
    "token_logprobs": (
        {},
        {"return_entropy": True, "return_logsumexp": True},
        {"temperature": 0.7},
        {"return_entropy": True, "return_logsumexp": True, "temperature": 1.5},
    ),
}


@dataclass(frozen=True)
class Cell:
    """An op, a dtype and a class of widths, and how inputs are drawn. `rows`: of each case; None for as many as fit."""

    op: str
    dtype: str
    low: int
    high: int
    seed: int
    elements: int
    rows: int | None = None


@dataclass(frozen=True)
class Case:
    """One call: `rows` x `width` values of a kind, and the op's options as JSON holds them."""

    op: str
    dtype: str
    rows: int
    width: int
    kind: str
    options: dict[str, Any]
    seed: int

    def __str__(self) -> str:
        options = ", ".join(f"{k}={v['dtype'] if k == 'mask' else v}" for k, v in self.options.items() if k != "dim")
        return f"{self.rows} x {self.width}, {self.kind}" + (f", {options}" if options else "")


@dataclass(frozen=True)
class Row:
    """The largest errors of one output, or of the gradient, in a cell; `ours_at` and `torch_at` name the cases.

    ours_flushed, torch_flushed: results below float32's smallest normal number that are 0. They are counted, and have
    no part in the error. infinite: cases in which ours has a NaN or an infinity that the reference does not have, or
    lacks one, or raises.
    """

    op: str
    output: str
    dtype: str
    low: int
    high: int
    unit: str
    ours: float = 0.0
    torch: float = 0.0
    ours_at: str = ""
    torch_at: str = ""
    ours_flushed: int = 0
    torch_flushed: int = 0
    cases: int = 0
    elements: int = 0
    # kind of values -> the largest error of ours and of torch's
    by_kind: dict[str, tuple[float, float]] = field(default_factory=dict)
    infinite: tuple[str, ...] = ()


def cells(ops: tuple[str, ...], dtypes: tuple[str, ...], seed: int, rows: int | None, interpreted: bool) -> list[Cell]:
    """The cells of a run, widest first: these take longest. Interpreted, rows above INTERPRETED_WIDEST are left out."""
    elements = INTERPRETED_ELEMENTS if interpreted else ELEMENTS
    classes = [c for c in WIDTH_CLASSES if not interpreted or c[1] <= INTERPRETED_WIDEST]
    return [
        Cell(op, dtype, low, high, seed, elements, rows)
        for low, high in reversed(classes)
        for op in ops or tuple(OPS)
        for dtype in dtypes or DTYPES
    ]


def cases(cell: Cell) -> Iterator[Case]:
    """The calls of a cell, the same for the same seed."""
    random = Random(f"{cell.seed} {cell.op} {cell.dtype} {cell.low}")
    variants = list(_OPTIONS.get(cell.op, ({"dim": -1} if OPS[cell.op].rows in ("dim", "dims") else {},)))
    random.shuffle(variants)
    for i in range(EACH):
        width = random.randint(cell.low, cell.high)
        width += (i + width) % 2 if width < cell.high else -((i + width) % 2)
        rows = cell.rows or max(1, cell.elements // (EACH * len(KINDS) * width))
        options = dict(variants[i % len(variants)])
        if "mask" in options:
            kind = options["mask"] or cell.dtype
            options["mask"] = {"dtype": kind, "shape": [rows, width], "hidden": "random"}
        for kind in KINDS:
            yield Case(cell.op, cell.dtype, rows, width, kind, options, random.getrandbits(62))


def measure(cell: Cell, device: torch.device | None = None) -> list[Row]:
    """The rows of a cell: one for each output of the op, and one for the gradient."""
    device = device or device_here()
    found: dict[str, Row] = {}
    for case in cases(cell):
        for row in evaluate(case, device):
            row = replace(row, low=cell.low, high=cell.high)
            found[row.output] = _worse(found[row.output], row) if row.output in found else row
    return list(found.values())


def _worse(a: Row, b: Row) -> Row:
    ours, own = max(a, b, key=lambda row: row.ours), max(a, b, key=lambda row: row.torch)
    counts = ("ours_flushed", "torch_flushed", "cases", "elements", "infinite")
    summed = {name: getattr(a, name) + getattr(b, name) for name in counts}
    by_kind = {
        kind: (max(pair[0] for pair in both), max(pair[1] for pair in both))
        for kind in a.by_kind | b.by_kind
        if (both := [row.by_kind[kind] for row in (a, b) if kind in row.by_kind])
    }
    return replace(
        a, ours=ours.ours, ours_at=ours.ours_at, torch=own.torch, torch_at=own.torch_at, by_kind=by_kind, **summed
    )  # fmt: skip


def evaluate(case: Case, device: torch.device) -> list[Row]:
    """A row for each result of one case."""
    spec, dtype = OPS[case.op], getattr(torch, case.dtype)
    g = torch.Generator().manual_seed(case.seed)
    shape = (case.rows, case.width)
    x = values(case.kind, shape, 1, dtype, g).to(device)
    dims = (1,)
    arguments = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in spec.arguments(case.options, shape, dims, dtype, g).items()
    }
    upstream: dict[str, Tensor] = {}
    try:
        got = results(spec, spec.function, x, arguments, upstream, g)
        again = spec.tensors(spec.function(x, **arguments))
    except Exception as error:
        said = f"{case}: raises {type(error).__name__}: {str(error)[:200]}"
        unit = OUTPUT_UNITS[spec.holds]
        return [Row(case.op, spec.outputs[0], case.dtype, 0, 0, unit, math.inf, 0.0, str(case), infinite=(said,))]
    own = results(spec, spec.torch_way, x, arguments, upstream, g)
    ref = results(spec, spec.reference, x.double(), arguments, upstream, g)
    found = []
    for name, wanted in ref.items():
        unit = "row" if name == GRADIENT else OUTPUT_UNITS[spec.holds]
        at_least = row_magnitude(case, ref, upstream) if name == GRADIENT else 0.0
        # without a gradient to come the forward may be another kernel
        ours = [got[name], *([again[name]] if name in again else [])]
        judged = [compare(t, wanted, unit, at_least) for t in (*ours, own[name])]
        worst, lost = max(judged[:-1])
        said = f"{case}: {name} has a NaN or an infinity out of place"
        found.append(
            Row(
                case.op, name, case.dtype, 0, 0, unit, worst, judged[-1][0], str(case), str(case),
                lost, judged[-1][1], 1, wanted.numel(), {case.kind: (worst, judged[-1][0])},
                (said,) if math.isinf(worst) else (),
            )
        )  # fmt: skip
    return found


def results(
    spec: OpSpec, function: Any, x: Tensor, arguments: dict[str, Any], upstream: dict[str, Tensor], g: torch.Generator
) -> dict[str, Tensor]:
    """The outputs by name and the gradient of x; upstream gradients are drawn for the first results and then kept."""
    x = x.detach().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = spec.tensors(function(x, **arguments))
    for name, t in outputs.items():
        if name not in upstream:
            upstream[name] = torch.randn(t.shape, generator=g).to(t.dtype).to(t.device)
    into = [upstream[name].to(t.dtype) for name, t in outputs.items()]
    (gradient,) = torch.autograd.grad(list(outputs.values()), x, into)
    return {**{name: t.detach() for name, t in outputs.items()}, GRADIENT: gradient}


def compare(got: Tensor, ref: Tensor, unit: str, at_least: Tensor | float = 0.0) -> tuple[float, int]:
    """(the largest error, how many results were flushed to zero)."""
    if got.shape != ref.shape:
        return math.inf, 0
    lost = flushed(got, ref)
    found = errors(got, ref, at_least, LOG_UNIT if unit == "log" else 0.0).where(~lost, 0.0)
    worst, n_lost = torch.stack([found.amax(), lost.sum().double()]).tolist()
    return worst, int(n_lost)


def row_magnitude(case: Case, ref: dict[str, Tensor], upstream: dict[str, Tensor]) -> Tensor:
    """For each row of the gradient the largest number that it holds or is a difference of; (rows, 1), float64."""
    dy = {name: t.double() for name, t in upstream.items()}
    held = ref[GRADIENT].abs().nan_to_num(0.0).amax(1, keepdim=True)
    if OPS[case.op].holds == "probability":  # y * (dy - sum(dy * y))
        terms = (ref["y"] * dy["y"]).abs().nan_to_num(0.0).amax(1, keepdim=True)
        terms = terms * abs(case.options.get("scale", 1.0))
    elif OPS[case.op].holds == "log-probability":  # dy - exp(y) * sum(dy)
        terms = dy["y"].abs().amax(1, keepdim=True)
    elif case.op == "logsumexp":  # exp(x - lse) * dy
        return held
    elif case.op == "cross_entropy":  # dy * (exp(x - lse) - (column == target))
        terms = dy["loss"].abs()
        terms = terms.unsqueeze(1) if terms.dim() else (terms / case.rows).expand(case.rows, 1)
    else:  # the same for the log-probability; p * (log(p) + entropy) for the entropy
        terms = torch.stack([t.abs() for t in dy.values()]).sum(0).unsqueeze(1) / case.options.get("temperature", 1.0)
    return torch.maximum(held, terms)


# --- units in the last place (ULP): the distance between neighboring numbers of a dtype -------------------------------


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from `magnitude` (float64) to the next number of `dtype`; constant below the smallest normal one."""
    info = torch.finfo(dtype)
    return _power_of_two(magnitude.abs().clamp(info.smallest_normal, info.max)) * info.eps


def errors(got: Tensor, ref: Tensor, at_least: Tensor | float = 0.0, unit_at_least: float = 0.0) -> Tensor:
    """|got - ref| of each element in ULP of got's dtype at `ref` (float64), or at `at_least` where that is larger.

    No unit is smaller than `unit_at_least`. The error is infinite where only one of the two is NaN, and where an
    infinity is not what rounding gives: an overflow counts as the first number that the dtype does not have.
    """
    info = torch.finfo(got.dtype)
    beyond = 2.0 * float(_power_of_two(torch.tensor(info.max, dtype=torch.float64)))
    given, wanted = got.double(), ref.clamp(-beyond, beyond)
    # the last number before an overflow, and all after it
    overflows = (given == torch.inf) & (wanted >= info.max) | (given == -torch.inf) & (wanted <= -info.max)
    given = torch.where(overflows, given.sign() * beyond, given)
    unit = ulp(
        torch.maximum(wanted.abs(), torch.as_tensor(at_least, dtype=torch.float64, device=ref.device)), got.dtype
    )
    found = (given - wanted).abs() / unit.clamp(min=unit_at_least)
    found = found.where(~(ref.isinf() & given.isfinite() & ~overflows), torch.inf)
    found = found.where(given.isnan() == ref.isnan(), torch.inf)
    return found.where(~ref.isnan() | found.isinf(), 0.0)


def flushed(got: Tensor, ref: Tensor) -> Tensor:
    """Which elements are 0 where rounding gives a number below the smallest normal one of float32."""
    return (got == 0) & (ref.abs() < FLOAT32_TINY) & (ref.to(got.dtype) != 0)


def _power_of_two(magnitude: Tensor) -> Tensor:
    """The largest power of two that is not above `magnitude`, which is normal in float64; exact."""
    return (magnitude.view(torch.int64) & _EXPONENT_BITS).view(torch.float64)
