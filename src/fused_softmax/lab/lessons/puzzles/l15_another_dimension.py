"""Lesson 15, the puzzle: softmax over the first dimension of (n_classes, n_pixels).

The elements of one softmax are n_pixels apart, and the neighbors in memory are other softmaxes. A program takes INNER
neighboring pixels and all classes. The grader counts the sectors of 32 bytes that each load and store touches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def columns_kernel(y_ptr, x_ptr, n_classes, n_pixels, BLOCK: tl.constexpr, INNER: tl.constexpr):
    # write: the tile [BLOCK, INNER] of classes and pixels, its mask, one load, each pixel's softmax, one store
    classes = tl.arange(0, BLOCK)[:, None].to(tl.int64)
    pixels = tl.program_id(0) * INNER + tl.arange(0, INNER)[None, :]
    mask = (classes < n_classes) & (pixels < n_pixels)
    x = tl.load(x_ptr + classes * n_pixels + pixels, mask=mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0)[None, :])
    denominator = tl.sum(numerator, axis=0)[None, :]
    tl.store(y_ptr + classes * n_pixels + pixels, numerator / denominator, mask=mask)
    # end


def softmax_over_classes(x: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    n_classes, n_pixels = x.shape
    block = triton.next_power_of_2(n_classes)
    # write: inner, a power of two: how many neighboring pixels a program takes
    inner = min(64, max(1, 16384 // block), triton.next_power_of_2(n_pixels))
    # end
    num_warps = min(8, max(1, block * inner // 2048))
    grid = (triton.cdiv(n_pixels, inner),)
    columns_kernel[grid](y, x, n_classes, n_pixels, BLOCK=block, INNER=inner, num_warps=num_warps)
    return y
