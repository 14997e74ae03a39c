"""What a program waits for: host time of a call, and wall time of a step in an asynchronous loop; ours and torch's.

A step is a call as users write it, forward alone or forward and backward, next to torch's own way. Each is checked
against torch in float64 before it is timed. Host time is measured on 8 x 128, where the GPU never holds the host back.
Wall time is measured over a loop that only waits at its end, at the sizes of real steps, with the device time of our
own kernels and a copy of the logits next to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_softmax as fs
from fused_softmax.lab.bench.ahead import in_processes, jobs
from fused_softmax.lab.bench.ceilings import ceiling, measured
from fused_softmax.lab.record import Record, Results, header
from fused_softmax.lab.timing import EventStopwatch, HostStopwatch, interleave, peak_bytes
from fused_softmax.launch.availability import failures_raised
from fused_softmax.launch.device import interpreting
from fused_softmax.launch.loss_kernels import ONE_CTA_ROWS, SHARED, size_class

HOST_SHAPE = (8, 128)
WALL_SHAPES = (
    (64, 151936), (256, 128256), (1024, 65535), (1024, 128256), (2048, 32000), (4096, 32000), (4096, 128256),
    (16384, 4096),
)  # fmt: skip
NEW_ROWS = 1000  # numbers of rows in turn
UPSTREAM = 0.25
# how far a step may be from float64, of the largest value: a few units in the last place of the dtype
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

Call = Callable[[], Any]


@dataclass(frozen=True)
class Step:
    """op, and what is done with it ("forward", "dim 0", ...); ours and torch's own way, without arguments."""

    op: str
    way: str
    ours: Call
    torch: Call
    exact: Call  # torch's own way in float64


def _backward(forward: Callable[[Tensor], Tensor], x: Tensor, g: Tensor | None) -> Call:
    """Forward and backward; the gradient, which is new at each call, as after zero_grad()."""

    def call() -> Tensor | None:
        y = forward(x)
        y.backward(None if y.dim() == 0 else g)
        made, x.grad = x.grad, None
        return made

    return call


def _ways(x: Tensor, ids: Tensor, keeps: Tensor, dtype: torch.dtype, package: Any) -> Iterator[tuple[str, str, Call]]:
    """(op, way, call) by torch, or by the package where it is given, for logits x (n_rows, n_cols).

    dtype: what upstream gradients are rounded to, also where x is float64.
    """
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    out, turned = torch.empty_like(x), x.t().contiguous().t()
    ops: Any = torch if package is None else package
    for name in ("softmax", "log_softmax"):
        op = getattr(ops, name)
        yield name, "forward", partial(op, x, -1)
        yield name, "dim 0", partial(op, x, 0)
        yield name, "dtype=", partial(op, x, -1, dtype=wide)
        yield name, "out=", partial(op, x, -1, out=out)
        yield name, "transposed", partial(op, turned, -1)
    if package is None:
        rows: dict[str, Callable[[Tensor], Tensor]] = {
            "logsumexp": lambda x: torch.logsumexp(x, -1),
            "token_logprobs": lambda x: torch.log_softmax(x, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1),
            "masked_softmax": lambda x: torch.softmax(x.masked_fill(~keeps, -float("inf")), -1),
            "cross_entropy": lambda x: F.cross_entropy(x, ids),
        }
    else:
        rows = {
            "logsumexp": lambda x: fs.logsumexp(x, -1),
            "token_logprobs": lambda x: fs.token_logprobs(x, ids),
            "masked_softmax": lambda x: fs.masked_softmax(x, keeps),
            "cross_entropy": lambda x: fs.cross_entropy(x, ids),
        }
    for name, function in rows.items():
        yield name, "forward", partial(function, x)
    trained = x.detach().clone().requires_grad_()
    g = torch.randn(x.shape, generator=torch.Generator(x.device).manual_seed(7), device=x.device).to(dtype)
    last: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda x: ops.softmax(x, -1),
        "log_softmax": lambda x: ops.log_softmax(x, -1),
    }
    for name, function in (last | rows).items():
        # where the result has a number for each row, the gradient's first column
        with torch.no_grad():
            like = function(x)
        upstream = (g if like.dim() == 2 else g[:, 0]).to(like.dtype).contiguous()
        yield name, "forward and backward", _backward(function, trained, upstream)


def steps(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> list[Step]:
    """The steps on one set of random logits, ids and masks."""
    made = torch.Generator(device).manual_seed(seed)
    x = torch.randn(n_rows, n_cols, generator=made, device=device).to(dtype)
    ids = torch.randint(0, n_cols, (n_rows,), generator=made, device=device)
    keeps = torch.rand(n_rows, n_cols, generator=made, device=device) > 0.3
    ways = [_ways(z, ids, keeps, dtype, package) for z, package in ((x, fs), (x, None), (x.double(), None))]
    return [Step(op, way, ours, own, exact) for (op, way, ours), (_, _, own), (_, _, exact) in zip(*ways, strict=True)]


# processes that compile the calls of one shape and dtype, in turn
PARTS = 4


def compile_ahead(dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, int]], workers: int) -> int:
    """Makes each of our calls once in so many processes, so that nothing is compiled in turn; returns how many were."""
    todo = [(shape, dtype, part) for shape in shapes for dtype in dtypes for part in range(PARTS)]
    return len(in_processes(_make_once, jobs(todo, workers)))


