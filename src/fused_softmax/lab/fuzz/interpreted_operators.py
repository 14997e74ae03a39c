"""Operators of tensors in Triton's interpreter that call numpy at once, where they know what the interpreter would do.

`x + y` goes through some forty calls there, which find the same dtype and shape each time. For the dtypes and shapes of
two operands, an operator keeps the type of the result, if one call of numpy gave the same bits: for operands of one
dtype, and for a number that has that dtype next to it. All else is left to the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from triton.language import core
from triton.runtime import interpreter

MOST = 4096  # kinds of operands that an operator remembers
EXACT = 2**24  # Triton 3.9 rounds larger integers in another way, next to float32
FLOAT, INTEGERS = ("fp32",), ("int32", "int64", "uint32", "uint64")
BITS = "int1", *INTEGERS
Function = Callable[[Any, Any], Any]


class Operator(NamedTuple):
    """What an operator of tensors is in numpy."""

    function: Function
    dtypes: tuple[str, ...] = FLOAT + INTEGERS
    compares: bool = False  # makes a tensor of a number first


def _whole_quotient(a: Any, b: Any) -> Any:
    return (a - np.fmod(a, b)) // b  # rounds toward zero, as the interpreter's


OPERATORS = {
    "add": Operator(np.add),
    "sub": Operator(np.subtract),
    "mul": Operator(np.multiply),
    "truediv": Operator(np.divide, FLOAT),
    "floordiv": Operator(_whole_quotient, INTEGERS),
    "mod": Operator(np.fmod, INTEGERS),
    "and": Operator(np.bitwise_and, BITS),
    "or": Operator(np.bitwise_or, BITS),
    "xor": Operator(np.bitwise_xor, BITS),
    "lt": Operator(np.less, compares=True),
    "le": Operator(np.less_equal, compares=True),
    "gt": Operator(np.greater, compares=True),
    "ge": Operator(np.greater_equal, compares=True),
    "eq": Operator(np.equal, compares=True),
    "ne": Operator(np.not_equal, compares=True),
}
# casts that are numpy's own, from and to dtypes
CASTS = {name: {"int32", "int64", "fp32"} - {name} for name in FLOAT + BITS}


class Kind(NamedTuple):
    """What the result of two operands has. number: the other operand, where that is a number, as one element."""

    type: Any
    dtype: Any
    numel: Any
    shape: Any
    data: Any  # numpy's dtype of both operands
    number: Any
    one_shape: bool
    operands: tuple[Any, ...]  # their shapes, so that no other object gets their ids


def _kind_of(y: Any, data: Any, number: Any, *operands: Any) -> Kind:
    shapes = tuple(x.shape for x in operands)
    one_shape = len(shapes) == 2 and shapes[0] is shapes[1]
    return Kind(y.type, y.dtype, y.numel, y.shape, data, number, one_shape, shapes)


def _tensor(data: Any, dtype: Any, kind: Kind) -> Any:
    """The tensor of a kind, without the constructors' checks."""
    handle = object.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    made = object.__new__(core.tensor)
    made.handle, made.type, made.dtype, made.numel, made.shape = handle, kind.type, kind.dtype, kind.numel, kind.shape
    return made


def _equal(data: Any, y: Any) -> bool:
    other = y.handle.data
    return data.dtype == other.dtype and data.shape == other.shape and data.tobytes() == other.tobytes()


