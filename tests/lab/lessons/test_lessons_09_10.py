"""What is particular to the last two lessons: a row on a cluster, and the shipped kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_lessons import DTYPES, assert_softmax, interpreted, rows

from fused_softmax.lab import lessons
from fused_softmax.launch.device import Unsupported
from fused_softmax.planning.types import DEVICES


def test_a_row_on_a_cluster_says_where_there_is_none(monkeypatch):
    lesson = lessons.load(9)
    x = torch.empty(1, 100, device="meta")
    on_a_gpu = SimpleNamespace(is_cuda=True, device="cuda:0", shape=x.shape)
    for device in (DEVICES["sm_80"], DEVICES["gfx942"], Unsupported("compute capability 7.5: kernels need 8.0")):
        monkeypatch.setattr(lesson, "describe", lambda _, device=device: device)
        with pytest.raises(RuntimeError, match="no thread-block clusters on this device"):
            lesson.launches(on_a_gpu, on_a_gpu)
    monkeypatch.setattr(lesson, "describe", lambda _: DEVICES["sm_120"])
    widest = SimpleNamespace(is_cuda=True, device="cuda:0", shape=(1, 8 * lesson.MAX_LINE), numel=lambda: 1)
    (launch,) = lesson.launches(widest, widest)
    assert launch.meta["num_ctas"] == launch.meta["CTAS"] == 8  # as many as that device has, not an H200's 16
    widest.shape = (1, 8 * lesson.MAX_LINE + 1)
    with pytest.raises(ValueError, match="does not fit 8 CTAs"):
        lesson.launches(widest, widest)


@interpreted
@pytest.mark.parametrize("n_cols", [200, 8193, 50257, 131072])
def test_a_cluster_merges_its_lines(n_cols):
    lesson = lessons.load(9)
    x = rows(2, n_cols, torch.float32)
    (launch,) = lesson.launches(x, torch.empty_like(x))
    assert launch.meta["CTAS"] * launch.meta["BLOCK"] >= n_cols and "num_ctas" not in launch.meta
    assert_softmax(lesson.softmax(x), x)
    unmerged = lesson.unmerged(x).double()
    slices = unmerged.split(launch.meta["BLOCK"], dim=1)
    for part in slices:  # each looks like a softmax
        torch.testing.assert_close(part.sum(1), torch.ones(2).double(), rtol=1e-5, atol=0)
    assert len(slices) > 1


@interpreted
@pytest.mark.parametrize("n_cols", [1, 257, 2049, 4097, 33331, 70000])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_the_shipped_kernel_is_the_one_that_is_shipped(n_cols, dtype):
    import fused_softmax

    lesson = lessons.load(10)
    x = rows(2, n_cols, dtype)
    y = lesson.softmax(x)
    assert_softmax(y, x)
    assert torch.equal(y, fused_softmax.softmax(x))
    assert lesson.planned(x, y) == fused_softmax.plan_for(x)


@interpreted
def test_what_lies_outside_the_row():
    lesson = lessons.load(10)
    x = rows(2, 3001, torch.float32) - 60
    shrunk = lesson.padded_with_zeros(x)
    assert (shrunk.sum(1) < 0.1).all()  # the maximum is a padded lane's
    y = lesson.whole_vectors_only(x)
    assert not y[:, :3000].isnan().any() and y[:, 3000:].isnan().all()


@pytest.mark.compiled
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("n_cols", [3, 4096, 65536, 151936, 524288])
def test_a_line_of_a_cluster_stays_in_registers(n_cols, dtype, target):
    from fused_softmax.lab.cross_compile import cross_compile

    x = torch.empty(1, n_cols, dtype=dtype, device="meta")
    (launch,) = lessons.load(9).launches(x, torch.empty_like(x))
    kernel = cross_compile(launch, target)
    assert kernel.num_ctas == launch.meta["CTAS"] and kernel.spilled_bytes == 0 and kernel.fits()
    assert kernel.widest_load_bytes == kernel.widest_store_bytes == (16 if n_cols % 16 == 0 else dtype.itemsize)


@pytest.mark.compiled
def test_the_shipped_kernel_needs_no_width_that_is_round():
    from fused_softmax.lab.cross_compile import cross_compile

    def loads(n: int, n_cols: int) -> tuple:
        x = torch.empty(2, n_cols, dtype=torch.bfloat16, device="meta")
        return cross_compile(lessons.load(n).launches(x, torch.empty_like(x))[0], "sm_90").loads

    assert loads(10, 50256)[0][0] == 16 and len(loads(10, 50256)) == 1
    assert [size for size, _ in loads(10, 50257)] == [16, 2]  # the row's ends
    assert loads(10, 50257)[1] == (2, 1)
    assert [size for size, _ in loads(9, 50257)] == [2]
