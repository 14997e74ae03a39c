"""softmax and log_softmax of rows whose columns are spread over ranks: launches that follow a row's known numbers.

No mathematics, no collective, and nothing here waits for the device. KernelUnavailable where a kernel does not compile.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..planning.losses import plan_capped_statistics, plan_elementwise
from .kernel_loading import kernel_loader
from .launcher import RowOp, Vector, always, launch_rows


@kernel_loader
def _sums() -> Any:
    from ..kernels.softmax_shards import shard_gradient_sums

    return shard_gradient_sums


@kernel_loader
def _gradient() -> Any:
    from ..kernels.softmax_shards import shard_gradient

    return shard_gradient


@kernel_loader
def _log_softmax() -> Any:
    from ..kernels.softmax_shards import log_softmax_shard

    return log_softmax_shard


# a program for each row: the order of a sum does not depend on the number of rows
SUMS = RowOp(plan_capped_statistics, always(_sums))
GRADIENT = RowOp(plan_elementwise, always(_gradient))
LOG_SOFTMAX = RowOp(plan_elementwise, always(_log_softmax))


def gradient_sums(y: Tensor, dy: Tensor, sums: Vector, log: bool, invariant: bool) -> None:
    """Into sums, (n_rows,) float32, each row's sum of y*dy, or of dy where `log`."""
    launch_rows(SUMS, (dy if log else y, dy), (sums,), (), (("LOG", log),), invariant=invariant)


def gradient(y: Tensor, dy: Tensor, dx: Tensor, sums: Vector, log: bool, invariant: bool) -> None:
    """Into dx the gradient for sums of all columns, (n_rows,) float32."""
    launch_rows(GRADIENT, (y, dy, dx), (sums,), (), (("LOG", log),), invariant=invariant)


def log_softmax(x: Tensor, y: Tensor, moments: Vector, invariant: bool) -> None:
    """Into y, for the (row_max, row_sum) of all columns, (n_rows, 2) float32."""
    launch_rows(LOG_SOFTMAX, (x, y), (moments,), (), (), invariant=invariant)
