"""Whether the installed torch and Triton can run the kernels, and what happens where they cannot.

The package imports with any torch. Three cases end with PyTorch's own kernel, one warning for each reason and no
error: versions below the floors, a Triton that cannot be imported, and a kernel that cannot be compiled or loaded. A
Triton newer than `NEWEST_TRITON` is tried: its kernels run unless one of these cases occurs.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import threading
import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

# The oldest versions whose kernels compile and run; docs/compatibility.md has the runs. pyproject.toml names the same.
MIN_TORCH = (2, 10)
MIN_TRITON = (3, 6)
# The newest Triton that the compiled tests run with.
NEWEST_TRITON = (3, 9)
CAPACITY = 8192  # failures kept
_fall_back = True

_logger = logging.getLogger("fused_softmax")
_logger.addHandler(logging.NullHandler())  # without a handler of the program's own, the warning alone is printed
_lock = threading.Lock()
_warned: set[str] = set()
_noted: set[str] = set()
_failures: dict[Hashable, str] = {}


class KernelUnavailable(RuntimeError):
    """A kernel cannot be compiled or loaded in this process. It is raised before anything is launched or written."""


def version_pair(text: str) -> tuple[int, int]:
    """(major, minor) of a version such as "2.13.0+cpu"; (0, 0) where it has no such form."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@functools.cache
def triton_version() -> str | None:
    """The version of the Triton that is imported here, or None where none can be imported."""
    try:
        import triton
    except Exception:  # a broken installation raises more than ImportError
        return None
    return str(getattr(triton, "__version__", "0.0"))


def torch_is_too_old() -> bool:
    return version_pair(torch.__version__) < MIN_TORCH


def triton_is_too_old() -> bool:
    version = triton_version()
    return version is not None and version_pair(version) < MIN_TRITON


def triton_is_untested() -> bool:
    """Whether this Triton is newer than those that the tests run with."""
    return version_pair(triton_version() or "0.0") > NEWEST_TRITON


def versions() -> str:
    """The installed versions, as every message names them."""
    version = triton_version()
    return f"torch {torch.__version__} and {'no Triton' if version is None else f'Triton {version}'}"


def below_floor() -> str:
    """The message for a version that is too old."""
    floors = f"torch {MIN_TORCH[0]}.{MIN_TORCH[1]} and Triton {MIN_TRITON[0]}.{MIN_TRITON[1]} or later"
    return f"the kernels need {floors}; installed are {versions()}"


def warn_once(reason: str) -> None:
    """Warns that PyTorch's own kernel runs, and logs it, the first time that this reason is given."""
    with _lock:
        if reason in _warned:
            return
        _warned.add(reason)
    _logger.warning("PyTorch's own kernel runs: %s", reason)
    warnings.warn(f"fused_softmax: PyTorch's own kernel runs: {reason}", stacklevel=3)


def note(reason: str) -> str:
    """Logs that PyTorch's own kernel takes a call, the first time that this reason is given; returns the reason."""
    if reason not in _noted:
        _noted.add(reason)
        _logger.info("PyTorch's own kernel takes the call: %s", reason)
    return reason


def note_kernel(kernel: str, meta: Mapping[str, Any], index: int, seconds: float) -> None:
    """Logs that a kernel is ready on a device, the first time that it is prepared."""
    _logger.info("%s is ready on cuda:%d after %.3f s", kernel, index, seconds)
    _logger.debug("%s was compiled with %s", kernel, dict(meta))


# --- kernels that do not compile or load ------------------------------------------------------------------------------


def failure(key: Hashable) -> str | None:
    """Why the kernel of this key failed to compile, or None where it did not."""
    return _failures.get(key)


def raise_if_failed(key: Hashable) -> None:
    """KernelUnavailable where the kernel of this key failed before: a failure is not tried again."""
    reason = _failures.get(key)
    if reason is not None:
        raise KernelUnavailable(reason)


def failed(key: Hashable, kernel: str, error: Exception) -> KernelUnavailable:
    """Keeps and warns that `kernel` failed with `error`; returns the exception to raise.

    An error of the device itself (a fault in an earlier kernel, no memory left) is raised again as it is: it says
    nothing about this kernel, and hides nothing else.
    """
    if not _fall_back or is_device_error(error):
        raise error
    reason = f"{kernel} does not compile with {versions()}: {_cause(error)}"
    while len(_failures) >= CAPACITY:  # the oldest goes
        _failures.pop(next(iter(_failures)), None)
    _failures[key] = reason
    _logger.debug("%s failed", kernel, exc_info=error)
    warn_once(reason)
    return KernelUnavailable(reason)


@contextmanager
def failures_raised() -> Iterator[None]:
    """A kernel that does not compile raises its own error: where calls are timed or judged, they are to be ours."""
    global _fall_back
    before, _fall_back = _fall_back, False
    try:
        yield
    finally:
        _fall_back = before


# a driver's messages for a binary that it does not take; its other errors are the device's
_BINARY = re.compile(r"kernel image|PTX|symbol not found|not supported|shared object", re.IGNORECASE)


def is_device_error(error: BaseException) -> bool:
    """Whether `error` is about the device or the machine's memory, and not about a kernel or its compiler."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError, getattr(torch, "AcceleratorError", ()))):
        return True
    said = str(error)
    of_driver = "Triton Error [" in said or "CUDA error:" in said or "HIP error:" in said
    return of_driver and not _BINARY.search(said)


def _cause(error: BaseException) -> str:
    """The error in one line, and what to do about it where that is known."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    said = f"{type(root).__name__}: {lines[-1][:200]}" if lines else type(root).__name__
    if isinstance(error, OSError):
        return f"{said}. Triton keeps compiled kernels in {cache_folder()}: TRITON_CACHE_DIR names another folder"
    return said


def cache_folder() -> str:
    """Where Triton keeps compiled kernels."""
    try:
        return str(importlib.import_module("triton").knobs.cache.dir)
    except Exception:  # a Triton that has no knobs
        return "its cache folder"
