"""A failing case as a program of at most ten lines, in plain torch and fused_softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fused_softmax.lab import torch_ways

from .draw import Case
from .inputs import make

MOST_ELEMENTS = 48  # written out; more are made again by the fuzzer


def program(case: Case) -> list[str]:
    """Lines that show both results; where the tensors are too long to be written out, they come from the case."""
    inputs = make(case, "cpu")
    lines = ["import torch, fused_softmax as fs", "inf, nan = float('inf'), float('nan')"]
    if _is_written(case):
        lines.insert(1, "from fused_softmax.lab import torch_ways")
    tensors = {"x": inputs.x, **{k: v for k, v in inputs.arguments.items() if isinstance(v, Tensor)}}
    if case.way not in _CALLS or any(len(_storage(t)) > MOST_ELEMENTS for t in tensors.values() if t is not None):
        return [
            "from fused_softmax.lab.fuzz import replay",
            f"replay('{case.to_json()}')",
        ]
    lines += [f"{name} = {_written(t)}" for name, t in tensors.items()]
    given = ", ".join(f"{k}={k if k in tensors else _value(v)}" for k, v in inputs.arguments.items())
    ours = _CALLS[case.way].format(op=case.op, given=given)
    if case.direction == "forward":
        return [*lines, f"print({ours})", f"print({_torch_way(case, given)})"]
    lines.append(f"for y in ({ours}, {_torch_way(case, given)}):")
    upstream = {"one": "y.sum()", "quarter": "(y * 0.25).sum()", "zeros": "(y * 0).sum()"}.get(case.upstream)
    upstream = upstream or "(y * torch.arange(1.0, y.numel() + 1).view(y.shape)).sum()"
    return [*lines, f"    y = y[0] if isinstance(y, tuple) else y; print(torch.autograd.grad({upstream}, x)[0])"]


_CALLS = {
    "function": "fs.{op}(x, {given})",
    "checkpoint": "torch.utils.checkpoint.checkpoint(fs.{op}, x, use_reentrant=False, {given})",
    "operator": "torch.ops.fused_softmax.{op}(x, {given})",
    "vmap": "torch.vmap(lambda r: fs.{op}(r, {given}))(x)",
}


def _torch_way(case: Case, given: str) -> str:
    if case.way == "vmap":
        return f"torch.stack([{_torch_way(case.changed(way='function'), given).replace('(x,', '(r,')} for r in x])"
    module, function = ("torch_ways" if _is_written(case) else "torch"), case.spec.torch_way
    return f"{module}.{function.__name__}(x, {given})"


def _is_written(case: Case) -> bool:
    """Whether torch has no function for the op."""
    return case.spec.torch_way.__module__ == torch_ways.__name__


def _storage(t: Tensor) -> list[Any]:
    if t.numel() == 0:
        return []
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.detach().as_strided((span,), (1,), t.storage_offset()).tolist()


def _written(t: Tensor) -> str:
    kind = f"torch.{str(t.dtype).split('.')[1]}"
    need = ".requires_grad_()" if t.requires_grad else ""
    if t.is_contiguous() or t.numel() == 0:
        listed = t.detach().reshape(-1).tolist()
        return f"torch.tensor({_list(listed)}, dtype={kind}).view({tuple(t.shape)}){need}"
    return f"torch.tensor({_list(_storage(t))}, dtype={kind}).as_strided({tuple(t.shape)}, {t.stride()}){need}"


def _list(values: list[Any]) -> str:
    return "[" + ", ".join(_value(v) for v in values) + "]"


def _value(v: Any) -> str:
    if isinstance(v, torch.dtype):
        return str(v)
    if isinstance(v, float) and not math.isfinite(v):
        return "nan" if v != v else ("inf" if v > 0 else "-inf")
    return repr(v)
