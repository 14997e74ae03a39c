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
from ..planning.types import VECTOR_BYTES, Plan
from .cache import Cache
from .compile import kernel_loader
from .context import is_batch_invariant
from .launcher import RowOp, always, device_of, launch_rows, planned, prepare_rows
from .layout import empty, merge_dims, rows_of, rows_or_copy, starts
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


Numbers = tuple[int, ...]
# the allocation behind torch.empty; None in a build without CUDA, where no tensor is_cuda
_empty = empty_strided_cuda
# the kernels count rows in 32 bits
MAX_ROWS = 2**31
# bytes of 8 elements of float32, the widest vector of a mask
MASK_ALIGNMENT = 32
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
    order = _order(mask, x)
    op, invariant = FORWARD[mask is not None], is_batch_invariant()
    plan = op.plan((x_rows, y_rows), device_of(x), invariant)
    read, of_mask, numbers = describe_mask(mask, x, plan, y_rows, shifts=True)
    (read,) = starts((read,), numbers[-1])
    flags: Flags = (*of_mask, ("CAUSAL", causal), ("ZERO", zero))
    launch_rows(op, (x_rows, y_rows), (read,), (*order, *numbers, scale), flags, invariant=invariant)
    return y


def _queries(x: Tensor) -> int:
    return x.shape[-2] if x.dim() > 1 else 1


