"""One launch of every kernel of the package, as a call compiles it, for any device of the planner; no GPU is needed.

`launches(target)` yields (name, Launch, Plan or None). The widths are those that differ in kind: narrow rows, rows of
one program, of a cluster, unaligned ones, and rows that are read twice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from planned import problem

from fused_softmax.lab import cross_compile as compiled
from fused_softmax.launch import (
    cross_entropy,
    cross_entropy_gradient,
    cross_entropy_spatial,
    logsumexp,
    loss_kernels,
    masked_softmax,
    row_statistics,
    softmax_shards,
    spatial,
    views,
    vocab_shards,
)
from fused_softmax.launch.compile import Launch
from fused_softmax.launch.launcher import flat_launch, row_launch
from fused_softmax.launch.layout import problem_of
from fused_softmax.launch.softmax import softmax_launch
from fused_softmax.launch.views import strided_launch
from fused_softmax.planning.logsumexp import plan_logsumexp_gradient
from fused_softmax.planning.losses import plan_elementwise, plan_row_statistics, plan_statistics
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES, Device, Plan, Problem

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
FORWARD = (13, 50, 64, 77, 256, 1000, 1024, 4096, 16384, 50257, 128256, 262144, 1048576)
BACKWARD = (13, 50, 64, 77, 1000, 4096, 16384, 50257, 128256, 262144, 1048576)

Named = tuple[str, Launch, Plan | None]


def as_called(launch: Launch) -> Launch:
    """The launch with the argument types that a call compiles for: 64 bits where the kernel declares 64 bits."""
    declared = launch.kernel.declaration.arguments.values()
    args = tuple(
        value + (1 << 40) if argument.type == "i64" and isinstance(value, int) else value
        for argument, value in zip(declared, launch.args, strict=True)
    )
    return launch._replace(args=args)


def cross_compiled(launch: Launch, target: str) -> tuple[compiled.Resources, Mapping[str, Any]]:
    """(what the kernel uses, its assembly by stage)."""
    kept: list[Any] = []
    read = compiled.resources

    def remember(kernel: Any) -> compiled.Resources:
        kept.append(kernel)
        return read(kernel)

    compiled.resources = remember
    try:
        return compiled.cross_compile(launch, target), kept[0].asm
    finally:
        compiled.resources = read


def rows_like(n_cols: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(3, n_cols, dtype=dtype)


def apart(*rows: torch.Tensor) -> Problem:
    """The problem of rows that are not moved as one piece, whatever their width."""
    return replace(problem_of(*rows), packed=False)


def softmax(target: str) -> Iterator[Named]:
    """softmax, log_softmax and their gradients."""
    device = DEVICES[target]
    for dtype, name in ((BFLOAT16, "bfloat16"), (FLOAT32, "float32")):
        for log in (False, True):
            for n_cols in FORWARD if not log else (77, 400, 1000, 50257, 262144):
                chosen = plan(problem(n_cols, (name, name), log=log), device)
                x = rows_like(n_cols, dtype)
                launch = softmax_launch((x, x), chosen, log=log, device=device)
                yield f"{'log_' * log}softmax {name} {n_cols}", as_called(launch), chosen
            for n_cols in BACKWARD if not log else (77, 1000, 50257, 128256, 262144):
                chosen = plan(problem(n_cols, (name, name), backward=True, log=log), device)
                x = rows_like(n_cols, dtype)
                launch = softmax_launch((x, x, x), chosen, log=log, backward=True, device=device)
                yield f"{'log_' * log}softmax backward {name} {n_cols}", as_called(launch), chosen


def statistics(target: str) -> Iterator[Named]:
    """logsumexp, log-probabilities and entropy, and their gradient."""
    device = DEVICES[target]
    number, ids = torch.zeros(3), torch.zeros(3, 1, dtype=torch.int64)
    for dtype in (BFLOAT16, FLOAT32):
        for n_cols in (64, 1000, 4096, 50257, 128256):
            x = rows_like(n_cols, dtype)
            for third in ("", " entropy", " rank") if n_cols in (1000, 128256) else ("",):
                chosen, entropy = plan_statistics(problem_of(x), device), third == " entropy"
                flags = (("PICKS", 1), ("ENTROPY", entropy), ("SCALE", int(entropy)), ("KEEP_MOMENTS", True))
                flags = (*flags, ("RANK", third == " rank"))
                vectors = (number, number, number, ids, number, number)
                launch = row_launch(row_statistics.FORWARD, (x,), vectors, (1, 1.0), flags, chosen, device)
                yield f"row_statistics{third} {dtype} {n_cols}", as_called(launch), chosen
            chosen = plan_row_statistics(problem_of(x), device)
            for third in ("", " entropy") if chosen.part_cols else ():
                flags = (("ENTROPY", third == " entropy"), ("SCALE", 0))
                launch = row_launch(row_statistics.FORWARD, (x,), (number, number), (1.0,), flags, chosen, device)
                yield f"row_statistics parts{third} {dtype} {n_cols}", as_called(launch), chosen
                tensors = (x, number, number, number, number, ids, number, number)
                flags = (("PICKS", 1), *flags, ("KEEP_MOMENTS", True), ("BLOCK", 8), ("SPLITS", 64))
                flags = (*flags, ("LOOPS", n_cols == 128256), ("WAITS", True))
                numbers = (64, n_cols, n_cols, 32, 1, 1.0)
                launch = flat_launch(row_statistics._merge_statistics, tensors, numbers, flags, 4, device)
                yield f"row_statistics merge{third} {dtype} {n_cols}", as_called(launch), None
            if dtype is BFLOAT16 and n_cols in (1000, 128256):  # logsumexp writes 16 bits, and its gradient reads them
                chosen, rounded = plan_statistics(problem_of(x), device), torch.zeros(3, dtype=dtype)
                flags = (("PICKS", 0), ("ENTROPY", False), ("RANK", False), ("SCALE", 0), ("KEEP_MOMENTS", False))
                launch = row_launch(row_statistics.FORWARD, (x,), (rounded,) * 6, (0, 1.0), flags, chosen, device)
                yield f"logsumexp {dtype} {n_cols}", as_called(launch), chosen
            chosen = plan_elementwise(problem_of(x, x), device)
            vectors = (number, number, number, ids, number, number, number)
            for sharded in (False, True):
                flags = (("PICKS", 1), ("ENTROPY", False), ("LSE", False), ("SCALE", 0), ("HAS_MOMENTS", True))
                flags = (*flags, ("SHARDED", sharded))
                row_op = row_statistics.backward_op(1, sharded)
                launch = row_launch(row_op, (x, x), vectors, (1, 0, 0, 1.0), flags, chosen, device)
                yield f"row_statistics backward{' of a shard' * sharded} {dtype} {n_cols}", as_called(launch), chosen


def losses(target: str) -> Iterator[Named]:
    """cross_entropy without and with its gradient in the same pass, its gradient by itself, and the small sums."""
    device = DEVICES[target]
    number, ids = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    for dtype in (BFLOAT16, FLOAT32):
        for n_cols in (64, 1000, 4096, 32000, 50257, 128256):
            x = rows_like(n_cols, dtype)
            some = n_cols in (1000, 128256)
            for smoothing, weight in ((0.0, None), (0.1, None), (0.1, torch.zeros(n_cols)))[: 3 if some else 1]:
                facts = None if weight is None else torch.zeros(2)
                op = cross_entropy.CrossEntropy(ids, weight, facts, -100, "mean", smoothing, None, 0.0)
                chosen = plan_statistics(problem_of(x), device)
                name = f"{' weighted' * (weight is not None)}{' smoothed' * (smoothing > 0)} {dtype} {n_cols}"
                numbers = (op.ignore_index, *op.numbers)
                launch = row_launch(
                    cross_entropy.FORWARD[op.kind.arithmetic], (x,), (*op.vectors(number), number, number), numbers,
                    op.kind.flags, chosen, device,
                )  # fmt: skip
                yield f"cross_entropy_forward{name}", as_called(launch), chosen
                chosen = cross_entropy.WITH_GRADIENT[op.kind.arithmetic].planner(apart(x, x), device)
                if chosen.regime != "two_pass" and facts is None:
                    flags = loss_kernels.with_gradient_flags(op.kind, keeps_upstream=True, waits=device.supports_pdl)
                    vectors = (*op.vectors(number), number, number, number)
                    launch = row_launch(
                        cross_entropy.WITH_GRADIENT[op.kind.arithmetic], (x, x), vectors,
                        loss_kernels.with_gradient_numbers(op), flags, chosen, device,
                    )  # fmt: skip
                    yield f"cross_entropy_resident{name}", as_called(launch), chosen
                for unless, sharded in ((False, False), (True, False), (False, True)):
                    backward = cross_entropy_gradient
                    row_op = backward.BACKWARD_UNLESS_WRITTEN if unless else backward.BACKWARD
                    row_op = backward.OF_SHARDS if sharded else row_op
                    chosen = row_op.planner(apart(x, x), device)
                    flags = backward.gradient_flags(op.kind, not sharded, n_cols == 1000, sharded, unless, unless)
                    launch = row_launch(
                        row_op, (x, x), (*op.vectors(number), number, number, number, number, number),
                        (op.ignore_index, 0, 0, *op.numbers), flags, chosen, device,
                    )  # fmt: skip
                    kind = " unless written" * unless + " of a shard" * sharded
                    yield f"cross_entropy_backward{name}{kind}", as_called(launch), chosen
        chosen = cross_entropy_gradient.SCALE_UNLESS_ONE.planner(problem_of(x), device)
        launch = row_launch(cross_entropy_gradient.SCALE_UNLESS_ONE, (x,), (number,), (0,), (), chosen, device)
        yield f"scale_unless_one {dtype} {n_cols}", as_called(launch), chosen


def narrow(target: str) -> Iterator[Named]:
    """Losses and statistics of rows of few columns, which are moved as one piece where warps have 32 threads."""
    device = DEVICES[target]
    number, ids = torch.zeros(64), torch.zeros(64, dtype=torch.int64)
    if device.warp_size != 32:
        return
    for dtype in (BFLOAT16, FLOAT32):
        for n_cols, smoothing, softcap, weighted in ((2, 0, None, True), (19, 0.1, None, False), (77, 0, 30.0, False)):
            x, weight = torch.empty(64, n_cols, dtype=dtype), torch.zeros(n_cols) if weighted else None
            op = cross_entropy.CrossEntropy(ids, weight, None, -100, "mean", smoothing, softcap, 0.0)
            numbers, vectors = (op.ignore_index, *op.numbers), (*op.vectors(number), number, number)
            row_op = cross_entropy.FORWARD[op.kind.arithmetic]
            chosen = row_op.planner(problem_of(x), device)
            launch = row_launch(row_op, (x,), vectors, numbers, op.kind.flags, chosen, device)
            yield f"cross_entropy_forward_gathered {dtype} {n_cols}", as_called(launch), chosen
            row_op, flags = cross_entropy.WITH_GRADIENT[op.kind.arithmetic], loss_kernels.with_gradient_flags(op.kind)
            chosen, numbers = row_op.planner(problem_of(x, x), device), loss_kernels.with_gradient_numbers(op)
            launch = row_launch(row_op, (x, x), (*vectors, number), numbers, flags, chosen, device)
            yield f"cross_entropy_gathered {dtype} {n_cols}", as_called(launch), chosen
            row_op, flags = cross_entropy_gradient.BACKWARD, cross_entropy_gradient.gradient_flags(op.kind, True, False)
            chosen, numbers = row_op.planner(problem_of(x, x), device), (op.ignore_index, 1, 0, *op.numbers)
            launch = row_launch(row_op, (x, x), (*vectors, *(number,) * 3), numbers, flags, chosen, device)
            yield f"cross_entropy_backward_gathered {dtype} {n_cols}", as_called(launch), chosen
            entropy, scale = n_cols == 19, int(n_cols == 77)
            flags = (("PICKS", 1), ("ENTROPY", entropy), ("RANK", False), ("SCALE", scale), ("KEEP_MOMENTS", True))
            chosen, vectors = (
                row_statistics.FORWARD.planner(problem_of(x), device),
                (*(number,) * 3, ids, number, number),
            )
            launch = row_launch(row_statistics.FORWARD, (x,), vectors, (1, 0.5), flags, chosen, device)
            yield f"row_statistics_gathered {dtype} {n_cols}", as_called(launch), chosen
            flags = (("PICKS", 1), ("ENTROPY", entropy), ("LSE", True), ("SCALE", scale), ("HAS_MOMENTS", True))
            chosen = row_statistics.BACKWARD.planner(problem_of(x, x), device)
            launch = row_launch(
                row_statistics.BACKWARD, (x, x), (*vectors, number), (1, 0, 0, 0.5), flags, chosen, device
            )  # fmt: skip
            yield f"row_statistics_backward_gathered {dtype} {n_cols}", as_called(launch), chosen


def shards(target: str) -> Iterator[Named]:
    """What a rank packs of rows whose columns are spread over ranks, their merge, and a loss's factors."""
    device = DEVICES[target]
    number, ids = torch.zeros(64), torch.zeros(64, dtype=torch.int64)
    flat = functools.partial(flat_launch, num_warps=vocab_shards.WARPS, device=device)
    for dtype in (BFLOAT16, FLOAT32):
        for loss in (False, True):
            tensors = (torch.zeros(64, 64, dtype=dtype), ids, *(number,) * 8)
            flags = (("LOSS", loss), ("SCALE", 0 if loss else 2), ("WEIGHTED", loss), ("SMOOTH", loss))
            flags = (*flags, ("SOFTCAP", loss), ("HEAD", 35), ("PADDED", 64))
            launch = flat(vocab_shards._pack, tensors, (64, 64, 64, 64, 0, 64, -100, 1, 1, 1.0, 1.0), flags)
            yield f"pack_shard{' loss' * loss} {dtype}", as_called(launch), None
    header = (("COMMON", 30), ("PADDED", 32), ("HEAD", 35))
    for full in (False, True):
        flags = (("WEIGHTED", full), ("SMOOTH", full), *header)
        tensors = (number, ids, number, number, number)
        launch = flat(vocab_shards._merge_loss, tensors, (4, 64, 64, -100, 4, 1, 0.1, 0.1), flags)
        yield f"merge_loss{' smoothed' * full}", as_called(launch), None
        flags = (("PICKS", full), ("ENTROPY", full), ("INFINITE", full), *header)
        tensors = (number, ids, number, number, number, number)
        launch = flat(vocab_shards._merge_statistics, tensors, (4, 64, 64, 4, 1, 1), flags)
        yield f"merge_statistics{' entropy' * full}", as_called(launch), None
        flags = (("MEAN", full), ("WEIGHTED", full), ("SMOOTH", full))
        tensors = (number, ids, number, number, number, number, number)
        launch = flat(vocab_shards._factors, tensors, (4, -100, 64, 0, 0.1, 0.1), flags)
        yield f"loss_factors{' smoothed' * full}", as_called(launch), None


