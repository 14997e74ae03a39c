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

MOST_NUMBERS = 4096  # tensors that are remembered, of up to some 64 KB


def patch_once() -> Callable[[], None]:
    """Make the interpreter ten times as fast for small tensors, with the same bits. Returns what undoes this."""
    undo = (
        _patch_modules_once_in_a_launch(),
        _remember_types(),
        _remember_shapes(),
        _remember_numbers(),
        _leave_out_checks_of_overflow(),
        _convert_bits(),
    )

    def undo_all() -> None:
        for one in reversed(undo):
            one()

    return undo_all


def _patch_modules_once_in_a_launch() -> Callable[[], None]:
    """Patch the modules of `triton.language` once in a launch, not again in every call between device functions.

    The latter takes half of the time and changes nothing: what such a call patches stays patched until the launch has
    ended. The builtins of each module are looked up once in a process, and one call leads to a builtin, not three.
    """
    from triton.language import core
    from triton.runtime import interpreter

    from .interpreted_operators import methods

    function, executor, error = interpreter.InterpretedFunction, interpreter.GridExecutor, interpreter.InterpreterError
    patched: set[frozenset[str]] = set()
    modules_of: dict[Any, frozenset[str]] = {}
    builtins_of: dict[Any, list[tuple[str, Any, Any]]] = {}
    its_builder, semantic = interpreter.interpreter_builder, interpreter.TritonSemantic(interpreter.interpreter_builder)
    fast_methods = methods()
    checks_semantic = core.builtin(lambda: None).__code__
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

    def with_semantic(member: Any) -> Callable[..., Any]:
        # what `builtin` puts before a function looks for the semantic, which is here
        function = member.__wrapped__ if getattr(member, "__code__", None) is checks_semantic else member

        def builtin(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return builtin

    def patch_of(member: Any, fast: Any) -> Callable[..., Any]:
        builtin = with_semantic(member)
        return fast(builtin, semantic) if fast else builtin

    def patch_known_builtins(package: Any, builder: Any, scope: Any) -> None:
        assert builder is its_builder
        if package not in builtins_of:
            found = [pair for pair in inspect.getmembers(package) if core.is_builtin(pair[1])]
            fast = fast_methods if package is core.tensor else {}
            builtins_of[package] = [(name, member, patch_of(member, fast.get(name))) for name, member in found]
        for name, member, patch in builtins_of[package]:
            scope._changes.append((package, name, member))
            setattr(package, name, patch)

    def undo() -> None:
        function.__call__, executor.__call__, interpreter._patch_builtin = call_of, launch, patch_builtin

    function.__call__, executor.__call__, interpreter._patch_builtin = call, start, patch_known_builtins
    return undo


def _remember_types() -> Callable[[], None]:
    """Build each type, each shape and each numpy dtype of a type once, not again for every value that has it."""
    from triton.language import core
    from triton.runtime import interpreter

    np_dtype, init_tensor, init_block = interpreter._get_np_dtype, core.tensor.__init__, core.block_type.__init__
    with_element = core.block_type.with_element_ty
    np_dtypes: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def known_np_dtype(of: Any) -> Any:
        found = np_dtypes.get(of.name)
        if found is None:
            found = np_dtypes[of.name] = np_dtype(of)
        return found

    def known_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
        """(number of elements, shape) of a tensor: the same objects for equal shapes."""
        if shape not in shapes:
            shapes[shape] = core.constexpr(math.prod(shape)), core.tuple([core.constexpr(n) for n in shape])
        return shapes[shape]

    no_shape = known_shape(())

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type = handle, type
        if type.is_block():
            self.dtype = type.element_ty
            self.numel, self.shape = vars(type).get("of_tensor") or known_shape(tuple(type.shape))
        else:
            self.dtype = type.scalar
            self.numel, self.shape = no_shape

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, tuple([core._unwrap_if_constexpr(n) for n in shape]))
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = {**vars(self), "of_tensor": known_shape(key[1]), "kin": {}}
        vars(self).update(blocks[key])
        self.element_ty = element_ty  # pointers to two address spaces have one name

    def block_of(self: Any, scalar_ty: Any) -> Any:
        kin = vars(self).get("kin")
        if kin is None or scalar_ty.is_ptr():
            return with_element(self, scalar_ty)
        found = kin.get(scalar_ty.name)
        if found is None:
            found = kin[scalar_ty.name] = with_element(self, scalar_ty)
        return found

    def undo() -> None:
        interpreter._get_np_dtype, core.tensor.__init__, core.block_type.__init__ = np_dtype, init_tensor, init_block
        core.block_type.with_element_ty = with_element

    interpreter._get_np_dtype, core.tensor.__init__, core.block_type.__init__ = known_np_dtype, tensor, block
    core.block_type.with_element_ty = block_of
    return undo


