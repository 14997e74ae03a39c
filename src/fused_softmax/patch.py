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
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from .launch import torch_private
from .launch.availability import warn_once
from .launch.device import interpreting, triton_error

OPS = ("softmax", "log_softmax", "safe_softmax")
F = TypeVar("F", bound=Callable[..., Any])

_lock = threading.Lock()
_enabled = dict.fromkeys(OPS, 0)  # how many patches hold each op
_installed: dict[str, torch.library.Library] = {}


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
            from .torch_ops import aten_kernels  # loaded by `_install`

            aten_kernels.restore(_installed.pop(op))


def _install(op: str) -> None:
    if not (interpreting() or torch.cuda.is_available()):
        return
    error = triton_error()
    if error is not None:
        warn_once(error)
    elif torch_private.get_kernel is None:
        warn_once(f"patch() needs torch.library.get_kernel (torch 2.10 or later), and this is {torch.__version__}")
    else:
        from .torch_ops import aten_kernels  # few programs patch

        _installed[op] = aten_kernels.replace(op)