def shards_of_softmax(target: str) -> Iterator[Named]:
    """softmax and log_softmax of rows whose columns are spread over ranks."""
    device, number = DEVICES[target], torch.zeros(6)
    for dtype in (BFLOAT16, FLOAT32):
        for n_cols in (64, 1000, 50257, 65536):
            x = rows_like(n_cols, dtype)
            for op, n in ((softmax_shards.SUMS, 2), (softmax_shards.GRADIENT, 3), (softmax_shards.LOG_SOFTMAX, 2)):
                rows = (x,) * n
                chosen = op.plan(rows, device, False)
                launch = row_launch(op, rows, (number,), (), (("LOG", n_cols == 1000),), chosen, device)
                yield f"{launch.kernel.fn.__name__} {dtype} {n_cols}", as_called(launch), chosen


def masked_launch(
    x: torch.Tensor, mask: torch.Tensor | None, causal: bool, device: Device, zero: bool = False,
    queries: int | None = None,
) -> tuple[Launch, Plan]:  # fmt: skip
    """masked_softmax of 4 rows x, by the plan that a call takes: of scores (2, 2, n_cols).

    Causal scores without a mask are (2, n_cols, n_cols), or (2, queries, n_cols).
    """
    n_cols = x.shape[1]
    assert queries is None or (causal and mask is None)
    shape = (2, n_cols if queries is None else queries, n_cols) if causal and mask is None else (2, 2, n_cols)
    strides = (shape[1] * x.stride(0), x.stride(0), 1)
    scores = torch.empty_strided(shape, strides, dtype=x.dtype, device="meta")
    found = masked_softmax.forward_of(scores, (x, x), mask, causal, zero, device, False)
    chosen = found.op.plan((x, x), device, False)
    numbers = (*found.order, *found.numbers, 0.5)
    return row_launch(found.op, (x, x), (found.read,), numbers, found.flags, chosen, device), chosen


