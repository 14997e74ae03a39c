"""Random calls of the linear losses, judged against float64: shapes, dtypes, layouts, options, chunks, ways in.

The registry's fuzzer judges each element of a row by the row's own arithmetic. Here each result is a sum of products,
so the rule is one of norms: the error of the loss and of each gradient is at most twice that of torch on all logits, in
the same dtypes, plus some roundings. Rows that are ignored, weights that are frozen and rows that are left out of the
products are drawn too.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fused_softmax as fs
from fused_softmax.lab.registry import LINEAR_OPS, OPS
from fused_softmax.launch.availability import failures_raised
from fused_softmax.launch.device import interpreting

DTYPES = ("float32", "bfloat16", "float16", "float64")
# how often each way is drawn
WEIGHTS = {"function": 3}
# roundings of float32 that a norm may be off by, and of the dtype where Triton's interpreter truncates
SLACK = 4e-6
TRUNCATED = 1.5


@dataclass(frozen=True)
class LinearCase:
    """One call, from which every tensor can be made again."""

    op: str
    way: str
    dtype: str
    rows: int
    hidden: int
    n_cols: int
    bias: bool
    frozen: tuple[str, ...]
    strided: bool
    ignored: float
    leaves_out: bool
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


def draw(seed: int, most_columns: int = 4099, most_rows: int = 40) -> LinearCase:
    """The case of a seed."""
    rng = Random(seed)
    op = rng.choice(("linear_cross_entropy", "linear_cross_entropy", "linear_token_logprobs"))
    n_cols = rng.choice((1, 2, 7, 64, 131, 1000, 1024, most_columns, rng.randint(1, most_columns)))
    options: dict[str, Any] = {"chunk_rows": rng.choice((None, None, 1, 3, 16))}
    if op == "linear_cross_entropy":
        options["reduction"] = rng.choice(("mean", "sum", "none"))
        options |= rng.choice(({}, {}, {"label_smoothing": 0.1}, {"softcap": 5.0}, {"z_loss": 1e-3}))
        options |= rng.choice(({}, {}, {"accumulate": "weight"}, {"weight": True}))
        if n_cols == 1:
            options.pop("z_loss", None)  # the loss's gradient is 0 there, and the penalty's is 1e-3 of what cancels
    else:
        options |= rng.choice(({}, {"temperature": 0.7}, {"temperature": "rows"}))
        options |= {"return_entropy": rng.random() < 0.5, "picks": rng.choice((None, None, 1, 3))}
    frozen = rng.choice(((), (), ("weight",), ("input",), ("bias",)))
    ways = LINEAR_OPS[op].ways
    way = rng.choices(ways, [WEIGHTS.get(way, 1) for way in ways])[0]
    return LinearCase(
        op, way, rng.choice(DTYPES), rng.randint(1, most_rows), rng.choice((1, 8, 16, 33)), n_cols,
        rng.random() < 0.4, frozen, rng.random() < 0.3, rng.choice((0.0, 0.0, 0.4, 1.0)), rng.random() < 0.3, options,
        seed,
    )  # fmt: skip


def drawn(ops: tuple[str, ...], ways: tuple[str, ...], dtypes: tuple[str, ...], seed: int) -> Iterator[LinearCase]:
    """The cases of a run's seed that are of these ops, ways and dtypes; empty: all. It does not end."""
    for index in count():
        case = draw(seed * 1_000_003 + index)
        wanted = ((ops, case.op), (ways, case.way), (dtypes, case.dtype))
        if all(not names or name in names for names, name in wanted):
            yield case


