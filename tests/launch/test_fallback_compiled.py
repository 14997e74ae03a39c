"""What real failures of Triton's compiler, cache and loader end with. A driver stands for a GPU that is not there."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from fused_softmax.kernels.common.arguments import Int32, Rows
from fused_softmax.kernels.common.arguments import kernel as declared
from fused_softmax.launch import availability
from fused_softmax.launch import compile as launch
from fused_softmax.launch import softmax as launch_softmax
from fused_softmax.torch_ops.softmax import forward_or_torch

pytestmark = pytest.mark.compiled
IMAGE = "Triton Error [CUDA]: device kernel image is invalid"
FAULT = "Triton Error [CUDA]: an illegal memory access was encountered"


@declared()
def copy_numbers(x_ptr: Rows, y_ptr: Rows, n_cols: Int32, COLS: tl.constexpr):
    at = tl.arange(0, COLS)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n_cols), mask=at < n_cols)


@declared()
def copy_numbers_again(x_ptr: Rows, y_ptr: Rows, n_cols: Int32, COLS: tl.constexpr):
    at = tl.arange(0, COLS)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n_cols), mask=at < n_cols)


@declared()
def call_what_is_not_there(x_ptr: Rows, y_ptr: Rows, n_cols: Int32, COLS: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, COLS), tl.no_such_function(x_ptr))


@triton.jit
def take_a_method_of_a_stride(x_ptr, y_ptr, n_cols, COLS: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, COLS) * n_cols.to(tl.int64), 0.0)


class Driver:
    """Triton's driver of an H200, whose loader fails with `message`, or says how many threads a kernel may have."""

    def __init__(self, message: str, threads: int):
        self.message, self.threads = message, threads
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132},
            load_binary=self.load_binary,
        )

    def load_binary(self, *_):
        if self.threads:
            return None, None, 0, 0, self.threads
        raise RuntimeError(self.message)

    def launcher_cls(self, *_):
        return None

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _) -> int:
        return 0


@pytest.fixture
def loader(monkeypatch, tmp_path):
    """Sets what the loader says; nothing is remembered from other tests, and the cache is empty."""
    monkeypatch.setattr(availability, "_warned", set())
    monkeypatch.setattr(availability, "_failures", {})
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    return lambda message, threads=0: monkeypatch.setattr(triton.runtime.driver, "_active", Driver(message, threads))


def build(kernel):
    pointers = ((torch.float32, 16), (torch.float32, 16))
    return launch.compile_kernel(kernel, pointers, {"COLS": 64, "num_warps": 4}, 0)


def jit(kernel) -> launch.Launch:
    x = torch.zeros(64)
    return launch.Launch(kernel, (1,), (x, torch.zeros(64), 1), {"COLS": 64, "num_warps": 4})


WAYS = [build, lambda kernel: jit(kernel)._compile(0)]


@pytest.mark.parametrize("way", WAYS, ids=["signature", "jit"])
def test_a_kernel_that_does_not_compile(way, loader):
    loader("never reached")
    with pytest.warns(
        UserWarning, match="call_what_is_not_there does not compile with torch .* and Triton .*"
    ) as given:
        with pytest.raises(availability.KernelUnavailable, match="no_such_function"):
            way(call_what_is_not_there)
    assert len(given) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(availability.KernelUnavailable, match="no_such_function"):
            way(call_what_is_not_there)


def test_a_stride_of_one_is_a_constant_to_the_jit(loader):
    """The JIT compiles a kernel anew for arguments equal to 1, so each kind of argument fails by itself."""
    loader(IMAGE)
    with pytest.warns(UserWarning, match="'int' object has no attribute|has no attribute 'to'"):
        with pytest.raises(availability.KernelUnavailable):
            jit(take_a_method_of_a_stride)._compile(0)


@pytest.mark.parametrize("way", WAYS, ids=["signature", "jit"])
def test_a_binary_that_the_driver_refuses(way, loader):
    loader(IMAGE)
    with pytest.warns(UserWarning, match="kernel image is invalid"), pytest.raises(availability.KernelUnavailable):
        way(copy_numbers)


@pytest.mark.parametrize("way", WAYS, ids=["signature", "jit"])
def test_a_fault_of_the_device_is_raised(way, loader):
    loader(FAULT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="illegal memory access") as raised:
                way(copy_numbers)
            assert not isinstance(raised.value, availability.KernelUnavailable)


@pytest.mark.parametrize("way", WAYS, ids=["signature", "jit"])
def test_a_cache_that_cannot_be_written(way, loader, monkeypatch, tmp_path: Path):
    loader("never reached")
    (tmp_path / "file").touch()
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="TRITON_CACHE_DIR"), pytest.raises(availability.KernelUnavailable):
        way(copy_numbers_again)  # the JIT remembers the other


def test_a_program_too_large_for_the_device(loader):
    loader("never reached", threads=64)
    with pytest.warns(UserWarning, match="OutOfResources"), pytest.raises(availability.KernelUnavailable):
        build(copy_numbers)


def test_softmax_of_a_kernel_that_does_not_compile(loader, monkeypatch):
    """The way to PyTorch's own kernel, from a real error of the compiler on."""
    loader("never reached")
    x = torch.randn(3, 64)

    def launch_rows(*_, **__):
        build(call_what_is_not_there)

    monkeypatch.setattr(launch_softmax, "launch_rows", launch_rows)
    with pytest.warns(UserWarning, match="no_such_function"):
        assert torch.equal(forward_or_torch(x, -1, torch.float32, False), torch.softmax(x, -1))


def test_clusters_of_programs_need_a_launcher_that_is_known():
    """CTAs without their cluster would wait for it forever."""
    kernel = SimpleNamespace(declaration=SimpleNamespace(cta_programs=True))
    meta = {"num_warps": 8, "CTAS": 4}
    compiled = SimpleNamespace(packed_metadata=(8, 1, 2048))
    for _ in range(2):  # Triton's cache gives the same object again
        launch.make_clusters(compiled, kernel, meta)
        assert compiled.packed_metadata == (8, 4, 2048)
    for other in ((8, 2, 2048), (4, 1, 2048), (8, 1, 1, 2048)):
        with pytest.raises((RuntimeError, ValueError)):
            launch.make_clusters(SimpleNamespace(packed_metadata=other), kernel, meta)
    alone = SimpleNamespace(packed_metadata=(8, 1, 1, 2048))
    launch.make_clusters(alone, kernel, {**meta, "CTAS": 1})
    assert alone.packed_metadata == (8, 1, 1, 2048)


class Metadata(NamedTuple):
    shared: int


def test_added_shared_memory_is_where_triton_has_none():
    meta = {"DYNAMIC": 76320}
    compiled = SimpleNamespace(packed_metadata=(8, 2, 0), metadata=Metadata(0))
    for _ in range(2):  # Triton's cache gives the same object again
        launch.add_shared_memory(compiled, meta)
        assert compiled.packed_metadata == (8, 2, 76320) and compiled.metadata.shared == 76320
    for packed, own in (((8, 2, 2048), 2048), ((8, 2, 0), 2048)):
        with pytest.raises(RuntimeError, match="shared memory"):
            launch.add_shared_memory(SimpleNamespace(packed_metadata=packed, metadata=Metadata(own)), meta)
    unchanged = SimpleNamespace(packed_metadata=(8, 2, 2048), metadata=Metadata(2048))
    launch.add_shared_memory(unchanged, {"DYNAMIC": 0})
    assert unchanged.packed_metadata == (8, 2, 2048)
