"""The rules for arguments, and their errors, which are raised before anything is launched or written.

The exception types are torch's. A number is anything that torch accepts as an int or a float: Python's, NumPy's, and
tensors of one element that need no gradient. The functions call these only for arguments of an unusual type, so a usual
call pays for one type check for each argument.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch.options import CrossEntropy
from ..launch.torch_private import check_reduction

NAMESPACE = __package__.split(".")[0]  # the package's own name, so that two copies can live in one process
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def stands_in(*arguments: Any) -> bool:
    """Whether one of them is no tensor and has a `__torch_function__`, as torch.fx's proxies are: it takes the call."""
    return any(not isinstance(a, Tensor) and hasattr(type(a), "__torch_function__") for a in arguments)


def is_dtensor(t: Any) -> bool:
    """Whether t is a torch.distributed.tensor.DTensor, which exists only where its module was imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def expect_local(function: str, **tensors: Tensor | None) -> None:
    """TypeError for a DTensor: each rank has rows of its own."""
    for name, t in tensors.items():
        if t is not None and is_dtensor(t):
            raise TypeError(f"{function}(): {name} must be this rank's own tensor, not a DTensor; pass .to_local()")


def same_size(m: int, n: int) -> bool:
    """Whether two sizes are equal. Under torch.compile sizes that only the run knows count as equal, and the run raises
    an error where they are not, as it does for torch's own functions."""
    if not torch.compiler.is_compiling():
        return m == n
    from torch.fx.experimental import symbolic_shapes

    if not hasattr(symbolic_shapes, "guard_or_true"):  # torch 2.8
        return m == n
    if not symbolic_shapes.guard_or_true(m == n):
        return False
    torch._check(m == n)
    return True


def same_shape(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes are equal, by `same_size`."""
    if not torch.compiler.is_compiling():
        return a == b
    return len(a) == len(b) and all(same_size(m, n) for m, n in zip(a, b, strict=True))


def broadcasts(m: int, n: int) -> bool:
    """Whether a size m broadcasts to n. As in torch, a size that only the run knows is taken for n."""
    if not torch.compiler.is_compiling():
        return m == n or m == 1
    from torch.fx.experimental import symbolic_shapes

    known = getattr(symbolic_shapes, "guard_or_false", bool)  # torch 2.8
    return known(m == 1) or same_size(m, n)


def expect_tensors(function: str, **arguments: Any) -> None:
    """TypeError for an argument that is no tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{function}(): {name} must be a Tensor, not {type(value).__name__}")


def expect_floating(function: str, name: str, x: Tensor) -> None:
    """NotImplementedError, as torch.softmax's, for integers, bools, complex numbers and 8-bit floats."""
    if x.dtype not in FLOATING:
        raise NotImplementedError(
            f"{function}() is not implemented for {x.dtype}: {name} must be float16, bfloat16, float32 or float64; "
            f"cast it first, as in {name}.float()"
        )


def expect_flag(function: str, name: str, value: Any) -> None:
    """TypeError for an argument that is neither True nor False."""
    if type(value) is not bool:
        raise TypeError(f"{function}(): {name} must be True or False, not {value!r}")


def integer(function: str, name: str, value: Any) -> int:
    """value as an int of 64 bits: TypeError if it is no int, or a bool; ValueError if it is larger."""
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    is_bool = isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype is torch.bool)
    try:
        found = None if is_bool else operator.index(value)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"{function}(): {name} must be an int, not {value!r}")
    if not -(2**63) <= found < 2**63:
        raise ValueError(f"{function}(): {name} must fit in 64 bits, {found} does not")
    return found


def real(function: str, name: str, value: Any) -> float:
    """value as a float: TypeError if it is no number, a bool, or a tensor that needs a gradient."""
    if isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]
    if isinstance(value, Tensor):
        takes = (
            value.dim() == 0 and not value.requires_grad and not value.is_complex() and value.dtype is not torch.bool
        )
    else:
        takes = hasattr(type(value), "__float__") and not isinstance(value, bool)
    if not takes:
        given = repr(value)
        if isinstance(value, Tensor):
            needs = " that requires grad: it gets no gradient, detach() it" if value.requires_grad else ""
            given = f"a Tensor of {value.dtype} and shape {tuple(value.shape)}{needs}"
        raise TypeError(f"{function}(): {name} must be a number, not {given}")
    return float(value)


