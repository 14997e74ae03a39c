"""Random launches of the kernels that hold columns on chip, as calls compile them, for any device of the planner.

`random_launches(target, seed, cases)` yields (name, Launch, Plan or None). Case i of a seed is the same problem on each
target. Half of the widths are the widest of a config, because their threads hold the most. No GPU is needed, and no
memory: the tensors are meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
from launches import Named, as_called, masked_gradient_launch, masked_launch

from fused_softmax.launch import (
    cross_entropy,
    cross_entropy_gradient,
    cross_entropy_spatial,
    loss_kernels,
    row_statistics,
    spatial,
)
from fused_softmax.launch.launcher import RowOp, row_launch
from fused_softmax.launch.layout import problem_of
from fused_softmax.launch.softmax import softmax_launch
from fused_softmax.planning import config_tables, masked_tables, spatial_tables
from fused_softmax.planning import cross_entropy_spatial as loss_plans
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES, Device

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BFLOAT16, BFLOAT16, FLOAT16, FLOAT32, FLOAT32)
# (input, output) of a softmax
PAIRS = (*((dtype, dtype) for dtype in DTYPES), (FLOAT16, FLOAT32), (BFLOAT16, FLOAT32))
INNER = (2, 3, 7, 8, 16, 24, 49, 64, 196, 256, 512, 729, 1000, 1024, 3136, 4096, 4097, 4098, 8200, 16384, 65536)
SPATIAL_COLS, LOSS_COLS, ROW_COLS = 31000, 12000, 600000  # at most; wider problems have the kernels of two passes


def _config_widths(*tables: object) -> tuple[int, ...]:
    """The widest columns of all configs of the tables."""
    found: set[int] = set()
    for table in tables:
        if isinstance(table, dict):
            found |= set(_config_widths(*table.values()))
        elif isinstance(table, tuple) and hasattr(table, "max_cols"):
            found.add(table.max_cols)
        elif isinstance(table, tuple):
            found |= set(_config_widths(*table))
    return tuple(sorted(n for n in found if n <= ROW_COLS))


SPATIAL_ENDS = _config_widths(spatial_tables.ON_CHIP, spatial_tables.UNALIGNED)
LOSS_ENDS = (
    loss_plans.WHOLE_COLS, loss_plans.WHOLE_ANYWHERE,
    *_config_widths(loss_plans.ALIGNED, loss_plans.ALONE, loss_plans.ANYWHERE, loss_plans.MORE_COLS),
    *(n_cols for table in loss_plans.SHARED.values() for n_cols in table),
)  # fmt: skip
MASKED_ENDS = _config_widths(masked_tables.MASKED, masked_tables.MASKED_UNALIGNED, masked_tables.MASKED_WIDE)
ROW_ENDS = _config_widths(
    config_tables.CLUSTER, config_tables.FORWARD_BLOCK, config_tables.BACKWARD_BLOCK, config_tables.LOSS_CLUSTER
)


def _width(rng: Random, ends: tuple[int, ...], most: int) -> int:
    if rng.random() < 0.5:
        return max(2, rng.choice(ends) - rng.choice((0, 0, 1, 3, 8)))
    return max(2, round(most ** rng.uniform(0.2, 1.0)))


def _rows(rng: Random, n_cols: int) -> tuple[int, int]:
    """(from one row to the next, elements from an aligned address to the first): contiguous, padded or cut."""
    return rng.choice(((n_cols, 0), (n_cols, 0), (n_cols + -n_cols % 16, 0), (n_cols + 1, 1)))


def _matrix(n_cols: int, dtype: torch.dtype, stride: int, shift: int) -> torch.Tensor:
    memory = torch.empty(4 * stride + shift, dtype=dtype, device="meta")[shift:]
    return memory.as_strided((4, n_cols), (stride, 1))


def _loss(rng: Random, n_cols: int) -> cross_entropy.CrossEntropy:
    """A loss with random options."""
    smoothing, softcap = rng.choice((0.0, 0.0, 0.1)), rng.choice((None, None, None, 30.0))
    weight = torch.empty(n_cols, device="meta") if rng.random() < 0.3 else None
    weight_facts = torch.empty(2, device="meta") if weight is not None and smoothing else None
    target = torch.empty(4, dtype=torch.int64, device="meta")
    reduction = rng.choice(("mean", "mean", "sum", "none"))
    z_loss = rng.choice((0.0, 0.0, 1e-4))
    return cross_entropy.CrossEntropy(target, weight, weight_facts, -100, reduction, smoothing, softcap, z_loss)


def _options(op: cross_entropy.CrossEntropy) -> str:
    given = {"weights": op.weight is not None, "smoothed": op.smoothing > 0, "capped": op.softcap is not None}
    return " ".join([op.reduction, *(word for word, has in given.items() if has)])


def softmax_rows(rng: Random, device: Device) -> Iterator[Named]:
    n_cols, (read, written) = _width(rng, ROW_ENDS, ROW_COLS), rng.choice(PAIRS)
    log, backward, lies = rng.random() < 0.3, rng.random() < 0.5, _rows(rng, n_cols)
    dtypes = (written, written, read) if backward else (read, written)
    tensors = tuple(_matrix(n_cols, dtype, *lies) for dtype in dtypes)
    chosen = plan(problem_of(*tensors, backward=backward, log=log), device)
    launch = softmax_launch(tensors, chosen, log=log, backward=backward, device=device)
    yield f"softmax{' log' * log}{' backward' * backward} {read} {written} {n_cols} {lies}", launch, chosen


def loss_rows(rng: Random, device: Device) -> Iterator[Named]:
    n_cols, dtype = _width(rng, ROW_ENDS, ROW_COLS), rng.choice(DTYPES)
    lies, inplace, op = _rows(rng, n_cols), rng.random() < 0.3, _loss(rng, n_cols)
    x, number = _matrix(n_cols, dtype, *lies), torch.empty(64, device="meta")
    name = f"{dtype} {n_cols} {lies} {_options(op)}{' in place' * inplace}"
    mean = op.reduction == "mean"
    with_gradient = cross_entropy.WITH_GRADIENT[op.kind.arithmetic]
    chosen = with_gradient.planner(problem_of(x, x), device)
    if chosen.regime != "two_pass" and op.weight_facts is None:
        waits = mean and not inplace and device.supports_pdl
        flags = loss_kernels.with_gradient_flags(op.kind, mean, inplace, not inplace, waits)
        vectors = (*op.vectors(number), number, number, number)
        numbers = loss_kernels.with_gradient_numbers(op)
        yield f"loss {name}", row_launch(with_gradient, (x, x), vectors, numbers, flags, chosen, device), chosen
        return
    forward = cross_entropy.FORWARD[op.kind.arithmetic]
    chosen, vectors = forward.planner(problem_of(x), device), (*op.vectors(number), number, number)
    launch = row_launch(forward, (x,), vectors, (op.ignore_index, *op.numbers), op.kind.flags, chosen, device)
    yield f"loss forward {name}", launch, chosen
    backward = cross_entropy_gradient.BACKWARD
    chosen = backward.planner(problem_of(x, x), device)
    flags = cross_entropy_gradient.gradient_flags(op.kind, mean, inplace)
    vectors, numbers = (*op.vectors(number), *(number,) * 5), (op.ignore_index, 0, 0, *op.numbers)
    yield f"loss backward {name}", row_launch(backward, (x, x), vectors, numbers, flags, chosen, device), chosen


def statistics(rng: Random, device: Device) -> Iterator[Named]:
    n_cols, dtype = _width(rng, ROW_ENDS, ROW_COLS), rng.choice(DTYPES)
    lies = _rows(rng, n_cols)
    x, number = _matrix(n_cols, dtype, *lies), torch.empty(64, device="meta")
    ids, entropy, scale = torch.empty(4, 1, dtype=torch.int64, device="meta"), rng.random() < 0.5, rng.choice((0, 1, 2))
    name = f"{dtype} {n_cols} {lies}{' entropy' * entropy} scale {scale}"
    row_op: RowOp = row_statistics.FORWARD
    chosen = row_op.planner(problem_of(x), device)
    if chosen.part_cols:
        flags = (("ENTROPY", entropy), ("SCALE", scale))
        launch = row_launch(row_op, (x,), (number, number), (1.0,), flags, chosen, device)
    else:
        flags = (("PICKS", 1), ("ENTROPY", entropy), ("RANK", False), ("SCALE", scale), ("KEEP_MOMENTS", True))
        vectors = (number, number, number, ids, number, number)
        launch = row_launch(row_op, (x,), vectors, (1, 1.0), flags, chosen, device)
    yield f"statistics {name}", launch, chosen
    chosen = row_statistics.BACKWARD.planner(problem_of(x, x), device)
    flags = (("PICKS", 1), ("ENTROPY", entropy), ("LSE", False), ("SCALE", scale), ("HAS_MOMENTS", True))
    vectors, numbers = (number, number, number, ids, number, number, number), (1, 0, 0, 1.0)
    flags = (*flags, ("SHARDED", False))
    launch = row_launch(row_statistics.BACKWARD, (x, x), vectors, numbers, flags, chosen, device)
    yield f"statistics backward {name}", launch, chosen


def masked_rows(rng: Random, device: Device) -> Iterator[Named]:
    n_cols, dtype = _width(rng, MASKED_ENDS, ROW_COLS), rng.choice(DTYPES)
    lies: tuple[int, ...]
    lies, kind, causal, backward = _rows(rng, n_cols), rng.choice((0, 1, 2)), rng.random() < 0.5, rng.random() < 0.4
    causal, zero = causal or kind == 0, rng.random() < 0.3
    x, mask = _matrix(n_cols, dtype, *lies), None
    if backward:
        kind = min(kind, 1)
    if kind:
        strides, first = rng.choice((((n_cols, 1), 0), ((n_cols, 1), 0), ((n_cols, 1), 1), ((1, 2), 0)))
        memory = torch.empty(2 * n_cols + 1, dtype=torch.bool if kind == 1 else dtype, device="meta")[first:]
        mask = memory.as_strided((2, n_cols), strides)
        lies = (*lies, *strides, first)
    name = f"masked{' backward' * backward} {dtype} {n_cols} {lies} mask {kind}{' causal' * causal}"
    if backward:
        found = masked_gradient_launch(x, mask, causal, device)
        if found is not None:
            yield name, *found
        return
    queries = rng.choice((None, 2, 20, 130)) if mask is None else None
    few = "" if queries is None else f" of {queries} queries"
    yield name + few, *masked_launch(x, mask, causal, device, zero, queries)


def _planes(rng: Random, n_cols: int, inner: int, dtypes: tuple[torch.dtype, ...]) -> tuple[torch.Tensor, ...]:
    """Tensors (2, n_cols, inner), contiguous, or cut out of longer runs."""
    run = inner + rng.choice((0, 0, 0, 8, 1))
    shape, strides = (2, n_cols, inner), (n_cols * run, run, 1)
    return tuple(torch.empty_strided(shape, strides, dtype=dtype, device="meta") for dtype in dtypes)


def softmax_planes(rng: Random, device: Device) -> Iterator[Named]:
    n_cols, inner, (read, written) = _width(rng, SPATIAL_ENDS, SPATIAL_COLS), rng.choice(INNER), rng.choice(PAIRS)
    log, backward, invariant = rng.random() < 0.3, rng.random() < 0.5, rng.random() < 0.1
    tensors = _planes(rng, n_cols, inner, (written, written, read) if backward else (read, written))
    chosen = spatial.softmax_plan(tensors, log, backward, invariant, device)
    recipe = spatial.softmax_recipe(tensors, chosen, log, backward, device)
    name = f"{' log' * log} {read} {written} {n_cols} {tensors[0].stride()} inner {inner}{' invariant' * invariant}"
    for launch in spatial.recipe_launches(recipe, tensors):
        yield launch.kernel.fn.__name__ + name, launch, chosen


def loss_planes(rng: Random, device: Device) -> Iterator[Named]:
    n_cols, inner, dtype = _width(rng, LOSS_ENDS, LOSS_COLS), rng.choice(INNER), rng.choice(DTYPES)
    op, inplace, gradient, again = _loss(rng, n_cols), rng.random() < 0.3, rng.random() < 0.8, rng.random() < 0.15
    x, dx = _planes(rng, n_cols, inner, (dtype, dtype))
    mean, number = op.reduction == "mean", torch.empty(64, device="meta")
    invariant = rng.random() < 0.1
    few_bits = torch.int8 if n_cols <= 1 << 7 else torch.int16
    target = torch.empty(64, dtype=few_bits if mean else torch.int64, device="meta")
    loss = cross_entropy_spatial.EACH_LOSS if op.reduction == "none" else cross_entropy_spatial.SUM_OF_LOSSES
    form = (loss, gradient, 0, False, gradient and inplace, None, mean)
    if again:  # for another upstream gradient
        upstream = 2 if op.reduction == "none" else 1
        unless_one = upstream == 1 and rng.random() < 0.5
        form = (cross_entropy_spatial.NO_LOSS, True, upstream, unless_one, inplace, None, False)
    may_share = cross_entropy_spatial.may_share(op, form[3]) and not form[4]
    chosen = cross_entropy_spatial.loss_plan(x, dx, invariant, device, shareable=may_share)
    recipe = cross_entropy_spatial.loss_recipe(x, dx, op, chosen, device, *form)
    given = (x, dx, target, *(number,) * 7)
    name = f" {dtype} {n_cols} {x.stride()} inner {inner} {_options(op)}{' in place' * inplace} {form}"
    for launch in spatial.recipe_launches(recipe, given, (op.ignore_index, *op.numbers)):
        yield launch.kernel.fn.__name__ + name, launch, chosen


Family = Callable[[Random, Device], Iterator[Named]]
FAMILIES: tuple[Family, ...] = (
    softmax_rows, loss_rows, statistics, masked_rows, softmax_planes, softmax_planes, loss_planes, loss_planes,
)  # fmt: skip


def random_launches(target: str, seed: int, cases: int, first: int = 0) -> Iterator[Named]:
    """The launches of cases `first` to `cases` - 1 of a seed, each kernel once."""
    seen = set()
    for i in range(first, cases):
        for name, launch, chosen in FAMILIES[i % len(FAMILIES)](Random(f"{seed} {i}"), DEVICES[target]):
            called = as_called(launch)
            args = called.args
            kinds = tuple((a.dtype, a.storage_offset() == 0) if isinstance(a, torch.Tensor) else a == 1 for a in args)
            key = (called.kernel, kinds, tuple(sorted(called.meta.items())))
            if key not in seen:
                seen.add(key)
                yield f"case {i}: {name}", called, chosen