def masked_gradient_launch(
    x: torch.Tensor, mask: torch.Tensor | None, causal: bool, device: Device
) -> tuple[Launch, Plan] | None:
    """The gradient of masked_softmax of 4 rows, as `masked_launch`; None where softmax's own kernel takes such rows."""
    scores = x.as_strided((2, 2, x.shape[1]), (2 * x.stride(0), x.stride(0), 1), x.storage_offset())
    found = masked_softmax.backward_of(scores, (x, x, x), mask, causal, device, False)
    if found is None:
        return None
    chosen = found.op.plan((x, x, x), device, False)
    return row_launch(
        found.op, (x, x, x), (found.read,), (*found.order, *found.numbers, 0.5), found.flags, chosen, device
    ), chosen


def masks(target: str) -> Iterator[Named]:
    """masked_softmax under each kind of mask, and its gradient."""
    device = DEVICES[target]
    for dtype in (BFLOAT16, FLOAT32):
        for n_cols in (33, 64, 1001, 1024, 4096, 16384, 50257, 262144, 2097152):
            x = torch.empty(4, n_cols, dtype=dtype)
            for kind in ("causal", "boolean", "additive"):
                mask = torch.empty(2, n_cols, dtype=torch.bool if kind == "boolean" else dtype)
                given = None if kind == "causal" else mask
                launch, chosen = masked_launch(x, given, kind == "causal", device)
                yield f"masked_softmax {kind} {dtype} {n_cols}", as_called(launch), chosen
            if n_cols == 1001:
                launch, chosen = masked_launch(x[:, :473].contiguous(), None, True, device, queries=30)
                yield f"masked_softmax causal {dtype} 473, 30 queries", as_called(launch), chosen
            found = masked_gradient_launch(x, None, True, device)
            if found is not None:
                yield f"masked_softmax backward {dtype} {n_cols}", as_called(found[0]), found[1]


