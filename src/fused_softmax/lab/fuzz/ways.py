"""The ways in: how a case's call reaches our kernels, and the same call as torch has it."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fused_softmax as fs
from fused_softmax.lab.timing import freeze

from .draw import Case
from .inputs import Inputs, make

Function = Callable[..., Any]
Upstream = Callable[[dict[str, Tensor]], dict[str, Tensor]]
_compiled: dict[tuple[str, str], Function] = {}
_freeze_once = functools.cache(freeze)  # before the first capture, which collects garbage


def forget_compiled() -> None:
    """Drop what torch.compile has made: it gives up after too many shapes."""
    if _compiled:
        _compiled.clear()
        torch._dynamo.reset()


@contextmanager
def around_ours(case: Case) -> Iterator[None]:
    """What surrounds our call and its backward."""
    if case.way == "patch":
        with fs.patch():
            yield
    elif case.way == "batch_invariant":
        with fs.batch_invariant():
            yield
    else:
        yield


def function(case: Case, inputs: Inputs, device: str, ours: bool, *, vmapped: bool = False) -> Function:
    """The call: takes x and the arguments. Torch's is a loop over vmap's items, unless `vmapped`."""
    spec, way = case.spec, case.way
    plain = spec.function if ours else spec.torch_way
    if way == "autocast" and (ours or spec.autocasts):
        return _autocast(plain, device, case.seed)
    if way == "vmap":
        return _vmap(spec.operator if ours and spec.operator and case.seed % 3 == 0 else plain, inputs, ours or vmapped)
    if way == "out":
        assert inputs.out is not None
        out = inputs.out.tensor
        repeats = any(step == 0 and n > 1 for n, step in zip(out.shape, out.stride(), strict=True))  # torch raises
        if not ours and not repeats and inputs.out.buffer is inputs.placed["x"].buffer:
            out = torch.empty_like(out)  # on x's own memory torch's result may be wrong, on a CPU and on a GPU
        return lambda x, **arguments: plain(x, **arguments, out=out)
    if not ours:
        return plain
    if way == "module":
        assert spec.module is not None
        module = spec.module
        return lambda x, **arguments: module(**arguments)(x)
    if way == "operator":
        assert spec.operator is not None
        return spec.operator
    if way == "patch":
        return spec.torch_way
    if way == "checkpoint":
        return lambda x, **arguments: checkpoint(plain, x, use_reentrant=False, **arguments)
    if way == "compile":
        backend = "inductor" if case.seed % 64 == 0 else ("aot_eager", "eager")[case.seed % 2]
        known = (case.op, backend)
        if known not in _compiled:
            torch._dynamo.config.recompile_limit = torch._dynamo.config.cache_size_limit = 256
            _compiled[known] = torch.compile(plain, backend=backend)
        return _compiled[known]
    return plain


def _autocast(plain: Function, device: str, seed: int) -> Function:
    def call(x: Tensor, **arguments: Any) -> Any:
        with torch.autocast(device, dtype=(torch.float16, torch.bfloat16)[seed % 2]):
            return plain(x, **arguments)

    return call


def _vmap(plain: Function, inputs: Inputs, ours: bool) -> Function:
    """Ours by torch.vmap; torch's and the reference as a loop over the items."""
    at, in_dims = inputs.batch_dim, inputs.in_dims

    def call(x: Tensor, **arguments: Any) -> Any:
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        rest = {name: value for name, value in arguments.items() if name not in tensors}
        dims = [in_dims.get(name) for name in tensors]
        if ours:

            def one(x: Tensor, *given: Tensor) -> Any:
                result = plain(x, **dict(zip(tensors, given, strict=True)), **rest)
                return tuple(t for t in result if t is not None) if isinstance(result, tuple) else result

            return torch.vmap(one, in_dims=(at, *dims))(x, *tensors.values())
        return loop_over_items(plain, x, at or 0, tensors, dims, rest)

    return call


