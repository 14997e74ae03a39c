"""Options that several commands share, and how their text becomes numbers and names."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from fused_softmax.lab.terminal import Refused

DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

Input = Annotated[Path | None, typer.Option(help="real data: .safetensors (every floating tensor), .npy or .pt")]
Tables = Annotated[
    str,
    typer.Option(
        help="comma-separated: ladder, forward, losses, random, shapes, few_rows, few_rows_cold, small, host, "
        "first_call, cpu"
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="comma-separated: bf16, fp16, fp32 (or the long names)")]


def names(text: str, option: str = "") -> tuple[str, ...]:
    """Split a comma-separated option; an empty one names nothing, which is the default."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if text and not found:
        raise Refused(f"{text!r} names nothing: give names with commas between them", option)
    return found


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Split a comma-separated option into positive integers."""
    try:
        found = tuple(int(part.replace("_", "")) for part in names(text, option))
    except ValueError:
        why = f"{text!r} is not a list of integers: give numbers with commas between them, such as 1024,50257"
        raise Refused(why, option) from None
    if any(not 1 <= n < 2**60 for n in found):
        raise Refused(f"{text!r}: numbers must be positive, and below 2^60", option)
    return found


def columns_between(text: str, option: str = "--columns") -> tuple[int, int] | None:
    """The fewest and the most columns of LOW:HIGH; None where nothing was given."""
    if not text:
        return None
    low, _, high = text.partition(":")
    try:
        limits = int(low), int(high or low)
    except ValueError:
        raise Refused(f"{text!r} is not LOW:HIGH: give two numbers of columns, such as 1:4096", option) from None
    if not 1 <= limits[0] <= limits[1] < 2**60:
        raise Refused(f"{text!r}: LOW is at least 1 and at most HIGH, as in 1:4096, and HIGH below 2^60", option)
    return limits


def shapes_named(text: str, sizes: tuple[str, ...], example: str) -> tuple[tuple[int, ...], ...]:
    """Split a comma-separated --shapes into the sizes of each, as many as there are names in `sizes`."""
    found = []
    for name in names(text, "--shapes"):
        shape = [part.strip() for part in name.lower().split("x")]
        if len(shape) != len(sizes) or not all(part.isdecimal() and len(part) < 19 and int(part) for part in shape):
            raise Refused(f"{name[:60]!r} is no shape: give {' x '.join(sizes)}, such as {example}", "--shapes")
        found.append(tuple(map(int, shape)))
    return tuple(found)


def dtypes(text: str, option: str = "--dtype") -> tuple[str, ...]:
    """Split and widen dtype names."""
    found = tuple(DTYPE_NAMES.get(name, name) for name in names(text, option))
    for name in found:
        if name not in DTYPE_NAMES.values():
            allowed = ", ".join((*DTYPE_NAMES, *DTYPE_NAMES.values()))
            raise Refused(f"{name!r} is none of {allowed}", option)
    return tuple(dict.fromkeys(found))


def expect_gpu() -> None:
    """Refuse where no GPU is usable, or kernels are interpreted."""
    import torch

    from fused_softmax.launch.device import interpreting

    if not torch.cuda.is_available() or interpreting():
        raise Refused("needs a GPU, and there is none that torch can use here: run it on a machine with one")


def interpret_without_gpu() -> None:
    """Where no GPU is usable, start this command again with Triton's interpreter; kernels must not be imported yet."""
    import torch

    from fused_softmax.launch.device import interpreting

    # numpy's, from inside the interpreter, on the infinities and NaN that are meant
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    if torch.cuda.is_available() or interpreting():
        return
    again = [sys.executable, "-m", "fused_softmax", *sys.argv[1:]]
    os.execve(sys.executable, again, {**os.environ, "TRITON_INTERPRET": "1"})
