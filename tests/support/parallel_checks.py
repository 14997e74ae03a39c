"""Checks of fused_softmax.parallel on every rank of a group, against the one-GPU ops on whole rows in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fused_softmax as fs
from fused_softmax import parallel

LOSSES: tuple[dict[str, Any], ...] = (
    {},
    dict(reduction="sum"),
    dict(reduction="none", z_loss=0.02),
    dict(ignore_index=3),
    dict(label_smoothing=0.1),
    dict(softcap=5.0),
    dict(softcap=4.0, z_loss=0.01, reduction="none"),
    dict(label_smoothing=0.2, softcap=3.0, z_loss=0.01),
    dict(weighted=True),
    dict(weighted=True, label_smoothing=0.1),
    dict(weighted=True, label_smoothing=0.3, softcap=4.0, z_loss=0.05, reduction="none"),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def cuts(ranks: int, n_cols: int, even: bool = False) -> list[int]:
    """Where each rank's columns begin, and the end; uneven, and for 4 ranks one has a single column."""
    if even:
        return [n_cols * r // ranks for r in range(ranks + 1)]
    inner = {1: [], 2: [n_cols // 3], 4: [n_cols // 8, n_cols // 2, n_cols // 2 + 1], 8: [*range(1, 8)]}
    return [0, *inner[ranks], n_cols]


def logits(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, targets, one of which is ignored, class weights), the same on every rank."""
    made = torch.Generator().manual_seed(n_cols)
    x = (3.0 * torch.randn(n_rows, n_cols, generator=made)).to(device, dtype)
    target = torch.randint(0, n_cols, (n_rows,), generator=made)
    weight = 0.1 + torch.rand(n_cols, generator=made)
    target[n_rows // 2] = -100
    return x, target.to(device), weight.to(device)


def close(got: Tensor, want: Tensor, dtype: torch.dtype, what: Any, *, result: bool = False) -> None:
    """Asserts that got is want to roundings of dtype; a result has float32 at least."""
    wide = result and dtype is not torch.float64 and got.dtype is torch.float32
    tolerance = TOLERANCE[torch.float32 if wide else dtype]
    scale = max(1.0, want.double().abs().max().item()) if want.numel() and want.isfinite().all() else 1.0
    torch.testing.assert_close(
        got.double(), want.double(), rtol=tolerance, atol=tolerance * (scale if result else 0.1), equal_nan=True,
        msg=lambda m: f"{what}: {m}",
    )  # fmt: skip


def same_on_every_rank(t: Tensor, what: Any) -> None:
    """Asserts equal bits on every rank of the default group."""
    if not torch.distributed.is_initialized():
        return
    t = t.detach().contiguous()
    found = [torch.empty_like(t) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(found, t)
    assert all(torch.equal(f, found[0]) for f in found), what


def pair(x: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(whole rows in float64, this rank's columns), both of which need a gradient."""
    return x.double().clone().requires_grad_(), x[:, columns].clone().requires_grad_()


def check_losses(
    where: dict[str, Any], columns: slice, x: Tensor, target: Tensor, weight: Tensor, options: Any
) -> None:
    """cross_entropy, forward and backward."""
    options, dtype = dict(options), x.dtype
    weighted = options.pop("weighted", False)
    if "ignore_index" in options:
        target = target.clamp(min=0)
    whole, local = pair(x, columns)
    want = fs.cross_entropy(whole, target, weight if weighted else None, **options)
    got = parallel.cross_entropy(local, target, weight[columns].clone() if weighted else None, **options, **where)
    close(got, want, dtype, options, result=True)
    same_on_every_rank(got, options)
    g = torch.linspace(0.5, 1.5, want.numel(), device=want.device).view(want.shape)
    want.backward(g.to(want.dtype))
    got.backward(g.to(got.dtype))
    # relative to the largest element: a mean divides by the number of rows
    by = whole.grad.double().abs().max()
    close(local.grad.double() / by, whole.grad[:, columns].double() / by, dtype, options)


def check_statistics(where: dict[str, Any], columns: slice, x: Tensor, target: Tensor) -> None:
    """logsumexp, and token_logprobs at one id and at several, with one temperature and each row's."""
    dtype, n_cols = x.dtype, x.shape[1]
    ids = torch.stack((target.clamp(min=0), (target.clamp(min=0) + 7) % n_cols), 1)
    by_row = torch.linspace(0.5, 2.0, x.shape[0], device=x.device)
    for given, options in (
        (ids[:, 0], {}),
        (ids, dict(temperature=0.7, return_entropy=True, return_logsumexp=True)),
        (ids, dict(temperature=by_row, return_entropy=True)),
    ):
        whole, local = pair(x, columns)
        want = fs.token_logprobs(whole, given, **options)
        got = parallel.token_logprobs(local, given, **options, **where)
        parts = zip(got, want, strict=True) if options else ((got, want),)
        total = {"got": 0.0, "want": 0.0}
        for i, (a, b) in enumerate(parts):
            assert (a is None) is (b is None)
            if a is not None:
                close(a, b, dtype, (options, i), result=True)
                same_on_every_rank(a, options)
                total["got"], total["want"] = total["got"] + (a * (i + 1)).sum(), total["want"] + (b * (i + 1)).sum()
        total["want"].backward()
        total["got"].backward()
        close(local.grad, whole.grad[:, columns], dtype, options)
    whole, local = pair(x, columns)
    want, got = torch.logsumexp(whole, -1, keepdim=True), parallel.logsumexp(local, keepdim=True, **where)
    close(got, want, dtype, "logsumexp", result=True)
    want.sum().backward()
    got.sum().backward()
    close(local.grad, whole.grad[:, columns], dtype, "logsumexp")


def check_softmax(where: dict[str, Any], columns: slice, x: Tensor) -> None:
    """softmax and log_softmax, and their dtype."""
    for name in ("softmax", "log_softmax"):
        for dtype in (None, torch.float32):
            if dtype is not None and x.dtype is torch.float64:
                continue
            whole, local = pair(x, columns)
            want = getattr(torch, name)(whole, -1)
            got = getattr(parallel, name)(local, dtype=dtype, **where)
            assert got.dtype is (x.dtype if dtype is None else dtype)
            close(got, want[:, columns], x.dtype, name, result=True)
            g = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(got)
            want.backward(g.double())
            got.backward(g[:, columns])
            # the gradient is made of a result that was rounded: relative to the largest upstream gradient
            by = 4.0 * g.double().abs().max()
            close(local.grad.double() / by, whole.grad[:, columns] / by, x.dtype, name)


def check_linear(where: dict[str, Any], columns: slice, dtype: torch.dtype, device: torch.device, n_cols: int) -> None:
    """linear_cross_entropy in chunks, with gradients of the input, the weight and the bias."""
    made = torch.Generator().manual_seed(5)
    h, w, b = (torch.randn(*shape, generator=made).to(device, dtype) for shape in ((7, 16), (n_cols, 16), (n_cols,)))
    target = torch.randint(0, n_cols, (7,), generator=made).to(device)
    target[2] = -100
    for options in ({}, dict(label_smoothing=0.1, softcap=4.0), dict(reduction="none")):
        whole = [t.double().clone().requires_grad_() for t in (h, w, b)]
        local = [t.clone().requires_grad_() for t in (h, w[columns], b[columns])]
        want = fs.linear_cross_entropy(whole[0], whole[1], target, linear_bias=whole[2], **options)
        got = parallel.linear_cross_entropy(
            local[0], local[1], target, local_bias=local[2], chunk_rows=4, **options, **where
        )
        close(got, want, dtype, options, result=dtype is not torch.bfloat16)
        want.sum().backward()
        got.sum().backward()
        for one, part, at in zip(whole, local, (slice(None), columns, columns), strict=True):
            by = one.grad.double().abs().max()
            # 16-bit logits and their gradient are rounded before they are multiplied
            close(part.grad.double() / by, one.grad[at].double() / by, dtype, options, result=True)


def check_all(
    rank: int, ranks: int, device: torch.device, n_rows: int, n_cols: int, dtypes: Any, even: bool, group: Any = None
) -> None:
    """Every op and option against whole rows."""
    at = cuts(ranks, n_cols, even)
    columns = slice(at[rank], at[rank + 1])
    where = dict(group=group) if even else dict(group=group, vocab_start=at[rank], vocab_size=n_cols)
    for dtype in dtypes:
        x, target, weight = logits(n_rows, n_cols, dtype, device)
        for options in LOSSES:
            check_losses(where, columns, x, target, weight, options)
        check_statistics(where, columns, x, target)
        check_softmax(where, columns, x)
        check_linear(where, columns, dtype, device, n_cols)


def results(x: Tensor, target: Tensor, weight: Tensor, columns: slice, group: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, bits): the results of every op and the gradients of these columns."""
    for i, options in enumerate(({}, dict(label_smoothing=0.1, softcap=5.0), dict(z_loss=0.1))):
        local = x[:, columns].clone().requires_grad_()
        loss = parallel.cross_entropy(local, target, weight[columns].clone() if i else None, group=group, **options)
        loss.backward()
        yield f"cross_entropy {options}", loss.detach()
        yield f"gradient of cross_entropy {options}", local.grad
    local = x[:, columns].clone().requires_grad_()
    found = parallel.token_logprobs(local, target.clamp(min=0), return_entropy=True, return_logsumexp=True, group=group)
    sum(part.sum() for part in found).backward()
    yield from zip(("logprobs", "entropy", "logsumexp"), (part.detach() for part in found), strict=True)
    yield "gradient of token_logprobs", local.grad
    for name in ("softmax", "log_softmax"):
        local = x[:, columns].clone().requires_grad_()
        y = getattr(parallel, name)(local, group=group)
        (y * y).sum().backward()
        yield f"columns of {name}", y.detach()
        yield f"gradient of {name}", local.grad


def check_equal_bits(rank: int, ranks: int, device: torch.device, shapes: Any, dtypes: Any) -> None:
    """Within batch_invariant(), each rank's part of a result has the bits of one rank alone, in groups of all sizes."""
    sizes = [size for size in (1, 2, 4, 8) if size <= ranks]
    groups = {size: torch.distributed.new_group(list(range(size))) for size in sizes if size > 1}
    alone = [torch.distributed.new_group([r]) for r in range(ranks)]
    for n_rows, n_cols in shapes:
        for dtype in dtypes:
            x, target, weight = logits(n_rows, n_cols, dtype, device)
            with fs.batch_invariant():
                want = dict(results(x, target, weight, slice(0, n_cols), alone[rank]))
                for size, group in groups.items():
                    if rank >= size:
                        continue
                    each = n_cols // size
                    columns = slice(rank * each, (rank + 1) * each)
                    for name, got in results(x, target, weight, columns, group):
                        whole = want[name]
                        part = whole[:, columns] if "gradient" in name or "columns" in name else whole
                        assert torch.equal(got, part), (name, size, dtype, n_rows, n_cols)
    torch.distributed.barrier()