def run(
    ops: tuple[str, ...], ways: tuple[str, ...], dtypes: tuple[str, ...], seconds: float | None, cases: int | None,
    seed: int, stop: bool, show: Callable[[str], None],
) -> int:  # fmt: skip
    """Judges cases until so many are done or the time is over (60 seconds without a count); how many are wrong."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    end = math.inf if seconds is None and cases else time.monotonic() + (60.0 if seconds is None else seconds)
    wrong = done = 0
    for case in islice(drawn(ops, ways, dtypes, seed), cases):
        done += 1
        try:
            found = judge(case, device, interpreting())
        except Exception as error:  # a call that raises is a finding as well
            found = [f"{type(error).__name__}: {error}"]
        if found:
            wrong += 1
            show(f"WRONG {'; '.join(found)}\n  --replay '{json.dumps(asdict(case))}'")
        if time.monotonic() > end or (stop and wrong):
            break
    show(f"linear losses: {done} cases, {wrong} wrong")
    return wrong


def replay(fields: dict[str, Any]) -> list[str]:
    """What is wrong with the case of these fields, as JSON has them."""
    case = LinearCase(**fields | dict(frozen=tuple(fields["frozen"])))
    return judge(case, "cuda" if torch.cuda.is_available() else "cpu", interpreting())


@failures_raised()
def judge(case: LinearCase, device: str, interpreted: bool = False) -> list[str]:
    """What is wrong with a case, in words; nothing where all is right."""
    from fused_softmax.planning import linear_losses as planning

    before = planning.LEAVE_OUT_OPERATIONS, planning.TILE_ROWS
    if case.leaves_out:
        planning.LEAVE_OUT_OPERATIONS, planning.TILE_ROWS = 0.0, 1
    try:
        return _judge(case, device, interpreted)
    finally:
        planning.LEAVE_OUT_OPERATIONS, planning.TILE_ROWS = before


def _judge(case: LinearCase, device: str, interpreted: bool) -> list[str]:
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        t = torch.randn(shape, generator=generator) * deviation
        if case.strided and len(shape) == 2:
            t = F.pad(t, (0, 5))[:, : shape[1]] if case.seed % 2 else t.t().contiguous().t()
        return t.to(device, dtype)

    tensors: dict[str, Tensor | None] = {
        "input": normal(case.rows, case.hidden),
        "weight": normal(case.n_cols, case.hidden, deviation=2 / case.hidden**0.5),
        "bias": normal(case.n_cols) if case.bias else None,
    }
    leaves = {n: t.requires_grad_(n not in case.frozen) for n, t in tensors.items() if t is not None}
    options = dict(case.options)
    ids_shape = (case.rows,) if options.get("picks") is None else (case.rows, options["picks"])
    options.pop("picks", None)
    ids = torch.randint(0, case.n_cols, ids_shape, generator=generator)
    if case.op == "linear_cross_entropy":
        ids[torch.rand(ids_shape, generator=generator) < case.ignored] = -100
        if options.pop("weight", False):
            options["weight"] = (torch.rand(case.n_cols, generator=generator) + 0.25).to(device)
    if options.get("temperature") == "rows":
        options["temperature"] = (torch.rand(case.rows, generator=generator) + 0.5).to(device)
    ids = ids.to(device)
    ours = _parts(_call(case, leaves, ids, options, tensors["bias"]))
    upstream = [torch.randn(t.shape, generator=generator).to(device) for t in ours]
    got = _with_gradients(ours, upstream, leaves)
    of_logits = {k: v for k, v in options.items() if k not in ("chunk_rows", "accumulate")}
    of = OPS[LINEAR_OPS[case.op].of]
    exact = _on_logits(of.reference, torch.float64, tensors, case.frozen, ids, of_logits, upstream)
    own = _on_logits(of.torch_way, dtype, tensors, case.frozen, ids, of_logits, upstream)
    wrong = []
    for key in exact:
        if key not in got or got[key].shape != exact[key].shape:
            wrong.append(f"{key} is missing or has another shape")
            continue
        eps = torch.finfo(dtype).eps
        # torch may round a result more luckily than any rule allows: one rounding of the dtype is always allowed
        allowed = 2 * _error(own[key], exact[key]) + SLACK + eps / 2
        if interpreted and dtype is torch.bfloat16:
            allowed += TRUNCATED * eps
        found = _error(got[key], exact[key])
        if not found <= allowed:
            wrong.append(f"{key} is off by {found:.1e}, allowed are {allowed:.1e}")
    return wrong


def _call(
    case: LinearCase, leaves: dict[str, Tensor], ids: Tensor, options: dict[str, Any], bias: Tensor | None
) -> Any:
    function = LINEAR_OPS[case.op].function
    x, weight = leaves["input"], leaves["weight"]
    if case.way == "module":
        module = fs.nn.LinearCrossEntropyLoss(case.hidden, case.n_cols, bias=case.bias, **options)
        module.linear.weight = torch.nn.Parameter(weight)
        module = module.to(x.device)
        # the leaves themselves, which get the gradients
        del module.linear._parameters["weight"], module.linear._parameters["bias"]
        module.linear.weight, module.linear.bias = weight, bias
        return module(x, ids)

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return function(x, weight, ids, linear_bias=bias, **options)

    if case.way == "checkpoint":
        return checkpoint(plain, x, weight, bias, use_reentrant=False)
    if case.way == "compile":
        torch._dynamo.reset()
        return torch.compile(plain, backend="aot_eager", fullgraph=True)(x, weight, bias)
    return plain(x, weight, bias)


def _parts(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, tuple) else (result,)
    return [t for t in parts if t is not None]


def _with_gradients(outputs: list[Tensor], upstream: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    if wanted:
        given = [g.to(t.dtype) for g, t in zip(upstream, outputs, strict=True)]
        grads = torch.autograd.grad(outputs, list(wanted.values()), given)
        found |= dict(zip(wanted, grads, strict=True))
    return found


def _on_logits(
    function: Any, dtype: torch.dtype, tensors: dict[str, Tensor | None], frozen: tuple[str, ...], ids: Tensor,
    options: dict[str, Any], upstream: list[Tensor],
) -> dict[str, Tensor]:  # fmt: skip
    leaves = {n: t.detach().to(dtype).requires_grad_(n not in frozen) for n, t in tensors.items() if t is not None}
    logits = F.linear(leaves["input"], leaves["weight"], leaves.get("bias"))
    return _with_gradients(_parts(function(logits, ids, **options)), upstream, leaves)


def _error(got: Tensor, exact: Tensor) -> float:
    """The norm of the error over that of the exact result; inf where NaN is out of place."""
    got, exact = got.double(), exact.double()
    if not torch.equal(got.isnan(), exact.isnan()):
        return float("inf")
    norm = exact.nan_to_num().norm()
    return float((got - exact).nan_to_num().norm() / norm) if norm > 0 else float(got.nan_to_num().norm())
