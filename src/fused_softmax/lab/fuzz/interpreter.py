"""Triton's interpreter without its repeated work: a fuzz process makes some 10,000 launches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def patch_once() -> Callable[[], None]:
    """Patch the modules of `triton.language` once in a launch, not again in every call between device functions.

    Triton (3.6 to 3.9) does the latter, which takes half of the time and changes nothing: what such a call patches
    stays patched until the launch has ended. Returns what undoes this.
    """
    from triton.runtime import interpreter

    function, executor, error = interpreter.InterpretedFunction, interpreter.GridExecutor, interpreter.InterpreterError
    patched: set[frozenset[str]] = set()
    modules_of: dict[Any, frozenset[str]] = {}
    launch, call_of = executor.__call__, function.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = modules_of.get(self)
        if modules is None:
            seen = (value for value in self.fn.__globals__.values() if inspect.ismodule(value))
            modules = modules_of[self] = frozenset(m.__name__ for m in seen if m.__name__.startswith("triton.language"))
        if modules not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(modules)
        rewritten = self.rewrite()
        try:
            return rewritten(*args, **kwargs)
        except Exception as raised:
            raise error(repr(raised)) from raised

    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    def undo() -> None:
        function.__call__, executor.__call__ = call_of, launch

    function.__call__, executor.__call__ = call, start
    return undo
