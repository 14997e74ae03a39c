"""`fused-softmax linear`: the linear losses against their peers and against the plain matrix products that bound them.

A result is the loss and the gradients of input and weight. It is checked first: each of them against float64, as a norm
of the error over a norm of the result. Ours may be twice as far off as torch's own, a peer by one rounding more. What
passes is timed in interleaved rounds with three plain products of the same sizes, on logits padded to 64 columns (four
where the logits are made twice). Peak memory is what a call takes above its inputs and its results.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_softmax.lab import reference
from fused_softmax.lab.bench.systems import outcome
from fused_softmax.lab.linear.systems import LOGPROBS, MEAN, SYSTEMS, Loss, System, log_softmax, ours, plain
from fused_softmax.lab.record import Record, Results, header
from fused_softmax.lab.timing import EventStopwatch, interleave, peak_bytes
from fused_softmax.launch.availability import failures_raised

Shape = tuple[int, int, int]  # rows, hidden size, vocabulary
SHAPES: tuple[Shape, ...] = (
    (2048, 4096, 128256),
    (4096, 4096, 128256),
    (8192, 4096, 128256),
    (8192, 2048, 151936),
    (16384, 1024, 50257),
)
# of the ops with a gradient for each row
ROW_SHAPES = SHAPES[1:4]
LARGE = (131072, 4096, 128256)
# float64 logits of this many elements at a time
REFERENCE_ELEMENTS = 2**28


@dataclass
class Problem:
    """The inputs of one shape, and what a result should be; gradients are for the upstream gradient `g`."""

    op: str
    x: Tensor
    weight: Tensor
    target: Tensor
    g: Tensor | None
    exact: tuple[Tensor, ...] = ()
    torch_errors: tuple[float, ...] = ()

    def call(self, loss: Loss) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                value = loss(self.x, self.weight, self.target)
                g = None if self.g is None else self.g.to(value.dtype)
                return (value.detach(), *torch.autograd.grad(value, (self.x, self.weight), g))

        return run

    def errors(self, result: tuple[Tensor, ...]) -> tuple[float, ...]:
        return tuple(_error(got, want) for got, want in zip(result, self.exact, strict=True))


def _error(got: Tensor, want: Tensor) -> float:
    """The norm of the error over the norm of the exact result, a piece of rows at a time."""
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return float("inf")
    pieces = zip(got.reshape(len(want) if want.dim() else 1, -1).split(8192),
                 want.reshape(len(want) if want.dim() else 1, -1).split(8192), strict=True)  # fmt: skip
    squares = [((a.double() - b).square().sum(), b.double().square().sum()) for a, b in pieces]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)).sqrt())


def problem(op: str, n_rows: int, hidden: int, n_cols: int, device: torch.device) -> Problem:
    """Normal hidden states and a weight whose logits have a deviation of 1; every target counts."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    x, weight = normal(n_rows, hidden).requires_grad_(), (normal(n_cols, hidden) / hidden**0.5).requires_grad_()
    target = torch.randint(0, n_cols, (n_rows,), generator=generator, device=device)
    g = None if op == MEAN else torch.rand(n_rows, generator=generator, device=device) + 0.5
    return Problem(op, x, weight, target, g)


