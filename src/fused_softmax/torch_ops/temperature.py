"""A temperature as the factor of the logits that the kernels take."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import other_device_error, real
from .decompositions import least_positive


def scale_of(function: str, temperature: float | Tensor, batch: torch.Size, logits: Tensor) -> float | Tensor:
    """1/temperature: a number, or a tensor of shape `batch` in float32, or float64 for float64 logits.

    logits: a tensor of the logits' dtype and device.
    """
    if not isinstance(temperature, Tensor):
        if type(temperature) is not float:
            temperature = real(function, "temperature", temperature)
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, not {temperature}")
        return max(1.0 / temperature, least_positive(logits.dtype))
    if temperature.dtype is torch.bool or temperature.is_complex():
        raise TypeError(f"temperature must hold real numbers, not {temperature.dtype}; temperature.float() makes them")
    if temperature.device != logits.device and not (temperature.dim() == 0 and temperature.is_cpu):
        raise other_device_error("temperature", temperature, "logits", logits)
    dtype = logits.dtype if logits.dtype is torch.float64 else torch.float32
    return temperature.to(logits.device, dtype).expand(batch).reciprocal()
