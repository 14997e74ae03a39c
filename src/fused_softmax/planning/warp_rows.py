"""Plans of the warp regime: short rows, each in one warp or less. Pure Python, no I/O.

A part of a warp takes a row, so that no reduction leaves it, and a program takes as many rows as its warps have parts.
Rows that start at a multiple of 16 bytes lie in whole vectors, others in partial ones, or in whole ones between a head
and a tail. The numbers are in `config_tables`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .config_tables import (
    PARTIAL_BACKWARD,
    PARTIAL_COLS,
    PARTIAL_EVEN,
    PARTIAL_FORWARD,
    PARTIAL_WARPS,
    WARP,
    WARP_COLS,
    WARP_EACH,
    WARP_HALVES,
    WARP_MAX_COLS,
    WARP_PAIRS,
    WARP_UNALIGNED,
)
from .types import Device, Plan, Problem, power_of_two
from .vectors import geometry, unpredicated_chunks, vectors_of


def warp_plan(
    problem: Problem, device: Device, partial: Mapping[int, tuple[int, int]] | None = None, even: int = PARTIAL_EVEN
) -> Plan | None:
    """The plan of the warp regime, or None for rows that are too wide for it.

    partial, even: the table of rows in partial vectors, and the most threads of such a row with an even number of
    chunks, as `config_tables` has them. None: the table of softmax.
    """
    if problem.n_cols > WARP_MAX_COLS:
        return None
    vec, unaligned = geometry(problem)
    units = max(1, vectors_of(problem))
    vectors = min(power_of_two(units), device.warp_size)
    if vec == problem.full_vec:
        vectors = max(vectors, 2 * vec) if unaligned else vectors
        if problem.itemsize == 2 and device.warp_size < units <= 3 * device.warp_size // 2:
            # three vectors for each of 16 threads, not one or two for each of 32, except unaligned rows of a gradient,
            # which take 105 registers with Triton 3.9: 309 columns 0.946 of the add, with 32 threads 0.996
            vectors = device.warp_size // (1 if unaligned and problem.backward else 2)
        config = next(c for c in WARP[problem.itemsize] if units <= c.max_cols)
        num_warps, rows_a_thread = max(1, config.num_warps * 32 // device.warp_size), config.rows
        if unaligned and vectors == device.warp_size and units <= vectors:
            num_warps, rows_a_thread = 1, 4  # 257 columns of bfloat16: 0.98 of copy instead of 0.93
        if unaligned and problem.itemsize == 2 and not problem.backward:
            of_row = (row[2:] for row in WARP_UNALIGNED if row[0] <= units <= row[1])
            vectors, num_warps, rows_a_thread = next(of_row, (vectors, num_warps, rows_a_thread))
    elif problem.n_cols <= PARTIAL_COLS:
        num_warps = max(1, PARTIAL_WARPS * 32 // device.warp_size)
        fewest, elements = (partial or (PARTIAL_BACKWARD if problem.backward else PARTIAL_FORWARD))[vec]
        while vectors > 1 and -(-units // vectors) < fewest:
            vectors //= 2
        rows_a_thread = power_of_two(max(1, elements // (vec * -(-units // vectors))) + 1) // 2
    else:  # as many elements as whole vectors have
        num_warps, rows_a_thread = 1, 1
        vectors *= problem.full_vec // vec
    chunks = -(-units // vectors)
    if vectors >= device.warp_size or (vec < problem.full_vec and vectors <= even):
        chunks += chunks > 4 and chunks % 2  # widths share kernels
    rows = max(1, num_warps * device.warp_size // vectors * rows_a_thread)
    why = f"{rows} row(s) per program, each in one warp or less: no reduction leaves its warp"
    return Plan("warp", rows, 1, 1, vectors, vec, chunks, 0, unaligned, problem.itemsize == 4, num_warps, None, why)


def preferred_warp_plan(problem: Problem, device: Device) -> Plan | None:
    """The plan of the warp regime where it is the fastest, or None."""
    found = warp_plan(problem, device) if problem.n_cols <= WARP_COLS[problem.itemsize] else None
    if found is None or found.vec < problem.full_vec or problem.backward:
        return found
    fewest, most, num_warps = WARP_PAIRS
    if found.unaligned and problem.itemsize == 2 and device.warp_size == 32 and fewest <= vectors_of(problem) <= most:
        rows = 2 * num_warps * device.warp_size // found.vectors_per_chunk
        why = f"{rows} rows per program, two in each half of a warp: no reduction leaves its warp"
        return replace(found, rows=rows, num_warps=num_warps, why=why)
    if found.chunks == 1 and found.vectors_per_chunk == device.warp_size == 32:
        vectors, num_warps = WARP_HALVES[problem.itemsize]
        rows = num_warps * device.warp_size // vectors
        why = f"{rows} rows per program, each in half a warp: no reduction leaves its warp"
        return replace(found, rows=rows, vectors_per_chunk=vectors, chunks=2, num_warps=num_warps, why=why)
    return found


def row_of_a_warp(problem: Problem, device: Device) -> Plan | None:
    """The plan of rows that a warp holds each, in programs of one or two, where such programs are the fastest."""
    found = warp_plan(problem, device) if device.kind == "cuda" and not problem.backward else None
    if found is None or found.vec < problem.full_vec or found.unaligned or problem.dtype != problem.out_dtype:
        return None
    of_width = (warps for fewest, most, warps in WARP_EACH[problem.itemsize] if fewest <= problem.n_cols <= most)
    warps = next(of_width, None)
    if warps is None:
        return None
    full = unpredicated_chunks(vectors_of(problem), 1, device.warp_size, found.chunks, False) if warps == 1 else 0
    why = f"{warps} row(s) per program, each in one warp: no reduction leaves its warp"
    return replace(found, rows=warps, num_warps=warps, unpredicated_chunks=full, why=why)
