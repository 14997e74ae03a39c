"""What a drawn tensor holds: ordinary numbers, and those at which a softmax goes wrong."""

from __future__ import annotations

import torch
from torch import Tensor

# kinds whose results are finite: these alone have a gradient of the gradient
FINITE = ("normal", "logits", "wide", "offset", "ties", "constant")
SPECIAL = (
    "minus_infinity", "minus_infinity_rows", "minus_infinity_chunk", "plus_infinity", "nan", "subnormal", "near_max",
    "far_apart",
)  # fmt: skip
KINDS = (*FINITE, *SPECIAL)


def values(kind: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """A dense CPU tensor of this kind; `dim` is where its rows lie."""
    x = torch.randn(shape, generator=g)
    if not dtype.is_floating_point:
        return x.mul(10).to(dtype)
    largest = torch.finfo(dtype).max
    x = x.double() if dtype == torch.float64 else x  # which holds its largest number
    if kind == "logits":
        x = x * 3 + 12 * (torch.rand(shape, generator=g) < 0.01)
    elif kind == "wide":
        x *= 1000.0
    elif kind == "offset":
        shift = float(10 ** (3 + 3 * torch.rand((), generator=g)))
        x += shift if dtype != torch.float16 else shift / 20
    elif kind == "ties":
        x = torch.randint(0, 3, shape, generator=g).float()
    elif kind == "constant":
        x = x.mean(dim, keepdim=True).expand(shape) if x.numel() and x.dim() else x
    elif kind == "subnormal":
        x *= torch.finfo(dtype).smallest_normal * (1.0 if dtype != torch.float64 else 0.0)
    elif kind == "near_max":
        x = largest * (1 - torch.rand(shape, generator=g) * 0.01) * x.sign()
    elif kind == "far_apart":
        x = torch.where(torch.rand(shape, generator=g) < 0.3, -largest, x)
    elif kind in ("minus_infinity", "plus_infinity", "nan"):
        odd = {"minus_infinity": -float("inf"), "plus_infinity": float("inf"), "nan": float("nan")}[kind]
        # a few for each tensor: rows without any are to be seen next to rows that have one
        share = 0.5 if kind == "minus_infinity" else 2.0 / max(2, x.numel())
        x = x.masked_fill(torch.rand(shape, generator=g) < share, odd)
    elif kind == "minus_infinity_rows" and x.dim():
        x = x.masked_fill(
            torch.rand([1 if d == dim else n for d, n in enumerate(shape)], generator=g) < 0.5, -torch.inf
        )
    elif kind == "minus_infinity_chunk" and x.dim() and x.numel():
        n = shape[dim]
        first, last = sorted(int(i) for i in torch.randint(0, n + 1, (2,), generator=g))
        x.narrow(dim, first, last - first).fill_(-torch.inf)
    return x.to(dtype)