def _make_once(todo: Sequence[tuple[tuple[int, int], torch.dtype, int]], done: Any) -> None:
    """One worker; failures are left for the timed process to meet and to record."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)
    for (n_rows, n_cols), dtype, part in todo:
        with suppress(Exception):
            # no kernel over rows depends on their number; those that add up losses do
            x = torch.zeros(min(n_rows, ONE_CTA_ROWS + 256), n_cols, dtype=dtype, device=device)
            ids = torch.zeros(len(x), dtype=torch.int64, device=device)
            for _, _, call in list(_ways(x, ids, x == 0.0, dtype, fs))[part::PARTS]:
                call()
            if size_class(n_rows) == SHARED and part == 0:
                few = torch.zeros(n_rows, 8, dtype=dtype, device=device, requires_grad=True)
                fs.cross_entropy(few, torch.zeros(n_rows, dtype=torch.int64, device=device)).backward()
            torch.cuda.synchronize(device)
        done.put("")


def difference(call: Call, step: Step) -> float:
    """The largest difference of a call's result from float64, over the largest value; NaN where it has NaN."""
    got, want = call().double(), step.exact()
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()


def check(step: Step, dtype: torch.dtype, record: Record) -> bool:
    """Whether ours is right, and may be timed; the record says."""
    try:
        record.error = difference(step.ours, step)
    except Exception as error:
        record.status, record.note = "error", f"{type(error).__name__}: {error}"[:160]
        return False
    # torch's own error, where it is larger: the gradient of a 16-bit logsumexp is made of the rounded result
    record.torch_error = difference(step.torch, step)
    allowed = max(TOLERANCE[dtype], 2.0 * record.torch_error)
    if not record.error <= allowed:
        record.status, record.note = "wrong", f"{record.error:.2g} of the largest value, at most {allowed:.2g}"
        return False
    return True


