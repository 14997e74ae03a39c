"""The model's arithmetic, and its floor next to the times that were recorded on an H200."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fused_softmax.lab.roofline import model, session
from fused_softmax.lab.roofline.gpus import GPUS, Gpu
from fused_softmax.lab.roofline.linear import DATASHEET_TFLOPS, LINEAR, as_data, lines, predict_linear
from fused_softmax.lab.roofline.predict import predict
from fused_softmax.lab.traffic import Traffic, three_reads
from fused_softmax.planning.types import MULTIPROCESSORS

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "h200" / "softmax.json"
PROFILES = RESULTS.parents[1] / "h200-profile"
H200 = GPUS["h200"]


def recorded() -> list[dict]:
    """The shipped kernel's cases of 2^28 bfloat16 elements, timed on an H200."""
    records = json.loads(RESULTS.read_text())["records"]
    mine = [r for r in records if r["op"] == "softmax" and r["system"] == "fused_softmax" and r.get("ms")]
    big = [r for r in mine if r["n_rows"] * r["n_cols"] > 2**27 and r["dtype"] == "bfloat16"]
    return [r for r in big if r["timed_by"] == "CUDA events" and 1024 <= r["n_cols"] <= 262144]


def test_the_floor_is_within_a_tenth_of_what_was_measured():
    found = recorded()
    assert len(found) > 20
    for r in found:
        said = predict("fused_softmax", r["n_rows"], r["n_cols"], r["dtype"], "h200")
        assert said.floor.binds == "bandwidth"
        assert 0.9 < said.floor.least / (1000 * r["ms"]) < 1.1, (r["n_cols"], said.floor.least, r["ms"])


@pytest.mark.parametrize("version", ["3.6", "3.9"])
def test_the_floor_holds_at_widths_that_nobody_chose(version: str):
    """40 random widths and the named ones, bfloat16 and float32, as one run on an H200 recorded them."""
    files = (RESULTS.parents[1] / f"h200-triton{version}").glob("*.json")
    records = [r for file in files for r in json.loads(file.read_text())["records"] if r["system"] == "fused_softmax"]
    for ops in (("softmax", "log_softmax"), ("cross_entropy",)):
        mine = [
            r for r in records if r["op"] in ops and 1024 <= r["n_cols"] <= 262144 and r["timed_by"] == "CUDA events"
        ]
        assert len({r["n_cols"] for r in mine}) > 20 and {r["dtype"] for r in mine} == {"bfloat16", "float32"}
        for r in mine:
            said = predict("fused_softmax", r["n_rows"], r["n_cols"], r["dtype"], "h200", r["op"]).floor.least
            worst = 0.11 if r["op"] == "cross_entropy" else 0.1
            assert abs(1000 * r["ms"] / said - 1) < worst, (r["op"], r["n_cols"], said, r["ms"])


