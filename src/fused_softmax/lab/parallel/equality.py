"""Whether every op of `parallel` gives what the one-GPU op gives, and equal bits on 1, 2, 4 and 8 ranks.

Each rank has whole rows, so it knows the one-GPU result. A difference is relative to the largest value. Results and
gradients are compared. Within batch_invariant() each rank's part is compared, bit by bit, with that of a rank alone, in
groups of every size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fused_softmax as fs
from fused_softmax import parallel
from fused_softmax.lab.record import Record

# rows, columns, dtype; segments of 6,282 columns do not start on 16 bytes
CASES = ((64, 131072, torch.bfloat16), (64, 131072, torch.float32), (33, 50256, torch.bfloat16))
HIDDEN = 256  # of the linear loss
# of the largest value, for numbers in float32: sums in two orders differ by less
LIMIT = 1e-5
ALLOWED = "1e-5 of the largest value, or a rounding; softmax in float32: and twice what one GPU is off from float64"


class Problem(NamedTuple):
    """Whole rows, targets, weights, and a linear loss's inputs; the same on every rank. One target is ignored."""

    x: Tensor
    target: Tensor
    weight: Tensor
    hidden: Tensor
    matrix: Tensor


Call = Callable[[Problem, Tensor, slice, dict[str, Any]], Any]
OPTIONS: dict[str, Any] = dict(label_smoothing=0.1, softcap=20.0, z_loss=1e-3)


def _ids(p: Problem) -> Tensor:
    return p.target.clamp(min=0)


def _several(p: Problem) -> Tensor:
    """Three ids of each row."""
    return torch.stack([(_ids(p) + k) % p.x.shape[1] for k in (0, 1, 7)], 1)


def _temperatures(p: Problem) -> Tensor:
    return torch.linspace(0.5, 2.0, p.x.shape[0], device=p.x.device)


STATISTICS: dict[str, Any] = dict(return_entropy=True, return_logsumexp=True)
# ours of these columns, given the group; and of whole rows
PARALLEL: dict[str, Call] = {
    "cross_entropy": lambda p, x, at, w: parallel.cross_entropy(x, p.target, **w),
    "cross_entropy, in place": lambda p, x, at, w: parallel.cross_entropy(x, p.target, inplace_backward=True, **w),
    "cross_entropy, weight, none": lambda p, x, at, w: parallel.cross_entropy(
        x, p.target, p.weight[at].clone(), reduction="none", **w
    ),
    "cross_entropy, every option": lambda p, x, at, w: parallel.cross_entropy(
        x, p.target, p.weight[at].clone(), **OPTIONS, **w
    ),
    "cross_entropy, every option, in place": lambda p, x, at, w: parallel.cross_entropy(
        x, p.target, p.weight[at].clone(), inplace_backward=True, **OPTIONS, **w
    ),
    "token_logprobs": lambda p, x, at, w: parallel.token_logprobs(x, _ids(p), temperature=0.7, **STATISTICS, **w),
    "token_logprobs, 3 ids": lambda p, x, at, w: parallel.token_logprobs(
        x, _several(p), temperature=_temperatures(p), **w
    ),
    "logsumexp": lambda p, x, at, w: parallel.logsumexp(x, **w),
    "softmax": lambda p, x, at, w: parallel.softmax(x, **w),
    "log_softmax": lambda p, x, at, w: parallel.log_softmax(x, **w),
    "softmax, float32": lambda p, x, at, w: parallel.softmax(x, dtype=torch.float32, **w),
    "log_softmax, float32": lambda p, x, at, w: parallel.log_softmax(x, dtype=torch.float32, **w),
    "linear_cross_entropy": lambda p, x, at, w: parallel.linear_cross_entropy(p.hidden, x, p.target, **w),
}
WHOLE: dict[str, Call] = {
    "cross_entropy": lambda p, x, at, w: fs.cross_entropy(x, p.target),
    "cross_entropy, in place": lambda p, x, at, w: fs.cross_entropy(x, p.target),
    "cross_entropy, weight, none": lambda p, x, at, w: fs.cross_entropy(x, p.target, p.weight, reduction="none"),
    "cross_entropy, every option": lambda p, x, at, w: fs.cross_entropy(x, p.target, p.weight, **OPTIONS),
    "cross_entropy, every option, in place": lambda p, x, at, w: fs.cross_entropy(x, p.target, p.weight, **OPTIONS),
    "token_logprobs": lambda p, x, at, w: fs.token_logprobs(x, _ids(p), temperature=0.7, **STATISTICS),
    "token_logprobs, 3 ids": lambda p, x, at, w: fs.token_logprobs(x, _several(p), temperature=_temperatures(p)),
    "logsumexp": lambda p, x, at, w: fs.logsumexp(x.float(), -1),  # which has the logits' dtype
    "softmax": lambda p, x, at, w: fs.softmax(x, -1),
    "log_softmax": lambda p, x, at, w: fs.log_softmax(x, -1),
    "softmax, float32": lambda p, x, at, w: fs.softmax(x, -1, dtype=torch.float32),
    "log_softmax, float32": lambda p, x, at, w: fs.log_softmax(x, -1, dtype=torch.float32),
    "linear_cross_entropy": lambda p, x, at, w: fs.linear_cross_entropy(p.hidden, x, p.target),
}
SHARDED = (
    "softmax",
    "log_softmax",
    "softmax, float32",
    "log_softmax, float32",
)  # ops whose result is this rank's columns
WITHOUT_BITS = ("linear_cross_entropy",)  # a product's bits depend on its shape


