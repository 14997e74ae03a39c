"""Triton's interpreter without its repeated work: a fuzz process makes some 10,000 launches.

Triton 3.6 to 3.9 have the code that is replaced here. tests/lab/fuzz/test_interpreter.py compares every bit
with the unchanged interpreter.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any


def patch_once() -> Callable[[], None]:
    """Make the interpreter four times as fast for small tensors, with the same bits. Returns what undoes this."""
    undo = (_patch_modules_once_in_a_launch(), _remember_types(), _leave_out_checks_of_overflow())

    def undo_all() -> None:
        for one in reversed(undo):
            one()

    return undo_all


def _patch_modules_once_in_a_launch() -> Callable[[], None]:
    """Patch the modules of `triton.language` once in a launch, not again in every call between device functions.

    The latter takes half of the time and changes nothing: what such a call patches stays patched until the launch has
    ended. The builtins of each module are looked up once in a process.
    """
    from triton.language import core
    from triton.runtime import interpreter

    function, executor, error = interpreter.InterpretedFunction, interpreter.GridExecutor, interpreter.InterpreterError
    patched: set[frozenset[str]] = set()
    modules_of: dict[Any, frozenset[str]] = {}
    builtins_of: dict[Any, list[tuple[str, Any]]] = {}
    launch, call_of, patch_builtin = executor.__call__, function.__call__, interpreter._patch_builtin

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

    def patch_known_builtins(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins_of:
            builtins_of[package] = [pair for pair in inspect.getmembers(package) if core.is_builtin(pair[1])]
        for name, member in builtins_of[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    def undo() -> None:
        function.__call__, executor.__call__, interpreter._patch_builtin = call_of, launch, patch_builtin

    function.__call__, executor.__call__, interpreter._patch_builtin = call, start, patch_known_builtins
    return undo


def _remember_types() -> Callable[[], None]:
    """Build each type, each shape and each numpy dtype of a type once, not again for every value that has it."""
    from triton.language import core
    from triton.runtime import interpreter

    np_dtype, init_tensor, init_block = interpreter._get_np_dtype, core.tensor.__init__, core.block_type.__init__
    np_dtypes: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def known_np_dtype(of: Any) -> Any:
        found = np_dtypes.get(of.name)
        if found is None:
            found = np_dtypes[of.name] = np_dtype(of)
        return found

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            shapes[shape] = core.constexpr(math.prod(shape)), core.tuple([core.constexpr(n) for n in shape])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[shape]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, tuple(core._unwrap_if_constexpr(n) for n in shape))
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        else:
            vars(self).update(blocks[key])
            self.element_ty = element_ty  # pointers to two address spaces have one name

    def undo() -> None:
        interpreter._get_np_dtype, core.tensor.__init__, core.block_type.__init__ = np_dtype, init_tensor, init_block

    interpreter._get_np_dtype, core.tensor.__init__, core.block_type.__init__ = known_np_dtype, tensor, block
    return undo


def _leave_out_checks_of_overflow() -> Callable[[], None]:
    """Compute no 64-bit copy of each sum and product of integers: its result goes to an assertion that is switched off.

    `device_assert` asserts only where the option `debug` is set, and the interpreter's is not.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    options = builder.options
    if not options.debug:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)

    def undo() -> None:
        builder.options = options

    return undo
