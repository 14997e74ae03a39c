"""What is compared: each system by name, the op it computes, why it may be missing, and how to get a callable.

`build()` imports and compiles lazily and returns a callable over the op's inputs that returns a fresh output. Failures
are results: `outcome` sorts an exception into 'out of resources', 'refused' or 'error', and a fault of the device
itself, after which nothing in this process can be trusted, into DeviceFault.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch

from fused_softmax.lab.bench import loss_systems
from fused_softmax.lab.bench.ops import AUTOGRAD, OPS, through_autograd
from fused_softmax.lab.bench.peers import PEER_SYSTEMS
from fused_softmax.launch.device import interpreting

Kind = Literal["ours", "torch", "peer", "lesson"]


class DeviceFault(Exception):
    """The device faulted (an illegal access, a device assertion): results so far stand, this process cannot go on."""


@dataclass(frozen=True)
class System:
    """One column of the benchmark. `missing()` gives the reason why it cannot run here, or ''."""

    name: str
    op: str
    kind: Kind
    build: Callable[[], Callable[..., Any]]
    missing: Callable[[], str] = lambda: ""
    # torch.compile guards on PyTorch's deterministic mode; such a system is poisoned through the allocator alone
    poison_by_mode: bool = True


def _needs_triton() -> str:
    if find_spec("triton") is None:
        return "needs triton"
    if not interpreting() and not torch.cuda.is_available():
        return "needs a GPU or TRITON_INTERPRET=1"
    return ""


def _gradient(log: bool) -> Callable[[], Callable[..., Any]]:
    def build() -> Callable[..., Any]:
        backward = importlib.import_module("fused_softmax.launch.softmax").softmax_backward
        return lambda dy, y: backward(dy, y, -1, y.dtype, log)

    return build


def _ours(op: str) -> System:
    def build() -> Callable[..., Any]:
        function = getattr(importlib.import_module("fused_softmax"), op.removesuffix("_autograd"))

        def forward(x: torch.Tensor) -> torch.Tensor:
            return function(x, -1)

        return through_autograd(forward) if op in AUTOGRAD else forward

    builds = {"softmax_backward": _gradient(False), "log_softmax_backward": _gradient(True), **loss_systems.OURS}
    return System("fused_softmax", op, "ours", builds.get(op, build), _needs_triton)


def _torch(op: str) -> System:
    return System("torch", op, "torch", loss_systems.TORCH.get(op, lambda: OPS[op].torch_call))


def _lesson(number: int, name: str, mistake: str | None = None) -> System:
    def build() -> Callable[..., Any]:
        module = importlib.import_module("fused_softmax.lab.lessons").load(number)
        return module.MISTAKES[mistake] if mistake else module.softmax

    def missing() -> str:
        if find_spec("fused_softmax.lab.lessons") is None:
            return "has no lessons"
        return _needs_triton() if number > 1 else ""

    return System(name, "softmax", "lesson", build, missing)


PUBLISHED = "as published: 512 columns of the row"
LESSON_SYSTEMS = (
    _lesson(1, "01_naive"),
    _lesson(2, "02_one_row"),
    _lesson(3, "03_driver"),
    _lesson(4, "04_persistent"),
    _lesson(5, "05_published", PUBLISHED),
    _lesson(5, "05_vectorized"),
    _lesson(6, "06_three_pass"),
    _lesson(7, "07_online"),
    _lesson(8, "08_many_rows"),
    _lesson(9, "09_cluster"),
)
# the tenth lesson's kernel is the shipped one: it is measured as fused_softmax
LESSON_NUMBERS = {system.name: int(system.name[:2]) for system in LESSON_SYSTEMS}

SYSTEMS: tuple[System, ...] = (
    *(_ours(op) for op in OPS),
    *(
        System("fused_softmax_in_place", op, "ours", build, _needs_triton)
        for op, build in loss_systems.IN_PLACE.items()
    ),
    *(_torch(op) for op in OPS),
    *(System(n, op, "peer", build, missing, poison_by_mode=by_mode) for n, op, build, missing, by_mode in PEER_SYSTEMS),
    *LESSON_SYSTEMS,
)


def systems_for(op: str, names: tuple[str, ...] = ()) -> tuple[System, ...]:
    """Systems that compute `op`, all or those named, in the registry's order; raises KeyError for an unknown name."""
    known = {system.name: system for system in SYSTEMS if system.op == op}
    unknown = [name for name in names if name not in {system.name for system in SYSTEMS}]
    if unknown:
        raise KeyError(f"no system named {', '.join(unknown)}: there are {', '.join(known)}")
    return tuple(system for name, system in known.items() if not names or name in names)


FAULTS = ("illegal memory access", "misaligned address", "device-side assert", "illegal instruction", "launch failure")


def outcome(error: BaseException, kind: Kind) -> tuple[str, str]:
    """Sort an exception of a call into (status, short reason); raises DeviceFault when the device itself faulted."""
    text = str(error) or type(error).__name__
    reason = next((line.strip() for line in text.splitlines() if line.strip()), text)[:160]
    # the causes: torch.compile and the peers wrap what Triton raised
    chain, link = [], error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__  # type: ignore[assignment]
    if any(fault in str(e).lower() for e in chain for fault in FAULTS):
        raise DeviceFault(reason) from error
    names = {type(e).__name__ for e in chain}
    if names & {"OutOfResources", "OutOfMemoryError"} or any("out of resource" in str(e).lower() for e in chain):
        return "out of resources", reason
    refusals = (ValueError, NotImplementedError, RuntimeError, AssertionError)
    refused = isinstance(error, refusals) or type(error).__name__ == "CompilationError" or kind == "peer"
    return ("refused", reason) if refused else ("error", f"{type(error).__name__}: {reason}")
