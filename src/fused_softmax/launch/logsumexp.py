"""logsumexp over dimensions that are not the last, and its gradient: tensors as they lie, (outer, n_cols, inner).

Tensors that fold neither so nor to rows are copied first, in their order: a copy into rows would transpose them. Others
are rows, or are copied into rows: `row_statistics` takes them. KernelUnavailable, with nothing written, where a kernel
does not compile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..planning.types import Device, Plan
from .cache import Cache
from .context import is_batch_invariant
from .device import device_of
from .folding import as_planes, merge_dims
from .layout import as_rows
from .spatial import (
    PARTS,
    Recipe,
    Run,
    Step,
    cached_run,
    merge_step,
    of_layout,
    parts_step,
    prepare,
    problem_of,
    sizes_and_steps,
    with_outer,
)

_runs = Cache()


def lse_plan(x: Tensor, invariant: bool, device: Device) -> Plan:
    """The plan of logsumexp of (outer, n_cols, inner) over n_cols."""
    from ..planning.logsumexp import plan_logsumexp  # loaded when it is first needed, as that of the gradient

    return plan_logsumexp(problem_of(x, batch_invariant=invariant), device)


def gradient_plan(x: Tensor, dx: Tensor, device: Device) -> Plan:
    """The plan of the gradient over (x, dx)."""
    from ..planning.logsumexp import plan_logsumexp_gradient

    return plan_logsumexp_gradient(problem_of(x, dx), device)


def lse_recipe(x: Tensor, plan: Plan, device: Device) -> Recipe:
    """What the forward launches over (x, lse)."""
    _, n_cols, inner = x.shape
    parts = -(-n_cols // plan.part_cols)
    one = parts == 1
    tensors = (0, 1, 1) if one else (0, 2, 3)
    kernel = PARTS["softmax_spatial_reduce"]()
    reduce = with_outer(parts_step(kernel, (x,), tensors, plan, device, LSE=True, ONE_PART=one))
    if one:
        return Recipe((reduce,))
    # the merge writes no sum
    merge = merge_step(PARTS["softmax_spatial_merge"](), device, (2, 3, 1, 3), inner, parts, LSE=True)
    return Recipe((reduce, merge), (parts * inner, parts * inner))


def gradient_recipe(x: Tensor, dx: Tensor, plan: Plan, device: Device) -> Recipe:
    """What the gradient launches over (x, dx, lse, g)."""
    kernel = PARTS["logsumexp_spatial_backward"]()
    scalars, programs, meta = sizes_and_steps(kernel, (x, dx), plan, device)
    return Recipe((with_outer(Step(kernel, meta, (0, 1, 2, 3), scalars, programs, plan.outers)),))


def _forward(x: Tensor, lse: Tensor) -> None:
    """Writes logsumexp of x, (outer, n_cols, inner), over n_cols to lse: contiguous, outer x inner, in any dtype."""
    invariant = is_batch_invariant()

    def make() -> Run:
        device = device_of(x)
        return prepare(lse_recipe(x, lse_plan(x, invariant, device), device), (x, lse))

    cached_run(_runs, (of_layout((x, lse)), invariant), x, make)((x, lse))


def _backward(x: Tensor, dx: Tensor, lse: Tensor, g: Tensor) -> None:
    """dx = g*exp(x - lse) for x, dx: (outer, n_cols, inner); lse, g: contiguous, outer x inner, in any dtype."""
    tensors = (x, dx, lse, g)

    def make() -> Run:
        device = device_of(x)
        return prepare(gradient_recipe(x, dx, gradient_plan(x, dx, device), device), tensors)

    cached_run(_runs, of_layout(tensors), x, make)(tensors)


def planes_over(x: Tensor, dims: tuple[int, ...]) -> Tensor | None:
    """x as (outer, n_cols, inner), n_cols being all of dims, which rise; None where x does not fold, or inner is 1."""
    first, last = dims[0], dims[-1]
    if last - first + 1 != len(dims) or last == x.dim() - 1:
        return None
    if len(dims) > 1:
        sizes = x.shape[first : last + 1]
        strides = x.stride()[first : last + 1]
        for size, inner_stride, outer_stride in zip(sizes[1:], strides[1:], strides, strict=False):
            if outer_stride != size * inner_stride:
                return None
        n_cols = sizes.numel()
        x = x.as_strided(
            (*x.shape[:first], n_cols, *x.shape[last + 1 :]),
            (*x.stride()[:first], strides[-1], *x.stride()[last + 1 :]),
        )
    planes = as_planes(x, first)
    return planes if planes is not None and planes.shape[2] > 1 else None


def _read_over(x: Tensor, dims: tuple[int, ...]) -> Tensor | None:
    """x as (outer, n_cols, inner) to be read alone: as `planes_over`, and where neighbors in memory lie before dims.

    Not these within batch_invariant(), as they may be rows, and one of them alone is planned as a row.
    """
    planes = planes_over(x, dims)
    if planes is None and len(dims) == 1 and not is_batch_invariant():
        rest = merge_dims([(x.shape[d], x.stride(d)) for d in range(x.dim()) if d != dims[0] and x.shape[d] != 1])
        if rest and rest[-1][1] == 1 and len(rest) <= 2 and x.shape[dims[0]] > 1:
            outer, outer_stride = rest[0] if len(rest) == 2 else (1, x.numel())
            n_cols, col = x.shape[dims[0]], x.stride(dims[0])
            planes = x.as_strided((outer, n_cols, rest[-1][0]), (outer_stride, col, 1))
    return planes


def _planes(x: Tensor, dims: tuple[int, ...], backward: bool) -> Tensor | None:
    """x, or a copy of it where `_is_copied`, as (outer, n_cols, inner); None where it is not for here."""
    planes = planes_over(x, dims) if backward else _read_over(x, dims)
    if planes is None and _is_copied(x, dims):
        from .views import contiguous  # loaded when it is first needed

        planes = planes_over(contiguous(x), dims)
    return planes


def _is_copied(x: Tensor, dims: tuple[int, ...]) -> bool:
    """Whether x, which does not fold to planes, is copied to memory where it does: one dimension, and no rows."""
    return len(dims) == 1 and x.shape[dims[0] + 1 :].numel() > 1 and as_rows(x, dims[0]) is None


def planned_logsumexp(x: Tensor, dim: int, backward: bool) -> Plan | None:
    """The plan of logsumexp of x over one dimension, or of its gradient; None where it is not for here."""
    planes = planes_over(x, (dim,)) if backward else _read_over(x, (dim,))
    copied = planes is None and _is_copied(x, (dim,))
    contiguous = planes_over(torch.empty(x.shape, dtype=x.dtype, device="meta"), (dim,))  # a copy, and a gradient
    planes = contiguous if copied else planes
    if planes is None:
        return None
    device = device_of(x)
    if backward:
        assert contiguous is not None
        plan = gradient_plan(planes, contiguous, device)
    else:
        plan = lse_plan(planes, is_batch_invariant(), device)
    return plan.after_copy if copied else plan


def logsumexp_forward(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor | None:
    """logsumexp of x over dims (rising, each in [0, x.dim())) in x's dtype; None where it is not for here."""
    planes = _planes(x, dims, backward=False)
    if planes is None:
        return None
    shape = [1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims]
    lse = torch.empty(shape, dtype=x.dtype, device=x.device)
    _forward(planes, lse.view(planes.shape[0], planes.shape[2]))
    return lse


def logsumexp_backward(g: Tensor, x: Tensor, lse: Tensor, dims: tuple[int, ...]) -> Tensor | None:
    """dx = g*exp(x - lse), contiguous, in x's dtype, NaN where a softmax is nothing but -inf; None as the forward."""
    planes = _planes(x, dims, backward=True)
    if planes is None:
        return None
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dx_planes = planes_over(dx, dims)
    assert dx_planes is not None
    _backward(planes, dx_planes, lse.contiguous().view(-1), g.contiguous().view(-1))
    return dx