def loop_over_items(
    plain: Function, x: Tensor, at: int, tensors: dict[str, Tensor], dims: list[int | None], rest: dict[str, Any]
) -> Any:
    results = []
    for i, item in enumerate(x.unbind(at)):
        given = {n: t if d is None else t.select(d, i) for (n, t), d in zip(tensors.items(), dims, strict=True)}
        result = plain(item, **given, **rest)
        results.append(result if isinstance(result, tuple) else (result,))
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True) if parts[0] is not None)
    return stacked if len(stacked) > 1 else stacked[0]


def named(case: Case, result: Any) -> dict[str, Tensor]:
    """The outputs by name; vmap leaves out those that are None."""
    spec = case.spec
    if case.way != "vmap" or not isinstance(result, tuple) or len(result) == len(spec.outputs):
        return spec.tensors(result)
    asked = [n for n in spec.outputs if n == spec.outputs[0] or case.options.get(f"return_{n}")]
    return dict(zip(asked, result, strict=True))


def run(case: Case, call: Function, inputs: Inputs, upstream: Upstream, *, twice: bool = False) -> dict[str, Tensor]:
    """The case's results by name: outputs, then gradients as d_x and dd_x; `twice`: backward again, as again_x."""
    outputs = named(case, call(inputs.x, **inputs.arguments))
    results = dict(outputs)
    if case.direction == "forward":
        return results
    from_outputs = {name: t for name, t in outputs.items() if t.requires_grad}
    given = upstream(from_outputs)
    double, wanted = case.direction == "double", inputs.differentiable
    if double:
        given = {name: g.detach().clone().requires_grad_() for name, g in given.items()}
    if not from_outputs:
        return results
    grads = torch.autograd.grad(
        list(from_outputs.values()), list(wanted.values()), list(given.values()),
        create_graph=double, retain_graph=twice or double, allow_unused=True,
    )  # fmt: skip
    results |= {f"d_{name}": g for name, g in zip(wanted, grads, strict=True) if g is not None}
    if twice:
        again = torch.autograd.grad(
            list(from_outputs.values()), list(wanted.values()), list(given.values()), allow_unused=True
        )
        results |= {f"again_{name}": g for name, g in zip(wanted, again, strict=True) if g is not None}
    if double and grads[0] is not None and grads[0].requires_grad:
        probe = upstream({"probe": grads[0]})["probe"]
        to = {"x": inputs.x, **{f"g_{name}": g for name, g in given.items()}}
        second = torch.autograd.grad(grads[0], list(to.values()), probe, allow_unused=True)
        results |= {f"dd_{name}": g for name, g in zip(to, second, strict=True) if g is not None}
    return results


def run_graph(case: Case, inputs: Inputs, upstream: Upstream) -> dict[str, Tensor]:
    """`run`, captured in a CUDA graph with other numbers in x, and replayed with the case's."""
    placed = inputs.placed["x"]
    values = placed.buffer.clone()
    placed.buffer.copy_(make(case, "cuda", other_values=True).placed["x"].buffer)
    try:
        inputs = _own_leaves(inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(case, case.spec.function, inputs, upstream)  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        _freeze_once()
        gc.collect()  # torch.cuda.graph no longer does; what is destroyed within a capture may end it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run(case, case.spec.function, inputs, upstream)
    finally:
        placed.buffer.copy_(values)
    for t in results.values():
        if t.is_floating_point():
            t.detach().fill_(float("nan"))
    graph.replay()
    return {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in results.items()}


def _own_leaves(inputs: Inputs) -> Inputs:
    """The same memory, in tensors that no other graph holds.

    autograd sends a leaf's gradient to the stream that the leaf was first used on, as long as a graph holds it: torch's
    own results, which were computed on the default stream, do, and a capture must not wait for that stream.
    """

    def fresh(t: Any) -> Any:
        return t.detach().requires_grad_() if isinstance(t, Tensor) and t.requires_grad else t

    arguments = {name: fresh(value) for name, value in inputs.arguments.items()}
    return dataclasses.replace(inputs, x=fresh(inputs.x), arguments=arguments)