def problem(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device) -> Problem:
    made = torch.Generator().manual_seed(n_cols)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    target = torch.randint(0, n_cols, (n_rows,), generator=made)
    target[n_rows // 2] = -100
    x, weight = (3.0 * normal(n_rows, n_cols)).to(device, dtype), 0.1 + torch.rand(n_cols, generator=made)
    matrix = (normal(n_cols, HIDDEN) * (3.0 / HIDDEN**0.5)).to(device, dtype)
    return Problem(x, target.to(device), weight.to(device), normal(n_rows, HIDDEN).to(device, dtype), matrix)


def found(name: str, ways: dict[str, Call], p: Problem, columns: slice, where: dict[str, Any]) -> list[Tensor]:
    """An op's results, then the gradient of what is sharded, for upstream gradients that depend on the place."""
    x = (p.matrix[columns] if name.startswith("linear") else p.x[:, columns]).clone().requires_grad_()
    results = ways[name](p, x, columns, where)
    results = [results] if isinstance(results, Tensor) else [t for t in results if t is not None]
    upstream = []
    for t in results:
        whole = (*t.shape[:-1], p.x.shape[1]) if name in SHARDED else t.shape
        n = max(1, torch.Size(whole).numel())
        g = torch.arange(n, device=t.device, dtype=torch.float64).mul(0.7).cos().view(whole).float().to(t.dtype)
        upstream.append(g[..., columns] if name in SHARDED else g)
    torch.autograd.backward(results, upstream)
    assert x.grad is not None
    return [*(t.detach() for t in results), x.grad]


def part_of(name: str, t: Tensor, last: bool, columns: slice) -> Tensor:
    """A rank's part of a result of whole rows, or of the gradient, which is the last."""
    if last and name.startswith("linear"):
        return t[columns]
    return t[:, columns] if last or name in SHARDED else t


def difference(got: Tensor, want: Tensor, roundings: int = 1, exact: Tensor | None = None) -> float:
    """Over what is allowed: 1 is the limit. roundings: of want's dtype that a value may be off by. exact: want in
    float64, for a result whose own rounding may be more; twice that is allowed, too."""
    if got.shape != want.shape or got.dtype is not want.dtype:
        return float("inf")
    largest = want.double().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    off = ((got.double() - want.double()).abs().max() / largest).item()
    own = 0.0 if exact is None else ((want.double() - exact.double()).abs().max() / largest).item()
    allowed = max(LIMIT + 2.0 * own, roundings * torch.finfo(want.dtype).eps)
    return off / allowed if off == off else float("inf")


def check(rank: int, ranks: int, device: torch.device, cases: Any = CASES) -> Iterator[Record]:
    """A record for each op and case, the same on every rank: the largest difference over what is allowed."""
    sizes = [size for size in (1, 2, 4, 8) if size <= ranks]
    groups = {size: dist.new_group(list(range(size))) for size in sizes if size > 1}
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    for n_rows, n_cols, dtype in cases:
        p = problem(n_rows, n_cols, dtype, device)
        for name in PARALLEL:
            try:
                mine = (*_compare(name, p, rank, ranks, groups, alone), "")
            except Exception as error:  # the other ranks meet it too
                mine = [], None, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:160]
            of_ranks: list[Any] = [None] * ranks
            dist.all_gather_object(of_ranks, mine)
            record = Record(
                name, "fused_softmax", str(dtype).removeprefix("torch."), n_rows, n_cols, "ok", case=f"{ranks} GPUs"
            )
            failed = next((error for *_, error in of_ranks if error), "")
            if failed:
                record.status, record.note = "error", failed
                yield record
                continue
            worst = [max(each) for each in zip(*(off for off, *_ in of_ranks), strict=True)]
            bits = "no equal bits promised"
            if name not in WITHOUT_BITS:
                equal = all(same for _, same, _ in of_ranks)
                bits = f"bits {'equal' if equal else 'DIFFER'} on {', '.join(map(str, sizes))} ranks"
            record.error = max(worst)
            record.status = "wrong" if record.error > 1.0 or "DIFFER" in bits else "ok"
            record.note = (
                f"off from one GPU over what is allowed ({ALLOWED}): results "
                + ", ".join(f"{w:.1e}" for w in worst[:-1]) + f", gradient {worst[-1]:.1e}; {bits}"
            )  # fmt: skip
            yield record


