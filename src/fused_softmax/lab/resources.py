"""What each system's kernels compile to for a GPU that is not here, in a process that does not interpret.

`python -m fused_softmax.lab.resources TARGET` reads lines of JSON (system, dtype, n_rows, n_cols) and answers each
with one line: registers, spilled_bytes, shared_bytes, widest_load_bytes, or `failed` with the reason. The parent
interprets meanwhile; a process can do only one of the two, because Triton decides when a kernel is decorated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from fused_softmax.lab.bench.cases import Case

Key = tuple[str, str, int, int]  # system, dtype, n_rows, n_cols
FIELDS = ("registers", "spilled_bytes", "shared_bytes", "widest_load_bytes", "num_warps", "num_ctas")
# what GPU runs have: where a kernel takes the number of rows, it is compiled for that
ROWS = 4096


def launches(system: str, dtype: str, n_rows: int, n_cols: int, target: str) -> Sequence[Any]:
    """The launches that a system would make for that shape; raises ValueError for a system that has none of ours."""
    from fused_softmax.lab.plans import described_rows, launches_for, problem_for

    if system == "fused_softmax":
        from fused_softmax.planning.softmax import plan
        from fused_softmax.planning.types import DEVICES

        chosen = plan(problem_for(n_cols, dtype), DEVICES[target])
        return launches_for(n_rows, n_cols, dtype, chosen, DEVICES[target])
    from fused_softmax.lab.bench.systems import LESSON_NUMBERS
    from fused_softmax.lab.grading.subjects import SUBJECTS
    from fused_softmax.lab.lessons import load

    if system in SUBJECTS:
        return load(SUBJECTS[system]).launches_for(described_rows(n_rows, n_cols, dtype)[0])
    if system not in LESSON_NUMBERS:
        raise ValueError("not a kernel of this package")
    lesson = load(LESSON_NUMBERS[system])
    make = lesson.published_launches if system == "05_published" else getattr(lesson, "launches", None)
    if make is None:
        raise ValueError("eager passes: no kernel of its own")
    return make(*described_rows(n_rows, n_cols, dtype))


def compile_one(system: str, dtype: str, n_rows: int, n_cols: int, target: str) -> dict[str, Any]:
    """Resources of a system's most demanding kernel as plain data; {'failed': reason} when it does not compile."""
    from fused_softmax.lab.cross_compile import cross_compile

    try:
        used = [cross_compile(launch, target) for launch in launches(system, dtype, n_rows, n_cols, target)]
    except ValueError as error:
        return {"none": str(error)}
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return {"failed": f"{target}: {reason.strip()}"[:160]}
    if not used:
        return {"none": "nothing to launch"}
    worst = max(used, key=lambda u: (u.spilled_bytes, u.registers))
    found = {name: getattr(worst, name) for name in FIELDS}
    if not worst.fits():
        found["failed"] = f"out of resources on {target}: {worst.shared_bytes} bytes of shared memory"
    return found


class CrossCompiler:
    """Runs the subprocess while the caller works; `found` fills as answers come. Close it, or wait with a limit."""

    def __init__(self, keys: Iterable[Key], target: str = "sm_90") -> None:
        self.keys = list(dict.fromkeys(keys))
        self.found: dict[Key, dict[str, Any]] = {}
        plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**plain, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write("".join(json.dumps(key) + "\n" for key in self.keys))
            self.process.stdin.close()
            for line in self.process.stdout:
                answer = json.loads(line)
                self.found[tuple(answer.pop("key"))] = answer
        except (BrokenPipeError, ValueError):
            return

    def wait(self, seconds: float) -> bool:
        """Wait for the remaining answers, at most that long; True when all came."""
        self.reader.join(seconds)
        return len(self.found) == len(self.keys)

    def close(self) -> None:
        """End the subprocess, finished or not."""
        self.process.kill()
        self.process.wait()


def keys_of(cases: Iterable[Case], systems: Iterable[str]) -> list[Key]:
    """What to compile: every system and width once, narrow ones first, for the row count of a GPU run."""
    names = list(systems)
    shapes = sorted({(c.n_cols, c.dtype) for c in cases if c.op == "softmax"})
    return [(name, dtype, ROWS, n_cols) for n_cols, dtype in shapes for name in names]


def main() -> None:
    """Answer each line of standard input with one line."""
    target = sys.argv[1]
    for line in sys.stdin:
        system, dtype, n_rows, n_cols = json.loads(line)
        answer = compile_one(system, dtype, n_rows, n_cols, target)
        print(json.dumps({"key": [system, dtype, n_rows, n_cols], **answer}), flush=True)


if __name__ == "__main__":
    main()
