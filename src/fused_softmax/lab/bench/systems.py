"""The systems that are compared: ours, torch's, the peers' and the lessons', each by the workload that it runs.

Every workload of ops.py has ours, torch's and torch.compile's from its entry; SYSTEMS lists the others.
`build()` imports and compiles lazily and returns a callable over the workload's inputs that returns a fresh output.
Failures are results: `outcome` sorts an exception into 'out of resources', 'refused' or 'error'. A fault of the device,
after which nothing in this process can be trusted, becomes DeviceFault.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

import fused_softmax
from fused_softmax.lab.bench.cases import Case, workload
from fused_softmax.lab.bench.ops import OPS
from fused_softmax.lab.bench.workload import Op, with_gradient
from fused_softmax.lab.record import without_colors
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
    # builds it for a workload in another shape than rows; None: it takes rows only
    over: Callable[[Op], Callable[..., Any]] | None = None
    plan: str = ""  # in words, where it is not the planner's choice

    def made_for(self, case: Case) -> Callable[..., Any]:
        """The callable over a case's inputs."""
        if case.inner is None:
            return self.build()
        assert self.over is not None, f"{self.name} takes rows only"
        return self.over(workload(case))


def _needs_triton() -> str:
    if find_spec("triton") is None:
        return "needs triton"
    if not interpreting() and not torch.cuda.is_available():
        return "needs a GPU or TRITON_INTERPRET=1"
    return ""


def _made_from(
    name: str,
    op: str,
    kind: Kind,
    make: Callable[[Op], Callable[..., Any]],
    missing: Callable[[], str] = lambda: "",
    poison_by_mode: bool = True,
) -> System:
    """A system that is made from the workload's entry alone, in whatever shape."""
    return System(name, op, kind, lambda: make(OPS[op]), missing, poison_by_mode, make)


def _ours(op: str) -> System:
    return _made_from("fused_softmax", op, "ours", lambda entry: entry.ours, _needs_triton)


def _in_place() -> Callable[..., Any]:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        return fused_softmax.cross_entropy(x, target, inplace_backward=True)

    return with_gradient(loss, overwrites=True)


def _torch(op: str) -> System:
    return _made_from("torch", op, "torch", lambda entry: entry.torch_call)


# --- peers: imported only when they are built -------------------------------------------------------------------------


def _needs(package: str | None) -> str:
    if not torch.cuda.is_available():
        return "needs a GPU"
    if package and find_spec(package) is None:
        return f"needs the package {package}"
    return ""


def _compiled(op: str) -> System:
    def make(entry: Op) -> Callable[..., Any]:
        # past its recompile limit torch.compile would fall back to eager in silence: start anew, and forbid breaks
        torch._dynamo.reset()
        return entry.compiled(lambda function: torch.compile(function, dynamic=False, fullgraph=True))

    return _made_from("torch.compile", op, "peer", make, lambda: _needs(None), poison_by_mode=False)


def _liger(op: str, build: Callable[[], Callable[..., Any]]) -> System:
    return System("liger", op, "peer", build, lambda: _needs("liger_kernel"))


def _liger_softmax() -> Callable[..., Any]:
    return importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply


def _liger_loss() -> Callable[..., Any]:
    """Liger's cross-entropy, which writes the gradient over the logits."""
    function = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction

    def loss(x: Tensor, target: Tensor, count: Tensor | None = None) -> Tensor:
        result = function.apply(x, target, None, -100, 0.0, 0.0, "mean", None, False)
        return result[0] if isinstance(result, tuple) else result

    return loss


def _trl() -> Callable[..., Any]:
    """TRL's log-probability kernel. It keeps the logsumexp to itself: a gather and a subtraction give it again."""
    function = importlib.import_module("trl.kernels.logprob_entropy").selective_log_softmax_and_entropy

    def statistics(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        picked, entropy = function(logits, ids)
        return picked, entropy, logits.gather(-1, ids[:, None])[:, 0] - picked

    return statistics


def _quack(op: str, module: str, *names: str) -> System:
    """A function of QuACK, by the first of `names` that its version has."""

    def build() -> Callable[..., Any]:
        # quack's package exports functions under the names of its modules: take the module itself
        importlib.import_module(module)
        found = sys.modules[module]
        function = next(getattr(found, name) for name in names if hasattr(found, name))
        # a softmax takes the inputs as they are; a loss is measured as ours is
        return OPS[op].measured(OPS[op].call(function)) if OPS[op].spec.name == "cross_entropy" else function

    return System("quack", op, "peer", build, lambda: _needs("quack"))


def _lesson(number: int, name: str, mistake: str | None = None) -> System:
    def build() -> Callable[..., Any]:
        from fused_softmax.lab.lessons import load

        module = load(number)
        return module.MISTAKES[mistake] if mistake else module.softmax

    def missing() -> str:
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
    System("fused_softmax_in_place", "cross_entropy", "ours", _in_place, _needs_triton),
    *(_torch(op) for op in OPS),
    *(_compiled(op) for op in OPS),
    _liger("softmax", _liger_softmax),
    _liger("cross_entropy", lambda: with_gradient(_liger_loss(), overwrites=True)),
    _liger("cross_entropy_forward", _liger_loss),
    System("trl", "token_logprobs", "peer", _trl, lambda: _needs("trl")),
    _quack("softmax", "quack.softmax", "softmax_fwd", "softmax"),
    _quack("softmax_backward", "quack.softmax", "softmax_bwd", "softmax_backward"),
    _quack("cross_entropy", "quack.cross_entropy", "cross_entropy"),
    _quack("cross_entropy_forward", "quack.cross_entropy", "cross_entropy"),
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
    text = without_colors(str(error)) or type(error).__name__
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
