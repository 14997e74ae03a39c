"""Single elements of a piece in shared memory, by their addresses: slots.

Where the step from a thread's element to its next one is a number of the call, its address is added up as it goes. As
`fetch` and `put` of `gathered_rows`, whose steps are constants; where interpreted, a slot is a place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gathered_ptx import fetch_ptx, put_ptx
from .gathered_rows import phase_of


@triton.jit
def slot_of(ptr, place, REGION: tl.constexpr, PTX: tl.constexpr):
    """The address of a place of the piece at ptr in shared memory; the place itself where interpreted.  # [THREADS]"""
    if PTX:
        ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        ASM: tl.constexpr = "mov.u32 $0, gathered_rows; add.u32 $0, $0, $1;"
        operands = [(phase_of(ptr) + place) * ITEMSIZE + REGION]
        return tl.inline_asm_elementwise(ASM, "=r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
    else:
        return place


@triton.jit
def next_slot(slot, ptr, elements, PTX: tl.constexpr):
    """The slot so many elements further. Added here: the compiler would hold a register for each multiple of them."""
    if PTX:
        ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        ADD: tl.constexpr = "add.s32 $0, $1, $2;"
        return tl.inline_asm_elementwise(
            ADD, "=r,r,r", [slot, elements * ITEMSIZE], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return slot + elements


@triton.jit
def fetch_slot(ptr, slot, there, FILL: tl.constexpr, PREDICATED: tl.constexpr, PTX: tl.constexpr):
    """The element in each thread's slot, in float32; FILL, as of `fetch`, where PREDICATED and not there."""
    if PTX:
        ASM: tl.constexpr = fetch_ptx(0, ptr.dtype.element_ty.name, 1, FILL if PREDICATED else "", True)
        operands = [slot, there.to(tl.int32)]
        return tl.inline_asm_elementwise(ASM, "=f,r,r", operands, dtype=tl.float32, is_pure=False, pack=1)
    else:
        return tl.load(ptr + slot, mask=there, other=-float("inf") if FILL == "-inf" else 0.0).to(tl.float32)


@triton.jit
def put_slot(value, ptr, slot, there, PTX: tl.constexpr):
    """Puts a float32 for each thread that is there, in ptr's dtype, into its slot."""
    if PTX:
        ASM: tl.constexpr = put_ptx(0, ptr.dtype.element_ty.name, 1, True, True)
        operands = [value, slot, there.to(tl.int32)]
        tl.inline_asm_elementwise(ASM, "=r,f,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(ptr + slot, value.to(ptr.dtype.element_ty), mask=there)
