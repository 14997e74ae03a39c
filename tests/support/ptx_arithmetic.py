"""PTX's arithmetic on numpy: `evaluate` gives what an instruction computes, for all threads at once.

A register is an array of uint64, one number for each thread, with the bits of its type at the low end. An instruction
that is not known raises NotImplementedError.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

Bits = np.ndarray  # uint64, [threads]
WIDTHS = {f"{kind}{width}": width for kind in "sub" for width in (8, 16, 32, 64)}
FLOATS = {"f32": ("f32", 1), "bf16": ("bf16", 1), "bf16x2": ("bf16", 2), "f16": ("f16", 1), "f16x2": ("f16", 2)}
OF_FLOATS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fma": lambda a, b, c: a * b + c,
    "max": lambda *of: reduce(np.fmax, of), "min": lambda *of: reduce(np.fmin, of),  # of two or three
    "neg": np.negative, "abs": np.abs, "rcp": np.reciprocal, "ex2": np.exp2, "lg2": np.log2,
}  # fmt: skip
OF_BITS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda a, b, c: a * b + c, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not, "neg": lambda a: np.uint64(0) - a,
}  # fmt: skip
OF_NUMBERS = {
    "min": np.minimum, "max": np.maximum, "div": lambda a, b: (a - np.fmod(a, b)) // b, "rem": np.fmod, "abs": np.abs,
}  # fmt: skip
UNKNOWN = {"NaN", "xorsign", "sat", "relu", "rz", "rm", "rp", "cc"}  # modifiers that change the result
COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


def masked(bits: Bits, width: int) -> Bits:
    return bits & np.uint64((1 << width) - 1)


def signed(bits: Bits, width: int) -> np.ndarray:
    """int64, [threads]"""
    up = np.uint64(64 - width)
    return (bits << up).view(np.int64) >> np.int64(64 - width)


def floats(bits: Bits, kind: str) -> np.ndarray:
    """float64, [threads]"""
    if kind == "f32":
        return masked(bits, 32).astype(np.uint32).view(np.float32).astype(np.float64)
    half = masked(bits, 16)
    if kind == "f16":
        return half.astype(np.uint16).view(np.float16).astype(np.float64)
    return floats(half << np.uint64(16), "f32")


def bits_of(values: np.ndarray, kind: str) -> Bits:
    """Rounded to nearest, ties to even."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint64)
    bits = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32).astype(np.uint64)
    if kind == "f32":
        return bits
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), np.uint64(0x7FFF), masked(rounded, 16))


def evaluate(op: str, operands: list[Bits]) -> Bits:
    """What `op`, such as "mad.lo.s32", computes."""
    name, *modifiers = op.split(".")
    kind = modifiers[-1]
    if not UNKNOWN.isdisjoint(modifiers):
        raise NotImplementedError(op)
    with np.errstate(all="ignore"):
        if name == "cvt":
            return _converted(modifiers[-2], kind, operands)
        if name == "setp":
            found = _compared(modifiers[0], kind, operands[:2])
            if len(modifiers) == 3:  # and, or: with a predicate
                found = OF_BITS[modifiers[1]](found, operands[2] != 0)
            return found.astype(np.uint64)
        if name == "selp":
            return np.where(operands[2] != 0, operands[0], operands[1])
        if name == "prmt":
            return _permuted(*operands)
        if kind in FLOATS and name in OF_FLOATS:
            of, lanes = FLOATS[kind]
            shifts = [np.uint64(16 * lane) for lane in range(lanes)]
            found = (OF_FLOATS[name](*(floats(x >> shift, of) for x in operands)) for shift in shifts)
            return sum((bits_of(x, of) << shift for x, shift in zip(found, shifts, strict=True)), np.uint64(0))
        if kind == "pred":
            return (OF_BITS[name](*(x != 0 for x in operands)) if name != "not" else operands[0] == 0).astype(np.uint64)
        if kind in WIDTHS:
            return _integer(name, modifiers, operands)
    raise NotImplementedError(op)


def _integer(name: str, modifiers: list[str], operands: list[Bits]) -> Bits:
    kind = modifiers[-1]
    width = WIDTHS[kind]
    numbers = [signed(x, width) if kind[0] == "s" else masked(x, width) for x in operands]
    if "wide" in modifiers:
        product = (numbers[0] * numbers[1]).view(np.uint64)
        return product + operands[2] if name == "mad" else product
    if name == "mul" and "hi" in modifiers:
        products = [int(a) * int(b) >> width for a, b in zip(*numbers, strict=True)]
        return np.array([product & ((1 << width) - 1) for product in products], dtype=np.uint64)
    if name in ("shl", "shr"):
        by = np.minimum(masked(operands[1], 32), np.uint64(63))
        if name == "shr" and kind[0] == "s":
            return masked((numbers[0] >> by.view(np.int64)).view(np.uint64), width)
        found = operands[0] << by if name == "shl" else masked(operands[0], width) >> by
        return np.where(masked(operands[1], 32) < width, masked(found, width), np.uint64(0))
    if name == "bfe":
        return (numbers[0] >> operands[1]) & ((np.uint64(1) << operands[2]) - np.uint64(1))
    if name in OF_NUMBERS:
        if name in ("div", "rem"):
            numbers[1] = np.where(numbers[1] == 0, np.ones_like(numbers[1]), numbers[1])
        return masked(OF_NUMBERS[name](*numbers).view(np.uint64), width)
    if name in OF_BITS and ("hi" not in modifiers):
        return masked(OF_BITS[name](*operands), width)
    raise NotImplementedError(".".join([name, *modifiers]))


def _converted(to: str, of: str, operands: list[Bits]) -> Bits:
    if to in ("bf16x2", "f16x2"):  # the first operand is the upper half
        upper, lower = (bits_of(floats(x, "f32"), to[:-2]) for x in operands)
        return lower | upper << np.uint64(16)
    x = operands[0]
    if to in FLOATS:
        values = floats(x, of) if of in FLOATS else (signed(x, WIDTHS[of]) if of[0] == "s" else masked(x, WIDTHS[of]))
        return bits_of(values.astype(np.float64), to)
    wide = signed(x, WIDTHS[of]).view(np.uint64) if of[0] == "s" else masked(x, WIDTHS[of])
    return masked(wide, WIDTHS[to])


def _compared(how: str, kind: str, operands: list[Bits]) -> np.ndarray:
    if kind in FLOATS:
        a, b = (floats(x, kind) for x in operands)
        either = np.isnan(a) | np.isnan(b)
        return COMPARISONS[how[:2]](a, b) | either if how.endswith("u") else COMPARISONS[how](a, b) & ~either
    width = WIDTHS[kind]
    a, b = (signed(x, width) if kind[0] == "s" else masked(x, width) for x in operands)
    return COMPARISONS[{"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(how, how)](a, b)


def _permuted(a: Bits, b: Bits, selector: Bits) -> Bits:
    """Four of the eight bytes of two words."""
    both, found = masked(a, 32) | masked(b, 32) << np.uint64(32), np.zeros_like(a)
    for byte in range(4):
        at = (selector >> np.uint64(4 * byte)) & np.uint64(7)
        found |= ((both >> at * np.uint64(8)) & np.uint64(0xFF)) << np.uint64(8 * byte)
    return found