def others(target: str) -> Iterator[Named]:
    """The small sums of losses, and softmax along a dimension that is not the last."""
    device = DEVICES[target]
    ids, number = torch.zeros(4096, dtype=torch.int64), torch.zeros(4096)
    ctas, parts, lanes = (16, 8, 32) if device.max_cluster >= 16 else (1, 1, 256)
    shared = (("CTAS", ctas), ("WARPS_PER_ROW", parts), ("VECTORS", lanes), ("EACH", 8), ("PTX", device.ptx))
    numbers = (4096, 4096, 1000, -100)
    flags = (("WEIGHTED", False), ("TRIGGER", device.supports_pdl), *shared)
    launch = flat_launch(loss_kernels.count_kernel, (ids, number, number), numbers, flags, 8, device)
    yield "count_targets", as_called(launch), None
    for has_count in (False, True):
        counts = (("KEEPS_COUNT", not has_count), ("HAS_COUNT", has_count))
        flags = (("MEAN", True), *counts, ("WEIGHTED", False), ("WAITS", device.supports_pdl), *shared)
        tensors = (number, ids, number, number, number)
        launch = flat_launch(loss_kernels.reduce_kernel, tensors, numbers, flags, 8, device)
        yield "reduce_losses" + " with count" * has_count, as_called(launch), None
    for dtype in (BFLOAT16, FLOAT32):
        x, y = torch.empty(100, 2002, dtype=dtype)[:, ::2], torch.empty(100, 1001, dtype=dtype)
        yield f"stepped copy {dtype}", as_called(views.stepped_copy_launch(x, y, 2, device)), None
        for n_cols in (64, 4096):
            x = torch.empty(2, n_cols, 4096, dtype=dtype, device="meta")
            yield f"softmax strided {dtype} {n_cols}", strided_launch(x, x, 1, False, device), None
        for n_cols in (21, 333, 1001):
            x, y = torch.empty(2, n_cols, 4095, dtype=dtype).transpose(1, 2), torch.empty(2, 4095, n_cols, dtype=dtype)
            for kind, (a, b), dim in (("transposed", (x, y), 2), ("channels last", (y.transpose(1, 2), x.mT), 1)):
                rows = (4095, 1, n_cols) if dim == 2 else (4095, n_cols, 1)
                dims = [(2, n_cols * 4095, n_cols * 4095), rows]
                found = views.transposition(a, b, dim, dims, 4095, device)
                if found is not None:
                    launch = views.transposed_launch(a, b, False, found, device)
                    yield f"softmax {kind} {dtype} {n_cols}", as_called(launch), found.plan
            tiles = views.tiles_of(x)
            if tiles is not None:
                yield f"transposed copy {dtype} {n_cols}", as_called(views.copy_launch(x, y, tiles, device)), None


