"""A short list for compute-sanitizer: every regime, aligned and not, inside fields that nothing may touch.

    compute-sanitizer --tool memcheck  python tests/gpu/sanitizer_cases.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitizer_cases.py
    compute-sanitizer --tool initcheck python tests/gpu/sanitizer_cases.py

Exact allocations (PYTORCH_NO_CUDA_MEMORY_CACHING=1, set below) let memcheck see an access one element too far.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from cases import DTYPES, assert_contract, dtype_id, logits, softmax_by

CASES = {
    "tile": (1, 33, 1000, 1024),
    "block": (1000, 4097, 8192),
    "cluster": (4096, 8193, 50257),
    "stream": (1000, 8191, 20001),
}


def main() -> None:
    for regime, widths in CASES.items():
        for n_cols in widths:
            for dtype in DTYPES:
                for offset in (0, 1):
                    storage = logits(1, offset + 5 * n_cols, dtype=dtype, device="cuda")[0]
                    x = storage[offset:].view(5, n_cols)
                    y = torch.empty(offset + 5 * n_cols, dtype=dtype, device="cuda")[offset:].view(5, n_cols)
                    assert_contract(softmax_by(regime, x, y), x)
                    print(regime, n_cols, dtype_id(dtype), "unaligned" if offset else "aligned", flush=True)


if __name__ == "__main__":
    main()
