"""Rows past 2^31 elements: element offsets are int64, for the input and for the output.

The tensor is a strided view over uninitialised memory of which only the rows are ever touched, so it costs address
space and a few pages. An offset that wrapped around would read or write unmapped memory, which ends the process; hence
a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import cases
import pytest

pytestmark = pytest.mark.interpreted

CODE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from cases import assert_contract, logits, softmax_by
import fused_softmax as fs

regime, n_cols, stride = sys.argv[2], 1000, 2**30 + 8


def far_rows():
    # rows 0, 1 and 2 start at 0, 2^30 + 8 and 2^31 + 16
    return torch.empty(2 * stride + n_cols, dtype=torch.float16).as_strided((3, n_cols), (stride, 1))


x, y = far_rows(), far_rows()
assert 2 * stride > 2**31
x.copy_(logits(3, n_cols, dtype=torch.float16))
softmax_by(regime, x, y)
assert_contract(y, x)
assert_contract(fs.softmax(x), x)
# over the other dim, and over columns that lie 2^30 elements apart
assert_contract(fs.softmax(x.t(), 0), x.t(), 0)
columns = far_rows()[:, :5].t()
columns.copy_(logits(5, 3, dtype=torch.float16))
assert_contract(fs.softmax(columns, -1), columns)
print("right")
"""


@pytest.mark.parametrize(
    "regime",
    ["cluster", *(pytest.param(regime, marks=pytest.mark.extended) for regime in ("warp", "block", "two_pass"))],
)
def test_row_offsets_past_two_to_the_31(regime):
    done = subprocess.run(
        [sys.executable, "-c", CODE, os.path.dirname(cases.__file__), regime],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{done.stderr}\nexit status {done.returncode}"
    assert done.stdout.strip() == "right"
