"""The transposing kernels and copy: what the machine moves for them, on each kind of device."""

from __future__ import annotations

import pytest
import torch
from launches import as_called, cross_compiled

from fused_softmax.launch import views
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.compiled

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# columns, inner, dtype, target, log
CASES = [
    *((n, inner, BFLOAT16, "sm_90", False) for n in (8, 21, 100, 333, 1001, 2048) for inner in (4096, 4095)),
    *((n, inner, FLOAT32, "sm_90", True) for n in (21, 150, 1001, 1500) for inner in (4096, 4095)),
    *((n, 4096, FLOAT16, target, True) for n in (21, 1001) for target in ("sm_80", "sm_100", "sm_120")),
    *((150, 4095, FLOAT16, target, True) for target in ("sm_80", "sm_100", "sm_120")),
]


def tensors(n_cols: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(2, n_cols, inner, dtype=dtype).transpose(1, 2), torch.empty(2, inner, n_cols, dtype=dtype)


@pytest.mark.parametrize(("n_cols", "inner", "dtype", "target", "log"), CASES, ids=str)
def test_rows_are_read_and_written_in_vectors(n_cols, inner, dtype, target, log):
    """Along the neighbors as far as they are aligned, and back as one piece; no register spills."""
    device, (x, y) = DEVICES[target], tensors(n_cols, inner, dtype)
    dims = [(2, n_cols * inner, n_cols * inner), (inner, 1, n_cols)]
    found = views.transposition(x, y, 2, dims, inner, device)
    assert found is not None and found.plan.vec == (16 // dtype.itemsize if inner == 4096 else 1)
    used, assembly = cross_compiled(as_called(views.transposed_launch(x, y, log, found, device)), target)
    assert used.spilled_bytes == 0 and used.fits() and used.registers <= 96
    assert used.shared_bytes - found.plan.dynamic_bytes <= 48 << 10
    (loads,) = used.loads
    assert loads[0] == found.plan.vec * dtype.itemsize and loads[1] >= 4, "few loads of a thread wait together"
    vectors = -(-found.plan.piece * dtype.itemsize // (16 * 32 * found.plan.num_warps))
    assert dict(used.stores) == {16: 1 if device.copies_in_bulk else vectors, dtype.itemsize: 1}
    assert ("cp.async.bulk.global" in assembly["ptx"]) == device.copies_in_bulk


@pytest.mark.parametrize(("n_cols", "inner", "dtype", "target", "log"), [c for c in CASES if c[0] < 400], ids=str)
def test_channels_last_is_read_and_written_in_vectors(n_cols, inner, dtype, target, log):
    """As one piece, and along the neighbors as far as they are aligned; no register spills."""
    device, (y, x) = DEVICES[target], tensors(n_cols, inner, dtype)
    dims = [(2, n_cols * inner, n_cols * inner), (inner, n_cols, 1)]
    found = views.transposition(x.transpose(1, 2), y.transpose(1, 2), 1, dims, inner, device)
    assert found is not None and found.plan.vec == (16 // dtype.itemsize if inner == 4096 else 1)
    launch = views.transposed_launch(x.transpose(1, 2), y.transpose(1, 2), log, found, device)
    used, _ = cross_compiled(as_called(launch), target)
    assert used.spilled_bytes == 0 and used.fits() and used.registers <= 96
    assert used.shared_bytes - found.plan.dynamic_bytes <= 48 << 10
    vectors = -(-found.plan.piece * dtype.itemsize // (16 * 32 * found.plan.num_warps))
    assert dict(used.loads) == {16: vectors, dtype.itemsize: 1}
    (stores,) = used.stores
    assert stores[0] == found.plan.vec * dtype.itemsize and stores[1] >= 4


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_neighboring_threads_copy_neighbors(dtype, target):
    """An access has one element of a thread, and no layout changes between reading and writing."""
    x, y = torch.empty(100, 2002, dtype=dtype)[:, ::2], torch.empty(100, 1001, dtype=dtype)
    used, _ = cross_compiled(as_called(views.stepped_copy_launch(x, y, 2, DEVICES[target])), target)
    assert dict(used.loads) == dict(used.stores) == {dtype.itemsize: views.STEPPED_CHUNKS}
    assert used.shared_bytes == 0 and used.spilled_bytes == 0 and used.registers <= 40


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize(("n_cols", "inner"), [(1000, 4096), (1001, 4096), (1000, 4095), (1001, 4095)])
def test_tiles_are_copied_in_vectors(n_cols, inner, dtype, target):
    """On either side whose runs start and end at vectors."""
    x, y = tensors(n_cols, inner, dtype)
    tiles = views.tiles_of(x)
    assert tiles is not None and (tiles.rows, tiles.cols) == (64, 64)
    used, _ = cross_compiled(as_called(views.copy_launch(x, y, tiles, DEVICES[target])), target)
    assert used.spilled_bytes == 0 and used.registers <= 72
    for accesses, n in ((used.loads, inner), (used.stores, n_cols)):
        assert [width for width, _ in accesses] == [dtype.itemsize if n % 2 else 16]
