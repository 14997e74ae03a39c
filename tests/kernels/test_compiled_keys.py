"""Triton's keys of kernels on disk: the same in each process, whatever it compiled before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

pytestmark = pytest.mark.compiled

# the keys of kernels that call the same functions, in the order of the arguments: loaded as a call does, or imported
CODE = """
import importlib, json, sys
from fused_softmax.launch.kernel_loading import kernel_of
keys = {}
for name in sys.argv[2:]:
    module, _, kernel = name.partition(".")
    imported = getattr(importlib.import_module("fused_softmax.kernels." + module), kernel)
    keys[name] = (kernel_of(module, kernel)() if sys.argv[1] == "loaded" else imported).cache_key
print(json.dumps(keys))
"""
KERNELS = [
    "softmax_spatial.softmax_spatial", "softmax_spatial.softmax_spatial_backward", "softmax_resident.softmax_resident",
    "softmax_spatial_skewed.softmax_spatial_skewed", "softmax_spatial_skewed.softmax_spatial_skewed_backward",
    "cross_entropy_resident.cross_entropy_resident", "masked_softmax_gathered.masked_softmax_gathered",
]  # fmt: skip


def keys(order: list[str], how: str = "loaded") -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path("src").resolve()), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", CODE, how, *order], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


def test_keys_are_those_of_any_order():
    assert keys(KERNELS) == keys(KERNELS[::-1])


def test_the_order_matters_to_triton():
    """What `settle_key` is for; Triton 3.9 has keys of its own that no order changes."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    in_order, reversed_ = keys(KERNELS, "imported"), keys(KERNELS[::-1], "imported")
    assert (in_order == reversed_) == (version >= (3, 9))
