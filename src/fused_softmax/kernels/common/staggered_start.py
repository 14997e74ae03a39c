"""Starts the programs that fit on a multiprocessor one after the other, so that some compute while others read.

Programs that start together stay in step: their tiles arrive at the same time, and memory idles while all of them
compute. So a program of the first round waits for about the time in which the tiles of those in front of it arrive
(docs/measurements/other-dims.md, 'Programs that start one after the other').

Which programs share a multiprocessor is a guess: the device starts one program on each, then the next. No result
depends on it, nor on the time that passes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _wait_ptx(cycles: int, fitting: int) -> str:
    """PTX that waits rank*cycles, where rank is the place among the programs of a multiprocessor, 0 .. fitting-1.

    Only in the first round, and only if the grid has at least 5/4 as many programs as fit on the device.
    """
    ptx = [".reg .pred waits, many;", ".reg .b32 rank, fit, start, now, until;"]
    ptx += ["mov.u32 rank, %ctaid.x;", "mov.u32 fit, %nsmid;", "div.u32 rank, rank, fit;"]
    ptx += [f"mul.lo.u32 fit, fit, {fitting};", "shr.u32 until, fit, 2;", "add.u32 until, until, fit;"]
    ptx += ["mov.u32 now, %nctaid.x;", "setp.ge.u32 many, now, until;"]
    ptx += [f"setp.lt.and.u32 waits, rank, {fitting}, many;", f"mul.lo.u32 until, rank, {cycles};"]
    ptx += ["mov.u32 start, %clock;", "wait_${:uid}:", "mov.u32 now, %clock;", "sub.u32 now, now, start;"]
    ptx += ["setp.lt.and.u32 waits, now, until, waits;", "@waits nanosleep.u32 100;", "@waits bra wait_${:uid};"]
    return "\n".join(["{", *ptx, "mov.u32 $0, 0;", "}"])


@triton.jit
def stagger(CYCLES: tl.constexpr, FITTING: tl.constexpr):
    """Waits for this program's turn, before its first load. CYCLES: from one start to the next; 0: all start at once.

    FITTING: programs that fit on a multiprocessor.
    """
    if CYCLES > 0:
        ASM: tl.constexpr = _wait_ptx(CYCLES, FITTING)
        tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