def finite(function: str, name: str, value: Any) -> float:
    """`real`, and ValueError for NaN and the infinities."""
    found = real(function, name, value)
    if not -math.inf < found < math.inf:  # torch.compile cannot trace math.isfinite of a dynamic number
        raise ValueError(f"{function}(): {name} must be finite, not {found}")
    return found


def other_device_error(name: str, t: Tensor, x_name: str, x: Tensor) -> RuntimeError:
    """The error, in torch's words, for t on another device than x, whose kernel would take t's address."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but {name} is on {t.device} and {x_name} is on {x.device}"
    )


def expect_layout(name: str, t: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> None:
    """RuntimeError where t's device or shape would have x's kernel read outside of t; None is as it should be.

    The functions that fold tensors see to both; an exported graph may be called with tensors on any device.
    """
    if t is None:
        return
    if t.device != x.device:
        raise other_device_error(name, t, "x", x)
    if t.shape != shape:
        raise RuntimeError(f"{name} must have shape {tuple(shape)}, not {tuple(t.shape)}")


def expect_weight_facts(op: CrossEntropy, x: Tensor) -> None:
    """RuntimeError where a smoothed loss with weights has no `weight_facts`, or others than a kernel reads."""
    expect_layout("weight_facts", op.weight_facts, x, (2,))
    if op.weight is None or not op.weight.numel() or not op.smoothing:
        return
    if op.weight_facts is None or op.weight_facts.dtype != op.weight.dtype:
        raise RuntimeError(f"weights with smoothing need weight_facts, two numbers of {op.weight.dtype}")


def expect_token_ids(function: str, ids: Tensor, x_name: str, x: Tensor) -> bool:
    """Whether ids are one for each row of x, and not several: (...,), not (..., n_picks), for x (..., n).

    ValueError where they are neither, TypeError where they are no integers, and RuntimeError on another device.
    """
    batch, one = x.shape[:-1], ids.dim() == x.dim() - 1
    of_rows = ids.shape if one else ids.shape[:-1]
    if not x.dim() or not (one or ids.dim() == x.dim()) or not same_shape(of_rows, batch):
        raise ValueError(
            f"{function}(): token_ids {tuple(ids.shape)} must be {tuple(batch)} or have one dimension more, for "
            f"{x_name} {tuple(x.shape)}"
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise TypeError(f"{function}(): token_ids must be integers, not {ids.dtype}")
    if ids.device != x.device:
        raise other_device_error("token_ids", ids, x_name, x)
    return one


# --- losses -----------------------------------------------------------------------------------------------------------

REDUCTIONS = ("mean", "sum", "none")


class LossOptions(NamedTuple):
    """What a cross-entropy is told next to its tensors, checked."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    softcap: float | None
    z_loss: float


def loss_options(
    function: str, ignore_index: Any, reduction: Any, label_smoothing: Any, softcap: Any, z_loss: Any
) -> LossOptions:
    """The options of a cross-entropy: ValueError for a reduction that there is not, a softcap that is not positive and
    finite, and an infinite or NaN z_loss; TypeError for what is no number."""
    if type(ignore_index) is not int or not -(2**63) <= ignore_index < 2**63:
        ignore_index = integer(function, "ignore_index", ignore_index)
    if type(label_smoothing) is not float:
        # torch takes a bool here
        smoothing = int(label_smoothing) if label_smoothing is True or label_smoothing is False else label_smoothing
        label_smoothing = real(function, "label_smoothing", smoothing)
    if softcap is not None:
        softcap = finite(function, "softcap", softcap)
        if softcap <= 0.0:
            raise ValueError(f"{function}(): softcap must be positive, or None for no cap, not {softcap}")
    if type(z_loss) is not float or z_loss:
        z_loss = finite(function, "z_loss", z_loss)
    if reduction not in REDUCTIONS:
        check_reduction(reduction)  # raises, or warns that its name for the mean is old
        reduction = "mean"
    return LossOptions(ignore_index, reduction, label_smoothing, softcap, z_loss)


