"""Marks functions that torch.compile runs and never traces.

The dispatcher and autograd call our kernels and gradients from inside frames that torch.compile watches: a backward()
in a compiled function, or the rest of one after a graph break. Dynamo would trace such a function as if a user had
written it, and it cannot trace a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])

# absent before torch 2.7
_mark: Any = getattr(eval_frame, "set_code_exec_strategy", None)


def untraced(function: F) -> F:
    """Returns function itself; torch.compile traces neither its frame nor what that calls.

    The mark is on the code, so a call costs nothing more. torch.compiler.disable would put a frame before it.
    """
    code = getattr(function, "__code__", None)
    if code is not None and _mark is not None:
        skip = eval_frame._FrameAction.SKIP
        _mark(code, eval_frame._FrameExecStrategy(skip, skip))
    return function
