"""The hardware: the only module that queries it, once per device.

`describe(torch_device)` gives the plan's Device, or why there is none; nothing here creates a CUDA context before a
tensor on that device exists, and importing it asks nothing.
"""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import suppress
from dataclasses import replace

import torch

from ..planning.types import DEVICES, Device, cuda_device, hip_device
from . import torch_private
from .availability import below_floor, torch_is_too_old, triton_is_too_old, versions, warn_once

# the first driver that captures programmatic dependent launches in CUDA graphs: with older ones no kernel starts early
CAPTURES_PDL = 12030


class Unsupported(str):
    """Why a device's tensors are left to PyTorch."""


def lacking() -> str | None:
    """The message if this torch lacks a function that the host code needs, or None."""
    if not torch_private.missing:
        return None
    return f"{', '.join(torch_private.missing)} cannot be found; installed are {versions()}"


@functools.cache
def triton_error() -> str | None:
    """Why Triton, or the torch that it came with, cannot be used; None where both can."""
    if torch_is_too_old():
        return below_floor()
    try:
        import triton  # noqa: F401
    except Exception as error:  # a broken installation raises more than ImportError
        return f"Triton cannot be imported: {error}"
    return below_floor() if triton_is_too_old() else lacking()


def interpreting() -> bool:
    """Whether kernels run through Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def driver_version() -> int:
    """The newest CUDA that the driver runs, as 1000*major + 10*minor; 0 where the driver's library does not say."""
    version = ctypes.c_int(0)
    for name in ("libcuda.so.1", "nvcuda.dll"):
        with suppress(OSError, AttributeError):
            if ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version)) == 0:
                return version.value
    return 0


@functools.cache
def describe(device: torch.device) -> Device | Unsupported:
    """The plan's view of `device`, or the reason why its tensors are left to PyTorch."""
    if device.type not in ("cuda", "cpu"):
        return Unsupported(f"no kernels for device type {device.type!r}")
    if device.type == "cpu" and not interpreting() and not torch_is_too_old():
        return Unsupported("a CPU tensor, and TRITON_INTERPRET is not set")
    error = triton_error()
    if error is not None:
        warn_once(error)
        return Unsupported(error)
    if interpreting():
        return DEVICES["interpreter"] if device.type == "cpu" else Unsupported("TRITON_INTERPRET is set")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        name = properties.gcnArchName.split(":")[0]
        if properties.warp_size != 64:
            return Unsupported(f"{name} has wavefronts of {properties.warp_size}: the kernels are built for 64")
        return hip_device(name)
    if properties.major < 8:
        return Unsupported(f"compute capability {properties.major}.{properties.minor}: kernels need 8.0")
    return replace(cuda_device(properties.major, properties.minor), captures_pdl=driver_version() >= CAPTURES_PDL)


def device_of(t: torch.Tensor) -> Device:
    """The planner's view of t's device; RuntimeError where it has no kernels."""
    described = describe(t.device)
    if not isinstance(described, Device):
        raise RuntimeError(described)
    return described


def device_here() -> torch.device:
    """Where kernels run in this process: the current GPU, or the CPU when interpreted or without one."""
    usable = torch.cuda.is_available() and not interpreting()
    return torch.device("cuda", torch.cuda.current_device()) if usable else torch.device("cpu")
