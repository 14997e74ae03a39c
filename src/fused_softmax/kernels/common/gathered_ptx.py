"""The PTX of `gathered_rows`: what moves between memory, a region of shared memory, and a thread's registers."""

from __future__ import annotations

import triton

# what fills places that do not exist: 32 bits of float32, or two numbers of 16
_FILLS = {
    "-inf": {"fp32": 0xFF800000, "bf16": 0xFF80FF80, "fp16": 0xFC00FC00},
    "0": dict.fromkeys(("fp32", "bf16", "fp16"), 0),
}


@triton.constexpr_function
def region_bytes(elements: int, itemsize: int) -> int:
    """Bytes of shared memory for a piece of so many elements that starts anywhere."""
    return (elements * itemsize + 2 * 16 - 1) // 16 * 16


@triton.constexpr_function
def declare_ptx(n_bytes: int, dynamic: int) -> str:
    """dynamic: bytes that the launch adds behind the kernel's own shared memory, which then is the first of them."""
    assert n_bytes <= (dynamic or 48 << 10), "a kernel's own shared memory has 48 KB"
    align, own = (128, 128) if dynamic else (16, n_bytes)
    return f".shared .align {align} .b8 gathered_rows[{own}];\nmov.u32 $0, 0;"


@triton.constexpr_function
def move_ptx(region: int, into: bool, itemsize: int) -> str:
    """Moves itemsize bytes between an address ($1) and a place ($2: bytes of the region) where $3 is not 0."""
    ptx = ["{", ".reg .pred there;", ".reg .b32 slot, a, b, c, d;", ".reg .b64 at;", ".reg .b16 half;"]
    ptx += ["setp.ne.u32 there, $3, 0;", "mov.u32 slot, gathered_rows;", "add.u32 slot, slot, $2;"]
    ptx += ["cvta.to.global.u64 at, $1;"]
    kind, value = {16: ("v4.b32", "{a, b, c, d}"), 4: ("b32", "a"), 2: ("b16", "half")}[itemsize]
    place = f"[slot+{region}]"
    if into and itemsize == 16:
        ptx += [f"@there cp.async.cg.shared.global {place}, [at], 16;"]
    elif into:
        ptx += [f"@there ld.global.{kind} {value}, [at];", f"@there st.shared.{kind} {place}, {value};"]
    else:
        ptx += [f"@there ld.shared.{kind} {value}, {place};", f"@there st.global.{kind} [at], {value};"]
    return "\n".join([*ptx, "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def bulk_ptx(region: int) -> str:
    """One thread asks for a copy of $3 bytes from a place ($2: bytes of the region) to an address ($1)."""
    ptx = ["{", ".reg .pred asks, some;", ".reg .b32 slot, thread;", ".reg .b64 at;", "mov.u32 thread, %tid.x;"]
    ptx += ["setp.eq.u32 asks, thread, 0;", "setp.ne.u32 some, $3, 0;", "and.pred asks, asks, some;"]
    ptx += ["mov.u32 slot, gathered_rows;", "add.u32 slot, slot, $2;", "cvta.to.global.u64 at, $1;"]
    ptx += [f"@asks cp.async.bulk.global.shared::cta.bulk_group [at], [slot+{region}], $3;"]
    return "\n".join([*ptx, "@asks cp.async.bulk.commit_group;", "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def _access(vec: int, itemsize: int) -> tuple[str, int]:
    """(PTX's suffix of an access to VEC elements, its 32-bit words): 2, 4 or 8 bytes."""
    n_bytes = vec * itemsize
    return {2: ".u16", 4: ".b32", 8: ".v2.b32"}[n_bytes], max(1, n_bytes // 4)


@triton.constexpr_function
def fetch_ptx(offset: int, dtype: str, vec: int, filled: str, from_slot: bool = False) -> str:
    """float32 $0 .. of the elements at place $vec (bytes). filled: the number where $(vec+1) is 0, or "".

    from_slot: $vec is the address itself.
    """
    suffix, words = _access(vec, 4 if dtype == "fp32" else 2)
    ptx = ["{", ".reg .pred there;", f".reg .b32 slot, w<{words}>;", ".reg .b16 low, high;"]
    ptx += [f"mov.u32 slot, {0 if from_slot else 'gathered_rows'};", f"add.u32 slot, slot, ${vec};"]
    if filled:
        ptx += [
            f"setp.ne.u32 there, ${vec + 1}, 0;",
            *(f"mov.b32 w{i}, {_FILLS[filled][dtype]};" for i in range(words)),
        ]
    value = "w0" if words == 1 else "{w0, w1}"
    ptx += [("@there " if filled else "") + f"ld.volatile.shared{suffix} {value}, [slot+{offset}];"]
    for i in range(words):
        if dtype == "fp32":
            ptx += [f"mov.b32 ${i}, w{i};"]
        elif dtype == "bf16":
            ptx += [f"shl.b32 ${2 * i}, w{i}, 16;"]
            ptx += [f"and.b32 ${2 * i + 1}, w{i}, 0xffff0000;"] if vec > 1 else []
        else:
            ptx += [f"mov.b32 {{low, high}}, w{i};", f"cvt.f32.f16 ${2 * i}, low;"]
            ptx += [f"cvt.f32.f16 ${2 * i + 1}, high;"] if vec > 1 else []
    return "\n".join([*ptx, "}"])


@triton.constexpr_function
def put_ptx(offset: int, dtype: str, vec: int, predicated: bool, to_slot: bool = False) -> str:
    """Rounds float32 $1 .. to the dtype and writes them to place $(vec+1); where predicated, if $(vec+2) is not 0.

    to_slot: $(vec+1) is the address itself.
    """
    suffix, words = _access(vec, 4 if dtype == "fp32" else 2)
    ptx = ["{", ".reg .pred there;", f".reg .b32 slot, w<{words}>;", ".reg .f32 zero;", "mov.f32 zero, 0f00000000;"]
    ptx += [f"mov.u32 slot, {0 if to_slot else 'gathered_rows'};", f"add.u32 slot, slot, ${vec + 1};"]
    ptx += [f"setp.ne.u32 there, ${vec + 2}, 0;"] if predicated else []
    for i in range(words):
        if dtype == "fp32":
            ptx += [f"mov.b32 w{i}, ${i + 1};"]
        else:
            to = "bf16x2" if dtype == "bf16" else "f16x2"
            ptx += [f"cvt.rn.{to}.f32 w{i}, {f'${2 * i + 2}' if vec > 1 else 'zero'}, ${2 * i + 1};"]
    value = "w0" if words == 1 else "{w0, w1}"
    ptx += [("@there " if predicated else "") + f"st.shared{suffix} [slot+{offset}], {value};"]
    return "\n".join([*ptx, "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def put_numbers_ptx(n: int, region: int) -> str:
    """Puts n float32 $1 .. at place $(n+1), in units of n, if $(n+2) is not 0."""
    suffix, values = (".v2", "{$1, $2}") if n == 2 else ("", "$1")
    ptx = ["{", ".reg .pred puts;", ".reg .b32 slot, base;", "mov.u32 base, gathered_rows;"]
    ptx += [f"setp.ne.u32 puts, ${n + 2}, 0;", f"mad.lo.u32 slot, ${n + 1}, {4 * n}, base;"]
    return "\n".join([*ptx, f"@puts st.shared{suffix}.f32 [slot+{region}], {values};", "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def get_numbers_ptx(n: int, region: int) -> str:
    """n float32 $0 .. of place $n, in units of n."""
    suffix, values = (".v2", "{$0, $1}") if n == 2 else ("", "$0")
    ptx = ["{", ".reg .b32 slot, base;", "mov.u32 base, gathered_rows;", f"mad.lo.u32 slot, ${n}, {4 * n}, base;"]
    return "\n".join([*ptx, f"ld.volatile.shared{suffix}.f32 {values}, [slot+{region}];", "}"])


@triton.constexpr_function
def put_vectors_ptx(itemsize: int, vec: int) -> str:
    """Writes a vector of 16 bytes to its place: after the result's words those of the vector, then VEC places.

    Only the first place is used. Where it is negative, nothing is written.
    """
    results, words = vec // 4, vec * itemsize // 4
    ptx = ["{", ".reg .pred there;", ".reg .b32 slot;", f"setp.ge.s32 there, ${results + words}, 0;"]
    ptx += ["mov.u32 slot, gathered_rows;", f"add.u32 slot, slot, ${results + words};"]
    values = ", ".join(f"${results + i}" for i in range(words))
    ptx += [f"@there st.shared.v{words}.b32 [slot], {{{values}}};", *(f"mov.u32 ${i}, 0;" for i in range(results))]
    return "\n".join([*ptx, "}"])


@triton.constexpr_function
def put_vectors_constraints(itemsize: int, vec: int) -> str:
    return ",".join(["=r"] * (vec // 4) + ["r"] * (vec * itemsize // 4 + vec))


@triton.constexpr_function
def constraints(results: str, floats: int) -> str:
    return ",".join([*results.split(), *["f"] * floats, "r", "r"])


@triton.constexpr_function
def shuffle_ptx(lanes: int, combine: str) -> str:
    ptx = ["{", ".reg .b32 other;", "mov.b32 $0, $1;"]
    for bit in range(lanes.bit_length() - 1):
        ptx += [f"shfl.sync.bfly.b32 other, $0, {1 << bit}, 0x1f, 0xffffffff;", f"{combine}.f32 $0, $0, other;"]
    return "\n".join([*ptx, "}"])
