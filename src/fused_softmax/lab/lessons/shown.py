"""How a lesson is shown: its results next to its mistakes' results, its traffic and its kernel's resources.

The inputs are made so that every mistake shows on one of them. `resources` compiles a lesson's kernel without a GPU.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fused_softmax.lab import reference
from fused_softmax.lab.compiling import compiled
from fused_softmax.lab.cross_compile import MULTIPROCESSORS, Resources, occupancy
from fused_softmax.lab.grading.trials import as_tuple
from fused_softmax.lab.lessons import load, module_name, parts, sources, title
from fused_softmax.lab.traffic import traffic
from fused_softmax.launch import availability
from fused_softmax.launch.availability import KernelUnavailable
from fused_softmax.launch.device import device_here

# the two worked examples of the write-ups, and what they give to three decimals
WORKED = torch.tensor([[1000.0, 999.0, 998.0], [2.0, 1.0, 0.1]])
WORKED_RESULT = torch.tensor([[0.665, 0.245, 0.090], [0.659, 0.242, 0.099]])


def shown_inputs() -> dict[str, Tensor]:
    """Small inputs by name, float32 (n_rows, n_cols): on at least one of them each mistake of each lesson is wrong."""
    rising = torch.stack([torch.linspace(-4, 4, 3000), torch.linspace(-40, 0, 3000)])
    late = rising.clone()
    late[:, :2500] = -math.inf  # nothing to see in the first chunk
    return {"worked examples": WORKED, "rising rows": rising, "rows that begin with -inf": late}


def error(y: Tensor, x: Tensor) -> float:
    """Largest difference from the float64 softmax of x; inf where one is NaN and the other is not."""
    expected = reference.softmax(x, 1)
    if not torch.equal(y.isnan(), expected.isnan()):
        return math.inf
    return (y.double() - expected).nan_to_num(0.0).abs().max().item()


def resources(n: int, widths: Sequence[int], dtype: str = "bfloat16", target: str = "sm_90") -> list[Resources]:
    """What lesson n's kernel compiles to on `target` for aligned rows of each of `widths` columns.

    RuntimeError with the reason where it does not compile.
    """
    found = [compiled(load(n).SYSTEM, dtype, 1, n_cols, target) for n_cols in widths]
    if failed := [one.failed or one.none for one in found if one.used is None]:
        raise RuntimeError(failed[0])
    return [one.used for one in found if one.used is not None]


def show(n: int) -> None:
    """Print lesson n and run it in this process, on the GPU where there is one."""
    print(title(n), module_name(n), sep="\n")
    for heading, text in parts(n).items():
        print(f"\n{heading}\n" + "\n".join(f"    {line}".rstrip() for line in text.splitlines()))
    print("\nSources\n" + "\n".join(f"    {line}" for line in sources.lines(n)))
    show_results(n)


def show_results(n: int) -> None:
    """Run lesson n in this process: its results, its mistakes, its traffic, and what its kernel compiles to.

    KernelUnavailable, with the versions, where torch or Triton is too old for the kernels of lessons 2 and later.
    """
    if n > 1 and (availability.torch_is_too_old() or availability.triton_is_too_old()):
        raise KernelUnavailable(availability.below_floor())
    lesson, device = load(n), device_here()
    with warnings.catch_warnings():
        # the interpreter's numpy warns of the infinities and NaN that are shown here
        warnings.simplefilter("ignore", RuntimeWarning)
        (_show_other_results if hasattr(lesson, "SUBJECT") else _show_results)(lesson, device)
    _show_traffic(n)
    if hasattr(lesson, "STEPS"):
        _show_steps(n, device)
    if hasattr(lesson, "launches"):
        _show_resources(n, (1000, 4096, 16384) if hasattr(lesson, "STEPS") else (1000, 4096, 65536))


def _show_results(lesson: ModuleType, device: torch.device) -> None:
    print(f"\nResults on {'the GPU' if device.type == 'cuda' else 'the CPU, through the interpreter'}")
    inputs = {name: x.to(device) for name, x in shown_inputs().items()}
    for name, x in inputs.items():
        print(f"    {name} {tuple(x.shape)}: max difference from float64 {error(lesson.softmax(x), x):.1e}")
    worked = inputs["worked examples"]
    for row, y in zip(worked, lesson.softmax(worked), strict=True):
        print(f"    {_row(row)} -> {_row(y)}")

    print("\nMistakes")
    for label, mistake in lesson.MISTAKES.items():
        outputs = {name: mistake(x) for name, x in inputs.items()}
        errors = {name: error(y, inputs[name]) for name, y in outputs.items()}
        worst = max(errors, key=lambda name: errors[name])
        by_row = [error(y[None], x[None]) for y, x in zip(outputs[worst], inputs[worst], strict=True)]
        i = max(range(len(by_row)), key=lambda i: by_row[i])
        how = "NaN" if math.isinf(by_row[i]) else f"off by {by_row[i]:.2g}"
        print(f"    {label}: WRONG on {worst}, row {i} is {how}:")
        print(f"        {_row(outputs[worst][i])}, right is {_row(reference.softmax(inputs[worst][i]))}")


def time_steps(n: int, elements: int = 2**28, seconds: float = 0.1) -> list[dict[str, Any]]:
    """Each of lesson n's STEPS on this GPU, bfloat16: microseconds, and the speed as a fraction of a copy's."""
    from fused_softmax.lab.timing import EventStopwatch, interleave

    lesson, found = load(n), []
    stopwatch = EventStopwatch(torch.device("cuda"))
    for n_cols in lesson.STEP_WIDTHS:
        x = torch.randn(elements // n_cols, n_cols, device="cuda").to(torch.bfloat16)
        y = torch.empty_like(x)
        calls: dict[str, Any] = {step: lesson.launches(x, y, step)[0] for step in lesson.STEPS}
        for step, launch in calls.items():
            y.fill_(math.nan)
            launch()
            if error(y[:64], x[:64]) > 1e-2:  # wrong results have no time
                raise RuntimeError(f"{step} is wrong at {n_cols} columns")
        times = interleave({**calls, "copy": functools.partial(y.copy_, x)}, stopwatch, seconds)
        copy = times["copy"].ms
        steps = [{"step": step, "us": 1e3 * times[step].ms, "fraction": copy / times[step].ms} for step in lesson.STEPS]
        found.append({"n_rows": x.shape[0], "n_cols": n_cols, "copy_us": 1e3 * copy, "steps": steps})
    return found


def _show_steps(n: int, device: torch.device) -> None:
    if device.type != "cuda":
        print("\nSteps: their times need a GPU")
        return
    print("\nSteps, speed as a fraction of the copy's (higher is better)")
    for case in time_steps(n):
        print(f"    {case['n_rows']:,} x {case['n_cols']:,}")
        for step in case["steps"]:
            print(f"        {step['step']:16} {step['us']:8.1f} us   {step['fraction']:.2f}")


def _row(values: Tensor) -> str:
    shown = [f"{v:.3f}".removesuffix(".000") for v in values.tolist()]
    return "[" + ", ".join(shown if len(shown) <= 6 else [*shown[:3], "...", *shown[-3:]]) + "]"


def _show_other_results(lesson: ModuleType, device: torch.device) -> None:
    """The results of a lesson on another op than softmax of rows: its SUBJECT says how it is called."""
    subject, function = lesson.SUBJECT, getattr(lesson, lesson.SUBJECT.function)
    print(f"\nResults of {subject.function} on {'the GPU' if device.type == 'cuda' else 'the CPU, interpreted'}")
    shown = shown_inputs()
    inputs = {name: subject.arguments(x.to(device)) for name, x in shown.items() if name != "worked examples"}
    for name, arguments in inputs.items():
        worst = other_error(function(*arguments), subject.exact(*arguments))
        print(f"    {name} {tuple(arguments[0].shape)}: max difference from float64 {worst:.1e}")
    print("\nMistakes")
    for label, mistake in lesson.MISTAKES.items():
        errors = {name: other_error(mistake(*a), subject.exact(*a)) for name, a in inputs.items()}
        worst_on = max(errors, key=lambda name: errors[name])
        how = "NaN" if math.isinf(errors[worst_on]) else f"off by {errors[worst_on]:.2g}"
        print(f"    {label}: WRONG on {worst_on}, where it is {how}")


def other_error(outputs: Any, expected: Any) -> float:
    """The largest difference of any output from its float64 reference; inf where one is NaN and the other is not."""
    pairs = zip(as_tuple(outputs), as_tuple(expected), strict=True)
    return max(_difference(y.double(), right) for y, right in pairs)


def _difference(y: Tensor, right: Tensor) -> float:
    if not torch.equal(y.isnan(), right.isnan()) or not torch.equal(y.isinf(), right.isinf()):
        return math.inf
    return (y - right).nan_to_num(0.0).abs().max().item()


def _show_traffic(n: int) -> None:
    n_rows, n_cols = 1024, 4096
    lesson = load(n)
    if hasattr(lesson, "SUBJECT"):
        moved = lesson.SUBJECT.moves(n_rows, n_cols)
        print(f"\nTraffic for {n_rows} x {n_cols}: reads {moved.reads:,}, writes {moved.writes:,} elements")
    elif moved := traffic(lesson.SYSTEM, n_rows, n_cols):
        once = 2 * n_rows * n_cols
        print(f"\nTraffic for {n_rows} x {n_cols}: reads {moved.reads:,}, writes {moved.writes:,} elements,")
        print(f"    {(moved.reads + moved.writes) / once:.2f} times what reading and writing each element once takes")


def _show_resources(n: int, widths: Sequence[int] = (1000, 4096, 65536), target: str = "sm_90") -> None:
    print(f"\nCompiled for {target}, bfloat16")
    for n_cols, used in zip(widths, resources(n, widths, target=target), strict=True):
        fit = occupancy(used, MULTIPROCESSORS[target])
        fits = f"resident on a multiprocessor: {fit.programs} ({fit.limiter})" if used.fits() else "out of resources"
        print(f"    {n_cols:,} columns: {used.num_warps} warps, {used.registers} registers,", end=" ")
        print(f"{used.shared_bytes:,} bytes of shared memory,")
        print(f"        {used.spilled_bytes} bytes spilled, loads of {used.widest_load_bytes} and", end=" ")
        print(f"stores of {used.widest_store_bytes} bytes at most; {fits}")
