"""What a launch compiles to for a GPU that is not here, with its instructions by kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fused_softmax.lab.cross_compile import Resources

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
    none: str = ""  # why there is no kernel

    @property
    def used(self) -> Resources | None:
        """The resources, or None where nothing was compiled."""
        if self.failed or self.none:
            return None
        # JSON has lists where Resources has tuples
        pairs = {name: tuple((size, n) for size, n in self.resources[name]) for name in ("loads", "stores")}
        return Resources(**{**self.resources, **pairs})


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
    """Compile a system's most demanding kernel: {system, dtype, n_rows, n_cols, target, op}. Must not interpret."""
    from fused_softmax.lab import cross_compile as cross
    from fused_softmax.lab.roofline.launches import NoKernel, launches_of

    try:
        launches = launches_of(request)
        kernels = [cross.compile_for(launch, request["target"]) for launch in launches]
        if not kernels:
            return Compiled(none="nothing to launch")
        used = [cross.resources(kernel) for kernel in kernels]
    except NoKernel as error:
        return Compiled(none=str(error))
    except Exception as error:  # a target that this Triton cannot compile for is an answer
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return Compiled(failed=f"{type(error).__name__}: {lines[0]}"[:200])
    worst = max(range(len(used)), key=lambda i: (used[i].spilled_bytes, used[i].registers))
    sass = kernels[worst].asm["sass"] if "cubin" in kernels[worst].asm else ""
    return Compiled(asdict(used[worst]), instructions_by_kind(sass), has_loops(sass))
