"""Makes a failing case smaller, as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from .draw import Case
from .values import KINDS

SIMPLER_VALUES = ("normal", "ties", "constant")


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 20.0) -> Case:
    """The smallest case found that `fails`, greedily; each step keeps what the last one removed."""
    end = time.monotonic() + seconds
    changed = True
    while changed and time.monotonic() < end:
        changed = False
        for smaller in _smaller(case):
            if time.monotonic() > end:
                break
            try:
                failing = fails(smaller)
            except Exception:  # no valid case
                failing = False
            if failing:
                case, changed = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    if case.layout[0] != "contiguous":
        yield case.changed(layout=("contiguous", 1))
        if case.layout[1] > 1:
            yield case.changed(layout=(case.layout[0], 1))
    if case.direction == "double":
        yield case.changed(direction="gradient")
    if case.direction == "gradient":
        yield case.changed(direction="forward")
    for name in case.options:
        if name not in ("dim", "batch", "batch_dim"):
            yield case.changed(options={k: v for k, v in case.options.items() if k != name})
    mask = case.options.get("mask")
    if mask and mask["layout"] != "contiguous":
        yield case.changed(options={**case.options, "mask": {**mask, "layout": "contiguous"}})
    yield from _smaller_shapes(case)
    for kind in SIMPLER_VALUES:
        if case.values in KINDS and kind != case.values and case.values not in SIMPLER_VALUES:
            yield case.changed(values=kind)
    for upstream in ("one", "quarter"):
        if case.upstream not in ("one", "quarter") and case.direction != "forward":
            yield case.changed(upstream=upstream)
    if case.way != "function" and case.way in ("module", "batch_invariant", "checkpoint", "operator", "autocast"):
        yield case.changed(way="function")


def _smaller_shapes(case: Case) -> Iterator[Case]:
    """Fewer dimensions, then fewer rows, then fewer columns; a mask's shape follows."""
    for d, n in enumerate(case.shape):
        if d not in case.dims and n == 1 and len(case.shape) > 2 and case.spec.rows == "last" and d == 0:
            yield _resized(case, case.shape[1:], tuple(r - 1 for r in case.dims))
    for d, n in enumerate(case.shape):
        for smaller in sorted({1, 2, n // 2, n - 1} & set(range(1, n))):
            yield _resized(case, (*case.shape[:d], smaller, *case.shape[d + 1 :]), case.dims)


def _resized(case: Case, shape: tuple[int, ...], dims: tuple[int, ...]) -> Case:
    mask = case.options.get("mask")
    options = case.options
    if mask:
        own = mask["shape"]
        kept = [n if own[i - len(shape)] != 1 else 1 for i, n in enumerate(shape) if i >= len(shape) - len(own)]
        options = {**options, "mask": {**mask, "shape": kept}}
    return case.changed(shape=shape, dims=dims, options=options)
