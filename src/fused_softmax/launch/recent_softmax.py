"""softmax and log_softmax of tensors like recent ones: one check of torch's in place of a full key.

Each function takes the full key where there is no such call, and caches the call that it finds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cache import Cache
from .context import row_invariance
from .options import TORCH
from .prepared_calls import Prepare, backward_call, prepare_into, softmax_call
from .recent_calls import RecentCalls
from .torch_private import in_forward_ad, is_watched

_forwards, _into, _gradients = RecentCalls(), RecentCalls(), RecentCalls()
_calls_into = Cache()  # the prepared calls of out=
_invariant = row_invariance.get
_is_grad_enabled = torch.is_grad_enabled
# dim, the input's dtype, log, the forward's batch invariance, as autograd calls from another thread, and what `size_of`
# says of the output
Described = tuple[int, torch.dtype, bool, bool, Any]
# of torch_ops.softmax: makes a result differentiable, trained(x, (y, described))
Trained = Callable[[Tensor, tuple[Tensor, Described]], Tensor]


def size_of(x: Tensor, dim: int) -> Any:
    """The part of x's shape that a key needs: rows that lie one after another may have any number."""
    shape = x.shape
    return shape[1] if len(shape) == 2 and (dim == -1 or dim == 1) else shape


def recent_softmax(
    x: Tensor, dim: int, asked: torch.dtype | None, log: bool, trained: Trained | None = None
) -> Tensor | None:
    """softmax or log_softmax of x over dim, where it is like that of a recent call; else None.

    x: of class Tensor itself. asked: the dtype that the caller gave. trained: None below autograd.
    """
    if is_watched():
        return None
    try:
        shape = x.shape
        size = shape[1] if len(shape) == 2 and (dim == -1 or dim == 1) else shape  # `size_of`
        recent = _forwards.get((size, dim, asked, log, _invariant()), ())
    except (RuntimeError, TypeError):  # it has no shape of its own; or what was asked for is no dtype
        return None
    for check, phase, call, any_rows, described in recent:
        if check(x):
            address = x.data_ptr()
            if address & 31 == phase:
                if not any_rows:
                    y = call(x, 0, address)
                elif n_rows := shape[0]:
                    y = call(x, n_rows, address)
                else:
                    return None
                if described is None or trained is None or not _is_grad_enabled():
                    return y
                return trained(x, (y, described))
    return None


def softmax_result(
    x: Tensor, dim: int, asked: torch.dtype | None, dtype: torch.dtype, log: bool, prepare: Prepare,
    trained: Trained | None = None, around: Callable[..., Tensor] | None = None,
) -> Any:  # fmt: skip
    """`prepared_calls.softmax_call`, called; TORCH, or None, where the call is another's.

    dtype: what `asked` comes to. around: what calls the prepared call, `around(call, *arguments)`.
    """
    found = softmax_call(x, dim, x.dtype, dtype, log, prepare)
    if found is None or found is TORCH:
        return found
    call, n_rows, address = found
    size = size_of(x, dim)
    described = (dim, x.dtype, log, _invariant(), size) if x.requires_grad else None
    if around is not None:
        y = around(call, x, n_rows, address)
    else:
        if not is_watched():
            key = size, dim, asked, log, _invariant()
            _forwards.add(key, (x,), n_rows > 0, address & 31, call, n_rows > 0, described)
        y = call(x, n_rows, address)
    if described is None or trained is None or not _is_grad_enabled():
        return y
    return trained(x, (y, described))


def softmax_into(x: Tensor, dim: int, asked: torch.dtype | None, log: bool, out: Tensor) -> bool | None:
    """Whether it wrote softmax or log_softmax of x to out, which are like those of a recent call; else None."""
    if is_watched():
        return None
    try:
        shape = x.shape
        size = shape[1] if len(shape) == 2 and (dim == -1 or dim == 1) else shape
        recent = _into.get((size, dim, asked, log, _invariant()), ())
    except (RuntimeError, TypeError):  # it has no shape of its own; or what was asked for is no dtype
        return None
    for check, phase, out_phase, call, any_rows in recent:
        if check(x, out):
            address, out_address = x.data_ptr(), out.data_ptr()
            if address & 31 == phase and out_address & 31 == out_phase:
                if not any_rows:
                    return call(x, out, 0, address, out_address)
                if (n_rows := shape[0]) and out.shape == shape:
                    return call(x, out, n_rows, address, out_address)
    return None


def prepared_into(
    x: Tensor, dim: int, asked: torch.dtype | None, log: bool, out: Tensor, prepare: Prepare, fuses: Callable[..., bool]
) -> bool:
    """Whether a prepared call wrote to out; both are plain tensors on a GPU.

    fuses: whether the kernels read one dtype and write another without a cast before them.
    """
    try:
        address, out_address, given, shape = x.data_ptr(), out.data_ptr(), x.dtype, x.shape
    except RuntimeError:  # one of them has no memory of its own
        return False
    dtype = given if asked is None else asked
    if out.dtype is not dtype or out.shape != shape or not (x.is_contiguous() and out.is_contiguous()):
        return False
    phases, devices, invariant = (address & 31, out_address & 31), (x.get_device(), out.get_device()), _invariant()
    n_rows, of_layout, size = 0, (shape, x.stride(), out.stride()), shape  # type: Any, Any, Any
    if len(shape) == 2 and (dim == -1 or dim == 1):
        size = shape[1]
        if shape[0] > 1:  # rows with one stride: the call does not depend on their number
            n_rows, of_layout = shape
    key = of_layout, dim, log, given, dtype, phases, devices, invariant
    call = _calls_into.get(key)
    if call is None:
        taken = fuses(given, dtype)
        call = _calls_into.store(key, taken and prepare_into(x, out, dim, dtype, log, prepare))
    if call is False:
        return False
    if not (x.requires_grad or out.requires_grad):
        _into.add((size, dim, asked, log, invariant), (x, out), n_rows > 0, *phases, call, n_rows > 0)
    return call(x, out, n_rows, address, out_address)


def recent_gradient(dy: Tensor, y: Tensor, described: Described) -> Tensor | None:
    """The gradient from the output y, which is like that of a recent call; else None."""
    if in_forward_ad():
        return None
    # in a thread of its own each object that the forward used, too, comes from another core's cache: few of them
    for check, phase, dy_phase, call, n_cols in _gradients.get(described, ()):
        if check(y, dy):
            address, dy_address = y.data_ptr(), dy.data_ptr()
            if address & 31 == phase and dy_address & 31 == dy_phase:
                if not n_cols:
                    return call(0, address, dy_address)
                # a hook of saved tensors may have given back another y
                size = y.numel()
                if size and size == dy.numel():
                    return call(size // n_cols, address, dy_address)
    return None


def softmax_backward(dy: Tensor, y: Tensor, described: Described, prepare: Prepare) -> Tensor | None:
    """`prepared_calls.backward_call`, called; None where the gradient is made in another way."""
    dim, dtype, log, invariant, _ = described
    found = backward_call(dy, y, dim, dtype, log, invariant, prepare)
    if found is None:
        return None
    call, n_rows, address, dy_address = found
    if not in_forward_ad():
        n_cols = y.shape[1] if n_rows else 0
        _gradients.add(described, (y, dy), n_rows > 0, address & 31, dy_address & 31, call, n_cols)
    return call(n_rows, address, dy_address)
