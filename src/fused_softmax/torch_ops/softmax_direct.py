"""softmax and log_softmax by prepared calls: the shortest way from the public function to a launch.

A call like a recent one is found by its width and one check of its tensors; another by a full key. Whatever is not for
this way gets None, and takes `softmax_of`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..launch import torch_private
from ..launch.availability import KernelUnavailable
from ..launch.cache import Cache
from ..launch.context import row_invariance
from ..launch.options import TORCH
from ..launch.prepared_calls import backward_call, prepare_into, softmax_call
from ..launch.recent_calls import RecentCalls
from ..launch.softmax import prepare_backward, prepare_softmax
from ..launch.softmax import softmax_backward as backward_by_kernel
from ..launch.torch_private import function_apply, has_storage, is_plain, is_watched, profiling
from .arguments import NAMESPACE
from .route import promotes, recorded, supports_fused_cast

_any_autocast = torch_private.any_autocast
_is_grad_enabled = torch.is_grad_enabled
_increment_versions = torch_private.increment_versions
_invariant = row_invariance.get
_FLOAT32 = torch.float32
_operators = getattr(torch.ops, NAMESPACE)
NAMES = {False: "softmax", True: "log_softmax"}
# what a gradient needs next to the output: dim, the input's dtype, log, batch invariance, the output's columns or shape
Described = tuple[int, torch.dtype, bool, bool, Any]
_RECORDED = {log: functools.partial(recorded, name) for log, name in NAMES.items()}
_recent = RecentCalls()
_recent_into = RecentCalls()
_recent_gradients = RecentCalls()
_calls_into = Cache()  # the prepared calls of out=


def torchs_own(log: bool) -> Callable[..., Tensor]:
    """PyTorch's own function."""
    return torch.log_softmax if log else torch.softmax


def direct_softmax(x: Any, dim: Any, dtype: torch.dtype | None, log: bool) -> Tensor | None:
    """softmax or log_softmax by a prepared call; None where the call takes `softmax_of`'s way."""
    if type(x) is not Tensor or type(dim) is not int:
        return None
    key = None
    if not is_watched():
        try:
            shape = x.shape
            # rows that lie one after another: any number of them
            size = shape[1] if len(shape) == 2 and (dim == -1 or dim == 1) else shape
            key = size, dim, dtype, log, _invariant()
            recent = _recent.get(key, ())
        except (RuntimeError, TypeError):  # it has no shape of its own; or its dtype is none
            return None
        for check, phase, call, any_rows, described in recent:
            if check(x):
                address = x.data_ptr()
                if address & 31 != phase:
                    continue
                n_rows = shape[0] if any_rows else 0
                if any_rows and not n_rows:
                    break
                y = call(x, n_rows, address)
                if described is not None and _is_grad_enabled():
                    return row_softmax(x, (y, described))
                return y
    return _by_full_key(x, dim, dtype, log, key)


def _by_full_key(x: Tensor, dim: int, dtype: torch.dtype | None, log: bool, recent_key: Any) -> Tensor | None:
    if not x.is_cuda or not is_plain(x):
        return None
    given, asked = x.dtype, dtype
    if dtype is None:
        dtype = given if given is _FLOAT32 or not (_any_autocast() and promotes(x)) else _FLOAT32
    elif dtype is not given and not supports_fused_cast(given, dtype):
        return None
    found = softmax_call(x, dim, given, dtype, log, prepare_softmax)
    if found is None:
        return None
    if found is TORCH:
        return torchs_own(log)(x, dim, dtype=asked)
    call, n_rows, address = found
    # batch invariance too: backward runs in a thread that does not know
    described = (dim, given, log, _invariant(), x.shape[1] if n_rows else x.shape) if x.requires_grad else None
    if recent_key is not None:
        _recent.add(recent_key, (x,), n_rows > 0, address & 31, call, n_rows > 0, described)
    y = _RECORDED[log](call, x, n_rows, address) if profiling() else call(x, n_rows, address)
    if described is not None and _is_grad_enabled():
        return row_softmax(x, (y, described))
    return y


def direct_out(x: Any, dim: Any, dtype: Any, log: bool, out: Any) -> Tensor | None:
    """`direct_softmax` into a tensor of x's shape; both are contiguous, and do not overlap in part."""
    if type(x) is not Tensor or type(out) is not Tensor or type(dim) is not int or is_watched():
        return None
    try:
        shape = x.shape
        size = shape[1] if len(shape) == 2 and (dim == -1 or dim == 1) else shape
        key = size, dim, dtype, log, _invariant()
        recent = _recent_into.get(key, ())
    except (RuntimeError, TypeError):  # it has no shape of its own; or its dtype is none
        return None
    for check, phase, out_phase, call, any_rows in recent:
        if check(x, out):
            address, out_address = x.data_ptr(), out.data_ptr()
            if address & 31 != phase or out_address & 31 != out_phase:
                continue
            n_rows = shape[0] if any_rows else 0
            if any_rows and (not n_rows or out.shape != shape):
                break
            if not call(x, out, n_rows, address, out_address):
                return None
            _increment_versions((out,))
            return out
    return _into_by_full_key(x, dim, dtype, log, out, shape, key)