def _remember_shapes() -> Callable[[], None]:
    """Compare two shapes, dimension by dimension, once; needs `_remember_types`."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value
    # the shapes to which two tensors of as many dimensions are brought, or None where one has that shape already; and
    # their shapes, so that no other object gets their ids
    known: dict[tuple[int, int], tuple[Any, ...]] = {}

    def to(self: Any, of: Any, shape: list[int] | None) -> Any:
        if shape is None:
            return of
        return self.tensor(self.builder.create_broadcast(of.handle, shape), core.block_type(of.type.scalar, shape))

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = id(lhs.shape), id(rhs.shape)
        shapes = known.get(key)
        if shapes is not None:
            return to(self, lhs, shapes[0]), to(self, rhs, shapes[1])
        pair = broadcast(self, lhs, rhs)
        if len(lhs.shape) == len(rhs.shape):
            both = zip(pair, (lhs, rhs), strict=True)
            first, second = (None if now is before else list(now.type.shape) for now, before in both)
            known[key] = first, second, lhs.shape, rhs.shape
        return pair

    def undo() -> None:
        TritonSemantic.broadcast_impl_value = broadcast

    TritonSemantic.broadcast_impl_value = broadcast_others
    return undo


def _remember_numbers() -> Callable[[], None]:
    """Make the tensor of a number next to a tensor once for each number, dtype and shape; needs `_remember_types`."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_type_checking_impl
    known: dict[Any, tuple[Any, ...]] = {}

    def checked(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        last = type(rhs) in (int, float)
        number, other = (rhs, lhs) if last else (lhs, rhs)
        if type(number) not in (int, float) or number != number or type(other) is not core.tensor:
            return check(self, lhs, rhs, *flags, **named)
        # 1 and 1.0 are equal, and so are 0.0 and -0.0
        sign = math.copysign(1, number) if number == 0 else 0
        key = last, number, type(number), sign, other.dtype.name, id(other.shape), flags, *named.items()
        found = known.get(key)
        if found is None:
            pair = check(self, lhs, rhs, *flags, **named)
            made, beside = pair if not last else pair[::-1]
            made.handle.data.flags.writeable = False
            if len(known) == MOST_NUMBERS:
                known.clear()
            known[key] = beside.dtype.name, beside.dtype, made, other.shape
            return pair
        name, dtype, made, _ = found
        if other.dtype.name != name:
            other = self.cast(other, dtype)
        return (other, made) if last else (made, other)

    def undo() -> None:
        TritonSemantic.binary_op_type_checking_impl = check

    TritonSemantic.binary_op_type_checking_impl = checked
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


def _convert_bits() -> Callable[[], None]:
    """Convert between bfloat16 and float32 by moving bits, where that is what the interpreter's conversion does."""
    from triton.runtime import interpreter

    from .interpreted_operators import fast_conversion

    convert = interpreter._convert_float

    def undo() -> None:
        interpreter._convert_float = convert

    interpreter._convert_float = fast_conversion(convert)
    return undo
