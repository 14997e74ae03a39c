"""What a user calls: torch's signatures and torch's errors, then the kernels; and which path a tensor takes.

Our kernels take float16, bfloat16 and float32 on a GPU that Triton supports (or on the CPU, interpreted). All else
(float64, integers with their errors, subclasses, forward-mode AD, other devices, no Triton) is PyTorch's own, called
with the same arguments. A call that nothing but autograd watches goes to the rows directly; under torch.compile,
torch.func and dispatch modes it goes through the operators, which they understand.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import handle_torch_function

from . import eager, operators, row_losses, rows
from .arguments import FLOATING, stands_in
from .device import describe
from .gradients import RowSoftmax
from .launch import MAX_COLS, failure, problem_of
from .operators import fuses, is_plain, is_traced, refusal, refusal_while_compiling
from .outputs import is_its_own, may_write_while_reading
from .plan import plan as make_plan
from .problem import Device, Plan
from .torch_ops import torch_private
from .torch_ops.torch_private import forward_ad


@dataclass(frozen=True)
class Fallback:
    """No kernel of rows runs, and `why`: PyTorch's own does ("torch"), or the strided one, or none ("empty")."""

    why: str
    regime: str = "torch"


def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """softmax(x) = exp(x - max(x)) / sum(exp(x - max(x))) over `dim`: `torch.softmax`, at the speed of a copy.

    Args:
        input: any shape and strides; float16, bfloat16 and float32 are ours on a GPU, all else is torch's.
        dim: the dimension that sums to 1, in [-input.dim(), input.dim()).
        dtype: the input is cast to it first. float16 and bfloat16 to float32 costs no pass of its own.
        out: a tensor to write to, of the result's dtype; it is resized if its shape differs.

    Returns: a contiguous tensor of input's shape, in `dtype` or input's. Rows with +inf, NaN or nothing but -inf are
    NaN. Autograd keeps it, and nothing else; its gradient is one kernel too, and differentiable.

    Raises: IndexError for a dim out of range, TypeError for one that is no integer, NotImplementedError for integers
    without dtype=, RuntimeError for an `out` of another dtype.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.softmax.html

    >>> softmax(torch.tensor([2.0, 1.0, 0.1]))
    tensor([0.6590, 0.2424, 0.0986])
    """
    if dtype is None and out is None:
        result = eager.forward(input, dim, False)
        if result is not None:
            return result
        known = eager.known_but_for_its_gradient(input, dim, False)
        if known is not None:
            return RowSoftmax.apply(input, dim, input.dtype, False, known)
    return _forward(input, dim, dtype, out, False)


def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """log_softmax(x) = x - max(x) - log(sum(exp(x - max(x)))) over `dim`: `torch.log_softmax`, at the speed of a copy.

    Arguments, result and errors as `softmax`'s. -inf among finite values stays -inf.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.log_softmax.html

    >>> log_softmax(torch.tensor([2.0, 1.0, 0.1]))
    tensor([-0.4170, -1.4170, -2.3170])
    """
    if dtype is None and out is None:
        result = eager.forward(input, dim, True)
        if result is not None:
            return result
        known = eager.known_but_for_its_gradient(input, dim, True)
        if known is not None:
            return RowSoftmax.apply(input, dim, input.dtype, True, known)
    return _forward(input, dim, dtype, out, True)


