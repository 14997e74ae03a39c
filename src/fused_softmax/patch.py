"""Routes a whole program's softmax through our kernels: they replace PyTorch's own on the GPU until the patch ends.

    with fused_softmax.patch():
        loss = model(tokens).loss          # torch.softmax, F.softmax, F.cross_entropy, attention: all of them
        loss.backward()

It replaces the kernels below autograd (aten::_softmax and its relatives), so autograd, autocast, vmap and modes work as
before. Calls that our kernels do not take, such as float64, go to the kernel that was there before. The replacement
belongs to the process, not to the thread, because autograd runs backward in its own threads. It does not reach programs
that never call these kernels: torch.compile's decompositions, flash attention, other fused kernels.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .launch import softmax as rows
from .launch import torch_private
from .launch.availability import KernelUnavailable, warn_once
from .launch.context import is_batch_invariant
from .launch.device import interpreting, triton_error
from .launch.options import TORCH
from .launch.prepared_calls import softmax_backward, softmax_result
from .torch_ops.library import untraced
from .torch_ops.outputs import is_its_own, may_write_while_reading
from .torch_ops.route import supports_fused_cast, unsupported_reason

OPS = ("softmax", "log_softmax", "safe_softmax")
Kernel = Callable[..., Tensor]
F = TypeVar("F", bound=Callable[..., Any])

_lock = threading.Lock()
_enabled = dict.fromkeys(OPS, 0)  # how many patches hold each op
_installed: dict[str, torch.library.Library] = {}
# a thread may have been on its way into one of our kernels, waiting for the interpreter's lock, when another took it
# out: it runs all the same, so the last few thousand outlive their registration (without this, threads crash)
_kept: deque[object] = deque(maxlen=4096)
# of fused_softmax.stats, while it counts: called with op, tensor, dim, dtype and backward
watch: Callable[..., None] | None = None


class patch:
    """Routes torch's softmax family on the GPU through our kernels, in a `with` block, as a decorator, or by hand.

    It nests, and several threads may use it. When the last patch that holds an op ends, the kernel that was there
    before is back. On a machine without kernels (no GPU, no Triton) it changes nothing. With TRITON_INTERPRET=1 it
    replaces the CPU's kernels. Where the installed torch and Triton cannot run the kernels, it changes nothing and
    warns once.

    It decorates functions, coroutine functions and generator functions, also asynchronous ones. A call holds the patch
    while the body runs: from the first step until it returns, raises or is closed, also between two steps. A copied or
    unpickled patch starts disabled.

    Args:
        ops: Any of "softmax", "log_softmax" (each with its backward and its out= variants) and "safe_softmax" (called
            by the math path of scaled_dot_product_attention). The default is all of them.

    Raises:
        ValueError: An op is unknown.
        RuntimeError: disable() was called without its enable().

    >>> with patch(ops=("softmax",)):
    ...     y = torch.softmax(torch.zeros(2, 4), -1)
    """

    def __init__(self, ops: Iterable[str] | None = None):
        self.ops = OPS if ops is None else tuple(dict.fromkeys((ops,) if isinstance(ops, str) else ops))
        unknown = [op for op in self.ops if op not in OPS]
        if unknown:
            raise ValueError(f"patch() knows {', '.join(OPS)}, not {', '.join(map(repr, unknown))}")
        self._depth = 0

    def enable(self) -> None:
        """Install our kernels, until disable() is called as often."""
        with _lock:
            taken = []
            try:
                for op in self.ops:
                    if _enabled[op] == 0:
                        _install(op)
                    _enabled[op] += 1
                    taken.append(op)
            except BaseException:
                _release(taken)
                raise
            self._depth += 1

    def disable(self) -> None:
        """Undo one enable()."""
        with _lock:
            if self._depth == 0:
                raise RuntimeError("patch.disable() without its enable()")
            self._depth -= 1
            _release(self.ops)

    def __enter__(self) -> patch:
        self.enable()
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()

    def __call__(self, function: F) -> F:
        return _held_while_it_runs(self, function)

    def __reduce__(self) -> tuple[Any, ...]:
        # this object is enabled, and its copy is not
        return type(self), (self.ops,)

    def __repr__(self) -> str:
        return f"patch(ops={self.ops!r})"


def _held_while_it_runs(held: patch, function: F) -> F:
    """function, in whose body `held` is enabled: a call of a coroutine or generator function runs no body yet."""
    patched: Callable[..., Any]
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def patched(*args: Any, **kwargs: Any) -> Any:
            with held:
                steps = function(*args, **kwargs)
                try:
                    step = await steps.__anext__()
                    while True:
                        try:
                            sent = yield step
                        except GeneratorExit:
                            raise
                        except BaseException as thrown:
                            step = await steps.athrow(thrown)
                        else:
                            step = await steps.asend(sent)
                except StopAsyncIteration:
                    return
                finally:
                    await steps.aclose()

    elif inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def patched(*args: Any, **kwargs: Any) -> Any:
            with held:
                return await function(*args, **kwargs)

    elif inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def patched(*args: Any, **kwargs: Any) -> Any:
            with held:
                return (yield from function(*args, **kwargs))

    else:

        @functools.wraps(function)
        def patched(*args: Any, **kwargs: Any) -> Any:
            with held:
                return function(*args, **kwargs)

    return patched  # type: ignore[return-value]


def _release(ops: Iterable[str]) -> None:
    for op in ops:
        _enabled[op] -= 1
        if _enabled[op] == 0 and op in _installed:
            torch_private.destroy_library(_installed.pop(op))


def _install(op: str) -> None:
    if not (interpreting() or torch.cuda.is_available()):
        return
    error = triton_error()
    if error is not None:
        warn_once(error)
        return
    if torch_private.get_kernel is None:
        warn_once(f"patch() needs torch.library.get_kernel (torch 2.10 or later), and this is {torch.__version__}")
        return
    key = "CPU" if interpreting() else "CUDA"
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # torch says once that a kernel was overridden, which is what patch() is for
            warnings.filterwarnings("ignore", message=".*(?s:.*)[Oo]verrid", category=UserWarning)
            for name, ours in _kernels(op).items():
                library.impl(name, untraced(ours(_original(name, key))), key, allow_override=True)
                _kept.append(torch_private.get_kernel(f"aten::{name}", key))
    except BaseException:
        torch_private.destroy_library(library)
        raise
    _installed[op] = library


def _original(name: str, key: str) -> Kernel:
    """The kernel that is in place now; calling it meets no dispatcher, so it cannot come back here."""
    kernel = torch_private.get_kernel(f"aten::{name}", key)
    return functools.partial(kernel.call_boxed, torch_private.DispatchKeySet(getattr(torch_private.DispatchKey, key)))


def _kernels(op: str) -> dict[str, Callable[[Kernel], Kernel]]:
    """What takes the place of which aten kernels; each is made from the kernel that it replaces."""
    if op == "safe_softmax":
        return {"_safe_softmax": _safe_softmax}
    log = op == "log_softmax"
    return {
        f"_{op}": functools.partial(_forward, log),
        f"_{op}.out": functools.partial(_forward_out, log),
        f"_{op}_backward_data": functools.partial(_backward, log),
        f"_{op}_backward_data.out": functools.partial(_backward_out, log),
    }


def _takes(x: Tensor, dim: int, out_dtype: torch.dtype) -> bool:
    bound = x.dim() or 1
    return (
        -bound <= dim < bound and supports_fused_cast(x.dtype, out_dtype) and unsupported_reason(x, out_dtype) is None
    )


def _out_dtype(x: Tensor, half_to_float: bool) -> torch.dtype | None:
    """The output's dtype; None if half_to_float is set for an input that is not 16-bit."""
    if not half_to_float:
        return x.dtype
    return None if x.dtype is torch.float32 else torch.float32


