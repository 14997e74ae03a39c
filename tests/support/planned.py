"""Problems that cover what the planner can be asked, and the kernels it answers with, as launches without a GPU.

`problem` makes any of them, for the widths that the speed is promised for and odd ones, and each way that rows can lie.
A kernel is what one compilation gives: two plans with the same numbers at compile time share it. `compile_kernel`
cross-compiles one as a call would build it, and `compile_all` many, in processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES, ITEMSIZE, Device, Plan, Problem

PROMISED = (
    256, 512, 1000, 1024, 2048, 3000, 4096, 8192, 12288, 16384, 32000, 32768, 50257, 65536, 100277, 128256, 131072,
    151936, 200019, 202048, 256000, 262144, 524288, 1048576,
)  # fmt: skip
WIDTHS = tuple(sorted({1, 2, 3, 5, 33, 100, 257, 1001, 1023, 4097, 8191, 12289, 33331, 4194304, *PROMISED}))
DTYPES = (("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("float16", "float32"))
# how rows lie: one after another from an aligned address; all tensors' rows one element off; one tensor's rows off
LAYOUTS = ("contiguous", "shifted", "apart")


def problem(
    n_cols: int, dtypes: tuple[str, str], layout: str = "contiguous", backward: bool = False, log: bool = False
) -> Problem:
    """What launch.problem_of says of rows in this layout. dtypes: the forward's (input, output)."""
    full = 16 // min(ITEMSIZE[dtype] for dtype in dtypes)
    vec = min(full, n_cols & -n_cols) if layout == "contiguous" else 1
    read, written = reversed(dtypes) if backward else dtypes
    return Problem(
        n_cols,
        read,
        written,
        vec,
        in_phase=layout != "apart",
        backward=backward,
        log=log,
        packed=layout == "contiguous" and read == written,
    )


@dataclass(frozen=True)
class Kernel:
    """One compilation: a target, the tensors' dtypes and the plan of the narrowest width that takes it."""

    target: str
    dtypes: tuple[str, str]
    backward: bool
    log: bool
    plan: Plan
    n_cols: int

    def __str__(self) -> str:
        op = ("log_softmax" if self.log else "softmax") + (" backward" if self.backward else "")
        return f"{self.target} {op} {'->'.join(self.dtypes)} {self.n_cols} columns: {self.plan}"


def kernels(
    target: str,
    widths: Iterable[int] = WIDTHS,
    dtypes: Iterable[tuple[str, str]] = DTYPES,
    ops: Iterable[tuple[bool, bool]] = ((False, False), (False, True), (True, False), (True, True)),
    layouts: Iterable[str] = LAYOUTS,
) -> list[Kernel]:
    """The distinct kernels that the planner chooses on `target`, once each. ops: pairs (backward, log)."""
    found: dict[object, Kernel] = {}
    for n_cols in widths:
        for pair in dtypes:
            for backward, log in ops:
                for layout in layouts:
                    chosen = plan(problem(n_cols, pair, layout, backward, log), DEVICES[target])
                    key = (pair, backward, *compile_time(chosen, DEVICES[target], log=log, backward=backward))
                    found.setdefault(key, Kernel(target, pair, backward, log, chosen, n_cols))
    return list(found.values())


def compile_time(chosen: Plan, device: Device, *, log: bool = False, backward: bool = False) -> tuple[object, ...]:
    """What tells one kernel from another, but for the dtypes."""
    import torch

    from fused_softmax.launch.softmax import softmax_launch

    x = torch.empty((1, 1), device="meta")
    meta = softmax_launch((x, x, x)[: 2 + backward], chosen, log=log, backward=backward, device=device).meta
    return (chosen.regime == "two_pass", chosen.vec, *sorted(meta.items()))


def compile_kernel(kernel: Kernel):
    """(kernel, its Resources): the binary that a call builds, with row strides of 64 bits and the alignment that the
    plan relies on."""
    import torch

    from fused_softmax.lab.cross_compile import cross_compile
    from fused_softmax.launch.softmax import softmax_launch

    def rows(dtype: str) -> torch.Tensor:
        return torch.empty(1, kernel.n_cols, dtype=getattr(torch, dtype))

    device = DEVICES[kernel.target]
    read, written = kernel.dtypes
    if kernel.backward:  # the gradient of a forward from `read` to `written`
        tensors = (rows(written), rows(written), rows(read))
    else:
        tensors = (rows(read), rows(written))
    launch = softmax_launch(tensors, kernel.plan, log=kernel.log, backward=kernel.backward, device=device)
    # the launch's own compilation takes n_rows and strides as 64 bits; the binder does, for numbers this large
    scalars = [n + (1 << 40) for n in launch.args[len(tensors) :]]
    scalars[1], scalars[-1] = launch.args[len(tensors) + 1], launch.args[-1]
    return kernel, cross_compile(launch._replace(args=(*launch.args[: len(tensors)], *scalars)), kernel.target)


def compile_all(wanted: list[Kernel], processes: int = 2) -> Iterator[tuple]:
    """(kernel, Resources) of each, in any order of work; Triton's disk cache makes a second run short."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(compile_kernel, wanted, chunksize=4)
