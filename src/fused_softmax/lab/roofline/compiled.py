"""What a launch compiles to for a GPU that is not here, with its instructions by kind.

`python -m fused_softmax.lab.roofline.compiled` reads one line of JSON and answers with one: a process that interprets
kernels cannot compile them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SECONDS = 180

# the kinds of SASS instructions, by the beginning of their names; the first that fits counts
KINDS: tuple[tuple[str, str], ...] = (
    ("global loads", r"LDG|LDGSTS|UBLKCP"),
    ("global stores", r"STG"),
    ("shared memory", r"LDS|STS|LDSM|STSM|ATOMS|ST\.E|LD\.E|STAS"),
    ("spills", r"LDL|STL"),
    ("exponentials and other special functions", r"MUFU"),
    ("shuffles", r"SHFL|REDUX"),
    ("barriers", r"BAR|WARPSYNC|SYNCS|UCGABAR|CCTL|MEMBAR|DEPBAR|ERRBAR|ARRIVES|BSYNC|BSSY|FENCE"),
    ("conversions", r"F2F|F2I|I2F|HADD2|PRMT|F2FP|HMNMX2|HFMA2|HMUL2"),
    ("float32 arithmetic", r"FADD|FMUL|FFMA|FMNMX|FSEL|FSETP|FSET|FCHK|FMNMX3"),
    ("integers, addresses and predicates", r"."),
)


@dataclass(frozen=True)
class Compiled:
    """Resources of one kernel, and its instructions by kind, each counted once, also within loops."""

    resources: dict[str, Any] = field(default_factory=dict)
    instructions: dict[str, int] = field(default_factory=dict)
    loops: bool = False
    failed: str = ""


_LINE = re.compile(r"^(?:[\w-]+:){4}\d+\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


def instructions_by_kind(sass: str) -> dict[str, int]:
    """Counts of a SASS listing, by kind; padding is left out."""
    found: Counter[str] = Counter()
    for name in _LINE.findall(sass):
        if not name.startswith(("NOP", "BRA", "EXIT")):
            found[next(kind for kind, names in KINDS if re.match(names, name))] += 1
    return {kind: found[kind] for kind, _ in KINDS if found[kind]}


def has_loops(sass: str) -> bool:
    """Whether a branch leads backward over more than a few instructions: shorter loops wait for a barrier, or pad."""
    at = {label: found.start() for found in re.finditer(r"^\.?(L\w+):", sass, re.MULTILINE) for label in [found[1]]}
    for found in re.finditer(r"\bBRA\S*\s+(?:!?U?P\w+,\s*)?`?\(?\.?(L\w+)\)?", sass):
        target = at.get(found[1])
        if target is not None and target < found.start() and sass.count("\n", target, found.start()) > 8:
            return True
    return False


def compile_kernel(request: Mapping[str, Any]) -> Compiled:
    """Compile one kernel as the request names it: {system, dtype, n_rows, n_cols, target, op}."""
    from fused_softmax.lab import cross_compile as cross
    from fused_softmax.lab.roofline.launches import launches_of

    launches = launches_of(request)
    if not launches:
        return Compiled(failed="nothing to launch")
    best: tuple[cross.Resources, Any] | None = None
    for launch in launches:
        kernel = cross.compile_for(launch, request["target"])
        used = cross.resources(kernel)
        if best is None or used.registers > best[0].registers:
            best = used, kernel
    assert best is not None
    sass = best[1].asm["sass"] if "cubin" in best[1].asm else ""
    return Compiled(asdict(best[0]), instructions_by_kind(sass), has_loops(sass))


def cross_compiled(system: str, dtype: str, n_rows: int, n_cols: int, target: str, op: str = "softmax") -> Compiled:
    """What the system's kernel compiles to, in another process; `failed` says why it does not."""
    request = dict(system=system, dtype=dtype, n_rows=n_rows, n_cols=n_cols, target=target, op=op)
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    plain["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        said = subprocess.run(
            [sys.executable, "-m", __name__], input=json.dumps(request), capture_output=True, text=True, env=plain,
            timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Compiled(failed=f"not compiled within {SECONDS} seconds")
    lines = [line for line in said.stdout.splitlines() if line.startswith("{")]
    if not lines:
        last = next((line for line in reversed(said.stderr.splitlines()) if line.strip()), "no answer")
        return Compiled(failed=last.strip()[:200])
    return Compiled(**json.loads(lines[-1]))


def main() -> None:
    """Answer the line of standard input."""
    try:
        found = compile_kernel(json.loads(sys.stdin.read()))
    except Exception as error:  # a target that this Triton cannot compile for is an answer
        lines = str(error).splitlines() or [type(error).__name__]
        found = Compiled(failed=f"{type(error).__name__}: {lines[0]}"[:200])
    print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