def softcap_of(softcap: float | None, logits: torch.dtype) -> float | None:
    """The softcap as the logits' arithmetic holds it: a normal number, or none where it is above all numbers."""
    if softcap is None:
        return None
    limits = torch.finfo(torch.float64 if logits is torch.float64 else torch.float32)
    return None if softcap > limits.max else max(softcap, limits.tiny)


def expect_targets(
    function: str, target: Tensor, weight: Tensor | None, input: Tensor, n_cols: int, options: LossOptions
) -> tuple[Tensor, Tensor | None]:
    """(targets (n_rows,) int64, the classes' weights float32), as kernels read.

    input: (..., H), whose rows the targets are for. The errors are torch.nn.functional.cross_entropy's.
    """
    if target.dtype is not torch.int64 and target.dtype is not torch.uint8:
        raise RuntimeError(f"{function}(): target must hold int64 class indices, not {target.dtype}; use target.long()")
    if not same_shape(target.shape, input.shape[:-1]):
        raise ValueError(
            f"{function}(): target {tuple(target.shape)} must have the shape {tuple(input.shape[:-1])} of input's rows"
        )
    for name, t in (("target", target), ("weight", weight)):
        if t is not None and t.device != input.device:
            raise other_device_error(name, t, "input", input)
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {options.label_smoothing}")
    flat = target.reshape(-1).long().contiguous()
    if weight is None:
        return flat, None
    if weight.shape != (n_cols,):
        raise RuntimeError(
            f"{function}(): weight must have shape ({n_cols},), one for each class, not {tuple(weight.shape)}"
        )
    if weight.dtype is not torch.float32 and weight.dtype is not input.dtype:
        raise RuntimeError(f"{function}(): weight must be torch.float32, or {input.dtype} as input, not {weight.dtype}")
    if weight.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{function}(): the derivative for 'weight' is not implemented; weight.detach() it")
    return flat, weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).contiguous()


def denominator_of(num_items: int | Tensor | None, like: Tensor) -> Tensor | None:
    """The number of items as a tensor on the device of `like`: a scalar or (1,), of the dtype of the loss."""
    if num_items is None:
        return None
    # not torch's default dtype, which may have no 70,000
    dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
    if isinstance(num_items, Tensor):
        return num_items.to(like.device, dtype)
    return torch.full((1,), float(num_items), dtype=dtype, device=like.device)


def least_positive(dtype: torch.dtype) -> float:
    """The least positive number of the dtype that `dtype` is computed in.

    A positive factor that would round to 0 becomes this: 0 times -inf would make NaN of hidden columns.
    """
    return 5e-324 if dtype is torch.float64 else 2.0**-149


def scale_of(function: str, temperature: float | Tensor, batch: torch.Size, logits: Tensor) -> float | Tensor:
    """1/temperature, the factor of the logits: a number, or a tensor of shape `batch` in float32, or in float64.

    logits: has their dtype and device. Only float64 gives a float64 tensor.
    """
    if not isinstance(temperature, Tensor):
        if type(temperature) is not float:
            temperature = real(function, "temperature", temperature)
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, not {temperature}")
        return max(1.0 / temperature, least_positive(logits.dtype))
    if temperature.dtype is torch.bool or temperature.is_complex():
        raise TypeError(f"temperature must hold real numbers, not {temperature.dtype}; temperature.float() makes them")
    if temperature.device != logits.device and not (temperature.dim() == 0 and temperature.is_cpu):
        raise other_device_error("temperature", temperature, "logits", logits)
    dtype = logits.dtype if logits.dtype is torch.float64 else torch.float32
    return temperature.to(logits.device, dtype).expand(batch).reciprocal()


def kernels_take_loss(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float, n_cols: int
) -> bool:
    """Whether a loss's kernels take these shapes and options; torch's own function raises the errors for others."""
    shape = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else torch.Size(())
    return (
        logits.dim() > 0
        and target.dtype is torch.int64
        and same_shape(target.shape, shape)
        and target.device == logits.device
        and reduction in REDUCTIONS
        and 0.0 <= label_smoothing <= 1.0
        and (weight is None or _weighs(weight, logits, n_cols))
    )


def _weighs(weight: Tensor, logits: Tensor, n_cols: int) -> bool:
    return (
        weight.shape == (n_cols,)
        and weight.device == logits.device
        and weight.dtype in (torch.float32, logits.dtype)
        and not weight.requires_grad
    )
