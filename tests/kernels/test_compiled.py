"""What launches compile to without a GPU, and the occupancy that follows: each number against one known otherwise."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from fused_softmax.lab import lessons
from fused_softmax.lab.cross_compile import MULTIPROCESSORS, Resources, cross_compile, occupancy
from fused_softmax.launch.compile import Launch

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
compiled = pytest.mark.compiled


def lesson_launch(n: int, n_cols: int, dtype: torch.dtype = torch.bfloat16, **settings) -> Launch:
    x = torch.empty(1, n_cols, dtype=dtype, device="meta")
    (launch,) = lessons.load(n).launches(x, torch.empty_like(x), **settings)
    return launch


def used(**changed) -> Resources:
    plain = {"name": "k", "target": "sm_90", "registers": 32, "spilled_bytes": 0, "shared_bytes": 0, "num_warps": 4}
    plain |= {"num_ctas": 1, "num_stages": 1, "loads": (), "stores": (), "async_copies": 0}
    return Resources(**(plain | changed))


@pytest.mark.parametrize(
    "changed, programs, limiter",
    [
        ({}, 16, "registers"),  # 64 warps of 32 registers fill the file, and the warps, exactly
        ({"registers": 33}, 12, "registers"),  # 40 registers a thread: 51 warps, 48 in fours
        ({"registers": 255, "num_warps": 8}, 1, "registers"),
        ({"registers": 16, "num_warps": 1}, 32, "slots"),
        ({"registers": 16, "num_warps": 16}, 4, "warps"),
        ({"shared_bytes": 100_000}, 2, "shared memory"),
        ({"shared_bytes": 227 << 10}, 1, "shared memory"),
        ({"shared_bytes": (227 << 10) + 1}, 0, "shared memory"),
    ],
    ids=str,
)
def test_occupancy_of_an_h200(changed, programs, limiter):
    fit = occupancy(used(**changed), MULTIPROCESSORS["sm_90"])
    assert (fit.programs, fit.limiter) == (programs, limiter)
    assert min(fit.by.values()) == programs


def test_fits_is_about_the_limit_that_is_asked_for():
    kernel = used(shared_bytes=150_000)
    assert kernel.fits() and not kernel.fits(99 << 10)
    assert not dataclasses.replace(kernel, target="sm_120").fits()


@pytest.mark.interpreted
def test_refuses_to_compile_where_kernels_are_interpreted():
    x = torch.zeros(1, 8)
    (launch,) = lessons.load(2).launches(x, x)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET unset"):
        cross_compile(launch, "sm_90")


@compiled
def test_refuses_a_target_of_another_form():
    with pytest.raises(ValueError, match="neither sm_"):
        cross_compile(lesson_launch(2, 8), "hopper")


@compiled
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("n", range(2, 9))
def test_lessons_compile_everywhere_with_wide_accesses_and_no_spills(n, target):
    kernel = cross_compile(lesson_launch(n, 4096), target)
    assert kernel.target == target and kernel.spilled_bytes == 0
    # a wave has 64 lanes there: where a block has 2,048 columns or 16 warps, 4 columns are left to each
    widest = 8 if target == "gfx942" and n in (3, 6, 7) else 16
    assert (kernel.widest_load_bytes, kernel.widest_store_bytes) == (widest, widest)
    assert 0 < kernel.registers <= 255 and kernel.fits()


@compiled
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_width_that_is_no_multiple_of_16_is_loaded_element_by_element(dtype, target):
    assert cross_compile(lesson_launch(2, 1000, dtype), target).widest_load_bytes == dtype.itemsize


@compiled
def test_alignment_is_that_of_the_tensor():
    aligned, x = torch.empty(2, 1024), torch.empty(2 * 1024 + 1)[1:].view(2, 1024)
    launches = lessons.load(2).launches
    assert cross_compile(launches(aligned, aligned)[0], "sm_90").widest_load_bytes == 16
    assert cross_compile(launches(x, aligned)[0], "sm_90").widest_load_bytes == 4


@compiled
def test_published_and_mended_load_as_lesson_05_says():
    assert cross_compile(lesson_launch(5, 4096, vec=4), "sm_90").widest_load_bytes == 8
    assert cross_compile(lesson_launch(5, 4096), "sm_90").widest_load_bytes == 16


@compiled
@pytest.mark.parametrize(
    "dtype, n_cols, fits",
    [
        (torch.bfloat16, 32768, True),
        (torch.bfloat16, 65536, False),
        (torch.float32, 16384, True),
        (torch.float32, 32768, False),
    ],
    ids=str,
)
def test_the_persistent_kernel_runs_out_of_shared_memory_where_it_was_seen_to(dtype, n_cols, fits):
    kernel = cross_compile(lesson_launch(4, n_cols, dtype), "sm_90")
    assert kernel.async_copies > 0  # pipelined through shared memory
    # three blocks, and the bytes of the reductions
    assert 0 <= kernel.shared_bytes - 3 * n_cols * dtype.itemsize < 1024
    assert kernel.fits() == fits
    assert (occupancy(kernel, MULTIPROCESSORS["sm_90"]).programs > 0) == fits


@compiled
def test_fewer_registers_spill():
    free, bound = (cross_compile(lesson_launch(3, 32768, **meta), "sm_90") for meta in ({}, {"maxnreg": 32}))
    assert free.spilled_bytes == 0 and free.registers > 32
    assert bound.spilled_bytes > 0 and bound.registers <= 32
    assert cross_compile(lesson_launch(2, 65536), "sm_90").spilled_bytes > 1000


@triton.jit
def two_pieces_kernel(y_ptr, x_ptr, n_cols, unit, PIECES: tl.constexpr):
    start = 0
    for i in tl.static_range(len(PIECES)):
        cols = start + tl.arange(0, PIECES[i])
        mask = cols < n_cols * unit
        tl.store(y_ptr + cols, tl.load(x_ptr + cols, mask=mask), mask=mask)
        start += PIECES[i]


@compiled
def test_constexpr_tuples_and_units_reach_the_kernel():
    x = torch.empty(1536, dtype=torch.float32, device="meta")
    wide, narrow = (
        cross_compile(Launch(two_pieces_kernel, (1,), (x, x, 96, unit), {"PIECES": pieces, "num_warps": 4}), "sm_90")
        for unit, pieces in ((16, (1024, 512)), (1, (1024,)))
    )
    assert wide.loads == ((16, 3),)  # 1,024 columns in two loads of 128 threads x 16 bytes, 512 in a third
    # unit == 1 is a constant, and 96 is known to be a multiple of 16
    assert narrow.loads == ((16, 2),)


@triton.jit(do_not_specialize=["n_cols"])
def unspecialised_kernel(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols, mask=cols < n_cols), mask=cols < n_cols)


@compiled
def test_do_not_specialize_is_honoured():
    x = torch.empty(1024, dtype=torch.float32, device="meta")
    kernel = cross_compile(Launch(unspecialised_kernel, (1,), (x, x, 1024), {"BLOCK": 1024}), "sm_90")
    assert kernel.widest_load_bytes == 4