def spatial_softmax_over(tensors: tuple[torch.Tensor, ...], kind: str, log: bool, device: Device) -> Iterator[Named]:
    """The launches over (x, y), or over (y, dy, dx) of a gradient; `kind` ends their names."""
    backward = len(tensors) == 3
    chosen = spatial.softmax_plan(tensors, log, backward, False, device)
    recipe = spatial.softmax_recipe(tensors, chosen, log, backward, device)
    for launch in spatial.recipe_launches(recipe, tensors):
        name = f"{launch.kernel.fn.__name__}{' log' * log} {tensors[0].dtype} {tensors[0].shape[1]} {kind}"
        yield name, as_called(launch), chosen


def spatial_softmax(target: str) -> Iterator[Named]:
    """softmax, log_softmax and logsumexp over a dimension that is not the last, and their gradients."""
    device = DEVICES[target]
    for dtype in (BFLOAT16, FLOAT32):
        # on chip, on a cluster, in parts, unaligned, several of outer
        for n_cols, inner in ((19, 4096), (150, 4096), (1000, 4096), (4096, 4096), (50257, 1024), (21, 4097), (40, 8)):
            x = torch.empty(2, n_cols, inner, dtype=dtype)
            for log in (False, True) if n_cols in (150, 4096) else (False,):
                for count in (2, 3):
                    yield from spatial_softmax_over((x,) * count, str(inner), log, device)
        # where the output has memory of its own: tiles that are skewed, that overlap at halves of sectors, or of few
        # positions, planes that are moved as one piece, or by a cluster, and columns in bundles
        halves = 4096 + 16 // dtype.itemsize
        few = ((1477, 40), (3000, 200), (600, 80), (8000, 16), (1210, 9), (9000, 2), (66853, 17))
        pieces = ((4, 11), (35, 31), (300, 13), (2, 16))
        if device.adds_shared_memory:
            pieces += ((468, 83), (1350, 47), (400, 301))
            x = torch.empty(2, 400, 301, dtype=dtype)  # in place it has plain tiles, else skewed ones
            for count in (2, 3):
                yield from spatial_softmax_over((x,) * count, "in place", False, device)
        for n_cols, inner, kind in (
            *((n, 4097, "apart") for n in (21, 150, 700)), *((n, halves, "in halves") for n in (120, 1600, 2700, 4500)),
            *((n, inner, str(inner)) for n, inner in (*few, *pieces)),
        ):  # fmt: skip
            for count in (2, 3):
                tensors = tuple(torch.empty(2, n_cols, inner, dtype=dtype) for _ in range(count))
                yield from spatial_softmax_over(tensors, kind, False, device)
        x, small = torch.empty(2, 5000, 512, dtype=dtype), torch.empty(2, 512, dtype=dtype)
        chosen = logsumexp.lse_plan(x, False, device)
        for launch in spatial.recipe_launches(logsumexp.lse_recipe(x, chosen, device), (x, small)):
            yield f"logsumexp {launch.kernel.fn.__name__} {dtype}", as_called(launch), chosen
        chosen = plan_logsumexp_gradient(spatial.problem_of(x, x), device)
        recipe = logsumexp.gradient_recipe(x, x, chosen, device)
        for launch in spatial.recipe_launches(recipe, (x, x, small, small)):
            yield f"{launch.kernel.fn.__name__} {dtype}", as_called(launch), chosen