def _into_by_full_key(
    x: Tensor, dim: int, dtype: Any, log: bool, out: Tensor, shape: torch.Size, recent_key: Any
) -> Tensor | None:
    if not x.is_cuda or not is_plain(x) or out.is_neg() or out.is_inference():
        return None
    trained = x.requires_grad or out.requires_grad
    if trained and _is_grad_enabled():
        return None
    try:
        address, out_address, given = x.data_ptr(), out.data_ptr(), x.dtype
    except RuntimeError:  # one of them has no memory of its own
        return None
    if dtype is None:
        dtype = given
    if out.dtype is not dtype or out.shape != shape or not (x.is_contiguous() and out.is_contiguous()):
        return None
    phases = address & 31, out_address & 31
    devices = x.get_device(), out.get_device()
    n_rows, size = 0, None
    if len(shape) == 2 and (dim == -1 or dim == 1) and shape[0] > 1:
        n_rows, size = shape  # rows with one stride: the call does not depend on their number
    of_layout = (size, log) if n_rows else (shape, x.stride(), out.stride(), dim, log)
    key = of_layout, given, dtype, phases, devices, _invariant()
    call = _calls_into.get(key)
    if call is None:
        taken = supports_fused_cast(given, dtype)
        call = _calls_into.remember(key, taken and prepare_into(x, out, dim, dtype, log, prepare_softmax))
    if call is False or not call(x, out, n_rows, address, out_address):
        return None
    if not trained:
        _recent_into.add(recent_key, (x, out), n_rows > 0, *phases, call, n_rows > 0)
    _increment_versions((out,))
    return out


def backward_or_torch(
    dy: Tensor, y: Tensor, dim: int, in_dtype: torch.dtype, log: bool, invariant: bool | None = None
) -> Tensor:
    """The gradient by our kernels, or PyTorch's own where one does not compile."""
    try:
        return backward_by_kernel(dy, y, dim, in_dtype, log, invariant)
    except KernelUnavailable:
        return torchs_own_backward(dy, y, dim, in_dtype, log).contiguous()


def torchs_own_backward(dy: Tensor, y: Tensor, dim: int, in_dtype: torch.dtype, log: bool) -> Tensor:
    own = torch_private.log_softmax_backward_data if log else torch_private.softmax_backward_data
    return own(dy.to(y.dtype), y, dim, y.dtype).to(in_dtype)


class RowSoftmax(torch.autograd.Function):
    """softmax or log_softmax of a plain tensor that needs a gradient, without the dispatcher.

    The result is made before: what comes in a tuple is no input, and is returned as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: tuple[Tensor, Described]) -> Tensor:
        y, ctx.described = made
        ctx.save_for_backward(y)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None]:
        if dy is None:
            return None, None
        (y,) = ctx.saved_tensors
        described = ctx.described
        if not _is_grad_enabled() and not is_watched():
            for check, y_phase, dy_phase, call, any_rows in _recent_gradients.get(described, ()):
                if check(y, dy):
                    y_address, dy_address, n_rows = y.data_ptr(), dy.data_ptr(), 0
                    if any_rows:
                        shape = y.shape
                        n_rows = shape[0]
                        if not n_rows or dy.shape != shape:  # a hook of saved tensors gave back another y
                            break
                    if y_address & 31 == y_phase and dy_address & 31 == dy_phase:
                        return call(n_rows, y_address, dy_address), None
        return _of_plain_tensors(dy, y, described), None


def _of_plain_tensors(dy: Tensor, y: Tensor, described: Described) -> Tensor:
    dim, dtype, log, invariant, _ = described
    plain = not _is_grad_enabled() and is_plain(dy) and type(y) is Tensor
    found = backward_call(dy, y, dim, dtype, log, invariant, prepare_backward) if plain else None
    if found is not None:
        call, n_rows, y_address, dy_address = found
        if not profiling():
            phases = y_address & 31, dy_address & 31
            _recent_gradients.add(described, (y, dy), n_rows > 0, *phases, call, n_rows > 0)
        return call(n_rows, y_address, dy_address)
    if plain and has_storage(dy):
        return backward_or_torch(dy, y, dim, dtype, log, invariant)
    return getattr(_operators, f"{NAMES[log]}_backward")(dy, y, dim, dtype)


row_softmax = function_apply(RowSoftmax)