def test_the_copy_of_the_table_is_the_recorded_one():
    copies = [r["ceiling_gbps"] for r in recorded() if r.get("ceiling") == "copy"]
    assert abs(H200.gbps / sorted(copies)[len(copies) // 2] - 1) < 0.02


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_each_gpu_is_in_the_hardware_table(gpu: Gpu):
    assert gpu.target in MULTIPROCESSORS and gpu.gbps < gpu.datasheet_gbps and gpu.measured == (gpu.name == "H200")
    assert 5 < gpu.ridge < 200 and 3e5 < gpu.bytes_in_flight < 1e7


def test_what_is_read_again_comes_from_the_l2_if_it_fits():
    asked = three_reads(1 << 16, 4096)
    cells = asked.writes
    near = model.dram_bytes(asked, cells, 2, 1056, 8192, H200)
    assert near == model.DramBytes(2 * cells, 2 * cells, 4 * cells) and near.all == 4 * cells
    far = model.dram_bytes(asked, cells, 2, 1056, 1 << 18, H200)
    assert far == model.DramBytes(6 * cells, 2 * cells) and far.kept == 0
    assert model.dram_bytes(Traffic(cells, cells), cells, 2, 10**6, 1 << 18, H200).kept == 0


def test_what_a_kernel_leaves_in_the_l2_is_not_counted_for_it():
    left = model.unsent_bytes([2**30], H200)
    assert 0.1 * H200.l2_bytes < left < 0.5 * H200.l2_bytes
    assert model.unsent_bytes([2**30, 2**30, 1000, 0], H200) == 2 * left + 1000
    assert predict("01_naive", 4096, 4096, "bfloat16", "h200").dram.unsent == 3 * left
    assert predict("05_published", 4096, 65536, "bfloat16", "h200").dram.unsent == left + 4096 * 512 * 2
    assert predict("11_over_gpus", 4096, 65536, "bfloat16", "h200").dram.unsent == 4 * left  # a kernel for each rank


def test_kernels_follow_one_another():
    one, five = (predict("fused_softmax", 4096, 4096, "bfloat16", "h200", op) for op in ("softmax", "cross_entropy"))
    assert (one.launches, five.launches) == (1, 5)
    targets = 8 * 4096 / (H200.gbps * 1e3)  # microseconds to read them
    for name, more in {"bandwidth": targets, "launch": 0.0}.items():
        found = five.floor.microseconds[name] - one.floor.microseconds[name]
        assert found == pytest.approx(4 * H200.launch_us + more)


def test_random_widths_lie_between_the_least_and_the_largest():
    widths = session.random_widths(20, 7)
    assert len(set(widths)) == 20 and widths == session.random_widths(20, 7) != session.random_widths(20, 8)
    assert all(1024 <= n_cols <= 262144 for n_cols in widths) and any(n_cols % 2 for n_cols in widths)


@pytest.mark.extended
def test_bytes_that_ncu_counted_are_within_3_per_cent_of_the_model():
    profiles = [p for f in PROFILES.glob("profile*.json") for p in json.loads(f.read_text())["profiles"]]
    assert len(profiles) > 60
    for p in profiles:
        op = p["op"] if p["system"] == "fused_softmax" else "softmax"
        said = predict(p["system"], p["n_rows"], p["n_cols"], p["dtype"], "h200", op).dram
        assert (p["read"] + p["written"]) / (said.all - said.unsent) == pytest.approx(1, abs=0.03), p


def test_each_time_can_bind():
    few = model.InFlight(1, "registers", 1000, 1e5, H200.bytes_in_flight)
    enough = replace(few, bytes=1e8)
    big = 2**30
    assert model.floor(big, big // 4, H200, in_flight=enough).binds == "bandwidth"
    assert model.floor(big, big // 4, H200, in_flight=few).binds == "latency"
    assert model.floor(big, big // 4, H200, in_flight=enough, instructions=100).binds == "arithmetic"
    assert model.floor(1024, 256, H200, in_flight=few).binds == "launch"
    # the exponentials alone: 16 a cycle on each multiprocessor
    found = model.floor(0, 16 * 132 * 1980, H200, exponentials=1.0, instructions=0.1)
    assert found.microseconds["arithmetic"] == pytest.approx(1.0)


def test_naive_passes_move_eight_elements_for_each():
    said = predict("01_naive", 4096, 4096, "bfloat16", "h200")
    assert (said.dram.read, said.dram.written) == (2 * (5 * 2**24 + 2 * 4096), 2 * (3 * 2**24 + 2 * 4096))
    assert said.launches == 5 and said.plan is None and said.compiled is None


def test_the_floor_of_linear_losses_is_within_a_tenth_of_what_was_measured():
    records = json.loads((RESULTS.parents[1] / "h200-linear" / "linear_losses.json").read_text())["records"]
    mine = [r for r in records if r["system"] == "fused_softmax" and r["op"] in LINEAR and r.get("ms")]
    assert len(mine) >= 8
    for r in mine:
        said = predict_linear(r["op"], r["n_rows"], r["n_cols"], int(r["case"].split()[-1]), r["dtype"], "h200")
        assert 0.9 < said.floor_us / (1000 * r["ms"]) < 1.1, (r["op"], r["n_rows"], said.floor_us, r["ms"])


def test_linear_losses_in_words():
    said = predict_linear("linear_cross_entropy", 131072, 128256, 4096, "bfloat16", "h200")
    text = "\n".join(lines(said))
    assert "32 of 4,096 rows: 1,050.7 MB of logits are held, and not 33,621.5 MB" in text
    assert "3 of 1.38e+14 operations" in text and "2 passes over the logits" in text and "(measured)" in text
    assert as_data(said)["floor_us"] == said.products_us + said.kernels_us
    assert set(DATASHEET_TFLOPS) == {gpu.name for gpu in GPUS.values()}
    with pytest.raises(ValueError, match="float32"):
        predict_linear("linear_cross_entropy", 8, 8, 8, "float32", "h200")


def test_unknown_gpus_are_named():
    with pytest.raises(KeyError, match="h200, h100"):
        predict("fused_softmax", 4, 4, "bfloat16", "nosuch")
    with pytest.raises(RuntimeError):
        predict("fused_softmax", 4, 4, "bfloat16", "this")
