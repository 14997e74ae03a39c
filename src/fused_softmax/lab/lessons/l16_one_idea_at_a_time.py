"""16. One idea at a time: from one block to the shipped kernel's row.

Problem
    Lessons 02 to 05 hold a row in one block of a power of two. 50,257 columns take 65,536 lanes, a third more registers
    than the row needs, and rows of an odd width are read two bytes at a time. The shipped kernel (lesson 10) has
    neither fault. Which of its ideas gives what?

Mechanism
    Five steps, each with one idea more (STEPS). One block: lesson 02's load. Chunks: the row is cut into CHUNKS chunks
    of VECTORS x VEC columns. CHUNKS is any number, so less than a chunk is wasted, and only the last one or two need a
    mask. Own sums: each lane keeps its own maximum over the chunks, and then its own sum, so one reduction serves all
    chunks. Head and tail: the body starts at the row's first aligned column, so every width is read in vectors of 16
    bytes. The columns before and after it are one element for each lane. Eviction hints: what is read stays in the L2
    longer than what was written, so dirty lines go to memory earlier, and in larger batches.

Resource trade-off
    CHUNKS is a compile-time number: each new one is a kernel to compile. The chunks stay in registers as float32, 2
    bytes of bfloat16 become 4. So this kernel stops at about 16,384 columns with 16 warps, and a cluster must hold
    wider rows (lesson 09). The shipped kernel keeps wide 16-bit rows as they were loaded, and computes each exponential
    twice: it recomputes instead of holding results. No idea pays at every width. On an H200 and 8,191 columns the head
    and the tail take this kernel from 0.72 of the copy to 0.93, and own sums take 16,384 columns from 0.69 to 0.95
    (higher is better). At 1,000 columns the first two steps are the fastest. The hints gain nothing at any of these
    widths.

Common failure mode
    A head and a tail that are written, but not summed, or the reverse. The results are right for every aligned width,
    which is what most tests use. Another one is a chunk count that is rounded down: the row's last columns are then
    never read.

Measurement
    The steps next to each other are timed by `fused-softmax lesson 16` on a GPU. The kernels around them:
    $ fused-softmax bench --systems 02_one_row,05_vectorized,fused_softmax --widths 1000,4096,8192
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.lab.grading.subjects import Subject
from fused_softmax.lab.traffic import one_read
from fused_softmax.launch.compile import Launch

SYSTEM = "16_one_idea_at_a_time"
MAX_COLS = 16384
STEP_WIDTHS = (1000, 1025, 5000, 8191, 16384)
# what each step adds to the one before
STEPS: Mapping[str, dict[str, bool]] = {
    "one block": dict(CHUNKED=False, OWN=False, ENDS=False, HINTS=False),
    "chunks": dict(CHUNKED=True, OWN=False, ENDS=False, HINTS=False),
    "own sums": dict(CHUNKED=True, OWN=True, ENDS=False, HINTS=False),
    "head and tail": dict(CHUNKED=True, OWN=True, ENDS=True, HINTS=False),
    "eviction hints": dict(CHUNKED=True, OWN=True, ENDS=True, HINTS=True),
}


@triton.jit
def steps_kernel(
    y_ptr, x_ptr, n_cols, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr,
    OWN: tl.constexpr, ENDS: tl.constexpr, HINTS: tl.constexpr, SUM_ENDS: tl.constexpr,
):  # fmt: skip
    READS: tl.constexpr = "evict_last" if HINTS else ""
    start = tl.program_id(0).to(tl.int64) * n_cols
    # the body: whole vectors from the row's first aligned column on
    head = tl.minimum((VEC - start % VEC) % VEC, n_cols).to(tl.int32) if ENDS else 0
    body = tl.multiple_of((n_cols - head) // VEC * VEC, VEC) if ENDS else n_cols
    first = tl.multiple_of(start + head, VEC) if ENDS else start
    lanes = tl.arange(0, VECTORS)[:, None] * VEC + tl.arange(0, VEC)[None, :]  # [VECTORS, VEC]

    xs = ()
    for c in tl.static_range(CHUNKS):
        cols = c * (VECTORS * VEC) + lanes
        if c < UNPREDICATED:  # inside every row's body
            x = tl.load(x_ptr + first + cols, eviction_policy=READS)
        else:
            x = tl.load(x_ptr + first + cols, mask=cols < body, other=-float("inf"), eviction_policy=READS)
        xs = xs + (x.to(tl.float32),)  # type: ignore[assignment]
    if ENDS:
        ends = tl.arange(0, 2 * VEC)
        end_cols = tl.where(ends < VEC, ends, head + body + ends - VEC)
        in_ends = tl.where(ends < VEC, ends < head, end_cols < n_cols)
        x_end = tl.load(x_ptr + start + end_cols, mask=in_ends, other=-float("inf")).to(tl.float32)

    if OWN:
        # each lane's own maximum over the chunks: one reduction at the end
        lane_max = xs[0]  # type: ignore[misc]
        for c in tl.static_range(1, CHUNKS):
            lane_max = tl.maximum(lane_max, xs[c])
        row_max = tl.max(lane_max)
    else:
        row_max = tl.max(xs[0])  # type: ignore[misc]
        for c in tl.static_range(1, CHUNKS):
            row_max = tl.maximum(row_max, tl.max(xs[c]))
    if ENDS:
        row_max = tl.maximum(row_max, tl.max(x_end))

    exps = ()
    lane_sum = tl.zeros((VECTORS, VEC), tl.float32)
    row_sum = 0.0
    for c in tl.static_range(CHUNKS):
        e = tl.exp(xs[c] - row_max)
        exps = exps + (e,)  # type: ignore[assignment]
        if OWN:
            lane_sum += e
        else:
            row_sum += tl.sum(e)
    if OWN:
        row_sum = tl.sum(lane_sum)
    if ENDS:
        e_end = tl.exp(x_end - row_max)
        if SUM_ENDS:  # without it: the mistake, as code
            row_sum += tl.sum(e_end)

    for c in tl.static_range(CHUNKS):
        cols = c * (VECTORS * VEC) + lanes
        y = exps[c] / row_sum
        if c < UNPREDICATED:
            tl.store(y_ptr + first + cols, y)
        else:
            tl.store(y_ptr + first + cols, y, mask=cols < body)
    if ENDS:
        tl.store(y_ptr + start + end_cols, e_end / row_sum, mask=in_ends)


def launches(x: Tensor, y: Tensor, step: str = "eviction hints", **wrong: Any) -> list[Launch]:
    """One launch of a step for contiguous x, y (n_rows, n_cols); ValueError above 16,384 columns."""
    n_rows, n_cols = x.shape
    if n_cols > MAX_COLS:
        raise ValueError(f"a row of {n_cols} columns does not fit one program: at most {MAX_COLS}")
    if not x.numel():
        return []
    ideas = dict(STEPS[step])
    vec, num_warps = 16 // x.element_size(), 4 if n_cols <= 4096 else 16
    if ideas.pop("CHUNKED"):
        vectors = min(32 * num_warps, triton.next_power_of_2(triton.cdiv(n_cols, vec)))
    else:
        vectors = triton.next_power_of_2(triton.cdiv(n_cols, vec))
    chunk = vectors * vec
    # a head and a tail shorten the body by less than a vector each
    inside = (n_cols - 2 * (vec - 1) * ideas["ENDS"]) // chunk
    meta: dict[str, Any] = {"VECTORS": vectors, "VEC": vec, "CHUNKS": triton.cdiv(n_cols, chunk)}
    meta |= {"UNPREDICATED": max(0, inside), "SUM_ENDS": True, **ideas, **wrong}
    return [Launch(steps_kernel, (n_rows,), (y, x, n_cols), {**meta, "num_warps": num_warps})]


def launches_for(x: Tensor) -> list[Launch]:
    """The launch for rows like x: to be compiled, not to be run."""
    return launches(x, torch.empty_like(x))


def softmax(x: Tensor, step: str = "eviction hints") -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols), float16, bfloat16 or float32, by one of STEPS."""
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    y = torch.empty_like(x)
    for launch in launches(x, y, step):
        launch()
    return y


def wrongly(x: Tensor, **wrong: Any) -> Tensor:
    """The last step with a mistake."""
    y = torch.full_like(x, math.nan)
    for launch in launches(x.contiguous(), y, **wrong):
        launch()
    return y


def whole_chunks(x: Tensor) -> Tensor:
    """The chunk count rounded down: columns after the last whole chunk are not read."""
    vec = 16 // x.element_size()
    covered = max(1, x.shape[1] // (128 * vec)) * 128 * vec
    y = torch.full_like(x, math.nan)
    kept = min(covered, x.shape[1])
    y[:, :kept] = softmax(x[:, :kept])
    return y


SUBJECT = Subject("softmax", one_read)
MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "the head and the tail are not summed": functools.partial(wrongly, SUM_ENDS=False),
    "the number of chunks is rounded down": whole_chunks,
}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(16)
