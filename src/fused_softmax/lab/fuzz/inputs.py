"""Makes tensors and upstream gradients of a case, on the CPU first, so that devices hold the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .draw import Case
from .layouts import Placed, onto, place, place_output
from .values import values

# options that say how a call is made; no function takes them
_OF_THE_CALL = ("batch", "batch_dim", "out", "odd")


@dataclass
class Inputs:
    """x and the arguments of a call, and every buffer that they lie in."""

    x: Tensor
    arguments: dict[str, Any]
    placed: dict[str, Placed]
    out: Placed | None = None
    batch_dim: int | None = None  # where vmap finds its items in x
    in_dims: dict[str, int | None] = field(default_factory=dict)

    @property
    def differentiable(self) -> dict[str, Tensor]:
        """The tensors that get a gradient, x first."""
        needed = {name: t for name, t in self.arguments.items() if isinstance(t, Tensor) and t.requires_grad}
        return {"x": self.x, **needed}


def make(case: Case, device: str, *, other_values: bool = False) -> Inputs:
    """The tensors of a case; `other_values`: other numbers of the same kind, for a CUDA graph's capture."""
    spec, options = case.spec, {k: v for k, v in case.options.items() if k not in _OF_THE_CALL}
    g = torch.Generator().manual_seed(case.seed)
    batch = case.options.get("batch")
    dtype = getattr(torch, case.dtype)
    shape = case.shape if batch is None else (batch, *case.shape)
    if other_values:
        torch.rand(7, generator=g)
    dense = values(case.values, shape, case.dims[0] + (batch is not None), dtype, g)
    placed = {"x": place(dense, case.layout, device)}
    x = placed["x"].tensor
    batch_dim = None
    if batch is not None:
        batch_dim = case.options.get("batch_dim", 0)
        x = x.movedim(0, batch_dim)
    g.manual_seed(case.seed + 1)
    items = [spec.arguments(options, case.shape, case.dims, dtype, g) for _ in range(batch or 1)]
    made, in_dims = {}, {}
    for name, value in items[0].items():
        if isinstance(value, Tensor):
            of_each = batch is not None and name in spec.by_row
            layout = _layout_of(case, name)
            placed[name] = place(torch.stack([item[name] for item in items]) if of_each else value, layout, device)
            value, in_dims[name] = placed[name].tensor, 0 if of_each else None
        made[name] = value
    inputs = Inputs(x, made, placed, batch_dim=batch_dim, in_dims=in_dims)
    if case.direction != "forward":
        inputs.x = x.detach().requires_grad_(dtype.is_floating_point)
        for name in spec.differentiable:
            if isinstance(case.options.get(name), dict) and case.options[name].get("gradient"):
                made[name] = made[name].detach().requires_grad_()
    _make_odd(case, inputs)
    if case.way == "out":
        inputs.out = _output(case, inputs, device)
    return inputs


def _layout_of(case: Case, name: str) -> tuple[str, int]:
    given = case.options.get(name)
    return (given.get("layout", "contiguous"), 3) if isinstance(given, dict) else ("contiguous", 1)


def _make_odd(case: Case, inputs: Inputs) -> None:
    """Arguments that torch refuses, or takes in a way of its own."""
    for name, value in case.options.get("odd", {}).items():
        if name == "target_dtype":
            inputs.arguments["target"] = inputs.arguments["target"].to(getattr(torch, value))
        elif name == "target_shift":
            inputs.arguments["target"] = inputs.arguments["target"] + value
        else:
            inputs.arguments[name] = value


def _output(case: Case, inputs: Inputs, device: str) -> Placed:
    """The tensor given as out=; where it shares x's memory it is guarded by x's buffer."""
    kind, x = case.options.get("out", "fresh"), inputs.x
    shape, dtype = result_shape(case), x.dtype
    if "dtype" in case.options:
        dtype = getattr(torch, case.options["dtype"])
    of_x = inputs.placed["x"]
    if case.layout[0] == "overlapping" and kind in ("same", "transposed"):
        kind = "fresh"  # elements of an output that share memory have no defined value, and torch sees only stride 0
    if kind == "same" and shape == x.shape:
        return Placed(x.detach(), of_x.buffer, of_x.before)
    if kind == "transposed" and x.dim() > 1 and shape == x.shape and shape[0] == shape[-1]:
        return Placed(x.detach().transpose(0, -1), of_x.buffer, of_x.before)
    if kind == "partly" and shape == x.shape and x.is_contiguous() and x.numel() > 1:
        # starts one element later: the guard behind x is long enough
        return Placed(x.detach().as_strided(x.shape, x.stride(), x.storage_offset() + 1), of_x.buffer, of_x.before)
    if kind == "wrong_dtype":
        dtype = torch.float64 if dtype != torch.float64 else torch.float32
    if kind == "empty":  # its memory will be torch's: no guard
        made = torch.empty(0, dtype=dtype, device=device)
        return Placed(made, of_x.buffer, of_x.before)
    with torch.inference_mode(kind == "inference"):
        placed = place_output(shape, dtype, case.layout, device)
    if kind == "expanded" and len(shape) > 0 and shape[0] > 1:
        return Placed(placed.tensor[:1].expand(shape), placed.buffer, placed.before)
    return placed


def result_shape(case: Case) -> tuple[int, ...]:
    """Of the first output."""
    if case.spec.rows != "dims":
        return case.shape
    if case.options.get("keepdim"):
        return tuple(1 if d in case.dims else n for d, n in enumerate(case.shape))
    return tuple(n for d, n in enumerate(case.shape) if d not in case.dims)


_CONSTANT = {"one": 1.0, "quarter": 0.25, "zeros": 0.0}  # exact in every dtype


def upstream_of(case: Case, device: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Upstream gradients for outputs, the same for ours, torch's and the reference's."""

    # kept, since a CUDA graph's capture can make no tensor from the CPU
    known: dict[tuple[Any, ...], Tensor] = {}

    def draw(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {}
        for position, (name, t) in enumerate(outputs.items()):
            key = (name, t.shape, t.dtype)
            if key in known:
                made[name] = known[key]
                continue
            g = torch.Generator().manual_seed(case.seed + 7 * position + len(name))
            kind = case.upstream if name != "probe" else "random"
            low = t.dtype if t.dtype != torch.float64 or case.dtype == "float64" else _low(case, name)
            if kind in _CONSTANT:
                value = torch.full(t.shape, _CONSTANT[kind], dtype=t.dtype, device=device)
            elif kind == "random":
                value = onto(torch.randn(t.shape, generator=g).to(low), device).to(t.dtype)
            else:
                value = torch.randn((), generator=g).to(low).to(device).expand(t.shape).to(t.dtype)
            made[name] = known[key] = value
        return made

    return draw


def _low(case: Case, name: str) -> torch.dtype:
    """The dtype that ours and torch's have where the reference has float64."""
    if case.spec.full_outputs or case.spec.rows == "dims" or name == "probe":
        if case.way == "autocast" and case.spec.autocasts:
            return torch.float32 if name != "probe" else getattr(torch, case.dtype)
        return getattr(torch, case.options.get("dtype", case.dtype) if name != "probe" else case.dtype)
    return torch.float32
