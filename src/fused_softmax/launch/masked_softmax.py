"""masked_softmax over whole tensors, forward and backward: folds scores and mask, and launches.

No autograd and no checks: torch_ops calls these with tensors that the kernels take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..planning.masked_softmax import plan_masked
from ..planning.types import Plan
from .cache import Cache
from .compile import kernel_loader
from .context import is_batch_invariant
from .launcher import RowOp, always, device_of, launch_rows, planned, prepare_rows
from .layout import empty, merge_dims, rows_of, rows_or_copy
from .options import Flags
from .torch_private import current_device, empty_strided_cuda


@kernel_loader
def _forward() -> Any:
    from ..kernels.masked_softmax import masked_softmax_forward

    return masked_softmax_forward


@kernel_loader
def _backward() -> Any:
    from ..kernels.masked_softmax_backward import masked_softmax_backward

    return masked_softmax_backward


# the allocation behind torch.empty; None in a build without CUDA, where no tensor is_cuda
_empty = empty_strided_cuda
# the kernels count rows in 32 bits
MAX_ROWS = 2**31
# of scores that follow each other in memory before the same of the next batch; H200: 64 KB are 2% slower
GROUP_BYTES = 2 << 20


def _op(kernel: Any, masked: bool, backward: bool) -> RowOp:
    planner = functools.lru_cache(functools.partial(plan_masked, masked=masked))
    return RowOp(planner, always(kernel), backward=backward, aligned=True)


# by whether there is a mask, which takes as many registers as a second row
FORWARD = {masked: _op(_forward, masked, False) for masked in (False, True)}
BACKWARD = {masked: _op(_backward, masked, True) for masked in (False, True)}


def _rows(t: Tensor) -> Tensor:
    return rows_of(t, t.shape[-1])


def masked_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    """softmax(scale*x) over the columns that the mask (bool or floating, any strides) and causality keep; contiguous.

    KernelUnavailable, with nothing written, where the kernel does not compile.
    """
    call = _call(_prepare_forward, (x,), mask, x, causal, zero) if x.is_cuda and _empty is not None else None
    if call is not None:
        return call((x,), mask, scale)
    x_rows = _rows(x)
    n_rows, n_cols = x_rows.shape
    y_rows = empty((n_rows, n_cols), (n_cols, 1), x.dtype, x)
    y = y_rows if x.dim() == 2 else y_rows.view(x.shape)
    order = row_schedule(n_rows, n_cols * x.element_size(), _queries(x), shared=mask is not None)
    op, invariant = FORWARD[mask is not None], is_batch_invariant()
    read, of_mask, numbers = describe_mask(mask, x, lambda: op.plan((x_rows, y_rows), device_of(x), invariant), y_rows)
    flags: Flags = (*of_mask, ("CAUSAL", causal), ("ZERO", zero))
    launch_rows(op, (x_rows, y_rows), (read,), (*order, *numbers, scale), flags, invariant=invariant)
    return y


def _queries(x: Tensor) -> int:
    return x.shape[-2] if x.dim() > 1 else 1


def planned_forward(x: Tensor, mask: Tensor | None) -> Plan | str:
    """The plan of scores x under such a mask, or why its kernel did not compile in this process."""
    x_rows = rows_or_copy(x)
    y_rows = torch.empty(x_rows.shape, dtype=x.dtype, device="meta")
    op = FORWARD[mask is not None]
    plan = op.plan((x_rows, y_rows), device_of(x), is_batch_invariant())
    read, of_mask, _ = describe_mask(mask, x, plan, y_rows)
    flags = (*of_mask, ("CAUSAL", False), ("ZERO", False))
    return planned(op, (x_rows, y_rows), (read.dtype,), flags, x)


def planned_backward(x: Tensor, mask: Tensor | None) -> Plan | str:
    """The plan of the gradient of scores x under such a mask, as `planned_forward`.

    A two_pass plan stands for rows that softmax's own gradient takes.
    """
    rows = (torch.empty((x.numel() // x.shape[-1], x.shape[-1]), dtype=x.dtype, device="meta"),) * 3
    boolean = mask is not None and mask.dtype is torch.bool
    op = BACKWARD[boolean]
    plan = op.plan(rows, device_of(x), is_batch_invariant())
    if plan.regime == "two_pass":
        return plan
    read, of_mask, _ = describe_mask(mask if boolean else None, x, plan, rows[0])
    return planned(op, rows, (read.dtype,), (*of_mask, ("CAUSAL", False)), x)


def describe_mask(
    mask: Tensor | None, x: Tensor, plan: Plan | Callable[[], Plan], unused: Tensor
) -> tuple[Tensor, Flags, tuple[int, ...]]:
    """(what a kernel of this plan reads, its flags, sizes and strides) of the mask of scores x; `unused` for none."""
    if mask is None:
        return unused, (("MASK", 0), ("MASK_COLS", 0), ("MASK_VEC", 1)), (1, 1, 0, 0, 0, 0, 0)
    kind = 1 if mask.dtype is torch.bool else 2
    read = _readable(mask.detach().view(torch.uint8) if kind == 1 else mask.detach(), plan)
    expanded = read.expand(x.shape if x.dim() > 1 else (1, *x.shape))
    batch = merge_dims([(n, s) for n, s in zip(expanded.shape[:-2], expanded.stride()[:-2], strict=True) if n != 1])
    if len(batch) > 3:  # no three strides describe it
        read = expanded = expanded.contiguous()
        batch = merge_dims(list(zip(expanded.shape[:-2], expanded.stride()[:-2], strict=True)))
    outer, middle, inner = ([(1, 0)] * 3 + batch)[-3:]
    m_query, m_col = expanded.stride()[-2:]
    m_col = 0 if expanded.shape[-1] == 1 else m_col
    cols = m_col if m_col in (0, 1) else 2
    strides = (outer[1], middle[1], inner[1], m_query)
    vec = _mask_vector(read, x) if cols == 1 else 1
    flags: Flags = (("MASK", kind), ("MASK_COLS", cols), ("MASK_VEC", vec))
    return read, flags, (middle[0], inner[0], *(s // vec for s in strides), m_col)


def _readable(mask: Tensor, plan: Plan | Callable[[], Plan]) -> Tensor:
    """The mask as a kernel of this plan may read it: on a cluster its columns are neighbors, or one value.

    Other strides are copied first. Triton 3.6 gives their tile a layout that spreads a segment over warps, but a
    reduction over a cluster needs each segment in one warp.
    """
    if mask.dim() == 0 or mask.shape[-1] == 1 or mask.stride(-1) in (0, 1):
        return mask
    plan = plan if isinstance(plan, Plan) else plan()
    return mask if plan.ctas == 1 else mask.contiguous()


@functools.lru_cache(maxsize=4096)
def _divisor(n: int, most: int) -> int:
    """The largest divisor of n up to `most`, and at least 1: remembered, as every call with a mask asks for it."""
    return next(d for d in range(max(1, min(most, n)), 0, -1) if n % d == 0)


def row_schedule(n_rows: int, row_bytes: int, n_queries: int, shared: bool) -> tuple[int, ...]:
    """The arguments of `scheduled_row`: (n_queries, n_group, multiplier, power, n_batch, multiplier, power).

    The multipliers and powers are for `fast_divmod`. shared: whether rows of the batch share a mask; they then follow
    each other soon enough to find it in L2.
    """
    n_group = _divisor(n_queries, GROUP_BYTES // row_bytes) if shared else n_queries
    n_batch = n_rows // n_queries
    power, batch_power = 31 + (n_group - 1).bit_length(), 31 + (n_batch - 1).bit_length()
    multiplier, batch_multiplier = -(-(1 << power) // n_group), -(-(1 << batch_power) // n_batch)
    return n_queries, n_group, multiplier, power, n_batch, batch_multiplier, batch_power


def _mask_vector(mask: Tensor, x: Tensor) -> int:
    """Elements of a vector access to the mask of scores x: at most 16 bytes, a power of two.

    The mask's address, its width and its strides are multiples of it. The width and the strides of single rows count
    too: the vector is then the same for a batch and for one of its rows, and so are a row's bits.
    """
    before = x.dim() - mask.dim()
    own = [s for d, s in enumerate(mask.stride()[:-1]) if mask.shape[d] > 1 or x.shape[before + d] == 1]
    vec = 16 // mask.element_size()
    while vec > 1 and (mask.data_ptr() % (vec * mask.element_size()) or any(n % vec for n in (mask.shape[-1], *own))):
        vec //= 2
    return vec


def masked_backward(y: Tensor, dy: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor | None:
    """scale*y*(dy - sum(dy*y)), contiguous, in y's dtype; 0 where the boolean mask or causality hides.

    Causal columns that a row does not see are not read, and the mask only for rows whose sum is not finite: in the
    others y is 0 where it hides. None where a row does not fit on chip, which this kernel does not take;
    KernelUnavailable, with nothing written, where it does not compile.
    """
    tensors = (y, dy)
    call = _call(_prepare_backward, tensors, mask, y, causal, False) if _direct(y, dy) else None
    if call is not None:
        return call(tensors, mask, scale)
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    rows = (_rows(y), _rows(dy.to(y.dtype)), _rows(dx))
    op, invariant = BACKWARD[mask is not None], is_batch_invariant()
    plan = op.plan(rows, device_of(y), invariant)
    if plan.regime == "two_pass":
        return None
    read, of_mask, numbers = describe_mask(mask, y, plan, rows[0])
    order = row_schedule(rows[0].shape[0], y.shape[-1] * y.element_size(), _queries(y), shared=False)
    launch_rows(op, rows, (read,), (*order, *numbers, scale), (*of_mask, ("CAUSAL", causal)), invariant=invariant)
    return dx


def _direct(y: Tensor, dy: Tensor) -> bool:
    return y.is_cuda and _empty is not None and dy.dtype is y.dtype and dy.shape == y.shape


# --- prepared calls ---------------------------------------------------------------------------------------------------


_calls = Cache()
# call(tensors, mask, scale) -> a new contiguous tensor
Call = Callable[[tuple[Tensor, ...], "Tensor | None", float], Tensor]


def _call(
    prepare: Callable[..., Any], tensors: tuple[Tensor, ...], mask: Tensor | None, x: Tensor, causal: bool, zero: bool
) -> Call | None:
    """The call that `prepare` makes for such tensors and mask; None where something is copied first.

    Scores of two dimensions have one call for all numbers of rows, those of more have one for each shape.
    """
    sizes: Any = x.shape
    of_mask = None
    if mask is not None:
        of_mask = (mask.shape, mask.stride(), mask.dtype, mask.data_ptr() & 31, mask.get_device())
    if len(sizes) == 2:
        if mask is not None and mask.dim() == 2:
            of_mask = (mask.shape[0] == 1, mask.shape[1], *of_mask[1:])  # type: ignore[index]
        sizes = (sizes[0] == 1, sizes[1])
    layouts = tuple([(t.stride(), t.data_ptr() & 31) for t in tensors])
    key = (prepare, sizes, layouts, of_mask, x.dtype, x.get_device(), causal, zero, is_batch_invariant())
    found = _calls.get(key)
    if found is None:
        found = _calls.remember(key, prepare(tensors, mask, causal, zero))
    return None if found is False or current_device() != x.get_device() else found


def _prepare_forward(tensors: tuple[Tensor, ...], mask: Tensor | None, causal: bool, zero: bool) -> Any:
    flags: Flags = (("CAUSAL", causal), ("ZERO", zero))
    return _prepare(FORWARD[mask is not None], tensors, mask, flags, shared=mask is not None)


def _prepare_backward(tensors: tuple[Tensor, ...], mask: Tensor | None, causal: bool, zero: bool) -> Any:
    return _prepare(BACKWARD[mask is not None], tensors, mask, (("CAUSAL", causal),), shared=False)


def _prepare(op: RowOp, tensors: tuple[Tensor, ...], mask: Tensor | None, flags: Flags, *, shared: bool) -> Any:
    """The call; False where one of the tensors is copied first, or a row of a gradient does not fit on chip."""
    x = tensors[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = tuple(_rows(t) for t in (*tensors, out))
    copied = any(t.data_ptr() != r.data_ptr() for t, r in zip(tensors, rows, strict=False))
    invariant = is_batch_invariant()
    plan = op.plan(rows, device_of(x), invariant)
    if copied or out.data_ptr() % 32 or (op.backward and plan.regime == "two_pass"):
        return False
    read, of_mask, numbers = describe_mask(mask, x, plan, rows[-1])
    if mask is not None and read.data_ptr() != mask.data_ptr():
        return False
    launch = prepare_rows(op, rows, (read,), (*of_mask, *flags), invariant).at
    shape, dtype, n_cols = tuple(x.shape), x.dtype, x.shape[-1]
    strides, row_bytes = out.stride(), n_cols * x.element_size()
    n_queries, known_rows, of_two = _queries(x), rows[0].shape[0], x.dim() == 2
    order = row_schedule(known_rows, row_bytes, n_queries, shared)

    def call(tensors: tuple[Tensor, ...], mask: Tensor | None, scale: float) -> Tensor:
        if of_two:
            n_rows = tensors[0].shape[0]
            y = _empty((n_rows, n_cols), strides, dtype)
            scheduled = order if n_rows == known_rows else row_schedule(n_rows, row_bytes, n_rows, shared)
        else:
            n_rows, scheduled = known_rows, order
            y = _empty(shape, strides, dtype)
        address = y.data_ptr()
        vectors = (address if mask is None else mask.data_ptr(),)
        launch(n_rows, (*[t.data_ptr() for t in tensors], address), vectors, (*scheduled, *numbers, scale))
        return y

    return call
