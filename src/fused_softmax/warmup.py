"""Compiles kernels before they are needed, so that a first step waits for nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .functional import log_softmax, logsumexp, masked_softmax, softmax
from .launch.loss_kernels import ONE_CTA_ROWS, ONE_PROGRAM_ROWS
from .losses import cross_entropy, token_logprobs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _causal(x: Tensor) -> Tensor:
    return masked_softmax(x, causal=True)


def _with_ids(op: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: op(x, torch.zeros(len(x), dtype=torch.int64, device=x.device))


# queries of causal scores, which have kernels of their own where they see few of their columns
FEW_QUERIES = (1, 100)
# a call of each op, for logits (n_rows, n_cols)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: softmax(x, -1),
    "log_softmax": lambda x: log_softmax(x, -1),
    "logsumexp": lambda x: logsumexp(x, -1),
    "masked_softmax": _causal,
    "cross_entropy": _with_ids(cross_entropy),
    "token_logprobs": _with_ids(token_logprobs),
}
# the ops that take a language model's logits
OF_LOGITS = ("softmax", "log_softmax", "cross_entropy", "token_logprobs")


def warmup(
    shapes: Any,
    *,
    ops: str | Iterable[str] | None = None,
    dtype: torch.dtype | Iterable[torch.dtype] | None = None,
    backward: bool = True,
    device: torch.device | str | int | None = None,
) -> dict[tuple[str, torch.dtype, int], float]:
    """Compile the kernels that calls on rows of these widths will run, and load them on the device.

    A kernel depends on the columns, the dtype and the alignment of rows, not on the number of rows, so widths are
    enough. Causal scores with fewer queries than columns have up to two kernels more, which are compiled, too. Triton's
    disk cache keeps the compiled kernels, and a later process only loads them. Call this before a CUDA graph is
    captured.

    Args:
        shapes: A width; a shape, whose last size is the width; a list of widths or shapes; or a model's config, an
            object with `vocab_size` (and `torch_dtype` or `dtype`), such as transformers' PretrainedConfig.
        ops: Any of "softmax", "log_softmax", "logsumexp", "masked_softmax", "cross_entropy" and "token_logprobs". The
            default is all of them, or for a config those that take logits.
        dtype: One dtype or several. The default is the config's, or bfloat16, float16 and float32.
        backward: Whether gradients are needed, too.
        device: The GPU; by default the current one. Without a GPU nothing is compiled and the result is empty.

    Returns:
        Seconds for each (op, dtype, width): the first call and its backward.

    Raises:
        ValueError: An op is unknown, or a width is below 1.
        TypeError: `shapes` has another type.
    """
    config = shapes if hasattr(shapes, "vocab_size") else None
    widths = [config.vocab_size] if config is not None else _widths(shapes)
    for width in widths:
        if type(width) is not int:
            raise TypeError(f"warmup(): a width must be an int, not {width!r}")
        if width < 1:
            raise ValueError(f"warmup(): a width must be at least 1, not {width}")
    names = (
        (OF_LOGITS if config is not None else tuple(CALLS)) if ops is None else (ops,) if isinstance(ops, str) else ops
    )
    names = tuple(names)
    unknown = [name for name in names if name not in CALLS]
    if unknown:
        raise ValueError(f"warmup() knows {', '.join(CALLS)}, not {', '.join(map(repr, unknown))}")
    if not torch.cuda.is_available():
        return {}
    index = torch.device("cuda" if device is None else device).index if not isinstance(device, int) else device
    place = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    took = {}
    for width in dict.fromkeys(widths):
        for kind in _dtypes(dtype, config):
            for name in names:
                start = time.perf_counter()
                _run(CALLS[name], (4, width), kind, place, backward)
                if name == "masked_softmax":
                    for queries in FEW_QUERIES:
                        if queries < width:
                            _run(CALLS[name], (1, queries, width), kind, place, backward)
                if name == "cross_entropy":  # sums of many rows have kernels of their own, for any width
                    for most in (ONE_CTA_ROWS, ONE_PROGRAM_ROWS):
                        _run(CALLS[name], (most + 1, 8), kind, place, backward)
                torch.cuda.synchronize(place)
                took[name, kind, width] = time.perf_counter() - start
    return took


def _run(
    call: Callable[[Tensor], Tensor], shape: Sequence[int], dtype: torch.dtype, place: Any, backward: bool
) -> None:
    with torch.enable_grad() if backward else torch.no_grad():
        y = call(torch.zeros(*shape, dtype=dtype, device=place, requires_grad=backward))
        if backward:
            torch.autograd.backward(y, torch.zeros_like(y))


def _widths(shapes: Any) -> list[Any]:
    """The widths of what `warmup` takes."""
    if isinstance(shapes, int):
        return [shapes]
    if isinstance(shapes, (tuple, torch.Size)) and shapes and all(isinstance(n, int) for n in shapes):
        return [shapes[-1]]
    if isinstance(shapes, Iterable) and not isinstance(shapes, (str, bytes)):
        return [width for shape in shapes for width in _widths(shape)]
    raise TypeError(f"warmup(): shapes must be widths, shapes or a config with vocab_size, not {shapes!r}")


def _dtypes(dtype: Any, config: Any) -> tuple[torch.dtype, ...]:
    if dtype is None and config is not None:
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None:
        return DTYPES
    return (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