def _order(mask: Tensor | None, x: Tensor) -> Numbers:
    n_queries, row_bytes = _queries(x), x.shape[-1] * x.element_size()
    n_shared, inner = shared_batches(mask, x)
    return row_schedule(n_queries, x.numel() // x.shape[-1] // n_queries, row_bytes, n_shared, inner=inner)


def planned_forward(x: Tensor, mask: Tensor | None) -> Plan | str:
    """The plan of scores x under such a mask, or why its kernel did not compile in this process."""
    x_rows = rows_or_copy(x)
    y_rows = torch.empty(x_rows.shape, dtype=x.dtype, device="meta")
    op = FORWARD[mask is not None]
    plan = op.plan((x_rows, y_rows), device_of(x), is_batch_invariant())
    read, of_mask, _ = describe_mask(mask, x, plan, y_rows, shifts=True)
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
    mask: Tensor | None, x: Tensor, plan: Plan, unused: Tensor, *, shifts: bool = False
) -> tuple[Tensor, Flags, Numbers]:
    """(what a kernel of this plan reads, its flags, sizes and strides) of the mask of scores x; `unused` for none.

    shifts: whether the kernel takes a mask whose vectors are not its rows'. The last number is then the elements from
    the aligned address, which the kernel takes, to the mask.
    """
    if mask is None:
        return unused, (("MASK", 0), ("MASK_COLS", 0), ("MASK_VEC", 1)), (1, 1, 0, 0, 0, 0, 0, *([0] * shifts))
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
    phase = 0
    if shifts and cols == 1 and plan.ctas == 1 and plan.vec * x.element_size() == VECTOR_BYTES:
        # of the row's vector: its elements and its bytes in the mask, of which a thread reads at most 16 at once
        in_vector = plan.vec * read.element_size()
        first = read.data_ptr() % MASK_ALIGNMENT // read.element_size()
        in_phase = not plan.unaligned and vec * read.element_size() >= min(in_vector, VECTOR_BYTES)
        if not in_phase and read.untyped_storage().data_ptr() % MASK_ALIGNMENT == 0:
            cols, vec, phase = 3, 1, first
    flags: Flags = (("MASK", kind), ("MASK_COLS", cols), ("MASK_VEC", vec))
    numbers = (middle[0], inner[0], *(s // vec for s in strides), m_col)
    return read, flags, (*numbers, phase) if shifts else numbers


def _readable(mask: Tensor, plan: Plan) -> Tensor:
    """The mask as a kernel of this plan may read it: on a cluster its columns are neighbors, or one value.

    Other strides are copied first. Triton 3.6 gives their tile a layout that spreads a segment over warps, but a
    reduction over a cluster needs each segment in one warp.
    """
    if mask.dim() == 0 or mask.shape[-1] == 1 or mask.stride(-1) in (0, 1):
        return mask
    return mask if plan.ctas == 1 else mask.contiguous()


def row_order(n_queries: int) -> tuple[int, int, int]:
    """(n_queries, multiplier, power): the arguments of `row_in_order`."""
    return n_queries, *_divides(n_queries)


def row_schedule(n_queries: int, n_batch: int, row_bytes: int, n_shared: int = 1, *, inner: bool = True) -> Numbers:
    """The arguments of `row_of_shared_mask`. Without a shared mask it is the order of the rows.

    n_shared: batches that share a mask. inner: whether they are neighbors, or n_batch/n_shared batches apart.
    """
    n_group = n_queries if n_shared == 1 else max(1, min(GROUP_BYTES // row_bytes, n_queries))
    n_last = (n_queries - 1) % n_group + 1
    n_span, n_block = n_queries * n_shared, n_group * n_shared
    strides = (n_shared, 1) if inner else (1, n_batch // n_shared)
    return (
        n_queries, n_span, *_divides(n_span), strides[0], n_block, *_divides(n_block), strides[1],
        n_group, *_divides(n_group), n_last, *_divides(n_last),
    )  # fmt: skip


def _divides(n: int) -> tuple[int, int]:
    """The multiplier and power of `fast_divmod` for n."""
    power = 31 + (n - 1).bit_length()
    return -(-(1 << power) // n), power


def shared_batches(mask: Tensor | None, x: Tensor) -> tuple[int, bool]:
    """How many batches of scores x share a mask that depends on the query, and whether they are neighbors."""
    if mask is None or x.dim() < 3:
        return 1, True
    expanded = mask.detach().expand(x.shape)
    shared = [(n, s == 0) for n, s in zip(x.shape[:-2], expanded.stride()[:-2], strict=True) if n != 1]
    if expanded.stride(-2) == 0:  # one row for all queries: every order finds it in L2
        return 1, True
    of_ends = [1, 1]
    for end, dims in enumerate((shared, shared[::-1])):
        for n, is_shared in dims:
            if not is_shared:
                break
            of_ends[end] *= n
    outer, inner = of_ends
    return (inner, True) if inner >= outer else (outer, False)


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
    order = row_order(_queries(y))
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
    return _prepare(FORWARD[mask is not None], tensors, mask, flags)


def _prepare_backward(tensors: tuple[Tensor, ...], mask: Tensor | None, causal: bool, zero: bool) -> Any:
    return _prepare(BACKWARD[mask is not None], tensors, mask, (("CAUSAL", causal),))


def _prepare(op: RowOp, tensors: tuple[Tensor, ...], mask: Tensor | None, flags: Flags) -> Any:
    """The call; False where one of the tensors is copied first, or a row of a gradient does not fit on chip."""
    x = tensors[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = tuple(_rows(t) for t in (*tensors, out))
    copied = any(t.data_ptr() != r.data_ptr() for t, r in zip(tensors, rows, strict=False))
    invariant = is_batch_invariant()
    plan = op.plan(rows, device_of(x), invariant)
    if copied or out.data_ptr() % 32 or (op.backward and plan.regime == "two_pass"):
        return False
    read, of_mask, numbers = describe_mask(mask, x, plan, rows[-1], shifts=not op.backward)
    if mask is not None and read.data_ptr() != mask.data_ptr():
        return False
    to_mask = 0 if op.backward else numbers[-1] * read.element_size()
    if to_mask:
        (read,) = starts((read,), numbers[-1])
    launch = prepare_rows(op, rows, (read,), (*of_mask, *flags), invariant).at
    shape, dtype, n_cols = tuple(x.shape), x.dtype, x.shape[-1]
    strides = out.stride()
    known_rows, of_two, backward = rows[0].shape[0], x.dim() == 2, op.backward
    order = row_order(_queries(x)) if backward else _order(mask, x)

    def call(tensors: tuple[Tensor, ...], mask: Tensor | None, scale: float) -> Tensor:
        if of_two:
            n_rows = tensors[0].shape[0]
            y = _empty((n_rows, n_cols), strides, dtype)
            scheduled = order
            if n_rows != known_rows:
                scheduled = row_order(n_rows) if backward else row_schedule(n_rows, 1, 1)
        else:
            n_rows, scheduled = known_rows, order
            y = _empty(shape, strides, dtype)
        address = y.data_ptr()
        vectors = (address if mask is None else mask.data_ptr() - to_mask,)
        launch(n_rows, (*[t.data_ptr() for t in tensors], address), vectors, (*scheduled, *numbers, scale))
        return y

    return call
