"""Case: one drawn call, as JSON; and how cases are drawn.

A draw class fixes what kernels are compiled for (width, layouts, flags), its cases draw the rest, so that a run spends
its time on calls and not on compilations. Classes of one op and dtype are the same for every way in.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fused_softmax.lab.registry import OPS, OpSpec

from . import layouts, values

DTYPES = ("float16", "bfloat16", "float32")
# dtypes that are torch's: its result, or its error
OTHER_DTYPES = ("float64", "int64", "int32", "uint8", "bool")
# what out= is given: its own memory, x's (all of it, from the second element on, transposed), and what torch refuses
OUTPUTS: tuple[str, ...] = ("fresh", "fresh", "fresh", "fresh", "empty", "same", "partly", "transposed")
OUTPUTS += ("expanded", "wrong_dtype", "inference")
APART = ("step", "transposed", "channels_last")  # layouts whose columns may lie apart
UPSTREAMS = ("one", "one", "quarter", "random", "random", "zeros", "expanded")


@dataclass(frozen=True)
class Case:
    """One call, from which every tensor can be made again. `dims` are a row's; `layout` is (kind, number)."""

    op: str
    way: str
    dtype: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    layout: tuple[str, int] = ("contiguous", 1)
    values: str = "normal"
    direction: str = "forward"
    upstream: str = "one"
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def spec(self) -> OpSpec:
        return OPS[self.op]

    @property
    def cell(self) -> tuple[str, str, str]:
        return self.op, self.way, self.dtype

    @property
    def n_cols(self) -> int:
        return math.prod(self.shape[d] for d in self.dims) if self.shape else 1

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def changed(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        made = json.loads(text)
        for name in {"shape", "dims", "layout"} & made.keys():
            made[name] = tuple(made[name])
        return cls(**made)


@dataclass(frozen=True)
class Budget:
    """How large a case may be: elements of a tensor, rows of it, columns."""

    elements: int = 1 << 19
    rows: int = 1 << 17
    columns: int = 1 << 18
    strided: int = 1 << 18  # columns that do not lie next to each other
    widest: float = 0.06  # the part of the classes with 2^18 to 2^21 columns, which no other kernels take
    many_rows: float = 0.0  # the part of the cases of short rows with thousands of them, whatever `rows` says
    out_of_range: bool = False  # targets, which end a CUDA context
    large: float = 0.25  # the part of the cases that may have so many elements; others have 1/8 at most
    planes: int = 1 << 21  # elements in a quarter of the cases over another dimension: columns that are read twice
    wide: float = 1.0  # the part of the classes that may have so many columns; others have 1/16 at most
    # sets of options and shapes of a class. Each needs kernels of its own: more classes, which have other widths and
    # layouts, are worth more than more of these
    options: int = 1
    shapes: int = 2

    @classmethod
    def interpreted(cls) -> Budget:
        """A program costs milliseconds there, and so does a step of its loop, whatever their size."""
        return cls(
            1 << 13, 6, 1 << 17, strided=1 << 9, planes=1 << 13, widest=0.01, many_rows=0.02, out_of_range=True,
            large=1.0, wide=0.06, options=2, shapes=3,
        )  # fmt: skip


@dataclass(frozen=True)
class DrawClass:
    """What the cases of one class share."""

    op: str
    dtype: str
    n_cols: int
    layouts: tuple[tuple[str, int], ...]
    last: bool  # whether rows lie along the last dimension
    flags: tuple[int, ...]  # seeds of the options that kernels are compiled for
    shapes: tuple[int, ...]  # and of the shapes that they are compiled for
    seed: int


# widths at which a kernel's sizes change, and vocabularies
_BOUNDARIES: tuple[int, ...] = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    16,
    31,
    33,
    64,
    65,
    127,
    128,
    255,
    256,
    257,
    512,
    513,
    896,
    1000,
    1024,
    1025,
)
_BOUNDARIES += (2048, 2560, 3072, 4096, 4097, 6144, 7680, 8192, 8193, 10240, 12289, 14336, 16385, 24576, 32000)
_BOUNDARIES += (32768, 45056, 50257, 65536, 77824, 98304, 128256, 131072, 151936, 200019, 262144)


def draw_width(rng: Random, most: int) -> int:
    if rng.random() < 0.3:
        return rng.choice([n for n in _BOUNDARIES if n <= most])
    return min(most, max(1, round(math.exp(rng.uniform(0.0, math.log(most + 1))))))


