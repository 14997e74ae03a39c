"""The kernels of cross_entropy of rows, and what each of them is told: its flags and numbers."""

from __future__ import annotations

import functools
from typing import Any

from ..planning.types import Device, Plan
from .kernel_loading import kernel_loader
from .options import CrossEntropy, Flags, LossKind


@kernel_loader
def forward() -> Any:
    from ..kernels.cross_entropy import cross_entropy_forward

    return cross_entropy_forward


@kernel_loader
def resident() -> Any:
    from ..kernels.cross_entropy_resident import cross_entropy_resident

    return cross_entropy_resident


@kernel_loader
def _gathered() -> Any:
    from ..kernels.cross_entropy_gathered import cross_entropy_gathered

    return cross_entropy_gathered


@kernel_loader
def _forward_gathered() -> Any:
    from ..kernels.cross_entropy_gathered import cross_entropy_forward_gathered

    return cross_entropy_forward_gathered


def of_loss(plan: Plan) -> Any:
    """The kernel of a loss without a gradient."""
    return _forward_gathered() if plan.gathered else forward()


def of_both(plan: Plan) -> Any:
    """The kernel of a loss with its gradient in one pass."""
    return _gathered() if plan.gathered else resident()


@kernel_loader
def count_kernel() -> Any:
    from ..kernels.cross_entropy import count_targets

    return count_targets


@kernel_loader
def reduce_kernel() -> Any:
    from ..kernels.cross_entropy import reduce_losses

    return reduce_losses


@kernel_loader
def add_kernel() -> Any:
    from ..kernels.spatial_targets import add_partials

    return add_partials


# what `cross_entropy_gathered` writes of the losses: each row's, or each program's sum, or that over the count
EACH_ROW, SUMS, SUMS_OVER_COUNT = range(3)


def with_gradient_flags(
    kind: LossKind, mean: bool = True, inplace: bool = False, keeps_upstream: bool = False, waits: bool = False,
    losses: int = EACH_ROW,
) -> Flags:  # fmt: skip
    """The flags of the kernel that writes the gradient in the pass that reads the logits."""
    of_call = (("MEAN", mean), ("INPLACE", inplace), ("KEEPS_UPSTREAM", keeps_upstream), ("WAITS", waits))
    return (*of_call, ("SUM", losses), *kind.flags)


def with_gradient_numbers(op: CrossEntropy) -> tuple[int | float, ...]:
    """That kernel's numbers, for an upstream gradient of 1."""
    return (op.ignore_index, *op.numbers, 1.0)


# --- sums over rows: the losses added up, and how many targets count --------------------------------------------------

# more rows than this are shared by a cluster, and more than the second by independent programs of so many rows
ONE_CTA_ROWS = 2048
ONE_PROGRAM_ROWS = 65536
ROWS_OF_PROGRAM = 8192
# of partial sums, which one program adds up: in blocks, and so many of them at a time
ADDED_BLOCK, ADDED_EACH, ADDED_WARPS = 4096, 8, 32


# which of the ways adds up rows
BY_ONE, BY_CLUSTER, SHARED = range(3)


def size_class(n_rows: int) -> int:
    """The way that adds up so many rows."""
    return BY_ONE if n_rows <= ONE_CTA_ROWS else BY_CLUSTER if n_rows <= ONE_PROGRAM_ROWS else SHARED


def add_warps(device: Device) -> int:
    """Warps of `add_partials`, of so many threads on each device."""
    return ADDED_WARPS * 32 // device.warp_size


def partials_flags(device: Device) -> Flags:
    """The flags of `add_partials`: the kernel in front of it may still run, and the next one may start."""
    pdl = device.supports_pdl
    return (("WAITS", pdl), ("TRIGGER", pdl), ("EACH", ADDED_EACH), ("BLOCK", ADDED_BLOCK))


@functools.lru_cache
def sum_flags(losses: bool, mean: bool, weighted: bool, many: bool, device: Device) -> Flags:
    """The flags of a sum over rows, which the CTAs of a cluster share where there are many rows, and clusters.

    One CTA adds up weights: where they are looked up, Triton 3.6 does not keep a segment in a warp, which a reduction
    over a cluster needs.
    """
    ctas = 16 if many and device.max_cluster >= 16 and not weighted else 1
    warps, vectors = (8, 32) if ctas > 1 else (1, 256)
    shared = (("CTAS", ctas), ("WARPS_PER_ROW", warps), ("VECTORS", vectors), ("EACH", 8), ("PTX", device.ptx))
    flags: Flags = (("WEIGHTED", weighted), *shared)
    pdl = device.supports_pdl
    return (("MEAN", mean), ("WAITS", pdl), *flags) if losses else (("TRIGGER", pdl), *flags)
