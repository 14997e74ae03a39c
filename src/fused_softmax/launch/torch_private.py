"""Symbols of torch that are private, or that not every torch has: looked up once, here, and nowhere else.

A symbol that the kernels need and this torch lacks is named in `missing`; a harmless one takes its place, so that the
package imports. `device.describe` then leaves all tensors to PyTorch. Other symbols have a public fallback, or are None
where they are absent. FUSED_SOFTMAX_PUBLIC_TORCH=1 in the environment makes all of these take their fallback, as a
torch without them would: calls are slower, and their results are the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad
from torch.nn import Parameter

missing: list[str] = []
_PUBLIC_ONLY = os.environ.get("FUSED_SOFTMAX_PUBLIC_TORCH") == "1"


def _find(path: str) -> Any:
    """torch.<path>, or None."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _required(path: str, instead: Any) -> Any:
    found = _find(path)
    if found is None:
        missing.append(f"torch.{path}")
        return instead
    return found


def _or_public(path: str, public: Any) -> Any:
    """torch.<path>, or its public replacement."""
    found = None if _PUBLIC_ONLY else _find(path)
    return public if found is None else found


def _nothing() -> None:
    return None


def _zero(*_: Any) -> int:
    return 0


# --- modes, transforms and tracers: required, and in torch 2.4 to 2.15 ------------------------------------------------

dispatch_modes = _required("_C._len_torch_dispatch_stack", _zero)
innermost_transform = _required("_C._functorch.peek_interpreter_stack", _nothing)
transforms = _required("_C._functorch.get_interpreter_stack", _nothing)
Transform = _required("_C._functorch.CInterpreter", type("NoTransform", (), {}))
TransformType = _required("_C._functorch.TransformType", SimpleNamespace(Vmap=None))
_level: Any = _forward_ad
if not hasattr(_forward_ad, "_current_level"):
    missing.append("torch.autograd.forward_ad._current_level")
    _level = SimpleNamespace(_current_level=-1)


def in_forward_ad() -> bool:
    """Whether a level of forward-mode AD is entered."""
    return _level._current_level >= 0


# --- what watches a call: with public fallbacks; the private ones are in torch 2.4 to 2.15 ----------------------------


def _public_has_storage(x: torch.Tensor) -> bool:
    try:
        x.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of a batch that vmap made, for one
        return False
    return True


_profiler: Any = _or_public("autograd.profiler", None)
if not hasattr(_profiler, "_is_profiler_enabled"):  # then a profile does not name our ops
    _profiler = SimpleNamespace(_is_profiler_enabled=False)
_is_tracing: Any = _or_public("_C._is_tracing", torch.jit.is_tracing)
# cheaper than is_compiling: what else is being compiled has tensors of other classes, and modes
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def profiling() -> bool:
    """Whether a torch profiler is active."""
    return _profiler._is_profiler_enabled


any_autocast = _or_public(
    "_C._is_any_autocast_enabled", lambda: torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
)
has_storage = _or_public("_C._has_storage", _public_has_storage)


def can_bypass(x: Tensor) -> bool:
    """Whether nothing but autograd and autocast would see a call with x, which may have no memory of its own.

    False while compiling, tracing, in a dispatch mode, under torch.func or forward-mode AD, for subclasses and for
    lazily negated views.
    """
    return (
        not _is_dynamo_compiling()
        and (type(x) is Tensor or type(x) is Parameter)
        and not dispatch_modes()
        and innermost_transform() is None
        and _level._current_level < 0
        and not _is_tracing()
        and not x.is_neg()
    )


def is_watched() -> bool:
    """Whether torch.compile traces, a level of forward-mode AD is entered, or a profiler is active.

    Whatever else could see a call changes the dispatch keys, which a `tensor_guard` compares.
    """
    return _is_dynamo_compiling() or _level._current_level >= 0 or _profiler._is_profiler_enabled


Guard = Callable[..., bool]
_TensorGuards: Any = _or_public("_C._dynamo.guards.TensorGuards", None)