def draw_class(op: str, dtype: str, seed: int, budget: Budget, widths: tuple[int, int] | None = None) -> DrawClass:
    rng = Random(f"{op} {dtype} {seed}")
    most = budget.columns if rng.random() < budget.wide else budget.columns >> 5
    n_cols = rng.randint(*widths) if widths else draw_width(rng, most)
    if not widths and rng.random() < budget.widest:
        n_cols = round(2 ** rng.uniform(18, 21))
        n_cols -= n_cols % 64 if rng.random() < 0.5 else 0  # other kernels take rows of whole vectors
    n_dims = rng.choice((2, 3, 4))
    chosen = tuple(layouts.draw_layout(rng, n_dims) for _ in range(3))
    if n_cols > budget.strided and all(kind in APART for kind, _ in chosen):  # no case of these is drawn
        chosen = (("contiguous", 1), *chosen[1:])
    last = OPS[op].rows == "last" or rng.random() < 0.75
    flags = tuple(rng.getrandbits(32) for _ in range(budget.options))
    return DrawClass(
        op, dtype, n_cols, chosen, last, flags, tuple(rng.getrandbits(32) for _ in range(budget.shapes)), seed
    )


def draw_cases(of: DrawClass, way: str, count: int, budget: Budget) -> Iterator[Case]:
    """`count` cases of a class, by one way in."""
    rng = Random(f"{of} {way}")
    while count > 0:
        case = _draw(of, way, rng, budget)
        if case is not None:
            count -= 1
            yield case


def _draw(of: DrawClass, way: str, rng: Random, budget: Budget) -> Case | None:
    spec, layout = OPS[of.op], rng.choice(of.layouts)
    several = spec.rows == "dims" and rng.random() < 0.3
    n_dims, shape, dims, at = _shape_of(of, way, layout[0] in APART, several, rng, budget)
    if n_dims and rng.random() < 0.01:  # nothing to compute
        shape[rng.randrange(n_dims)] = 0
        if spec.rows in ("classes", "last") and shape[at] == 0:
            return None
    numbers = Random(rng.getrandbits(32))
    options = spec.draw(Random(rng.choice(of.flags)), numbers, tuple(shape), dims, of.dtype)
    if way == "module":
        options.pop("dtype", None)
    if way in ("cuda_graph", "checkpoint"):  # both run the forward again
        options.pop("inplace_backward", None)
    if way == "vmap":
        options["batch"] = rng.choice((1, 2, 3))
        options["batch_dim"] = rng.randrange(len(shape) + 1)
    dtype = of.dtype if rng.random() < 0.96 or way not in ("function", "out") else rng.choice(OTHER_DTYPES)
    direction = rng.choice(_directions(way, options)) if dtype == of.dtype else "forward"
    if isinstance(options.get("weight"), dict) and options["weight"]["dtype"] not in ("float32", dtype):
        options["weight"]["dtype"] = dtype if dtype == "float64" else "float32"  # torch takes no others
    if way == "out":
        options["out"] = rng.choice(OUTPUTS)
        if options["out"] == "transposed":
            shape = [min(of.n_cols, 70)] * 2
            dims = (rng.randrange(2),)
            options = {**options, "dim": dims[0]}
    if way == "function" and rng.random() < 0.04:
        odd = _odd(spec, rng, tuple(shape), dims, budget)
        if odd:
            options["odd"], direction = odd, "forward"
            options.pop("ignored", None)  # another index to ignore would leave targets outside the classes
    kinds = values.KINDS if direction != "double" else values.FINITE
    kind = rng.choice((*values.FINITE, *kinds)) if rng.random() < 0.8 else "normal"
    if direction == "double" and kind in ("wide", "offset"):
        kind = "normal"
    if of.n_cols > budget.strided and (at != n_dims - 1 or layout[0] in APART):
        return None
    upstream = rng.choice(UPSTREAMS)
    return Case(
        of.op, way, dtype, tuple(shape), dims, layout, kind, direction, upstream, options, rng.getrandbits(31)
    )  # fmt: skip