def fast_operator(operator: Operator, reverse: bool, slow: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """`slow`, the tensor's method of an operator, by one call of numpy where that gives the same.

    reverse: the tensor is the second operand.
    """
    function, dtypes, compares = operator
    known: dict[Any, Kind | None] = {}

    def remember(key: Any, kind: Kind | None) -> None:
        if len(known) >= MOST:
            known.clear()
        known[key] = kind

    def apply(self: Any, other: Any, _semantic: Any = None) -> Any:
        given = other
        kind: Any = type(other)
        if kind is core.constexpr:
            other = other.value
            kind = type(other) if type(other) is not core.tensor else None
        if kind is core.tensor:
            key: Any = self.dtype.name, id(self.shape), other.dtype.name, id(other.shape)
        elif (kind is int or kind is float) and other == other:
            # 1 and 1.0 are equal, and so are 0.0 and -0.0
            key = self.dtype.name, id(self.shape), kind, other, math.copysign(1, other) if other == 0 else 0
        else:
            return slow(self, given)
        found = known.get(key, key)
        if found is key:
            return learn(key, self, other)
        if found is None:
            return slow(self, given)
        own, beside = self.handle, other.handle if kind is core.tensor else found.number
        mine, its = own.data, beside.data
        if not (mine.dtype is found.data and its.dtype is found.data):
            return slow(self, given)
        # the interpreter fills a block with one element, which decides how the result lies in memory
        if not (found.one_shape or (mine.flags.c_contiguous and its.flags.c_contiguous)):
            return slow(self, given)
        if reverse:
            return _tensor(function(its, mine), beside.dtype.scalar, found)
        return _tensor(function(mine, its), own.dtype.scalar, found)

    def learn(key: Any, self: Any, other: Any) -> Any:
        y = slow(self, other)
        remember(key, None)
        name, is_tensor = self.dtype.name, type(other) is core.tensor
        if name not in dtypes:
            return y
        number: Any = None
        operands: tuple[Any, ...] = (self,)
        if is_tensor:
            # a block of booleans is filled by the dtype of what was compared
            if other.dtype.name != name or (name == "int1" and other.shape is not self.shape):
                return y
            beside, operands = other.handle, (self, other)
        else:
            if type(other) is int and abs(other) > EXACT and name in FLOAT:
                return y
            other = semantic.to_tensor(other) if compares else other
            pair = semantic.binary_op_type_checking_impl(*((other, self) if reverse else (self, other)))
            mine, its = pair[::-1] if reverse else pair
            if mine.dtype.name != name or mine.shape is not self.shape:
                return y
            # all elements are equal
            number = beside = interpreter.TensorHandle(its.handle.data.reshape(-1)[:1].copy(), its.handle.dtype)
        first, second = (beside, self.handle) if reverse else (self.handle, beside)
        same = first.data.dtype is second.data.dtype
        if same and _equal(function(first.data, second.data), y):
            known[key] = _kind_of(y, first.data.dtype, number, *operands)
        return y

    def add(self: Any, other: Any, _semantic: Any = None) -> Any:
        """The sum of addresses and offsets of elements, too."""
        if type(other) is not core.tensor or not self.dtype.is_ptr() or other.dtype.name not in ("int32", "int64"):
            return apply(self, other)
        key = self.dtype.name, self.dtype.address_space, id(self.shape), other.dtype.name, id(other.shape)
        found = known.get(key)
        if found is None:
            y = slow(self, other)
            remember(key, _kind_of(y, None, None, self, other))
            return y
        offsets = other.handle.data.astype(np.uint64)
        own = self.handle
        if not (found.one_shape or (own.data.flags.c_contiguous and offsets.flags.c_contiguous)):
            return slow(self, other)
        size = max(1, own.get_element_ty().primitive_bitwidth // 8)
        return _tensor(own.data + size * offsets, own.dtype, found)

    return add if function is np.add and not reverse else apply


def fast_cast(slow: Callable[..., Any]) -> Callable[..., Any]:
    """The tensor's method `to`, by one call of numpy where that gives the same."""
    known: dict[Any, Kind] = {}

    def to(self: Any, dtype: Any, *more: Any, _semantic: Any = None, **named: Any) -> Any:
        if type(dtype) is core.constexpr:
            dtype = dtype.value
        if more or named or type(dtype) is not core.dtype:
            return slow(self, dtype, *more, **named)
        name = self.dtype.name
        if name == dtype.name:
            return self
        # a comparison of bfloat16 has this dtype, which is cast in another way
        if dtype.name not in CASTS.get(name, ()) or self.handle.dtype.name == "bf16":
            return slow(self, dtype)
        key = name, id(self.shape), dtype.name
        found = known.get(key)
        if found is None:
            y = slow(self, dtype)
            known[key] = _kind_of(y, y.handle.data.dtype, None, self)
            return y
        return _tensor(self.handle.data.astype(found.data), found.dtype, found)

    return to


def fast_conversion(slow: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's conversion of numbers between bfloat16 and float32, unless some are subnormal.

    Both have the same exponents, and the interpreter cuts the digits that bfloat16 lacks.
    """
    bfloat16, float32 = core.bfloat16, core.float32

    def convert(numbers: Any, from_dtype: Any, to_dtype: Any, rounding: Any) -> Any:
        widens = from_dtype == bfloat16 and to_dtype == float32
        narrows = from_dtype == float32 and to_dtype == bfloat16
        # a comparison's results have the dtype of what was compared
        if rounding is None and (widens or narrows) and numbers.dtype == (np.uint16 if widens else np.float32):
            bits = numbers if widens else np.ascontiguousarray(numbers).view(np.uint32).reshape(numbers.shape)
            exponents, digits = (0x7F80, 0x7F) if widens else (0x7F800000, 0x7FFFFF)
            if not np.any(((bits & exponents) == 0) & ((bits & digits) != 0)):
                return bits.astype(np.uint32, order="C") << 16 if widens else (bits >> 16).astype(np.uint16)
        return slow(numbers, from_dtype, to_dtype, rounding)

    return convert


def methods() -> dict[str, Callable[[Callable[..., Any], Any], Callable[..., Any]]]:
    """The tensor's methods that are replaced, each with what makes the fast one of (its method, the semantic)."""
    forward = {f"__{bare}__": partial(fast_operator, op, False) for bare, op in OPERATORS.items()}
    backward = {f"__r{bare}__": partial(fast_operator, op, True) for bare, op in OPERATORS.items() if not op.compares}
    return {**forward, **backward, "to": lambda slow, semantic: fast_cast(slow)}