def tensor_guard(tensors: tuple[Tensor, ...], any_rows: bool) -> Guard | None:
    """check(*tensors): whether these are like the given ones, in one call of torch's; None where it has none.

    It compares class, dtype, device, shape, strides, requires_grad, and the dispatch keys that a call would meet here:
    of a lazy negation, a dispatch mode, a transform of torch.func, autocast, tracing. Two that are one tensor are not
    like any. any_rows: the first dimension may have any size, also 0. It keeps no tensor.
    """
    if _TensorGuards is None:
        return None
    sizes = [[None if any_rows and not d else size for d, size in enumerate(t.shape)] for t in tensors]
    strides = [list(t.stride()) for t in tensors]
    try:
        made = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return made.check if made.check(*tensors) else None
    except (TypeError, ValueError, RuntimeError):  # another torch may build it otherwise
        return None


# fake and functional tensors; where torch's classes are not found, they are subclasses like any other, and PyTorch's
_traced = tuple(
    found
    for path in ("_subclasses.fake_tensor.FakeTensor", "_subclasses.functional_tensor.FunctionalTensor")
    if (found := _or_public(path, None)) is not None
)


def is_traced(x: torch.Tensor) -> bool:
    """Whether x stands for a plain tensor while a graph is made of the call."""
    return isinstance(x, _traced)


# --- CUDA: absent from a build without it, where no tensor is on a GPU; torch 2.4 to 2.15 -----------------------------

current_device: Any = _or_public("_C._cuda_getDevice", torch.cuda.current_device)
current_stream: Any = _or_public(
    "_C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
# the allocation behind torch.empty; without it a call takes the longer path
empty_strided_cuda: Any = _or_public("_C._dynamo.guards._empty_strided_cuda", None)

# --- autograd: Function.apply without its part for torch.func; torch 2.4 to 2.15 --------------------------------------


def function_apply(function: Any) -> Callable[..., Any]:
    """function.apply of an autograd.Function, for callers that know that no transform of torch.func is active.

    The engine then calls function.backward itself, without the frames that look for it at each call.
    """
    direct = None if _PUBLIC_ONLY else getattr(super(torch.autograd.Function, function), "apply", None)
    if direct is None:
        return function.apply
    node: Any = getattr(function, "_backward_cls", None)
    if hasattr(node, "apply"):
        node.apply = function.backward
    return direct


def _public_increment_versions(tensors: tuple[Tensor, ...]) -> None:
    for t in tensors:
        torch.autograd.graph.increment_version(t)


def _incremented_by_c() -> Any:
    """increment_version without its frame and its type check, where torch's C function takes a tuple.

    In torch 2.4 it takes one tensor, and raises RuntimeError for a tuple.
    """
    increment = _or_public("_C._increment_version", _public_increment_versions)
    try:
        increment((torch.empty(0),))
    except (TypeError, RuntimeError):
        return _public_increment_versions
    return increment


# counts a write to each of a tuple of tensors that autograd did not see
increment_versions: Any = _incremented_by_c()

# --- torch.library ----------------------------------------------------------------------------------------------------

# public, but not in every torch
register_vmap: Any = _find("library.register_vmap")  # torch 2.5; before, vmap of our operators is not supported
get_kernel: Any = _find("library.get_kernel")  # torch 2.10; without it patch() changes nothing


def destroy_library(library: torch.library.Library) -> None:
    """Undo the registration; without torch's own method (2.4 to 2.15), when the last reference goes."""
    destroy = None if _PUBLIC_ONLY else getattr(library, "_destroy", None)
    if destroy is not None:
        destroy()


def library_reset(library: torch.library.Library) -> Callable[[], object] | None:
    """What takes a library's kernels out of torch's table without a step of Python; None where it is not found.

    In torch 2.4 to 2.15. destroy_library calls it, too, and a second call does nothing.
    """
    return None if _PUBLIC_ONLY else getattr(getattr(library, "m", None), "reset", None)


# make_autograd_impl, Info and the registry of fake kernels: torch 2.4 to 2.15
_autograd: Any = _or_public("_library.autograd", None)
_fakes: Any = _or_public("_library.simple_registry.singleton", None)


def register_autograd(library: torch.library.Library, operator: Any, gradients: Any, setup_context: Any) -> None:
    """torch.library.register_autograd, whose kernel is made at the operator's first call: that takes 0.6 ms."""
    make, info, made = getattr(_autograd, "make_autograd_impl", None), getattr(_autograd, "Info", None), list[Any]()
    if make is None or info is None:
        return torch.library.register_autograd(operator, gradients, setup_context=setup_context, lib=library)

    def autograd(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(make(operator, info(gradients, setup_context)))
        return made[0](keys, *args, **kwargs)

    if skip_code is not None:
        skip_code(autograd.__code__)
    library.impl(operator, autograd, "Autograd", with_keyset=True)


def register_fake(library: torch.library.Library, operator: Any, fake: Callable[..., Any]) -> None:
    """torch.library.register_fake, which looks at the caller's source for most of its 0.2 ms."""
    try:
        source = f"{fake.__code__.co_filename}:{fake.__code__.co_firstlineno}"
        _fakes.find(operator._schema.name).fake_impl.register(fake, source, lib=library)
    except (AttributeError, TypeError):  # no function, or another torch
        torch.library.register_fake(operator, fake, lib=library)


def results_of(operator: Any) -> int:
    """How many results an operator returns."""
    return len(operator._schema.returns)


# --- dispatch keys, torch.compile, aten's own gradients and losses; the private ones are in torch 2.4 to 2.15 ---------

DispatchKey: Any = _required("DispatchKey", SimpleNamespace(AutocastCUDA=None))
DispatchKeySet: Any = _required("DispatchKeySet", lambda key: None)


def _without_autocast() -> Callable[[], AbstractContextManager[Any]]:
    guard = _or_public("_C._ExcludeDispatchKeyGuard", None)
    if guard is None:
        return lambda: torch.autocast("cuda", enabled=False)
    keys = DispatchKeySet(DispatchKey.AutocastCUDA)
    return lambda: guard(keys)


without_autocast = _without_autocast()
softmax_backward_data: Any = _or_public("_softmax_backward_data", torch.ops.aten._softmax_backward_data.default)
log_softmax_backward_data: Any = _or_public(
    "_log_softmax_backward_data", torch.ops.aten._log_softmax_backward_data.default
)
# (size_average, reduce), both deprecated -> the reduction that they stand for
legacy_reduction: Any = _or_public(
    "nn._reduction.legacy_get_string",
    lambda average, reduce: torch.nn.CrossEntropyLoss(None, average, -100, reduce).reduction,
)
# raises, or warns, as torch does for another reduction than those of today
check_reduction: Any = _or_public(
    "nn._reduction.get_enum",
    lambda reduction: torch.nn.functional.cross_entropy(
        torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), reduction=reduction
    ),
)
# set_code_exec_strategy: torch 2.7; without it torch.compile may trace frames of ours, and break the graph there
_eval_frame: Any = _or_public("_C._dynamo.eval_frame", None)


def _skip_code(code: Any) -> None:
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))


