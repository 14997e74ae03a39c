"""The PTX of `transposed_rows`: vectors along the rows' neighbors in memory, to rows in shared memory and back."""

from __future__ import annotations

import triton
import triton.language as tl

# PTX's access to a vector of so many bytes
_ACCESS = {2: "u16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}


@triton.constexpr_function
def words_of(vec: int, itemsize: int) -> int:
    """32-bit registers of a vector."""
    return max(1, vec * itemsize // 4)


@triton.constexpr_function
def words_type(n: int):
    return (tl.int32,) * n


@triton.constexpr_function
def load_constraints(n: int) -> str:
    return ",".join(["=r"] * n + ["l", "l", "l", "r"])


@triton.constexpr_function
def load_ptx(vec: int, itemsize: int, pair: int, groups: int, step: int) -> str:
    """Loads `groups` vectors, or pairs of them in neighboring columns, each `step` columns after the one before.

    After the results: the first one's address, bytes of a column, and of `step`; columns that are left.
    """
    words = words_of(vec, itemsize)
    at, column, steps, left = (f"${groups * pair * words + i}" for i in range(4))
    ptx = ["{", ".reg .pred there;", ".reg .b64 at, next;", f"cvta.to.global.u64 at, {at};"]
    for g in range(groups):
        ptx += [f"setp.gt.s32 there, {left}, {g * step};"]
        for p in range(pair):
            first = (g * pair + p) * words
            into = ", ".join(f"${first + i}" for i in range(words))
            ptx += [f"add.s64 next, at, {column};"] if p else []
            place = "next" if p else "at"
            ptx += [f"@there ld.global.{_ACCESS[vec * itemsize]} {f'{{{into}}}' if words > 1 else into}, [{place}];"]
        ptx += [f"add.s64 at, at, {steps};"] if g < groups - 1 else []
    return "\n".join([*ptx, "}"])


@triton.constexpr_function
def store_constraints(n: int) -> str:
    return ",".join(["=r", "r", "r", "r", *["r"] * n])


@triton.constexpr_function
def store_ptx(vec: int, itemsize: int, pair: int, groups: int, step: int) -> str:
    """Writes what `load_ptx` loaded to shared memory: each element of a vector to another row.

    $1: the address of the first row's first column. $2: bytes of a row. $3: columns that are left. Then the words.
    """
    words = words_of(vec, itemsize)
    ptx = ["{", f".reg .pred there<{groups}>;", ".reg .b32 slot, both;", ".reg .b16 low, high;", "mov.u32 slot, $1;"]
    ptx += [f"setp.gt.s32 there{g}, $3, {g * step};" for g in range(groups)]
    for row in range(vec):
        for g in range(groups):
            first = 4 + g * pair * words
            place = f"[slot+{g * step * itemsize}]"
            if itemsize == 4:
                values = [f"${first + p * words + row}" for p in range(pair)]
                kind = ("b32", values[0]) if pair == 1 else ("v2.b32", "{" + ", ".join(values) + "}")
            elif pair == 2:
                a, b = (f"${first + p * words + row // 2}" for p in range(2))
                ptx += [f"prmt.b32 both, {a}, {b}, {'0x7632' if row % 2 else '0x5410'};"]
                kind = ("b32", "both")
            else:
                ptx += [f"mov.b32 {{low, high}}, ${first + row // 2};"]
                kind = ("u16", "high" if row % 2 else "low")
            ptx += [f"@there{g} st.shared.{kind[0]} {place}, {kind[1]};"]
        ptx += ["add.u32 slot, slot, $2;"] if row < vec - 1 else []
    return "\n".join([*ptx, "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def take_constraints(n: int) -> str:
    return ",".join([*["=r"] * n, "r", "r", "r"])


@triton.constexpr_function
def take_ptx(vec: int, itemsize: int, pair: int, groups: int, step: int) -> str:
    """Reads what `write_ptx` writes from shared memory: each element of a vector from another row.

    After the words: the address of the first row's first column, bytes of a row, columns that are left.
    """
    words = words_of(vec, itemsize)
    slot, row_bytes, left = (f"${groups * pair * words + i}" for i in range(3))
    ptx = ["{", f".reg .pred there<{groups}>;", f".reg .b32 slot, even<{groups}>, odd<{groups}>;"]
    ptx += [f".reg .b16 low<{groups}>, high<{groups}>;", f"mov.u32 slot, {slot};"]
    ptx += [f"setp.gt.s32 there{g}, {left}, {g * step};" for g in range(groups)]
    for row in range(vec):
        for g in range(groups):
            into = [f"${(g * pair + p) * words + row * itemsize // 4}" for p in range(pair)]
            if itemsize == 4:
                kind, value = ("b32", into[0]) if pair == 1 else ("v2.b32", "{" + ", ".join(into) + "}")
            elif pair == 2:
                kind, value = "b32", f"odd{g}" if row % 2 else f"even{g}"
            else:
                kind, value = "u16", f"high{g}" if row % 2 else f"low{g}"
            ptx += [f"@there{g} ld.shared.{kind} {value}, [slot+{g * step * itemsize}];"]
            if itemsize == 4 or (vec > 1 and row % 2 == 0):
                continue
            # both rows of a word are here; a vector of one row has a word of its own
            if pair == 2:
                other = f"odd{g}" if vec > 1 else f"even{g}"
                ptx += [f"prmt.b32 {into[0]}, even{g}, {other}, 0x5410;"]
                ptx += [f"prmt.b32 {into[1]}, even{g}, {other}, 0x7632;"]
            else:
                ptx += [f"mov.b32 {into[0]}, {{low{g}, {f'high{g}' if vec > 1 else f'low{g}'}}};"]
        ptx += [f"add.u32 slot, slot, {row_bytes};"] if row < vec - 1 else []
    return "\n".join([*ptx, "}"])


@triton.constexpr_function
def write_constraints(n: int) -> str:
    return ",".join(["=r", "l", "l", "l", "r", *["r"] * n])


@triton.constexpr_function
def write_ptx(vec: int, itemsize: int, pair: int, groups: int, step: int) -> str:
    """Writes vectors, or pairs of them, to memory, where `load_ptx` would load them.

    $1: the first one's address. $2, $3: bytes of a column, and of `step`. $4: columns that are left. Then the words.
    """
    words = words_of(vec, itemsize)
    ptx = ["{", ".reg .pred there;", ".reg .b64 at, next;", "cvta.to.global.u64 at, $1;"]
    for g in range(groups):
        ptx += [f"setp.gt.s32 there, $4, {g * step};"]
        for p in range(pair):
            of = [f"${5 + (g * pair + p) * words + i}" for i in range(words)]
            ptx += ["add.s64 next, at, $2;"] if p else []
            value = of[0] if words == 1 else "{" + ", ".join(of) + "}"
            ptx += [f"@there st.global.{_ACCESS[vec * itemsize]} [{'next' if p else 'at'}], {value};"]
        ptx += ["add.s64 at, at, $3;"] if g < groups - 1 else []
    return "\n".join([*ptx, "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def largest_ptx(dtype: str, vec: int, chunks: int, step: int) -> str:
    """The largest of `chunks` vectors, `step` elements apart, in float32. $1: the address of the first.

    Of 16-bit numbers two at once.
    """
    itemsize = 4 if dtype == "fp32" else 2
    words = max(1, vec * itemsize // 4)
    ptx = ["{", f".reg .b32 w<{chunks * words}>;", ".reg .b16 low, high;", ".reg .f32 a, b;"]
    for c in range(chunks):
        of = [f"w{c * words + i}" for i in range(words)]
        into = of[0] if words == 1 else "{" + ", ".join(of) + "}"
        ptx += [f"ld.volatile.shared.{_ACCESS[vec * itemsize]} {into}, [$1+{c * step * itemsize}];"]
    kind = {"fp32": "f32", "bf16": "bf16x2", "fp16": "f16x2"}[dtype]
    left = [f"w{i}" for i in range(chunks * words)]
    while len(left) > 1:
        pairs = list(zip(left[::2], left[1::2], strict=False))
        ptx += [f"max.{kind} {a}, {a}, {b};" for a, b in pairs]
        left = [a for a, _ in pairs] + left[len(pairs) * 2 :]
    if dtype == "fp32":
        ptx += ["mov.b32 $0, w0;"]
    elif dtype == "bf16":
        ptx += ["shl.b32 $0, w0, 16;"]
        ptx += ["and.b32 w0, w0, 0xffff0000;", "mov.b32 a, w0;", "max.f32 $0, $0, a;"] if vec > 1 else []
    else:
        ptx += ["mov.b32 {low, high}, w0;", "cvt.f32.f16 a, low;", "cvt.f32.f16 b, high;"]
        ptx += ["max.f32 $0, a, b;" if vec > 1 else "mov.f32 $0, a;"]
    return "\n".join([*ptx, "}"])
