"""Faults that are put into a copy of the package, and the process that runs the fuzzer on such copies.

`python tests/support/planting.py` imports torch and Triton once and then forks for each request, a line of JSON on its
standard input: {"source": folder of the copy, "op", "way", "dtypes", "columns", "seed", "cases"}. The child writes its
process id, then each case before it runs, and once more with its problems where it is wrong. Its parent writes how it
ended.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "fused_softmax"


@dataclass(frozen=True)
class Defect:
    """One fault: in `file` of kernels/, `old`, which stands there `times` times, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    op: str
    way: str = "function"
    dtypes: tuple[str, ...] = ("float32",)
    columns: tuple[int, int] = (2, 600)
    times: int = 1


DEFECTS = (
    Defect(
        "a mask off by one", "common/tiles.py",
        "mask=offsets < width, other=fill", "mask=offsets < width - 1, other=fill", "softmax",
    ),
    Defect(
        "a stride ignored", "softmax_resident.py",
        "x_row = x_ptr + start_of(row, x_stride, phase, VEC, UNALIGNED)",
        "x_row = x_ptr + start_of(row, n_cols, phase, VEC, UNALIGNED)", "log_softmax",
    ),
    Defect(
        "a missing rescale", "common/online_softmax.py",
        "        s = s * exp(m - m_new)\n", "        s = s * 1.0\n", "logsumexp", columns=(2000, 40000),
    ),
    Defect(
        "a wrong fill", "softmax_resident.py",
        'UNPREDICATED, VECTORS, VEC, -float("inf"), WARPS_PER_ROW,', "UNPREDICATED, VECTORS, VEC, 0.0, WARPS_PER_ROW,",
        "softmax", dtypes=("bfloat16",),
    ),
    Defect(
        "a lost tail", "common/tiles.py",
        "place - VEC < n_cols - head - interior)", "place - VEC < n_cols - head - interior - 1)", "softmax",
        columns=(65, 3000),
    ),
    Defect(
        "16-bit accumulation", "softmax_resident.py",
        "        s += sum_of_vectors(e, IN_ORDER)\n", "        s += tl.sum(e.to(tl.float16), 2).to(tl.float32)\n",
        "softmax", columns=(64, 3000),
    ),
    Defect(
        "a row guard left out", "softmax_resident.py",
        "    if ROWS > 1:\n        width = width_if(row < n_rows, width)\n\n    # each vector's own maximum",
        "    # each vector's own maximum", "softmax", way="out", columns=(2, 40),
    ),
    Defect(
        "a wrong sign in a gradient", "common/softmax_terms.py",
        "return y.to(tl.float32) * (dy.to(tl.float32) - d)", "return y.to(tl.float32) * (dy.to(tl.float32) + d)",
        "softmax", way="module",
    ),
    Defect(
        "a smoothing term dropped", "common/cross_entropy_terms.py",
        "        a = b + c * w_sum\n", "        a = b\n", "cross_entropy",
    ),
    Defect(
        "causality off by one", "common/row_scheduler.py",
        "return tl.minimum(query + 1, columns)", "return tl.minimum(query + 2, columns)", "masked_softmax",
    ),
    Defect(
        "a scale forgotten", "common/masks.py",
        "return tl.fma(x, scale, mask.to(tl.float32))", "return x + mask.to(tl.float32)", "masked_softmax",
    ),
    Defect(
        "the last column of another dimension ignored", "common/spatial_tiles.py",
        "inside = exists & (column < n_cols - C * COLS)", "inside = exists & (column < n_cols - C * COLS - 1)",
        "log_softmax", columns=(65, 500),
    ),
)  # fmt: skip


def plant(defect: Defect, folder: Path) -> Path:
    """A copy of the package with the fault in it; the folder to import it from."""
    source = folder / "src"
    shutil.copytree(PACKAGE, source / "fused_softmax", ignore=shutil.ignore_patterns("__pycache__"))
    file = source / "fused_softmax" / "kernels" / defect.file
    text = file.read_text()
    found = text.count(defect.old)
    if found != defect.times:
        raise LookupError(f"{defect.name}: {defect.old!r} stands {found} times in {defect.file}, not {defect.times}")
    file.write_text(text.replace(defect.old, defect.new))
    return source


class Planter:
    """The process that forks, from the test's side."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, defect: Defect, source: Path, seed: int, cases: int) -> Iterator[dict[str, Any]]:
        """Each wrong case, as {"case", "problems", "index"}, until the caller stops."""
        assert self.process.stdin is not None and self.process.stdout is not None
        request = dict(source=str(source), op=defect.op, way=defect.way, dtypes=defect.dtypes)
        request |= dict(columns=defect.columns, seed=seed, cases=cases)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        pid = json.loads(self.process.stdout.readline())["pid"]
        last: dict[str, Any] = {}
        while True:
            line = json.loads(self.process.stdout.readline())
            if "done" in line:
                if line["done"]:  # a case that ended the process
                    yield last
                return
            last = line
            if "problems" in line:
                try:
                    yield line
                except GeneratorExit:
                    os.kill(pid, 9)
                    while "done" not in json.loads(self.process.stdout.readline()):
                        pass
                    raise

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def _fuzz(request: dict[str, Any]) -> None:
    """In the child: the fuzzer of the copy, case by case."""
    sys.path.insert(0, request["source"])
    import fused_softmax

    assert fused_softmax.__file__.startswith(request["source"]), fused_softmax.__file__
    from fused_softmax.lab.fuzz import session, worker
    from fused_softmax.lab.fuzz.draw import Budget, draw_cases
    from fused_softmax.lab.fuzz.judge import evaluate

    worker.prepare("cpu")
    asked = session.Request(
        (request["op"],), (request["way"],), tuple(request["dtypes"]), cases=request["cases"], seed=request["seed"],
        columns=tuple(request["columns"]),
    )  # fmt: skip
    index = 0
    for unit in session.units(asked, "cpu", Budget.interpreted()):
        for way, count in unit.ways:
            for case in draw_cases(unit.of, way, count, unit.budget):
                index += 1
                print(json.dumps({"case": case.to_json(), "index": index}), flush=True)
                found = evaluate(case, "cpu").found()
                if found:
                    print(json.dumps({"case": case.to_json(), "problems": found, "index": index}), flush=True)


def main() -> None:
    import torch
    import torch._dynamo  # what takes the time of an import
    import triton  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                print(json.dumps({"pid": os.getpid()}), flush=True)
                _fuzz(request)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"done": status}), flush=True)


if __name__ == "__main__":
    main()
