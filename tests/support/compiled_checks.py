"""Checks of what kernels compile to, as functions, so that they can also be run against kernels with a planted fault.

`python tests/support/compiled_checks.py NAME` runs one on the `fused_softmax` that PYTHONPATH finds first, and prints
what is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from planned import ITEMSIZE, Kernel, compile_all, kernels


def narrow_accesses(built: Iterable[tuple]) -> tuple[list[str], int]:
    """(loads and stores of aligned rows that move less than 16 bytes at a time, how many were looked at)."""
    narrow, wide = [], 0
    for kernel, used in built:
        read, written = reversed(kernel.dtypes) if kernel.backward else kernel.dtypes
        for access, dtype in (("load", read), ("store", written)):
            if kernel.plan.vec * ITEMSIZE[dtype] >= 16:
                widest = getattr(used, f"widest_{access}_bytes")
                wide += 1
                if widest < 16:
                    narrow.append(f"{access}s of {widest} bytes: {kernel}")
    return narrow, wide


def a_few_kernels() -> list[Kernel]:
    """Masked and unmasked rows of bfloat16 and float32, in one warp and in several."""
    pairs = (("bfloat16", "bfloat16"), ("float32", "float32"))
    return kernels("sm_90", (1000, 3000), pairs, ((False, False), (True, False)), ("contiguous",))


def check_vectors() -> list[str]:
    narrow, wide = narrow_accesses(compile_all(a_few_kernels(), processes=1))
    assert wide >= 8
    return narrow


def check_strides_of_one() -> list[str]:
    """The strided kernel where columns or rows are neighbours on either side: the JIT makes such strides constants."""
    import torch

    from fused_softmax.lab.cross_compile import cross_compile
    from fused_softmax.launch.views import strided_launch
    from fused_softmax.planning.types import DEVICES

    wrong = []
    for x, dim in ((torch.empty(9, 40)[:, ::2], 1), (torch.empty(20, 9).t(), 1), (torch.empty(9, 20), 0)):
        y = torch.empty(x.shape)
        try:
            cross_compile(strided_launch(x, y, dim, False, DEVICES["sm_90"]), "sm_90")
        except Exception as error:
            wrong.append(f"strides {x.stride()} to {y.stride()}, dim {dim}: {str(error.__cause__ or error)[-200:]}")
    return wrong


if __name__ == "__main__":
    found = {"vectors": check_vectors, "strides_of_one": check_strides_of_one}[sys.argv[1]]()
    print("\n".join(found))
    sys.exit(1 if found else 0)
