"""Where kernels start early: on devices with clusters, whose driver captures such launches in CUDA graphs."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fused_softmax.launch import device
from fused_softmax.launch.launcher import row_launch
from fused_softmax.launch.softmax import softmax_op
from fused_softmax.launch.views import strided_launch
from fused_softmax.planning.types import DEVICES, Device


def launches(on: Device):
    rows = torch.empty(2, 1000), torch.empty(2, 1000)
    op, flags = softmax_op(False, False)[0], (("LOG", False),)
    yield row_launch(op, rows, (), (), flags, op.plan(rows, on, False), on)
    planes = torch.empty(2, 64, 4096, device="meta")
    yield strided_launch(planes, planes, 1, False, on)


def test_the_device_decides():
    for name, starts_early in (("sm_90", True), ("sm_120", True), ("sm_80", False), ("gfx942", False)):
        for launch in launches(DEVICES[name]):
            assert launch.meta["EARLY"] is starts_early and launch.meta.get("launch_pdl", False) is starts_early
    for launch in launches(replace(DEVICES["sm_90"], captures_pdl=False)):
        assert launch.meta["EARLY"] is False and "launch_pdl" not in launch.meta


@pytest.mark.parametrize("version, captures", [(12020, False), (12030, True), (13000, True), (0, False)])
def test_the_driver_decides(version, captures, monkeypatch):
    monkeypatch.setattr(device, "driver_version", lambda: version)
    monkeypatch.setattr(device, "triton_error", lambda: None)
    monkeypatch.setattr(device, "interpreting", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    properties = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = device.describe.__wrapped__(torch.device("cuda"))
    assert isinstance(found, Device) and found.supports_pdl is captures
    assert (found == DEVICES["sm_90"]) is captures


def test_the_driver_says_its_version(monkeypatch):
    def version(to):
        to._obj.value = 12080
        return 0

    asked = []

    def load(name):
        asked.append(name)
        if name == "libcuda.so.1":
            raise OSError(name)
        return SimpleNamespace(cuDriverGetVersion=version)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert device.driver_version() == 12080 and asked == ["libcuda.so.1", "nvcuda.dll"]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=lambda to: 3))
    assert device.driver_version() == 0
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert device.driver_version() == 0
