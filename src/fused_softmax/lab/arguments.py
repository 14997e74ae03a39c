"""Draws each op's options, and makes of them the arguments that its three functions take.

draw_*(flags, numbers, shape, dims, dtype): options as JSON holds them. `flags` chooses what kernels are compiled for,
`numbers` chooses the rest, so that many draws can share kernels. The op's function of that name makes the arguments:
(options, shape, dims, dtype, generator) -> tensors on the CPU, and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

Options = dict[str, Any]
HALVES = ("float16", "bfloat16")
MASK_DTYPES = ("float16", "bfloat16", "float32")
# what a mask hides
HIDDEN = ("random", "most", "none", "rows", "all", "prefix", "suffix")


def draw_softmax(flags: Random, numbers: Random, shape: Sequence[int], dims: Sequence[int], dtype: str) -> Options:
    options: Options = {"dim": dims[0] - (len(shape) or 1) * (numbers.random() < 0.5)}
    if flags.random() < 0.15:
        options["dtype"] = flags.choice(("float32", "float32", "float32", "float16", "bfloat16", "float64"))
    return options


def softmax(options: Options, *_: Any) -> dict[str, Any]:
    made = dict(options)
    if "dtype" in made:
        made["dtype"] = getattr(torch, made["dtype"])
    return made


def draw_logsumexp(flags: Random, numbers: Random, shape: Sequence[int], dims: Sequence[int], dtype: str) -> Options:
    signed = [d - (len(shape) or 1) * (numbers.random() < 0.5) for d in dims]
    numbers.shuffle(signed)
    options: Options = {"dim": signed[0] if len(signed) == 1 and numbers.random() < 0.7 else signed}
    if numbers.random() < 0.4:
        options["keepdim"] = True
    return options


def logsumexp(options: Options, *_: Any) -> dict[str, Any]:
    made = dict(options)
    made["dim"] = tuple(made["dim"]) if isinstance(made["dim"], list) else made["dim"]
    return made


def draw_masked_softmax(
    flags: Random, numbers: Random, shape: Sequence[int], dims: Sequence[int], dtype: str
) -> Options:
    options: Options = {}
    kind = flags.choice(("none", "bool", "bool", "bool", *MASK_DTYPES, dtype if dtype in MASK_DTYPES else "float32"))
    last = flags.random() < 0.7  # whether the mask has a value for each column
    if kind != "none":
        kept = [numbers.random() < 0.5 for _ in shape]
        if shape:
            kept[-1] = last
        mask_shape = [n if k else 1 for n, k in zip(shape, kept, strict=True)]
        while mask_shape and mask_shape[0] == 1 and numbers.random() < 0.5:
            mask_shape.pop(0)
        layout = flags.choice(("contiguous", "contiguous", "offset", "padded", "step"))
        options["mask"] = {"dtype": kind, "shape": mask_shape, "hidden": numbers.choice(HIDDEN), "layout": layout}
        if kind != "bool" and numbers.random() < 0.3:
            options["mask"]["gradient"] = True
    if len(shape) > 1 and flags.random() < 0.4:
        options["causal"] = True
    if flags.random() < 0.4:
        options["fully_masked"] = "zero"
    if numbers.random() < 0.6:
        options["scale"] = numbers.choice((0.125, 0.3, 2.0, 1e-3, 64**-0.5, 1e-30, 1e-50, 50.0, -0.5))
    if "causal" in options and flags.random() < 0.35:  # causal rows without a mask have kernels of their own
        options.pop("mask", None)
    return options


def masked_softmax(
    options: Options, shape: Sequence[int], dims: Sequence[int], dtype: torch.dtype, g: torch.Generator
) -> dict[str, Any]:
    made = dict(options)
    if "mask" in made:
        made["mask"] = mask_of(made["mask"], g)
    return made


def mask_of(spec: Options, g: torch.Generator) -> Tensor:
    shape = spec["shape"]
    n = shape[-1] if shape else 1
    hidden = {"random": 0.4, "most": 0.97, "none": 0.0, "all": 1.0}.get(spec["hidden"], 0.0)
    keep = torch.rand(shape, generator=g) >= hidden
    if spec["hidden"] == "rows":  # some rows whole
        keep &= torch.rand((*shape[:-1], 1) if shape else (), generator=g) >= 0.5
    elif spec["hidden"] in ("prefix", "suffix"):
        at = torch.randint(0, n + 1, (*shape[:-1], 1) if shape else (), generator=g)
        column = torch.arange(n) if shape else torch.zeros((), dtype=torch.int64)
        keep &= column < at if spec["hidden"] == "prefix" else column >= at
    if spec["dtype"] == "bool":
        return keep
    bias = torch.randn(shape, generator=g).mul(2.0)
    return bias.masked_fill(~keep, -float("inf")).to(getattr(torch, spec["dtype"]))


def draw_cross_entropy(
    flags: Random, numbers: Random, shape: Sequence[int], dims: Sequence[int], dtype: str
) -> Options:
    options: Options = {}
    if (reduction := flags.choice(("mean", "mean", "sum", "none"))) != "mean":
        options["reduction"] = reduction
    if flags.random() < 0.35:
        kind = numbers.choice(("random", "random", "some_zeros", "zeros"))
        options["weight"] = {"kind": kind, "dtype": flags.choice(("float32", dtype))}
    if flags.random() < 0.35:
        options["label_smoothing"] = numbers.choice((0.1, 0.1, 0.5, 1.0, 1e-3))
    if flags.random() < 0.3:
        options["softcap"] = numbers.choice((30.0, 50.0, 1.0, 1e-2, 1e4, 1e6, 1e7))
    if flags.random() < 0.3:
        options["z_loss"] = numbers.choice((1e-4, 1e-2, 1.0))
    if flags.random() < 0.15:
        options["inplace_backward"] = True
    if numbers.random() < 0.5:
        options["ignored"] = numbers.choice(("some", "some", "all"))
        # torch's kernel for logits of more than two dimensions keeps the lower 32 bits of a target on a GPU
        large = 1 << 40 if len(shape) <= 2 else 1 << 30
        options["ignore_index"] = numbers.choice((-100, -1, 0, shape[dims[0]] - 1, large))
    return options


def cross_entropy(
    options: Options, shape: Sequence[int], dims: Sequence[int], dtype: torch.dtype, g: torch.Generator
) -> dict[str, Any]:
    made = dict(options)
    n = shape[dims[0]]
    of_rows = [size for d, size in enumerate(shape) if d != dims[0]]
    target = torch.randint(0, max(1, n), of_rows, generator=g)
    if n > 1 and g.initial_seed() % 3 == 0:
        target = torch.where(torch.rand(of_rows, generator=g) < 0.5, target, (n - 1) * (target % 2))
    ignored = made.pop("ignored", None)
    if ignored is not None:
        chosen = torch.rand(of_rows, generator=g) < (1.0 if ignored == "all" else 0.4)
        target = target.masked_fill(chosen, made["ignore_index"])
    made["target"] = target
    if "weight" in made:
        kind = made["weight"]["kind"]
        weight = torch.rand(n, generator=g) + 0.25
        if kind != "random":
            weight *= torch.rand(n, generator=g) >= (1.0 if kind == "zeros" else 0.5)
        made["weight"] = weight.to(getattr(torch, made["weight"]["dtype"]))
    return made


def draw_token_logprobs(
    flags: Random, numbers: Random, shape: Sequence[int], dims: Sequence[int], dtype: str
) -> Options:
    options: Options = {}
    picks = flags.choice((None, None, None, 1, 2, 3, 8))
    if picks is not None:
        options["picks"] = picks
    for name in ("return_entropy", "return_logsumexp"):
        if flags.random() < 0.4:
            options[name] = True
    scaled = flags.choice(("no", "no", "number", "rows"))
    if scaled == "number":
        options["temperature"] = numbers.choice((0.7, 2.0, 0.05, 1e3, "inf", 1.5))
    elif scaled == "rows":
        options["temperature_of_rows"] = numbers.choice(("all", "broadcast", "number", "with_inf"))
    return options


def token_logprobs(
    options: Options, shape: Sequence[int], dims: Sequence[int], dtype: torch.dtype, g: torch.Generator
) -> dict[str, Any]:
    made = dict(options)
    picks = made.pop("picks", None)
    batch = tuple(shape[:-1])
    made["token_ids"] = torch.randint(0, shape[-1], batch if picks is None else (*batch, picks), generator=g)
    if made.get("temperature") == "inf":
        made["temperature"] = float("inf")
    kind = made.pop("temperature_of_rows", None)
    if kind is not None:
        size: tuple[int, ...] = () if kind == "number" else tuple(1 if kind == "broadcast" else n for n in batch)
        temperature = torch.rand(size, generator=g) * 2 + 0.25
        if kind == "with_inf":
            temperature = torch.where(torch.rand(size, generator=g) < 0.5, float("inf"), temperature)
        made["temperature"] = temperature
    return made