def _shape_of(
    of: DrawClass, way: str, apart: bool, several: bool, rng: Random, budget: Budget
) -> tuple[int, list[int], tuple[int, ...], int]:
    """(dimensions, their sizes, those of a row, the one with n_cols).

    Rows that lie one after another may be of any number for one kernel. Others are compiled for what lies between their
    columns, and rows of `several` dimensions for their product: such sizes are the class's. `apart`: the layout's rows.
    Of columns beyond `budget.strided` only cases of the first kind are drawn.
    """
    spec = OPS[of.op]
    one_after_another = (of.last and spec.rows != "classes") or of.n_cols > budget.strided
    by_class = Random(rng.choice(of.shapes))
    draw = rng if one_after_another and not (apart or several) else by_class
    n_dims = draw.choice((0, 1, 2, 2, 2, 2, 3, 3, 3, 4, 5))
    if n_dims == 0 and (spec.rows in ("last", "classes") or way == "vmap" or draw.random() < 0.7):
        n_dims = 1
    # a class has few shapes: more of them are large and aligned, as some kernels take only those
    large = budget.large if draw is rng else max(0.5, budget.large)
    elements = budget.elements if large == 1.0 or draw.random() < large else budget.elements >> 3
    if draw is by_class and not of.last and draw.random() < 0.25:
        elements = budget.planes
    most = max(1, min(budget.rows, elements // of.n_cols))
    if of.n_cols <= 16 and rng.random() < budget.many_rows:
        n_dims, most = 2, 4096
    shape = _rows(draw, max(0, n_dims - 1), most)
    at = len(shape)
    if spec.rows == "classes":
        at = min(1, at)
    elif not of.last and shape:
        at = draw.randrange(at + 1)
    if draw is by_class and at < len(shape):
        if draw.random() < 0.5:
            shape[:at] = [1] * at
            shape[-1] = max(1, most // math.prod(shape[:-1]))
        if draw.random() < 0.5:
            shape[at:] = [n - n % 16 or n for n in shape[at:]]
    if not (one_after_another or apart or several):  # what lies before is each case's own
        shape[:at] = _rows(rng, at, max(1, most // math.prod(shape[at:])))
    if draw.random() < 0.2:  # dimensions of size 1 have strides of their own
        shape = [min(draw.randint(2, 6), most), *(1 for _ in shape[1:])] if shape else shape
    if n_dims:
        shape.insert(at, of.n_cols)
    dims = (at,) if n_dims else (0,)
    return n_dims, shape, tuple(sorted({at, draw.randrange(n_dims)})) if several and n_dims > 1 else dims, at


def _odd(
    spec: OpSpec, rng: Random, shape: tuple[int, ...], dims: tuple[int, ...], budget: Budget
) -> dict[str, Any] | None:
    """An argument that torch refuses, or takes in a way of its own."""
    if spec.rows in ("dim", "dims"):
        return {"dim": rng.choice((len(shape) + 1, -len(shape) - 2, 1.0, None, True, "a"))}
    if spec.rows != "classes":
        return None
    odd: list[dict[str, Any]] = [{"ignore_index": rng.choice((1.0, None, "a", True))}, {"reduction": "average"}]
    odd += [{"label_smoothing": rng.choice((2.0, -0.1))}]
    # torch takes uint8 on a CPU and for logits of two dimensions, ours everywhere
    kinds = ("int32", "uint8" if len(shape) <= 2 else "int32", "int16", "bool")
    odd += [{"target_dtype": rng.choice(kinds)}] if shape[dims[0]] < 256 else []
    odd += [{"target_shift": rng.choice((shape[dims[0]], -shape[dims[0]] - 1))}] if budget.out_of_range else []
    return rng.choice(odd)


def _rows(rng: Random, n_dims: int, most: int) -> list[int]:
    sizes = []
    for left in range(n_dims, 0, -1):
        n = min(most, max(1, round(math.exp(rng.uniform(0.0, math.log(most + 1) / (1 if left == 1 else 2))))))
        sizes.append(n)
        most = max(1, most // n)
    rng.shuffle(sizes)
    return sizes


def _directions(way: str, options: dict[str, Any]) -> tuple[str, ...]:
    if way == "out":
        return ("forward",)
    if way == "checkpoint":
        return ("gradient",)
    if options.get("inplace_backward"):
        return ("gradient", "forward")
    if way in ("compile", "cuda_graph", "patch", "vmap"):
        return ("forward", "gradient", "gradient")
    return ("forward", "forward", "gradient", "gradient", "gradient", "double")
