"""What each kernel compiles to under several Tritons, in one table: `python tests/support/compiled_table.py`.

    PYTHONPATH=src python tests/support/compiled_table.py --triton .venv/triton-3.6.0 -k softmax

A cell: registers, bytes spilled, machine instructions, CTA barriers + cluster barriers, and the widths of its loads and
stores in bytes, each with its count. A line is printed where a Triton differs from the first one, or all with --all.
Each Triton is a folder that is put first in PYTHONPATH; without one, the installed Triton alone is shown. --json keeps
the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


def measured(target: str, pattern: str) -> dict[str, Any]:
    """{name: numbers} of the kernels whose name `pattern` is found in, by the Triton of this process."""
    from launches import cross_compiled, launches

    found: dict[str, Any] = {}
    for name, launch, _ in launches(target):
        if not re.search(pattern, name):
            continue
        try:
            used, asm = cross_compiled(launch, target)
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:80]}
            continue
        sass = asm["sass"] if "cubin" in asm else ""
        found[name] = {
            "registers": used.registers,
            "spilled": used.spilled_bytes,
            "instructions": len(re.findall(r"\t(?!NOP)[@A-Z].*;", sass)),
            "barriers": len(re.findall(r"\bBAR\.", sass)),
            "cluster_barriers": used.cluster_barriers,
            "shared": used.shared_bytes,
            "loads": used.loads,
            "stores": used.stores,
        }
    return found


def cell(numbers: dict[str, Any]) -> str:
    if "failed" in numbers:
        return numbers["failed"]
    widths = "/".join(",".join(f"{size}x{count}" for size, count in numbers[kind]) for kind in ("loads", "stores"))
    said = (
        f"{numbers['registers']:3}r {numbers['instructions']:5}i {numbers['barriers']}+{numbers['cluster_barriers']}b"
    )
    return said + (f" SPILL {numbers['spilled']}" if numbers["spilled"] else "") + f" {widths}"


def table(tables: dict[str, dict[str, Any]], everything: bool) -> str:
    alike = set.intersection(*(set(found) for found in tables.values()))
    first = [name for name in next(iter(tables.values())) if name in alike]
    lines = []
    for name in first:
        cells = [cell(found[name]) for found in tables.values()]
        if everything or len(set(cells)) > 1:
            lines.append(name)
            lines += [f"    {version:8} {c}" for version, c in zip(tables, cells, strict=True)]
    return "\n".join([*lines, f"{len(first)} kernels"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", action="append", default=[], type=Path, help="folder of a Triton, or a --json file")
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("-k", default="", help="a regular expression of kernel names")
    parser.add_argument("--all", action="store_true", help="also what all of them have alike")
    parser.add_argument("--json", type=Path, help="write the numbers of this process's Triton, and print nothing")
    given = parser.parse_args()
    if given.json:
        given.json.write_text(json.dumps(measured(given.target, given.k)), encoding="utf-8")
        return
    tables = {}
    for folder in given.triton:
        if folder.suffix == ".json":
            tables[folder.stem] = json.loads(folder.read_text(encoding="utf-8"))
            continue
        out = Path(f"{folder}.{os.getpid()}.json")
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, __file__, "--json", str(out), "--target", given.target, "-k", given.k]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
        tables[folder.name.removeprefix("triton-")] = json.loads(out.read_text(encoding="utf-8"))
        out.unlink()
    print(table(tables or {"here": measured(given.target, given.k)}, given.all or len(tables) < 2))


if __name__ == "__main__":
    main()