class WallStopwatch:
    """Wall time of a step in a loop that waits for the device only at its end: 50 steps, or 20 ms of longer ones."""

    describe = "wall time of a step in an asynchronous loop"

    def __init__(self, device: torch.device, batch: int = 50, seconds: float = 0.02, fewest: int = 10) -> None:
        self.device, self.batch, self.seconds, self.fewest = device, batch, seconds, fewest

    def round(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """One round; returns milliseconds of one step by name."""
        return {name: self._loop(call, self._steps_of(call)) for name, call in calls.items()}

    def _steps_of(self, call: Call) -> int:
        return max(self.fewest, min(self.batch, int(1000 * self.seconds / self._loop(call, 2))))

    def _loop(self, call: Call, n_steps: int) -> float:
        """Milliseconds of a step in a loop of so many."""
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        for _ in range(n_steps):
            call()
        torch.cuda.synchronize(self.device)
        return 1000 * (time.perf_counter() - began) / n_steps


def _record(op: str, system: str, dtype: torch.dtype, shape: tuple[int, int], case: str) -> Record:
    return Record(op, system, str(dtype).removeprefix("torch."), *shape, "ok", case=case)


def host(dtypes: Iterable[torch.dtype], device: torch.device, seconds: float = 0.3) -> Iterator[Record]:
    """Host time of each step on 8 x 128, under patch() too, and with a new number of rows at each call."""
    stopwatch, shape = HostStopwatch(device), HOST_SHAPE
    for dtype in dtypes:
        for step in steps(*shape, dtype, device):
            ours, own = (_record(step.op, system, dtype, shape, step.way) for system in ("fused_softmax", "torch"))
            if check(step, dtype, ours):
                took = interleave({"ours": step.ours, "torch": step.torch}, stopwatch, seconds)
                own.take(took["torch"], stopwatch.describe)
                ours.take(took["ours"], stopwatch.describe)
            yield from (ours, own)
        x = torch.randn(shape, device=device).to(dtype)
        took = interleave({"torch": partial(torch.softmax, x, -1)}, stopwatch, seconds)
        yield _record("softmax", "torch", dtype, shape, "patch()").take(took["torch"], stopwatch.describe)
        with fs.patch():
            took = interleave({"ours": partial(torch.softmax, x, -1)}, stopwatch, seconds)
        yield _record("softmax", "fused_softmax", dtype, shape, "patch()").take(took["ours"], stopwatch.describe)
        yield from _new_rows(dtype, device, stopwatch, seconds)


def _new_rows(dtype: torch.dtype, device: torch.device, stopwatch: HostStopwatch, seconds: float) -> Iterator[Record]:
    n_cols = HOST_SHAPE[1]
    xs = [torch.randn(n, n_cols, device=device).to(dtype) for n in range(1, NEW_ROWS + 1)]
    ids = [torch.zeros(len(x), dtype=torch.int64, device=device) for x in xs]
    masks, outs = [x > -1.0 for x in xs], [torch.empty_like(x) for x in xs]
    calls: dict[str, Callable[[int], Any]] = {
        "softmax": lambda i: fs.softmax(xs[i], -1),
        "softmax out=": lambda i: fs.softmax(xs[i], -1, out=outs[i]),
        "log_softmax": lambda i: fs.log_softmax(xs[i], -1),
        "logsumexp": lambda i: fs.logsumexp(xs[i], -1),
        "masked_softmax": lambda i: fs.masked_softmax(xs[i], masks[i]),
        "cross_entropy": lambda i: fs.cross_entropy(xs[i], ids[i]),
        "token_logprobs": lambda i: fs.token_logprobs(xs[i], ids[i]),
    }
    for name, call in calls.items():
        turn = [0]

        def new(call: Callable[[int], Any] = call, turn: list[int] = turn) -> None:
            turn[0] = (turn[0] + 1) % NEW_ROWS
            call(turn[0])

        def same(call: Callable[[int], Any] = call, turn: list[int] = turn) -> None:
            turn[0] = (turn[0] + 1) % NEW_ROWS
            call(HOST_SHAPE[0] - 1)

        took = interleave({"new": new, "same": same}, stopwatch, seconds)
        for which, words in (("new", "a new number of rows each call"), ("same", "the same number of rows")):
            op, _, way = name.partition(" ")
            found = _record(op, "fused_softmax", dtype, HOST_SHAPE, f"{way} {words}".strip())
            yield found.take(took[which], stopwatch.describe)


def wall(
    dtypes: Iterable[torch.dtype], device: torch.device, shapes: Sequence[tuple[int, int]] = WALL_SHAPES,
    seconds: float = 0.3,
) -> Iterator[Record]:  # fmt: skip
    """Wall and device time of each step, a copy of the logits, and cross_entropy with an upstream gradient of 0.25."""
    loop, events = WallStopwatch(device), EventStopwatch(device)
    for shape in shapes:
        for dtype in dtypes:
            for step in (s for s in steps(*shape, dtype, device) if s.way in ("forward", "forward and backward")):
                ours = _record(step.op, "fused_softmax", dtype, shape, step.way)
                if not check(step, dtype, ours):
                    yield ours
                    continue
                ours.peak_bytes = peak_bytes(lambda _, step=step: step.ours(), (torch.empty(0, device=device),))
                took = interleave({"ours": step.ours, "torch": step.torch}, loop, seconds, fewest=5)
                yield ours.take(took["ours"], loop.describe)
                own = _record(step.op, "torch", dtype, shape, step.way)
                yield own.take(took["torch"], loop.describe)
                took = interleave({"ours": step.ours, "torch": step.torch}, events, seconds / 2, fewest=5)
                for name, system in (("ours", "fused_softmax"), ("torch", "torch")):
                    found = _record(step.op, system, dtype, shape, f"{step.way}, device time")
                    yield found.take(took[name], events.describe)
            yield from _upstream(shape, dtype, device, events, seconds)
            torch.cuda.empty_cache()


def _upstream(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, events: EventStopwatch, seconds: float
) -> Iterator[Record]:
    """cross_entropy forward and backward with an upstream gradient of 1 and another, and a copy of the logits."""
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    ids = torch.randint(0, shape[1], shape[:1], device=device)
    copied, _ = ceiling("copy", x.detach())

    def with_upstream(value: float) -> Call:
        g = torch.tensor(value, device=device)

        def call() -> Tensor | None:
            x.grad = None
            fs.cross_entropy(x, ids).backward(g)
            return x.grad

        return call

    found = _record("cross_entropy", "fused_softmax", dtype, shape, f"upstream {UPSTREAM}, device time")
    exact = torch.autograd.grad(F.cross_entropy(x[:16].double(), ids[:16], reduction="sum"), x)[0][:16].double()
    got = with_upstream(UPSTREAM)()
    assert got is not None
    wanted = exact * (UPSTREAM / shape[0])
    found.error = ((got[:16].double() - wanted).abs().max() / wanted.abs().max()).item()
    if not found.error <= TOLERANCE[dtype]:
        found.status, found.note = "wrong", f"{found.error:.2g} of the largest gradient"
        yield found
        return
    # one upstream gradient at a time, as in a program
    copy = partial(copied, x.detach())
    took = interleave({"ours": with_upstream(UPSTREAM), "copy": copy}, events, seconds, fewest=5)
    yield found.take(took["ours"], events.describe)
    took_one = interleave({"ours": with_upstream(1.0), "copy": copy}, events, seconds, fewest=5)
    one = _record("cross_entropy", "fused_softmax", dtype, shape, "upstream 1, device time")
    yield one.take(took_one["ours"], events.describe)
    yield _record("cross_entropy", "copy", dtype, shape, "device time").take(took["copy"], events.describe)


def run(found: Iterable[Record], file: Path | None, device: torch.device, seen: Callable[[Record], None]) -> int:
    """Writes the records to `file` as they come, shows each, and returns how many are not right."""
    results = Results(header(device, interpreting()), file, seen)
    if device.type == "cuda":
        results.head.ceilings = measured(device)
    with failures_raised():
        for record in found:
            results.add(record)
    return sum(record.status != "ok" for record in results.finish())
