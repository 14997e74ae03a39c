"""How a kernel declares its arguments: in its signature, next to the names.

    @kernel(num_stages=3)
    def row_statistics(x_ptr: Rows, lse_ptr: Vector, n_rows: Int64, scale: Float32, PICKS: tl.constexpr): ...

A launch compiles a kernel from this declaration, never from the values of a call, so no width becomes a constant. The
names carry no meaning, so any argument can be renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl


@dataclass(frozen=True)
class Argument:
    """The declared type of an argument.

    type: Triton's name of a scalar's type; "int" for 32 bits where the value fits them, else 64; None for a pointer,
    whose type follows the tensor. specialized: whether the kernel is compiled again for a value of 1 or for a multiple
    of 16.
    """

    type: str | None
    specialized: bool = False


# constexprs, because Triton evaluates the annotations of a kernel and accepts no other globals there
# A tensor (n_rows, n_cols) with contiguous columns. Its address is a multiple of a vector of the plan.
Rows = tl.constexpr(Argument(None))
# A contiguous tensor of O(rows) or O(columns) elements.
Vector = tl.constexpr(Argument(None))
# A tensor of any strides, a stride of it, the size of a dimension of it, and a number of elements.
AnyTensor = tl.constexpr(Argument(None))
Stride = tl.constexpr(Argument("int", specialized=True))
Size = tl.constexpr(Argument("int", specialized=True))
Count = tl.constexpr(Argument("int"))
Int32 = tl.constexpr(Argument("i32"))
Int64 = tl.constexpr(Argument("i64"))
Float32 = tl.constexpr(Argument("fp32"))


@dataclass(frozen=True)
class Declaration:
    """A kernel's declaration, as a launch needs it.

    arguments: the run-time arguments by name, in order. constexprs: the names of the compile-time arguments.
    num_stages: of the kernel's loops; None for the backend's default. asserts: whether the kernel checks its input on
    the device, so that assertions are compiled in. on_cluster: whether the programs of a row may form a thread-block
    cluster. cta_programs: whether, for Triton, each CTA of its clusters is a program of its own. splits_rows: whether
    independent programs share a row; their number is the argument after `phase`.
    """

    arguments: Mapping[str, Argument]
    constexprs: tuple[str, ...]
    num_stages: int | None
    asserts: bool
    on_cluster: bool
    cta_programs: bool
    splits_rows: bool


def kernel(
    *,
    num_stages: int | None = None,
    asserts: bool = False,
    on_cluster: bool = False,
    cta_programs: bool = False,
    splits_rows: bool = False,
) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` for a kernel whose run-time arguments are annotated with an `Argument`; adds its `declaration`.

    Raises TypeError where an argument is annotated with something else.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        arguments, constexprs = {}, []
        for name, annotation in list(function.__annotations__.items()):
            declared = function.__globals__.get(annotation) if isinstance(annotation, str) else annotation
            if isinstance(declared, tl.constexpr) and isinstance(declared.value, Argument):
                arguments[name] = declared.value
                del function.__annotations__[name]  # Triton knows no such types
            elif annotation is tl.constexpr or str(annotation).endswith("constexpr"):
                constexprs.append(name)
        code = function.__code__
        if (*arguments, *constexprs) != code.co_varnames[: code.co_argcount]:
            raise TypeError(f"{function.__name__}: every argument is declared with its type, then the constexprs")
        fixed = [name for name, argument in arguments.items() if argument.type and not argument.specialized]
        jitted = triton.jit(do_not_specialize=fixed)(function)
        jitted.declaration = Declaration(
            arguments, tuple(constexprs), num_stages, asserts, on_cluster, cta_programs, splits_rows
        )
        return jitted

    return decorate
