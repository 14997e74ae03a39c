"""`fused-softmax explain`: plan for a shape on a described device, its reason, its traffic, and the compiled kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from fused_softmax.lab.bench.inputs import DTYPES
from fused_softmax.lab.bench.ops import OPS
from fused_softmax.lab.plans import problem_for
from fused_softmax.lab.resources import ROWS, CrossCompiler
from fused_softmax.lab.traffic import regime_traffic
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES

# devices that can be compiled for
TARGETS = tuple(name for name, device in DEVICES.items() if device.kind != "interpreter")


def explain_lines(n_rows: int, n_cols: int, dtype: str, target: str) -> Iterator[str]:
    """Lines for (n_rows, n_cols) contiguous rows of `dtype` on `target`; raises KeyError for an unknown target."""
    device, size = DEVICES[target], DTYPES[dtype].itemsize
    try:
        problem = problem_for(n_cols, dtype)
    except NotImplementedError as error:
        yield f"softmax of {n_rows} x {n_cols} {dtype} on {target}: PyTorch's own kernel runs, because of {error}"
        return
    chosen = plan(problem, device)
    yield f"softmax of {n_rows} x {n_cols} {dtype} on {target}, rows aligned to {problem.vec * size} bytes"
    yield f"regime   {chosen.regime}: {chosen.why}"
    settings = {name: value for name, value in asdict(chosen).items() if name not in ("regime", "why")}
    yield "plan     " + ", ".join(f"{name}={value}" for name, value in settings.items())
    moved = regime_traffic(chosen.regime, n_rows, n_cols)
    if moved:
        least = OPS["softmax"].bytes_moved(n_rows, n_cols, size)
        asked = (moved.reads + moved.writes) * size
        over = f"{asked / max(least, 1):.2f} x the least"
        yield f"traffic  reads {moved.reads:,} and writes {moved.writes:,} elements, {over}"
    key = ("fused_softmax", dtype, ROWS, n_cols)
    compiler = CrossCompiler([key], target)
    try:
        compiler.wait(120)
        found = compiler.found.get(key, {"failed": "no answer from the compiler"})
    finally:
        compiler.close()
    if "registers" in found:
        yield (
            f"compiled {found['registers']} registers, {found['spilled_bytes']} bytes spilled, "
            f"{found['shared_bytes']} bytes of shared memory, widest load {found['widest_load_bytes']} bytes, "
            f"{found['num_warps']} warps, {found['num_ctas']} CTAs"
        )
    if why := found.get("failed") or found.get("none"):
        yield f"compiled {why}"