def spatial_loss(x: torch.Tensor, op: cross_entropy.CrossEntropy, device: Device, plan: Plan) -> list[Launch]:
    """The launches of a mean with its gradient."""
    number = torch.empty(1)
    prepared = op.target.to(torch.int16)
    dx = torch.empty_like(x) if plan.skewed else x
    tensors = (x, dx, prepared, *(number,) * 10)
    recipe = cross_entropy_spatial.loss_recipe(
        x, dx, op, plan, device, cross_entropy_spatial.SUM_OF_LOSSES, True, 0, False, False, waits=True
    )
    numbers = (op.ignore_index, *op.numbers)
    of_loss = [
        Launch(s.kernel, (1,), (*(tensors[i] for i in s.tensors), *s.numbers(1), *numbers), s.meta)
        for s in recipe.steps
    ]
    of_targets = [
        Launch(s.kernel, (1,), (op.target, number, prepared, number, *s.numbers(1)), s.meta)
        for s in cross_entropy_spatial.prepare_recipe(op, x.shape[1], device).steps
    ]
    of_sums = [
        Launch(s.kernel, (1,), (number, number, *s.numbers(1)), s.meta)
        for s in cross_entropy_spatial.sum_recipe(device).steps
    ]
    return of_loss + of_targets + of_sums


