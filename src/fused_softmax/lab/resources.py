"""What each system's kernels compile to for a GPU that is not here, while the benchmark interprets."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from fused_softmax.lab.bench.cases import Case
from fused_softmax.lab.compiling import Worker
from fused_softmax.lab.roofline.compiled import Compiled
from fused_softmax.planning.types import MULTIPROCESSORS

Key = tuple[str, str, int, int]  # system, dtype, n_rows, n_cols
# what GPU runs have: where a kernel takes the number of rows, it is compiled for that
ROWS = 4096


def fields_of(found: Compiled, target: str) -> dict[str, Any]:
    """Registers, spilled_bytes, shared_bytes, widest_load_bytes, num_warps and num_ctas as plain data.

    {"failed": reason} where it does not compile, or in addition where it cannot be launched; {"none": reason} where
    there is no kernel.
    """
    if found.none or found.failed:
        return {"none": found.none} if found.none else {"failed": f"{target}: {found.failed}"[:160]}
    used = found.resources
    names = ("registers", "spilled_bytes", "shared_bytes", "num_warps", "num_ctas")
    fields = {name: used[name] for name in names} | {"widest_load_bytes": used["loads"][0][0] if used["loads"] else 0}
    if used["shared_bytes"] > MULTIPROCESSORS[target].shared_per_program:
        fields["failed"] = f"out of resources on {target}: {used['shared_bytes']} bytes of shared memory"
    return fields


class CrossCompiler:
    """Compiles in another process while the caller works; `found` fills. Close it, or wait with a limit."""

    def __init__(self, keys: Iterable[Key], target: str = "sm_90") -> None:
        self.keys = list(dict.fromkeys(keys))
        self.found: dict[Key, dict[str, Any]] = {}
        self.target, self.worker = target, Worker()
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        for key in self.keys:
            system, dtype, n_rows, n_cols = key
            request = dict(system=system, dtype=dtype, n_rows=n_rows, n_cols=n_cols, target=self.target, op="softmax")
            answer = self.worker.ask(request)
            if not self.worker.alive:
                return
            self.found[key] = fields_of(answer, self.target)

    def wait(self, seconds: float) -> bool:
        """Wait for the remaining answers, at most that long; True when all came."""
        self.thread.join(seconds)
        return len(self.found) == len(self.keys)

    def close(self) -> None:
        """End the process, finished or not."""
        self.worker.process.kill()
        self.thread.join()
        self.worker.close()


def keys_of(cases: Iterable[Case], systems: Iterable[str]) -> list[Key]:
    """What to compile: every system and width once, narrow ones first, for the row count of a GPU run."""
    names = list(systems)
    shapes = sorted({(c.n_cols, c.dtype) for c in cases if c.op == "softmax"})
    return [(name, dtype, ROWS, n_cols) for n_cols, dtype in shapes for name in names]
