"""Symbols of torch that are private, or that not every torch has: looked up once, here.

A symbol that the kernels need and this torch lacks is named in `missing`; a harmless one takes its place, so that the
package imports. `device.describe` then leaves all tensors to PyTorch. Optional symbols are None where they are absent.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad as _forward_ad

missing: list[str] = []


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


def _nothing() -> None:
    return None


def _zero(*_: Any) -> int:
    return 0


# --- modes, transforms and tracers: all of these in torch 2.4 to 2.15 -----------------------------------------------------------

dispatch_modes = _required("_C._len_torch_dispatch_stack", _zero)
innermost_transform = _required("_C._functorch.peek_interpreter_stack", _nothing)
transforms = _required("_C._functorch.get_interpreter_stack", _nothing)
Transform = _required("_C._functorch.CInterpreter", type("NoTransform", (), {}))
TransformType = _required("_C._functorch.TransformType", SimpleNamespace(Vmap=None))
is_tracing = _required("_C._is_tracing", _zero)
tracing_state = _required("_C._get_tracing_state", _nothing)
any_autocast = _required("_C._is_any_autocast_enabled", _zero)
deterministic_algorithms = _required("_C._get_deterministic_algorithms", _zero)
has_storage = _required("_C._has_storage", _zero)
forward_ad: Any = _forward_ad
if not hasattr(_forward_ad, "_current_level"):
    missing.append("torch.autograd.forward_ad._current_level")
    forward_ad = SimpleNamespace(_current_level=-1)

# --- CUDA, absent from a build without it, where no tensor is on a GPU ------------------------------------------------

current_device: Any = _find("_C._cuda_getDevice")
current_stream: Any = _find("_C._cuda_getCurrentRawStream")
if torch.version.cuda is not None or torch.version.hip is not None:
    _required("_C._cuda_getDevice", None)
    _required("_C._cuda_getCurrentRawStream", None)
# the allocation behind torch.empty; without it a call takes the longer path
empty_strided_cuda: Any = _find("_C._dynamo.guards._empty_strided_cuda")

# --- torch.library ----------------------------------------------------------------------------------------------------

register_vmap: Any = _find("library.register_vmap")  # torch 2.5; before, vmap of our operators is not supported
get_kernel: Any = _find("library.get_kernel")  # torch 2.10; without it patch() changes nothing

# --- dispatch keys, torch.compile and aten's own gradients ------------------------------------------------------------

DispatchKey: Any = _required("_C.DispatchKey", SimpleNamespace(AutocastCUDA=None))
DispatchKeySet: Any = _required("_C.DispatchKeySet", lambda key: None)
exclude_dispatch_keys: Any = _required("_C._ExcludeDispatchKeyGuard", lambda keys: nullcontext())
autocast_keys = DispatchKeySet(DispatchKey.AutocastCUDA)
softmax_backward_data: Any = _required("_softmax_backward_data", None)
log_softmax_backward_data: Any = _required("_log_softmax_backward_data", None)
_eval_frame: Any = _find("_C._dynamo.eval_frame")  # set_code_exec_strategy: from torch 2.7 on


def _skip_code(code: Any) -> None:
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))


skip_code: Any = _skip_code if hasattr(_eval_frame, "set_code_exec_strategy") else None
