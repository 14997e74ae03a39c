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

from fused_softmax.lab.bench import loss_systems
from fused_softmax.lab.bench.ops import AUTOGRAD, OPS, through_autograd

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

        def compile(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False, fullgraph=True)

        compiled = loss_systems.compiled(op, compile) or compile(OPS[op].formula or OPS[op].torch_call)
        return through_autograd(compiled) if op in AUTOGRAD else compiled

    return build


def _liger_softmax() -> Callable[..., Any]:
    return importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply


def _quack_softmax(*names: str) -> Build:
    def build() -> Callable[..., Any]:
        # quack's package exports functions under the names of its modules: take the module itself
        importlib.import_module("quack.softmax")
        module = sys.modules["quack.softmax"]
        return next(getattr(module, name) for name in names if hasattr(module, name))

    return build


def _losses(loss: Callable[[], loss_systems.Loss], overwrites: bool) -> dict[str, Build]:
    return {
        "cross_entropy": lambda: loss_systems.with_gradient(loss(), overwrites=overwrites),
        "cross_entropy_forward": lambda: loss_systems.loss_alone(loss()),
    }


def _liger_missing() -> str:
    return _needs("liger_kernel")


def _quack_missing() -> str:
    return _needs("quack")


PEER_SYSTEMS: tuple[tuple[str, str, Build, Callable[[], str], bool], ...] = (
    *(("torch.compile", op, _compiled(op), lambda: _needs(None), False) for op in OPS),
    ("liger", "softmax", _liger_softmax, _liger_missing, True),
    *(("liger", op, build, _liger_missing, True) for op, build in _losses(loss_systems.liger_loss, True).items()),
    ("quack", "softmax", _quack_softmax("softmax_fwd", "softmax"), _quack_missing, True),
    ("quack", "softmax_backward", _quack_softmax("softmax_bwd", "softmax_backward"), _quack_missing, True),
    *(("quack", op, build, _quack_missing, True) for op, build in _losses(loss_systems.quack_loss, False).items()),
)
