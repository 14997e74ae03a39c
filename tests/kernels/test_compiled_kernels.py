"""What the planner's kernels compile to, for every target: no spills, 16-byte accesses, and shared memory that exists.

On sm_90 every kernel of the promised and the odd widths is compiled (bfloat16 and float32, softmax and its gradient,
contiguous rows), elsewhere and for other dtypes, log_softmax and unaligned rows the hungriest of each kind: of kernels
that differ in their length only, the longest. That is what FUSED_SOFTMAX_EXTENDED=1 compiles (make test-extended);
without it there is sm_90 with the hungriest of each variant. FUSED_SOFTMAX_ALL_KERNELS=1 compiles all there are,
some 5,000.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from compiled_checks import narrow_accesses
from planned import DTYPES, ITEMSIZE, PROMISED, WIDTHS, Kernel, compile_all, kernels

from fused_softmax.lab.cross_compile import MULTIPROCESSORS
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.compiled

ALL = os.environ.get("FUSED_SOFTMAX_ALL_KERNELS") == "1"
EXTENDED = ALL or os.environ.get("FUSED_SOFTMAX_EXTENDED") == "1"
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942") if EXTENDED else ("sm_90",)
PLAIN = (("bfloat16", "bfloat16"), ("float32", "float32"))
SOFTMAX, LOG, GRADIENT, LOG_GRADIENT = (False, False), (False, True), (True, False), (True, True)  # (backward, log)


def hungriest(of: Iterable[Kernel]) -> list[Kernel]:
    """Of kernels that differ in the length of their slice only, the longest."""
    longest: dict[object, Kernel] = {}
    for k in of:
        p = k.plan
        kind = (k.dtypes, k.backward, k.log, p.regime, p.rows, p.ctas, p.num_warps, p.vec, p.unaligned, p.recompute)
        kind += (p.max_registers, p.smem_staged, p.resident_chunks, p.prefetched_chunks)
        longest[kind] = max(longest.get(kind, k), k, key=lambda k: k.plan.chunks * k.plan.vectors_per_chunk)
    return list(longest.values())


def variant(k: Kernel) -> tuple[object, ...]:
    return k.backward, k.plan.regime, k.plan.ctas, k.plan.unaligned, k.plan.recompute


def chosen(target: str) -> list[Kernel]:
    if ALL:
        return kernels(target)
    plain = (SOFTMAX, GRADIENT)
    if target != "sm_90" or not EXTENDED:
        found = hungriest(kernels(target, PROMISED, PLAIN, plain, ["contiguous", "shifted"]))
        return found if EXTENDED else list({variant(k): k for k in found}.values())
    out = kernels(target, WIDTHS, PLAIN, plain, ["contiguous"])
    out += hungriest(kernels(target, PROMISED, PLAIN, plain, ["shifted"]))
    out += hungriest(kernels(target, WIDTHS, PLAIN, [SOFTMAX], ["apart"]))
    out += hungriest(kernels(target, PROMISED, PLAIN, [LOG, LOG_GRADIENT], ["contiguous"]))
    out += hungriest(kernels(target, WIDTHS, [d for d in DTYPES if d not in PLAIN], [SOFTMAX], ["contiguous"]))
    return list(dict.fromkeys(out))


@pytest.fixture(scope="module", params=TARGETS)
def built(request):
    """[(kernel, its Resources)] for one target."""
    wanted = chosen(request.param)
    assert len(wanted) > 20
    return list(compile_all(wanted))


def listed(wrong: list[str]) -> str:
    return "\n".join([f"{len(wrong)} kernels:", *wrong])


def test_no_kernel_spills(built):
    spilled = [
        f"{used.spilled_bytes} bytes a thread at {used.registers} registers: {kernel}"
        for kernel, used in built
        if used.spilled_bytes and used.target.startswith("sm_")
    ]
    assert not spilled, listed(spilled)


def test_lanes_add_rounded_products(built):
    """Each lane of a warp then has the same sum, so equal elements of a row have equal results."""
    fused = [f"{used.products_exchanged}: {kernel}" for kernel, used in built if used.products_exchanged]
    assert not fused, listed(fused)


def test_aligned_rows_are_moved_16_bytes_at_a_time(built):
    narrow, wide = narrow_accesses(built)
    assert not narrow, listed(narrow)
    assert wide > len(built) / 2


def test_vectors_are_all_that_moves_but_for_the_ends(built):
    """A masked chunk is no excuse for narrow accesses: beside the vectors there are only head and tail."""
    for kernel, used in built:
        p = kernel.plan
        if p.vec * min(ITEMSIZE[d] for d in kernel.dtypes) >= 16 and p.regime != "two_pass" and used.target != "gfx942":
            narrow = sum(count for size, count in used.loads if size < 16)
            ends = (1 + kernel.backward) * p.rows * p.vectors_per_chunk // (p.num_warps * 32) if p.unaligned else 0
            assert narrow <= ends, f"{used.loads}: {kernel}"


def test_the_ctas_of_a_cluster_meet_once(built):
    """The exchange's own barrier is the only one: none ends the kernel, and no tile goes from one CTA to another, as it
    does where a compiler spreads a line over CTAs, for which the exchange is not made."""
    for kernel, used in built:
        expected = int(used.num_ctas > 1)
        assert used.cluster_barriers == expected, f"{used.cluster_barriers} barriers: {kernel}"


def test_programs_fit_the_device(built):
    for kernel, used in built:
        limits = MULTIPROCESSORS[used.target]
        assert used.fits(), f"{used.shared_bytes} bytes of shared memory: {kernel}"
        assert (used.num_warps, used.num_ctas) == (kernel.plan.num_warps, kernel.plan.ctas)
        threads = used.num_warps * limits.warp_size
        assert threads <= 1024 and used.registers * threads <= limits.registers, f"{used.registers} registers: {kernel}"


def test_register_caps_hold(built):
    for kernel, used in built:
        if kernel.plan.max_registers is not None:
            cap = DEVICES[used.target].registers_within(kernel.plan.max_registers, kernel.plan.num_warps)
            assert used.registers <= cap, str(kernel)


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_compiled_has_every_variant_of_the_target(target):
    """The selection leaves out lengths, never a kind of kernel, of plain softmax."""
    everything = kernels(target, PROMISED, PLAIN, [SOFTMAX, GRADIENT], ["contiguous", "shifted"])
    assert {variant(k) for k in everything} <= {variant(k) for k in chosen(target)}
