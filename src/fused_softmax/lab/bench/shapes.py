"""Random shapes (outer, n_cols, inner) and layouts: softmax over a dimension that is not the last, and workloads of it.

Each of the outer x inner positions is a softmax over n_cols. Inputs are the rows of the op's own inputs, laid out
otherwise, and results are judged as rows again. So every shape has the outliers, the reference and the limits that rows
have.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_softmax.lab.bench.inputs import Inputs
from fused_softmax.lab.bench.ops import OPS
from fused_softmax.lab.bench.workload import Call, Op
from fused_softmax.launch.softmax import softmax_backward

FEWEST, MOST = 2**20, 2**27  # elements
# (n_cols, inner) that the shapes of a class are drawn from, both log-uniform
CLASSES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "up to 64 columns": ((2, 64), (1024, 2**19)),
    "65 to 1,024 columns": ((65, 1024), (1024, 2**17)),
    "1,025 to 4,096 columns": ((1025, 4096), (1024, 2**15)),
    "more columns": ((4097, 2**16), (1024, 2**13)),
    "more columns, inner below 1,024": ((4097, 2**22), (2, 1023)),
    "odd inner": ((2, 1024), (1025, 2**18)),
    "inner below 1,024": ((2, 4096), (2, 1023)),
    "odd inner below 1,024": ((2, 1024), (3, 1023)),
    "more columns, odd inner": ((1025, 2**20), (3, 4095)),
}
EVEN = "inner below 1,024"  # such as 14 x 14 positions; longer runs are multiples of 4, half a sector of float32


@dataclass(frozen=True)
class Layout:
    """How a tensor lies. `lay`: (outer, inner, n_cols) rows -> such a tensor; `dim`: of its softmax."""

    dim: int
    lay: Callable[[Tensor], Tensor]
    # whether each index of `outer` holds other rows
    repeats: bool = False


def _stepped(t: Tensor) -> Tensor:
    """t in every second place of its last dimension."""
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"), dtype=t.dtype, device=t.device)
    wide[..., ::2] = t
    return wide[..., ::2]


def _cropped(t: Tensor) -> Tensor:
    """t as (outer, n_cols, height, width), cropped from wider images."""
    outer, n_cols, inner = t.shape
    width = next(w for w in range(math.isqrt(inner), 0, -1) if inner % w == 0)
    wide = torch.full((outer, n_cols, inner // width, width + 8), float("nan"), dtype=t.dtype, device=t.device)
    wide[..., :width] = t.view(outer, n_cols, -1, width)
    return wide[..., :width]


LAYOUTS = {
    "": Layout(1, lambda rows: rows.transpose(1, 2).contiguous()),
    "channels last": Layout(1, lambda rows: rows.transpose(1, 2)),
    "transposed": Layout(-1, lambda rows: rows.transpose(1, 2).contiguous().transpose(1, 2)),
    "steps": Layout(1, lambda rows: _stepped(rows.transpose(1, 2))),
    "steps of columns": Layout(-1, _stepped),
    "cropped": Layout(1, lambda rows: _cropped(rows.transpose(1, 2))),
    "expanded": Layout(1, lambda rows: rows[:1].transpose(1, 2).contiguous().expand(len(rows), -1, -1), repeats=True),
}
# one shape in so many has a layout other than contiguous
OTHERS = 4
# a loss takes the classes of dimension 1
OF_IMAGES = ("", "channels last", "cropped")


@dataclass(frozen=True)
class Shape:
    """A tensor (outer, n_cols, inner) in one of LAYOUTS, and the dtype that it was drawn with."""

    outer: int
    n_cols: int
    inner: int
    layout: str
    dtype: str


def random_shapes(count: int, seed: int, most: int = MOST, layouts: Sequence[str] = tuple(LAYOUTS)) -> list[Shape]:
    """`count` shapes of a seed, of FEWEST to `most` elements; half of them have a quarter of `most`, or more.

    Where `most` is small, there are fewer elements, and only the classes that have so small shapes.
    """
    pick = random.Random(seed)
    fewest = min(FEWEST, most // 4)
    names = [name for name, (cols, inner) in CLASSES.items() if cols[0] * inner[0] <= most // 2]
    drawn = lambda low, high: low * (high / low) ** pick.random()  # noqa: E731
    found: list[Shape] = []
    while len(found) < count:
        name = names[len(found) % len(names)]
        (fewest_cols, most_cols), (narrowest, widest) = CLASSES[name]
        n_cols, inner = round(drawn(fewest_cols, most_cols)), round(drawn(narrowest, widest))
        if "odd inner" in name:
            inner |= 1
        elif inner >= 8:
            inner &= -2 if name == EVEN else -4
        elements = drawn(most // 4 if pick.random() < 0.5 else fewest, most)
        outer = max(1, round(elements / (n_cols * inner)))
        layout = pick.choice(layouts[1:]) if pick.random() < 1 / OTHERS else ""
        dtype = pick.choice(("bfloat16", "float32"))
        if fewest <= outer * n_cols * inner <= most:
            found.append(Shape(outer, n_cols, inner, layout, dtype))
    return found


def class_of(n_cols: int, inner: int, layout: str) -> str:
    """The class of a shape; a layout is a class of its own."""
    if layout:
        return layout
    if inner % 2 and n_cols > 1024:
        return "more columns, odd inner"
    if inner % 2:
        return "odd inner" if inner >= 1024 else "odd inner below 1,024"
    if inner < 1024:
        return "more columns, inner below 1,024" if n_cols > 4096 else "inner below 1,024"
    return next(name for name, ((_, most), _) in CLASSES.items() if n_cols <= most or name == "more columns")


# --- workloads --------------------------------------------------------------------------------------------------------


def _over(dim: int) -> Callable[[Call], Call]:
    return lambda function: lambda x: function(x, dim)


def _changes(name: str, dim: int) -> dict[str, Any]:
    """The fields of an op's entry that are other over another dimension."""
    if name in ("softmax", "log_softmax", "logsumexp"):
        own = {"softmax": F.softmax, "log_softmax": F.log_softmax}.get(name)
        return dict(call=_over(dim), torch=_over(dim)(own) if own else None)
    if name == "cross_entropy":  # the classes are in dimension 1
        return {}
    log = name.startswith("log_")
    backward = torch._log_softmax_backward_data if log else torch._softmax_backward_data
    return dict(
        own=lambda dy, y: softmax_backward(dy, y, dim, y.dtype, log),
        torch=lambda dy, y: backward(dy, y, dim, y.dtype),
    )