def reference_of(p: Problem) -> tuple[Tensor, ...]:
    """(loss, dx, dweight) in float64; the gradients are kept in float32, which is exact enough to judge 16 bits."""
    x, weight = p.x.detach(), p.weight.detach().double()
    n_rows = x.shape[0]
    step = max(1, REFERENCE_ELEMENTS // weight.shape[0])
    losses, dx, dweight = [], [], torch.zeros_like(weight)
    for start in range(0, n_rows, step):
        part = x[start : start + step].double()
        logits, target = part @ weight.t(), p.target[start : start + step]
        g = torch.full(target.shape, 1.0 / n_rows, device=x.device, dtype=torch.float64)
        g = g if p.g is None else p.g[start : start + step].double()
        row_loss = reference.cross_entropy(logits, target, reduction="none")
        dlogits = torch.softmax(logits, -1) * g[:, None]
        dlogits.scatter_add_(1, target[:, None], -g[:, None])
        sign = -1.0 if p.op == LOGPROBS else 1.0
        losses.append(sign * row_loss)
        dx.append((sign * dlogits @ weight).float())
        dweight.addmm_(dlogits.t(), part, alpha=sign)
        del logits, dlogits
    loss = torch.cat(losses)
    return (loss.mean() if p.op == MEAN else loss), torch.cat(dx), dweight.float()


def products(p: Problem) -> Callable[[], None]:
    """The plain products that a loss and its gradients take, into memory that is there: the ceiling."""
    (n_rows, _), n_cols = p.x.shape, p.weight.shape[0]
    padded = -(-n_cols // 64) * 64
    x, weight = p.x.detach(), F.pad(p.weight.detach(), (0, 0, 0, padded - n_cols))
    logits = torch.empty(n_rows, padded, dtype=x.dtype, device=x.device)
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)

    def run() -> None:
        for _ in range(1 if p.op == MEAN else 2):
            torch.mm(x, weight.t(), out=logits)
        torch.mm(logits, weight, out=dx)
        torch.mm(logits.t(), x, out=dweight)

    return run


class SteadyStopwatch(EventStopwatch):
    """Events around a call that comes right after the same call, untimed; the systems in another order each round.

    Products this long reach the device's power limit. What ran before then decides at which clock a call runs: a call
    after a pause, or after a system that mostly moves bytes, would look faster than the same call in a training step.
    """

    describe = "CUDA events, after the same call, in random order"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.random = Random(0)

    def round(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        order = list(calls)
        self.random.shuffle(order)
        pairs = [(kind, name) for name in order for kind in ("before ", "")]
        taken = super().round({kind + name: calls[name] for kind, name in pairs})
        return {name: taken[name] for name in calls}


def ceiling_name(op: str) -> str:
    return "three products" if op == MEAN else "four products"


def measure(
    op: str, shape: Shape, systems: tuple[System, ...], seconds: float, device: torch.device
) -> Iterator[Record]:
    """Checks every system in one shape, then times those that passed, with the plain products."""
    n_rows, hidden, n_cols = shape
    p = problem(op, n_rows, hidden, n_cols, device)
    p.exact = reference_of(p)
    _free()
    p.torch_errors = p.errors(p.call(log_softmax if op == LOGPROBS else plain("mean" if op == MEAN else "none"))())
    of_results = sum(t.numel() * t.element_size() for t in (p.x, p.weight))
    records, passed = {}, {}
    for system in systems:
        _free()
        record = Record(op, system.name, "bfloat16", n_rows, n_cols, "ok", case=f"hidden size {hidden}")
        records[system.name] = record
        record.torch_error = max(p.torch_errors)
        try:
            call = p.call(system.build())
            errors = p.errors(call())
            record.peak_bytes = peak_bytes(lambda *_, call=call: call(), (p.x,)) - of_results
        except Exception as error:
            record.status, record.note = outcome(error, system.kind)
            continue
        record.error = max(errors)
        slack = 2e-6 if system.kind == "ours" else torch.finfo(torch.bfloat16).eps
        far = [e > 2 * own + slack for e, own in zip(errors, p.torch_errors, strict=True)]
        # torch rounds a loss to bfloat16; what ours may be off there is float32's
        record.note = "errors of loss, dx, dweight: " + ", ".join(f"{e:.1e}" for e in errors)
        if any(far):
            record.status = "wrong"
            continue
        passed[system.name] = call
    p.exact = ()
    _free()
    if passed:
        bound = ceiling_name(op)
        stopwatch = SteadyStopwatch(device)
        times = interleave({bound: products(p), **passed}, stopwatch, seconds, fewest=7, most=40)
        records[bound] = Record(op, bound, "bfloat16", n_rows, n_cols, "ok", case=f"hidden size {hidden}")
        for name, taken in times.items():
            record = records[name].take(taken, stopwatch.describe)
            record.ceiling, record.fraction = bound, times[bound].ms / taken.ms
    yield from records.values()


def large(device: torch.device) -> Record:
    """One call on rows whose logits would take 34 GB."""
    n_rows, hidden, n_cols = LARGE
    p = problem(MEAN, n_rows, hidden, n_cols, device)
    record = Record(MEAN, "fused_softmax", "bfloat16", n_rows, n_cols, "ok", case=f"hidden size {hidden}")
    call = p.call(ours())
    value = float(call()[0])
    record.peak_bytes = peak_bytes(lambda *_: call(), (p.x,))
    record.peak_bytes -= sum(t.numel() * t.element_size() for t in (p.x, p.weight))
    record.note = f"loss {value:.4f}"
    stopwatch = EventStopwatch(device)
    return record.take(interleave({"": call}, stopwatch, 1.0, fewest=3, most=5)[""], stopwatch.describe)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@failures_raised()
def run(
    ops: tuple[str, ...], shapes: tuple[Shape, ...] | None, names: tuple[str, ...], seconds: float, out: Path,
    with_large: bool, show: Callable[[Record], None],
) -> list[Record]:  # fmt: skip
    """Runs all ops over these shapes, or over each op's own, and writes the results after every shape."""
    device = torch.device("cuda", torch.cuda.current_device())
    results = Results(header(device, False), out, show)
    chosen = [s for s in SYSTEMS if s.op in ops and (not names or s.name in names)]
    results.head.unavailable = {s.name: why for s in chosen if (why := s.missing())}
    chosen = [s for s in chosen if not s.missing()]
    for op in ops:
        for shape in shapes or (SHAPES if op == MEAN else ROW_SHAPES):
            results.add(*measure(op, shape, tuple(s for s in chosen if s.op == op), seconds, device))
    if with_large:
        _free()
        results.add(large(device))
    return results.finish()