skip_code: Any = _skip_code if hasattr(_eval_frame, "set_code_exec_strategy") else None


# --- functional collectives: private in torch 2.4 to 2.15; the public ones are not traced by torch.compile ------------


def all_gather_into_tensor(t: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Each rank's t, one after another, on the current stream; `wait_tensor` of it may be read."""
    if _functional() is not None:
        return _functional().all_gather_into_tensor(t, ranks, group)
    found = t.new_empty(ranks * t.shape[0], *t.shape[1:])
    torch.distributed.all_gather_into_tensor(found, t, group=_group_named(group))
    return found


def all_reduce(t: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """t reduced over the ranks by `op`, "sum" for one; `wait_tensor` of it may be read."""
    if _functional() is not None:
        return _functional().all_reduce(t, op, group)
    found = t.clone()
    torch.distributed.all_reduce(found, getattr(torch.distributed.ReduceOp, op.upper()), group=_group_named(group))
    return found


def wait_tensor(t: torch.Tensor) -> torch.Tensor:
    """t, once its collective has run."""
    return t if _functional() is None else _functional().wait_tensor(t)


def _functional() -> Any:
    return None if _PUBLIC_ONLY else getattr(torch.ops, "_c10d_functional", None)


def _group_named(name: str) -> Any:
    for group in torch.distributed.distributed_c10d._pg_map:
        if group.group_name == name:
            return group
    raise RuntimeError(f"there is no process group {name!r}")


# --- modules ----------------------------------------------------------------------------------------------------------


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks that its call runs and its parameters alone do not; in torch 2.4 to 2.15."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in names)
