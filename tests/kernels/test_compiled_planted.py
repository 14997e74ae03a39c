"""Faults that the interpreter cannot show are found by the checks of what kernels compile to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from planting import PACKAGE, Defect, plant

pytestmark = pytest.mark.compiled

CHECKS = Path(__file__).parents[1] / "support" / "compiled_checks.py"
FAULTS = (
    (
        Defect(
            "a method of an argument that may be a constant", "softmax_strided.py",
            "middle * y_middle + row * y_row + col * y_col\n",
            "middle * y_middle + row * y_row + col * y_col.to(tl.int64)\n", "softmax",
        ),
        "strides_of_one", "has no attribute 'to'",
    ),
    (
        # always true, but a comparison of which no two neighbours are known to be alike
        Defect(
            "a lost vector width", "common/tiles.py",
            "mask=offsets < width, other=fill", "mask=(offsets < width) & (offsets != width), other=fill", "softmax",
        ),
        "vectors", "loads of",
    ),
)  # fmt: skip


def run(check: str, source: Path) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(source), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, str(CHECKS), check], env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize(
    ("defect", "check", "said"),
    [FAULTS[0], pytest.param(*FAULTS[1], marks=pytest.mark.extended)],
    ids=[check for _, check, _ in FAULTS],
)
def test_the_compiled_checks_find(defect, check, said, tmp_path):
    clean = run(check, PACKAGE.parent)
    assert clean.returncode == 0, clean.stdout + clean.stderr[-2000:]
    planted = run(check, plant(defect, tmp_path))
    assert planted.returncode == 1 and said in planted.stdout, planted.stdout + planted.stderr[-2000:]