def spatial_losses(target: str) -> Iterator[Named]:
    """cross_entropy of logits (N, C, d1, ...) as they lie, with its gradient, and the count of its targets."""
    device, ids, weight = DEVICES[target], torch.zeros(4096, dtype=torch.int64), torch.zeros(40000)
    for dtype in (BFLOAT16, FLOAT32):
        for n_cols, smoothing, inner in (
            *((n, 0.0, 4096) for n in (19, 90, 150, 1000)),
            *((n, 0.1, 4096) for n in (19, 1000, 40000)),
            *((n, 0.0, 4097) for n in (60, 150, 700)),
        ):  # fmt: skip
            x = torch.empty(2, n_cols, inner, dtype=dtype)
            weights = (weight, torch.zeros(2)) if smoothing else (None, None)
            op = cross_entropy.CrossEntropy(ids, *weights, -100, "mean", smoothing, None, 0.0)
            shareable = cross_entropy_spatial.may_share(op, False)
            chosen = cross_entropy_spatial.loss_plan(x, None, False, device, shareable)
            for launch in spatial_loss(x, op, device, chosen):
                apart = " apart" * (inner % 2)
                yield f"{launch.kernel.fn.__name__} {dtype} {n_cols} {smoothing}{apart}", as_called(launch), chosen


def launches(target: str) -> Iterator[Named]:
    """A launch of every kernel, by name."""
    over_ranks = shards, shards_of_softmax
    for family in (softmax, statistics, losses, narrow, *over_ranks, masks, others, spatial_softmax, spatial_losses):
        yield from family(target)