SHAPED_OPS = ("softmax", "softmax_backward", "log_softmax", "log_softmax_backward", "logsumexp", "cross_entropy")


def shaped(name: str, outer: int, inner: int, layout: str) -> Op:
    """The workload of an op over tensors (outer, n_cols, inner) in a layout of LAYOUTS; of two, the first has it."""
    op, (dim, lay, repeats) = OPS[name], (LAYOUTS[layout].dim, LAYOUTS[layout].lay, LAYOUTS[layout].repeats)
    contiguous = LAYOUTS[""].lay if dim == 1 else (lambda rows: rows)

    def inputs(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
        rows = op.inputs(n_rows, n_cols, dtype, device, seed)
        if repeats:  # a gradient's two tensors belong together
            first = [t[:inner].repeat(outer, *[1] * (t.dim() - 1)) if t.dim() else t for t in rows]
            rows = tuple(first)
        laid: list[Tensor] = []
        for t in rows:
            if t.dim() == 2:
                laid.append((contiguous if laid else lay)(t.view(outer, inner, n_cols)))
            else:
                laid.append(t.view(outer, inner) if t.dim() else t)
        if layout == "cropped":
            height_width = laid[0].shape[2:]
            laid[1:] = [t.unflatten(-1, height_width) if t.dim() else t for t in laid[1:]]
        return tuple(laid)

    def as_rows(t: Tensor) -> Tensor:
        if t.dim() == 0:
            return t
        over_all = t.dim() == (4 if layout == "cropped" else 3)
        return t.movedim(dim, -1).reshape(outer * inner, -1) if over_all else t.reshape(-1)

    return replace(op, inputs=inputs, as_rows=as_rows, dim=dim, exact=op.reference, **_changes(name, dim))
