"""cross_entropy: torch's, on logits as wide as a vocabulary, without a tensor of their size beside the gradient.

    loss_i = -(1 - eps)*w_t*log p_t - eps/C*sum(w*log p) + z_loss*lse^2,   p = softmax(softcap*tanh(x/softcap))

Where a gradient is needed and the loss is a mean or a sum, it is written in the pass that reads the logits, for an
upstream gradient of 1, and backward mends on the device what came with another one: one read, one write, no host
synchronisation. Else, and under torch.compile, the forward only reads, and a second kernel writes the gradient.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction as _Reduction
from torch.overrides import handle_torch_function

from . import loss_formulas, loss_operators, row_losses
from .arguments import expect_flag, expect_floating, expect_tensors, finite, integer, real, stands_in
from .availability import KernelUnavailable
from .launch import DTYPE_NAMES
from .operators import is_compiled, is_plain, refusal
from .rows import batch_invariant, is_batch_invariant

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    """The cross-entropy of logits against class indices: `torch.nn.functional.cross_entropy`, in one read of the
    logits.

    Args:
        input: the logits, (C,), (N, C) or (N, C, d1, ...); float16, bfloat16 and float32 are ours on a GPU, all else is
            torch's. Where the classes are not contiguous in memory, as in (N, C, d1, ...), they are copied first.
        target: int64 or uint8 class indices of shape (), (N,) or (N, d1, ...), in [0, C) or ignore_index.
            Probabilities, of the logits' shape and a floating dtype, are torch's.
        weight: (C,) of the logits' dtype or float32; the mean divides by the weights of the targets that count.
        size_average, reduce: deprecated, as in torch: they warn, and replace reduction.
        ignore_index: rows with this target add nothing to the loss, nor to the mean's denominator.
        reduction: "mean", "sum" or "none". If no target counts, the mean is NaN and the sum 0.
        label_smoothing: in [0, 1], the share of every target that is spread over all classes.
        softcap: c replaces the logits by c*tanh(logits/c) (Gemma 2, arXiv:2408.00118).
        z_loss: adds z_loss*logsumexp(logits)^2 to every row that counts (PaLM, arXiv:2204.02311).
        inplace_backward: writes the gradient over the logits, which saves memory of their size. They hold nothing of
            use afterwards, the graph cannot be run through twice, and an upstream gradient other than 1 is multiplied
            onto the gradient as it was rounded. Without effect for reduction "none", for weights together with
            smoothing, for logits that are copied first, and under torch.compile.

    Returns: float32, or float64 for float64 logits (torch returns the logits' dtype, so 16 bits for 16-bit ones): a
    scalar, or for "none" a tensor of target's shape. The gradient has the logits' dtype, for any upstream gradient,
    per-row ones too. Where autograd keeps the gradient that the forward wrote it keeps the logits as well.

    Raises: as torch: ValueError for another reduction or shapes that do not fit, RuntimeError for other integer
    targets and for a target or weight on another device, TypeError for arguments of other types, NotImplementedError
    for logits that are not floating; ValueError for a softcap that is not positive and finite, or an infinite or NaN
    z_loss. A target outside the classes is an IndexError on the CPU and a
    device assertion on a GPU; nothing outside the tensors is read or written.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([1, 3]))
    tensor(1.3863)
    """
    if not (
        isinstance(input, Tensor) and isinstance(target, Tensor) and (weight is None or isinstance(weight, Tensor))
    ):
        if stands_in(input, target, weight):
            return handle_torch_function(
                cross_entropy,
                (input, target, weight),
                input,
                target,
                weight,
                size_average=size_average,
                ignore_index=ignore_index,
                reduce=reduce,
                reduction=reduction,
                label_smoothing=label_smoothing,
                softcap=softcap,
                z_loss=z_loss,
                inplace_backward=inplace_backward,
            )
        expect_tensors("cross_entropy", input=input, target=target)
        expect_tensors("cross_entropy", weight=weight)
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)
    return cross_entropy_over(
        None, input, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, inplace_backward
    )


def cross_entropy_over(
    denominator: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    """`cross_entropy`, whose mean divides by `denominator`, a tensor of one element, where there is one.

    To divide the sum afterwards would send an upstream gradient other than 1 back, and so write the gradient twice.
    """
    if logits.dtype not in DTYPE_NAMES:
        expect_floating("cross_entropy", "input", logits)
    if type(ignore_index) is not int or not -(2**63) <= ignore_index < 2**63:
        ignore_index = integer("cross_entropy", "ignore_index", ignore_index)
    if type(label_smoothing) is not float:
        # torch takes a bool here
        smoothing = int(label_smoothing) if label_smoothing is True or label_smoothing is False else label_smoothing
        label_smoothing = real("cross_entropy", "label_smoothing", smoothing)
    if softcap is not None:
        softcap = finite("cross_entropy", "softcap", softcap)
        if softcap <= 0.0:
            raise ValueError(f"cross_entropy(): softcap must be positive, or None for no cap, not {softcap}")
    if type(z_loss) is not float or z_loss:
        z_loss = finite("cross_entropy", "z_loss", z_loss)
    if type(inplace_backward) is not bool:
        expect_flag("cross_entropy", "inplace_backward", inplace_backward)
    if reduction not in REDUCTIONS:
        _Reduction.get_enum(reduction)  # raises, or warns that its name for the mean is old
        reduction = "mean"
    if weight is not None and weight.dtype is not torch.float32 and weight.dtype is not logits.dtype:
        raise RuntimeError(
            f"cross_entropy(): weight must be {logits.dtype}, as the logits, or torch.float32, not {weight.dtype}; "
            "cast it with weight.to(input.dtype)"
        )
    if target.dtype is torch.uint8:
        target = target.long()
    if softcap is not None:
        # a cap above all numbers is none
        limits = torch.finfo(torch.float64 if logits.dtype is torch.float64 else torch.float32)
        softcap = None if softcap > limits.max else max(softcap, limits.tiny)
    n_cols = logits.shape[1] if logits.dim() > 1 else logits.numel()
    plain = compiled = False
    if _fits(logits, target, weight, reduction, label_smoothing, n_cols):
        plain = is_plain(logits) and is_plain(target) and (weight is None or is_plain(weight))
        plain = plain and logits.numel() > 0 and refusal(logits, logits.dtype) is None
        compiled = not plain and n_cols > 0 and is_compiled(logits, target, weight)
    if not (plain or compiled):
        return loss_formulas.cross_entropy(
            logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, denominator
        )
    flat = target.reshape(-1).contiguous()
    if weight is not None:
        weight = weight.detach().float().contiguous()
    if denominator is not None:
        denominator = denominator.to(logits.device, torch.float32).reshape(1)
    weight_sum = weight.sum().view(1) if weight is not None and label_smoothing else None
    rows = row_losses.rows_of(logits if logits.dim() < 3 else logits.movedim(1, -1), n_cols)
    described = (
        flat, weight, weight_sum, ignore_index, reduction, float(label_smoothing), softcap, float(z_loss), denominator
    )  # fmt: skip
    if compiled:
        loss, _ = loss_operators.cross_entropy(rows, *described)
    else:
        if flat.device.type == "cpu":
            row_losses.check_targets(flat, ignore_index, n_cols)
        loss = _by_kernels(rows, row_losses.CrossEntropy(*described), inplace_backward)
    return loss.view(target.shape) if reduction == "none" else loss


def _by_kernels(x: Tensor, op: row_losses.CrossEntropy, inplace: bool) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return RowCrossEntropy.apply(x, op, inplace)
    losses, _ = row_losses.cross_entropy_forward(x, op)
    return row_losses.reduce_losses(losses, op, x.shape[1])


def _fits(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float, n_cols: int
) -> bool:
    """Whether shapes and options are the kernels'; what is wrong with others, torch's own function says."""
    shape = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else torch.Size(())
    return (
        logits.dim() > 0
        and target.dtype is torch.int64
        and target.shape == shape
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


class RowCrossEntropy(torch.autograd.Function):
    """Cross-entropy of rows that need a gradient. Keeps the rows, two numbers a row, and the gradient that the forward
    wrote: all of it by save_for_backward, where checkpointing and offloading see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: row_losses.CrossEntropy, inplace: bool) -> Tensor:
        n_cols = x.shape[1]
        # two rows that share memory cannot hold two gradients
        ctx.inplace = (
            inplace and op.reduction != "none" and op.weight_sum is None and (x.shape[0] == 1 or x.stride(0) >= n_cols)
        )
        count = row_losses.count_targets(op, n_cols) if op.reduction == "mean" else None
        dx = None
        # weights and smoothing together read a weight for each logit, twice: then the gradient has a kernel of its own
        if op.reduction != "none" and op.weight_sum is None:
            dx = x.detach() if ctx.inplace else row_losses.gradient_buffer(x)
            if not row_losses.fits_on_chip(x, dx, op):
                dx, ctx.inplace = None, False
        if dx is not None:
            try:
                losses, moments = row_losses.cross_entropy_with_gradient(x, dx, op, count)
            except KernelUnavailable:
                dx, ctx.inplace = None, False
        if dx is None:
            losses, moments = row_losses.cross_entropy_forward(x, op)
        if ctx.inplace:
            torch.autograd.graph.increment_version(x)
        ctx.save_for_backward(None if ctx.inplace else x, op.target, op.weight, op.weight_sum, moments, count, dx)
        ctx.unread = [dx is not None]  # popped by the backward that gives away what the forward wrote
        ctx.op = replace(op, target=None, weight=None, weight_sum=None, denominator=None)  # type: ignore[arg-type]
        ctx.over = op.denominator is not None
        ctx.invariant = is_batch_invariant()  # backward runs in a thread that does not know
        ctx.set_materialize_grads(False)
        return row_losses.reduce_losses(losses, op, n_cols)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None, None]:
        if g is None:
            return None, None, None
        x, target, weight, weight_sum, moments, count, written = ctx.saved_tensors
        op = replace(ctx.op, target=target, weight=weight, weight_sum=weight_sum)
        if torch.is_grad_enabled() or not is_plain(g):
            if x is None:
                raise RuntimeError(_OVERWRITTEN)
            op = replace(op, denominator=count if ctx.over else None)
            return loss_formulas.cross_entropy_gradient(g, x, op), None, None
        unread = bool(ctx.unread) and ctx.unread.pop()
        upstream = g.reshape(-1).float().contiguous()
        if ctx.inplace:
            if not unread:
                raise RuntimeError(_OVERWRITTEN)
            row_losses.scale_unless_one(written, upstream)
            return written, None, None
        if written is None:
            dx = row_losses.gradient_buffer(x)
        elif unread:
            # The first backward gives away what the forward wrote, with a version counter of its own: a change in place
            # does not disturb what is saved. Nothing reads the saved one again.
            dx = written.data
        else:
            # a further one runs the forward's kernel again, so that its bits are those of the first
            dx = row_losses.gradient_buffer(x)
            with batch_invariant() if ctx.invariant else nullcontext():
                row_losses.cross_entropy_with_gradient(x, dx, op, count)
        row_losses.cross_entropy_gradient(x, dx, op, count, moments, upstream, unless_one=written is not None)
        return dx, None, None


_OVERWRITTEN = (
    "cross_entropy(inplace_backward=True) wrote the gradient over the logits: one can go backward through it once, "
    "for one upstream gradient, and not differentiate its gradient"
)
