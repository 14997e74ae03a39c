"""Fresh memory is NaN, and each test runs only in the kind of process that it can run in.

Whether a kernel is interpreted or compiled is decided when it is decorated, so one process does one of the two:
TRITON_INTERPRET=1 pytest -m "not compiled and not gpu", then pytest -m compiled, then, on a GPU, pytest -m gpu.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from typing import Any

# graphs that an earlier version of the operators was compiled into are not this version's
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
# the workers of pytest-xdist, and the processes that tests start, share the cores; the tensors are small
os.environ.setdefault("OMP_NUM_THREADS", "1")
# inductor's pool of processes imports torch in each of them, for graphs of one or two kernels
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

try:
    from hypothesis import settings
except ImportError:  # a GPU machine without it runs everything but the properties
    settings = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if settings:
    # the same examples every time: a failure in CI is a failure here
    settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=25, database=None)
    settings.load_profile("fixed")


def _mark_all_but_a_sample(items: list[pytest.Item]) -> None:
    """Mark `extended` what `sampled(every)` leaves out: all cases of such a test but each `every`-th.

    They are drawn by a hash of their names. With other versions of torch and Triton all of them run.
    """
    if os.environ.get("FUSED_SOFTMAX_WHOLE") == "1":
        return
    cases: dict[tuple[Any, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("extended"):
            cases.setdefault((item.path, item.nodeid.split("[")[0]), []).append(item)
    for found in cases.values():
        marker = found[0].get_closest_marker("sampled")
        assert marker is not None
        found.sort(key=lambda item: zlib.crc32(item.name.encode()))
        for item in found[-(-len(found) // marker.args[0]) :]:
            item.add_marker(pytest.mark.extended)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_all_but_a_sample(items)
    unmet = {
        "interpreted": None if INTERPRETED else "needs TRITON_INTERPRET=1",
        "compiled": "needs TRITON_INTERPRET unset" if INTERPRETED else None,
        "extended": None if os.environ.get("FUSED_SOFTMAX_EXTENDED") == "1" else "needs FUSED_SOFTMAX_EXTENDED=1",
        "gpu": None if torch.cuda.is_available() and not INTERPRETED else "needs a CUDA device, and no interpreter",
    }
    for item in items:
        for marker, reason in unmet.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, by playwright."""
    program = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    assert program, "no Chromium: apt-get install chromium, or name one by CHROMIUM"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session", autouse=True)
def faster_interpreter() -> Iterator[list[Callable[[], None]]]:
    """A tenth of the interpreter's time with the same bits (test_interpreter.py). Yields what undoes it."""
    if not INTERPRETED:
        yield []
        return
    from fused_softmax.lab.fuzz.interpreter import patch_once

    try:
        undo = [patch_once()]
    except AttributeError:  # a newer Triton's interpreter has other parts: test_interpreter.py fails, the others run
        undo = [lambda: None]
    yield undo
    for one in undo:
        one()


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch.empty returns NaN (integers: their largest value), so that what a kernel leaves unwritten is seen.

    What is compiled alone runs no kernel: its tensors, of up to gigabytes, are addresses.
    """
    torch.manual_seed(0)
    if request.node.get_closest_marker("compiled"):
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