def logsumexp(input: Tensor, dim: int | tuple[int, ...], keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """log(sum(exp(x))) over one dimension or several: `torch.logsumexp`, in one read.

    Args:
        input: any shape and strides; float16, bfloat16 and float32 are ours on a GPU, all else is torch's.
        dim: an int or a tuple of them, each in [-input.dim(), input.dim()).
        keepdim: whether the reduced dimensions stay, with size 1.
        out: a tensor to write to; it is resized if its shape differs.

    Returns: a tensor of input's dtype: -inf for a row of nothing but -inf, +inf where +inf stands in it, NaN for NaN.

    Raises: IndexError for a dim out of range, RuntimeError for one that is named twice, TypeError for other types.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.logsumexp.html

    >>> logsumexp(torch.zeros(2, 4), dim=1)
    tensor([1.3863, 1.3863])
    """
    if not isinstance(input, Tensor) and stands_in(input):
        written = {} if out is None else {"out": out}
        return handle_torch_function(logsumexp, (input,), input, dim, keepdim, **written)
    dims = _dims(input, dim)
    if dims is None or _too_long(input, dims) or type(keepdim) is not bool or _fallback(input, None) is not None:
        if out is None:
            return torch.logsumexp(input, dim, keepdim)
        return torch.logsumexp(input, dim, keepdim, out=out)
    if out is None:
        watched = torch.is_grad_enabled() and input.requires_grad or torch_private.any_autocast()
        if is_plain(input) and not watched and input.dim() and input.numel():
            return row_losses.logsumexp_forward(input, dims, keepdim)
        return operators.logsumexp(input, dims, keepdim)
    if not _takes_out(out, input, input.dtype):
        return torch.logsumexp(input, dim, keepdim, out=out)
    result = operators.logsumexp(input, dims, keepdim)
    if out.shape != result.shape and out.numel():  # torch resizes it, and warns
        return torch.logsumexp(input, dim, keepdim, out=out)
    return _written(result, out)


def plan_for(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, log: bool = False) -> Plan | Fallback:
    """The plan that `softmax(x, dim, dtype)` takes, or `log_softmax` where log, or a `Fallback` that says why PyTorch's
    own kernel is called.

    No memory of x's size is taken. Both have `.regime` and `.why`: "torch", "strided" and "empty" are Fallbacks. Errors
    are `softmax`'s, those of integers and complex numbers too.

    >>> plan_for(torch.zeros(2, 8, dtype=torch.float64)).regime
    'torch'
    """
    index = _index(x, dim)
    if index is None:
        torch.softmax(x, dim, dtype)  # says what is wrong
        return Fallback("only PyTorch's own takes these arguments")
    reason = _fallback(x, dtype) or _short(x, index, dtype)
    if reason is not None:
        if x.numel() and (x.dtype if dtype is None else dtype) not in FLOATING:
            torch.softmax(x.new_zeros(1), 0, dtype)  # raises what the call raises
        return Fallback(reason)
    if x.numel() == 0:
        return Fallback("the tensor is empty: nothing is launched", regime="empty")
    device = describe(x.device)
    assert isinstance(device, Device)
    out_dtype = (torch.float32 if _promotes(x) else x.dtype) if dtype is None else dtype
    folded = rows.as_rows(x, index % x.dim()) if x.dim() else x.view(1, 1)
    result = rows.as_rows(torch.empty(x.shape, device="meta"), index % x.dim()) if x.dim() else folded
    if folded is None or result is None:
        return Fallback("dim's elements or rows are not neighbours: the strided kernel", regime="strided")
    # the output is new, so aligned and contiguous: a meta tensor stands in for it
    in_dtype = x.dtype if fuses(x.dtype, out_dtype) else out_dtype
    out = torch.empty(folded.shape, dtype=out_dtype, device="meta")
    like = folded if in_dtype is x.dtype else torch.empty(folded.shape, dtype=in_dtype, device="meta")
    plan = make_plan(problem_of(like, out, batch_invariant=rows.is_batch_invariant(), log=log), device)
    reason = failure(plan, device, (in_dtype, out_dtype), log, x.get_device())
    return plan if reason is None else Fallback(reason)


def _forward(input: Tensor, dim: int, dtype: torch.dtype | None, out: Tensor | None, log: bool) -> Tensor:
    if not isinstance(input, Tensor) and stands_in(input):
        written = {} if out is None else {"out": out}
        return handle_torch_function(log_softmax if log else softmax, (input,), input, dim, dtype, **written)
    index = _index(input, dim)
    if index is None or _fallback(input, dtype) is not None or _short(input, index, dtype) is not None:
        # wrong arguments too: the error is torch's own
        own = torch.log_softmax if log else torch.softmax
        return own(input, dim, dtype=dtype) if out is None else own(input, dim, dtype=dtype, out=out)
    if dtype is None:
        # autocast, as torch has it on CUDA: float32, from a 16-bit input in the same pass
        dtype = torch.float32 if out is None and _promotes(input) else input.dtype
    if not fuses(input.dtype, dtype):
        input = input.to(dtype)
    if out is not None:
        return _into(out, input, index, dtype, log)
    if not is_plain(input):
        return (operators.log_softmax if log else operators.softmax)(input, index, dtype)
    if input.requires_grad and torch.is_grad_enabled():
        return RowSoftmax.apply(input, index, dtype, log)
    return rows.forward_or_torch(input, index, dtype, log)


def _too_long(input: Tensor, dims: tuple[int, ...]) -> bool:
    """Whether dims together hold more than the kernels count in a row."""
    if torch.compiler.is_compiling() or input.numel() <= MAX_COLS:
        return False
    return math.prod([input.shape[d] for d in dims]) > MAX_COLS


def _promotes(input: Tensor) -> bool:
    """Whether autocast makes float32 of this call's result; with out= it does not."""
    return input.is_cuda and torch.is_autocast_enabled("cuda")


def _short(input: Tensor, dim: int, dtype: torch.dtype | None) -> str | None:
    """Why rows so short, or so long, are PyTorch's, or None; under torch.compile, which has no addresses, never."""
    if torch.compiler.is_compiling() or not input.is_cuda or not is_plain(input):
        return None
    if input.dim() and input.shape[dim] > MAX_COLS:
        return f"a row of {input.shape[dim]} columns is PyTorch's"
    return rows.left_to_torch(input, dim, input.dtype if dtype is None else dtype)


def _into(out: Tensor, input: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    if not _takes_out(out, input, dtype):
        return (torch.log_softmax if log else torch.softmax)(input, dim, dtype=dtype, out=out)
    if not (is_plain(input) and is_plain(out)):
        return _written((operators.log_softmax if log else operators.softmax)(input, dim, dtype), out)
    if out.shape != input.shape:
        if out.numel():  # torch resizes it, and warns
            return (torch.log_softmax if log else torch.softmax)(input, dim, dtype=dtype, out=out)
        out.resize_(input.shape)
    if not (is_its_own(out) and may_write_while_reading(out, input)):
        # copy_ raises, before it writes, where two elements of out share their memory
        return out.copy_(rows.forward_or_torch(input, dim, dtype, log))
    rows.forward_or_torch(input, dim, dtype, log, out)
    torch.autograd.graph.increment_version(out)
    return out


def _takes_out(out: Any, input: Tensor, dtype: torch.dtype) -> bool:
    """Whether out may be written here. What is wrong with it, and what autograd makes of it, is torch's to say."""
    if not isinstance(out, Tensor) or out.dtype is not dtype or out.device != input.device:
        return False
    if torch.is_grad_enabled() and (input.requires_grad or out.requires_grad):
        return False
    if not torch.compiler.is_compiling() and out.is_inference() and not torch.is_inference_mode_enabled():
        out.as_strided((0,), (1,)).zero_()  # raises torch's error; torch.softmax raises it after it wrote
    return out.layout is torch.strided


def _written(result: Tensor, out: Tensor) -> Tensor:
    return (out if out.shape == result.shape else out.resize_(result.shape)).copy_(result)


def _index(input: Any, dim: Any) -> int | None:
    """dim as an int in range, or None: then torch's own function takes the call, or says what is wrong with it."""
    if not isinstance(input, Tensor):
        return None
    if type(dim) is not int:
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            return None
        dim = operator.index(dim)
    bound = input.dim() or 1
    return dim if -bound <= dim < bound else None


def _dims(input: Any, dim: Any) -> tuple[int, ...] | None:
    """dim as rising dimensions, each once, counted from the first; or None, as `_index`."""
    if not isinstance(dim, (tuple, list)):
        dim = (dim,)
    indices = [_index(input, d) for d in dim]
    if not indices or any(index is None for index in indices):
        return None
    found = sorted({index % (input.dim() or 1) for index in indices if index is not None})
    return tuple(found) if len(found) == len(indices) else None


def _fallback(input: Tensor, dtype: torch.dtype | None) -> str | None:
    """Why this call is PyTorch's, or None where it is ours."""
    out_dtype = input.dtype if dtype is None else dtype
    if torch.compiler.is_compiling():
        return refusal_while_compiling(input, out_dtype)
    if type(input) is not Tensor and type(input) is not Parameter and not is_traced(input):
        return f"{type(input).__name__} is a subclass of Tensor: only its own class knows what softmax of it is"
    if forward_ad._current_level >= 0:
        return "forward-mode AD is PyTorch's"
    if torch_private.innermost_transform() is not None and _differentiates():
        return "torch.func's gradients are PyTorch's"
    return refusal(input, out_dtype)


def _differentiates() -> bool:
    """Whether torch.func.grad or a kin is in progress: an operator's autograd formula does not reach there."""
    stack = torch_private.transforms() or ()
    return any(interpreter.key() != torch_private.TransformType.Vmap for interpreter in stack)
