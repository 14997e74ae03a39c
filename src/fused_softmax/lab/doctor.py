"""`fused-softmax doctor`: what runs on this machine, what is missing, and what to do about it.

It needs torch and triton alone, so it also runs where an extra is missing.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch

import fused_softmax
from fused_softmax.launch import availability
from fused_softmax.launch.device import describe, device_here, interpreting
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import Device, Problem

# packages of the extras in pyproject.toml, by the names that are imported
EXTRAS = {
    "cli": ("typer", "rich"),
    "bench": ("typer", "rich", "numpy", "matplotlib", "safetensors", "jinja2"),
}
WIDTHS = tuple(2**power for power in range(4, 21))
N_COLS = 1000
# the error of a kernel that works is about 1e-8: rows of 1,000 columns have results of about 1e-3
LARGEST_ERROR = 1e-6
State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """One line: a part, its state, and details. Only "broken" is a failure."""

    name: str
    state: State
    text: str


def findings() -> Iterator[Finding]:
    """All findings, in the order in which a reader needs them."""
    yield Finding("fused-softmax", "ok", f"{fused_softmax.__version__}, Python {platform.python_version()}")
    yield _guarded("torch", _torch)
    yield _guarded("triton", _triton)
    yield _guarded("GPU", _gpu)
    yield _guarded("regimes", _regimes)
    yield _guarded("cache folder", _cache)
    yield _guarded("kernel", _kernel)
    for extra, packages in EXTRAS.items():
        yield _extra(extra, packages)


def _guarded(name: str, look: Callable[[], tuple[State, str]]) -> Finding:
    """What `look` finds; an error that it raises is a finding too."""
    try:
        return Finding(name, *look())
    except Exception as error:
        return Finding(name, "broken", f"{type(error).__name__}: {error}".splitlines()[0][:200])


def _torch() -> tuple[State, str]:
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    text = f"{torch.__version__}, built for {built if torch.version.cuda or torch.version.hip else 'the CPU'}"
    if availability.torch_is_too_old():
        return "missing", f"{text}; {availability.below_floor()}; PyTorch's own kernels run"
    return "ok", text


def _triton() -> tuple[State, str]:
    version = availability.triton_version()
    if version is None:
        return "missing", "cannot be imported; PyTorch's own kernels run: pip install triton (it has wheels for Linux)"
    if availability.triton_is_too_old():
        return "missing", f"{version}; {availability.below_floor()}; PyTorch's own kernels run"
    return "ok", f"{version}{', newer than the tested versions' if availability.triton_is_untested() else ''}"


def _gpu() -> tuple[State, str]:
    if not torch.cuda.is_available():
        advice = "torch is built for the CPU" if not (torch.version.cuda or torch.version.hip) else "torch finds none"
        return "missing", f"{advice}; PyTorch's own kernels run; the lab runs ours in Triton's interpreter"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    device = describe(torch.device("cuda", torch.cuda.current_device()))
    if not isinstance(device, Device):
        return "missing", f"{', '.join(names)}; PyTorch's own kernels run: {device}"
    return "ok", f"{', '.join(names)} ({device.name})"


def _regimes() -> tuple[State, str]:
    device = describe(device_here())
    if not isinstance(device, Device):
        return "missing", f"none: {device}"
    regime = {n: plan(Problem(n, "bfloat16", "bfloat16", vec=8), device).regime for n in WIDTHS}
    runs = [(name, list(widths)) for name, widths in groupby(WIDTHS, key=regime.__getitem__)]
    spans = [f"{name} {widths[0]:,} to {widths[-1]:,}" for name, widths in runs]
    return "ok", f"softmax of bfloat16 rows, columns: {', '.join(spans)}"


def _cache() -> tuple[State, str]:
    folder = Path(availability.cache_folder())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or type(error).__name__
        return "broken", f"{folder}: {why.lower()}: set TRITON_CACHE_DIR to a folder that can be written"
    at = str(folder).replace(str(Path.home()), "~", 1)
    return "ok", f"{at} can be written"


def _kernel() -> tuple[State, str]:
    if availability.triton_version() is None:
        return "missing", "no kernel without triton"
    if torch.cuda.is_available() or interpreting():
        return _checked()
    if find_spec("numpy") is None:
        return "missing", "Triton's interpreter needs numpy: pip install 'fused-softmax[bench]'"
    # whether a kernel is interpreted is decided when it is decorated: another process
    code = "from fused_softmax.lab import doctor; print(*doctor._checked(), sep='\\n')"
    where = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=where, timeout=300)
    if done.returncode:
        return "broken", f"in Triton's interpreter: {(done.stderr.strip().splitlines() or ['nothing said'])[-1][:160]}"
    state, text = done.stdout.strip().splitlines()
    return ("ok" if state == "ok" else "broken"), text


def _checked() -> tuple[State, str]:
    """Compile softmax here, or interpret it, and compare it with float64."""
    device = device_here()
    x = torch.linspace(-8, 8, 4 * N_COLS, device=device).view(4, N_COLS)
    found = fused_softmax.plan_for(x)
    if found.regime == "torch":
        return "missing", f"PyTorch's own kernel ran: {found.why}"
    error = (fused_softmax.softmax(x).double() - torch.softmax(x.double(), -1)).abs().max().item()
    how = "in Triton's interpreter" if device.type == "cpu" else "compiled and run on the GPU"
    text = f"softmax of 4 x {N_COLS:,} {how} ({found.regime}): largest error {error:.1e} against float64"
    return ("ok" if error <= LARGEST_ERROR else "broken"), text


def _extra(extra: str, packages: tuple[str, ...]) -> Finding:
    missing = [package for package in packages if find_spec(package) is None]
    if not missing:
        return Finding(f"extra {extra}", "ok", "installed")
    return Finding(f"extra {extra}", "missing", f"{', '.join(missing)}: pip install 'fused-softmax[{extra}]'")


def main() -> int:
    """Print the findings; the exit status: 1 where something is broken, 0 where it is only missing."""
    broken = False
    for finding in findings():
        print(f"{finding.name:14} {finding.state:8} {finding.text}", flush=True)
        broken = broken or finding.state == "broken"
    return int(broken)