def _compare(
    name: str, p: Problem, rank: int, ranks: int, groups: dict[int, Any], alone: Any
) -> tuple[list[float], bool | None]:
    """(each result's and the gradient's difference over what is allowed, whether bits are equal, where promised)."""
    n_cols = p.x.shape[1]
    each = n_cols // ranks
    columns = slice(rank * each, (rank + 1) * each)
    want = found(name, WHOLE, p, slice(0, n_cols), {})
    got = found(name, PARALLEL, p, columns, {})
    last = len(want) - 1
    pairs = [(t, part_of(name, w, i == last, columns)) for i, (t, w) in enumerate(zip(got, want, strict=True))]
    # a gradient is made of the rounded result, which is exponentiated: 2 has 4 roundings of 1
    roundings = [4 if name in SHARDED and i == last else 1 for i in range(len(pairs))]
    exact: list[Tensor | None] = [None] * len(pairs)
    if name in SHARDED and p.x.dtype is torch.float32:
        # the gradient is g - p*sum(g): over many columns that cancel, the sum's rounding is more than the limit
        in_float64 = found(name.partition(",")[0], WHOLE, p._replace(x=p.x.double()), slice(0, n_cols), {})
        exact = [part_of(name, t, i == last, columns) for i, t in enumerate(in_float64)]
    off = [difference(*pair, n, e) for pair, n, e in zip(pairs, roundings, exact, strict=True)]
    return off, None if name in WITHOUT_BITS else _equal_bits(name, p, rank, groups, alone)


def invariant(name: str, p: Problem, rank: int, size: int, group: Any) -> list[Tensor]:
    """`found` of a rank's columns within batch_invariant(), in a group of `size` ranks."""
    each = p.x.shape[1] // size
    with fs.batch_invariant():
        return found(name, PARALLEL, p, slice(rank * each, (rank + 1) * each), dict(group=group))


def _equal_bits(name: str, p: Problem, rank: int, groups: dict[int, Any], alone: Any) -> bool:
    want, equal = invariant(name, p, 0, 1, alone), True
    for size, group in groups.items():
        if rank < size:
            got, each = invariant(name, p, rank, size, group), p.x.shape[1] // size
            columns = slice(rank * each, (rank + 1) * each)
            parts = [part_of(name, w, i == len(want) - 1, columns) for i, w in enumerate(want)]
            equal &= all(torch.equal(g, w) for g, w in zip(got, parts, strict=True))
    return equal
