"""The systems of others: torch.compile, Liger, QuACK. Imported only when they are built, missing ones are named.

Each entry is (name, op, build, missing, poisoned by PyTorch's deterministic mode). Nothing of theirs is copied here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from fused_softmax.bench.ops import OPS

Build = Callable[[], Callable[..., Any]]


def _needs(package: str | None) -> str:
    if not torch.cuda.is_available():
        return "needs a GPU"
    if package and find_spec(package) is None:
        return f"needs the package {package}"
    return ""


def _compiled(op: str) -> Build:
    def build() -> Callable[..., Any]:
        # past its recompile limit torch.compile would fall back to eager in silence: start anew, and forbid breaks
        torch._dynamo.reset()
        return torch.compile(OPS[op].torch_call, dynamic=False, fullgraph=True)

    return build


def _liger_softmax() -> Callable[..., Any]:
    return importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply


def _quack(name: str) -> Build:
    def build() -> Callable[..., Any]:
        # quack's package exports functions under the names of its modules: take the module itself
        importlib.import_module("quack.softmax")
        module = sys.modules["quack.softmax"]
        return getattr(module, f"{name}_fwd" if hasattr(module, f"{name}_fwd") else name)

    return build


def _quack_softmax_backward() -> Callable[..., Any]:
    importlib.import_module("quack.softmax")
    return sys.modules["quack.softmax"].softmax_bwd


PEER_SYSTEMS: tuple[tuple[str, str, Build, Callable[[], str], bool], ...] = (
    *(("torch.compile", op, _compiled(op), lambda: _needs(None), False) for op in OPS),
    ("liger", "softmax", _liger_softmax, lambda: _needs("liger_kernel"), True),
    ("quack", "softmax", _quack("softmax"), lambda: _needs("quack"), True),
    ("quack", "softmax_backward", _quack_softmax_backward, lambda: _needs("quack"), True),
)
