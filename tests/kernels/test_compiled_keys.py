"""Triton's keys of kernels on disk: the same in each process, whatever it compiled before, and by which threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import triton
from planting import PACKAGE

pytestmark = pytest.mark.compiled

# the keys of all kernels: imported, or loaded as calls do, in one order or the reverse, or by a thread for each
CODE = """
import importlib, json, pkgutil, sys, threading
import fused_softmax.kernels
from fused_softmax.launch.kernel_loading import kernel_of
kernels = {}
for module in pkgutil.iter_modules(fused_softmax.kernels.__path__):
    if not module.ispkg:
        of = vars(importlib.import_module("fused_softmax.kernels." + module.name))
        kernels |= {name: (module.name, k) for name, k in of.items() if hasattr(k, "declaration")}
keys, how = {}, sys.argv[1:]
def key_of(name):
    module, imported = kernels[name]
    keys[name] = (imported if "imported" in how else kernel_of(module, name)()).cache_key
names = sorted(kernels, reverse="reversed" in how)
if "threads" in how:
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=key_of, args=(name,)) for name in names]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
else:
    for name in names: key_of(name)
print(json.dumps(keys))
"""


def keys(*how: str) -> dict[str, str]:
    path = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *how], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


def test_keys_are_those_of_any_order():
    found = keys()
    assert len(found) > 50 and found == keys("reversed") == keys("threads", "reversed")


@pytest.mark.extended
def test_the_order_matters_to_triton():
    """What `settle_key` is for; Triton 3.9 has keys of its own that no order changes."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    assert (keys("imported") == keys("imported", "reversed")) == (version >= (3, 9))