def _forward(log: bool, original: Kernel) -> Kernel:
    def forward(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        dtype = _out_dtype(x, half_to_float)
        if watch is not None:
            watch("log_softmax" if log else "softmax", x, dim=dim, dtype=dtype)
        if dtype is not None and type(x) is Tensor and x.is_cuda:
            y = softmax_result(x, dim, dtype, log, rows.prepare_softmax)
            if y is not None and y is not TORCH:
                return y
        if dtype is None or not _takes(x, dim, dtype):
            return original(x, dim, half_to_float)
        try:
            return rows.softmax_forward(x, dim, dtype, log)
        except KernelUnavailable:
            return original(x, dim, half_to_float)

    return forward


def _forward_out(log: bool, original: Kernel) -> Kernel:
    def forward_out(x: Tensor, dim: int, half_to_float: bool, *, out: Tensor) -> Tensor:
        dtype = _out_dtype(x, half_to_float)
        if dtype is None or not _takes(x, dim, dtype) or not _fits(out, x, dtype):
            return original(x, dim, half_to_float, out=out)
        try:
            if not may_write_while_reading(out, x):
                return out.copy_(rows.softmax_forward(x, dim, dtype, log))
            return rows.softmax_forward(x, dim, dtype, log, out)
        except KernelUnavailable:
            return original(x, dim, half_to_float, out=out)

    return forward_out


def _takes_backward(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> bool:
    same = dy.dtype is y.dtype and dy.shape == y.shape and dy.device == y.device
    return same and supports_fused_cast(input_dtype, y.dtype) and _takes(y, dim, y.dtype)


def _backward(log: bool, original: Kernel) -> Kernel:
    def backward(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
        if watch is not None:
            watch("log_softmax" if log else "softmax", y, dim=dim, dtype=y.dtype, backward=True)
        if type(y) is Tensor and type(dy) is Tensor and supports_fused_cast(input_dtype, y.dtype):
            dx = softmax_backward(dy, y, dim, input_dtype, log, is_batch_invariant(), rows.prepare_backward)
            if dx is not None:
                return dx
        if not _takes_backward(dy, y, dim, input_dtype):
            return original(dy, y, dim, input_dtype)
        try:
            return rows.softmax_backward(dy, y, dim, input_dtype, log)
        except KernelUnavailable:
            return original(dy, y, dim, input_dtype)

    return backward


def _backward_out(log: bool, original: Kernel) -> Kernel:
    # the two have different names for their output
    name = "out" if log else "grad_input"

    def backward_out(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype, **outputs: Tensor) -> Tensor:
        out = outputs[name]
        if not _takes_backward(dy, y, dim, input_dtype) or not _fits(out, y, input_dtype):
            return original(dy, y, dim, input_dtype, **outputs)
        try:
            return out.copy_(rows.softmax_backward(dy, y, dim, input_dtype, log))
        except KernelUnavailable:
            return original(dy, y, dim, input_dtype, **outputs)

    return backward_out


def _safe_softmax(original: Kernel) -> Kernel:
    def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        out_dtype = x.dtype if dtype is None else dtype
        if not _takes(x, dim, out_dtype):
            return original(x, dim, dtype)
        try:
            y = rows.softmax_forward(x, dim, out_dtype, False)
        except KernelUnavailable:
            return original(x, dim, dtype)
        # rows that are masked throughout give 0, not NaN
        return y if x.numel() == 0 else y.masked_fill_(x.amax(dim, keepdim=True) == -float("inf"), 0.0)

    return safe_softmax


def _fits(out: Tensor, like: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether out can take the result; an empty one is given its size, other sizes are torch's to resize."""
    if out.dtype is not dtype or out.device != like.device or not is_its_own(out):
        return False
    if out.shape != like.shape and out.numel() == 0:
        out.resize_(like.shape)
    return out.shape == like.shape
