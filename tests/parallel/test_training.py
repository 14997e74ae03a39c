"""The training of a language model whose output layer is spread over ranks runs, and checks itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "train_vocab_parallel.py"


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_over_ranks(ranks, tmp_path):
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(PROGRAM), "--steps", "30", "--out", str(tmp_path / "curves.json")]
    done = subprocess.run(command, env={**plain, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 collective forward" in done.stdout
    curves = json.loads((tmp_path / "curves.json").read_text())
    assert len(curves["one rank"]) == len(curves["sharded"]) == 30 and curves["ranks"] == ranks
