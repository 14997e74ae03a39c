"""explain: its lines, its data and its picture, with kernels that are compiled for a GPU that is not here."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from fused_softmax.lab import explain
from fused_softmax.lab.cli import app
from fused_softmax.lab.roofline import predict
from fused_softmax.lab.roofline.compiled import Compiled, has_loops, instructions_by_kind

extended = pytest.mark.extended
CLI = CliRunner()

SASS = """Function:kernel
--:-:0:-:1	LDC R1, c[0x0][0x28];
LBB0:
04:-:-:-:1	@P0 LDG.E.EL.128 R8, desc[UR4][R12.64];
--:-:-:-:1	MUFU.EX2 R3, R3;
--:-:-:Y:2	FFMA R3, R3, R4, R5;
--:-:-:-:1	FADD R3, R3, R4;
--:-:-:-:1	SHFL.BFLY PT, R3, R4, 0x1, 0x1f;
--:-:-:-:1	BAR.SYNC.DEFER_BLOCKING 0x0;
--:-:-:-:1	F2FP.BF16.F32.PACK_AB R3, R4, R5;
--:-:-:-:1	IMAD.WIDE R4, R5, 0x2, R6;
--:-:-:-:1	STG.E.128 desc[UR4][R12.64], R8;
--:-:-:-:5	@P0 BRA LBB0;
--:-:-:-:5	EXIT;
LBB1:
--:-:-:Y:0	BRA LBB1;
--:-:-:-:0	NOP;
"""


def test_instructions_are_counted_by_kind():
    found = instructions_by_kind(SASS)
    assert found == {
        "global loads": 1, "global stores": 1, "exponentials and other special functions": 1, "shuffles": 1,
        "barriers": 1, "conversions": 1, "float32 arithmetic": 2, "integers, addresses and predicates": 2,
    }  # fmt: skip
    assert has_loops(SASS) and not has_loops(SASS.replace("@P0 BRA LBB0", "@P0 BRA LBB1"))


@pytest.fixture
def known_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel as if it had been compiled: nothing is compiled."""
    resources = dict(
        name="k", target="sm_90", registers=96, spilled_bytes=0, shared_bytes=0, num_warps=1, num_ctas=1, num_stages=3,
        loads=[[16, 16]], stores=[[16, 16]], async_copies=0,
    )  # fmt: skip
    made = Compiled(resources, instructions_by_kind(SASS))
    monkeypatch.setattr(predict, "compiled", lambda *shape: made)


def test_words_data_and_occupancy_of_a_known_kernel(known_kernel: None):
    said = explain.predicted(65536, 4096, "bfloat16", "h200")
    text = "\n".join(explain.lines(said))
    assert "20 programs on a multiprocessor: registers allow no more" in text  # 65,536 / (96 * 32), by fours
    assert "8,192 bytes for each program" in text and text.endswith("enough")
    data = explain.as_data(said)
    assert (
        data["in_flight"]["bytes"] == 20 * 132 * 8192 and data["compiled"]["instructions_per_element"] == 10 * 32 / 4096
    )
    few = explain.predicted(8, 4096, "bfloat16", "h200")
    assert few.in_flight is not None and not few.in_flight.enough and few.floor.binds == "launch"


@extended
def test_one_call_in_words_in_data_and_as_a_picture():
    """One compilation serves the three."""
    said = explain.predicted(65536, 4096, "bfloat16", "h100")
    text = "\n".join(explain.lines(said))
    assert "on H100 SXM (sm_90), rows aligned to 16 bytes" in text and "block: 1 CTA" in text
    assert "bandwidth binds" in text and "an estimate from the datasheet's 3,350" in text
    assert "0 bytes spilled" in text and "widest load 16 bytes" in text and "Little's law needs" in text
    assert "1.25 for each byte, below the ridge point" in text and "registers allow no more" in text
    data = json.loads(json.dumps(explain.as_data(said)))
    assert data["bytes"] == {"read": 2**29, "written": 2**29, "from_l2": 0, "unsent": int(0.35 * 50 * 2**20)}
    assert data["floor"]["us"] == pytest.approx(2**30 / said.gpu.gbps / 1e3) and data["floor"]["binds"] == "bandwidth"
    assert data["compiled"]["resources"]["registers"] > 16 and 5 < data["compiled"]["instructions_per_element"] < 40
    assert data["occupancy"]["programs"] == min(data["occupancy"]["by"].values())
    from fused_softmax.lab.roofline.picture import roofline_svg

    drawn = ElementTree.fromstring(roofline_svg(said))
    assert drawn.tag.endswith("svg") and "ridge point is at" in drawn.attrib["aria-label"]
    assert "bandwidth binds" in "".join(drawn.itertext())


@extended
@pytest.mark.parametrize("op", explain.OPERATIONS)
def test_every_op_is_explained(op: str):
    for n_cols in (64, 50257, 128256):  # several rows a program, unaligned, a cluster or two passes
        said = explain.predicted(4096, n_cols, "bfloat16", "h200", op)
        assert said.compiled is not None and not said.compiled.failed, said.compiled
        assert said.floor.least > 0 and said.in_flight is not None


@extended
@pytest.mark.parametrize("gpu", explain.GPUS)
def test_every_gpu_is_explained(gpu: str):
    text = "\n".join(explain.explain_lines(4096, 4096, "bfloat16", gpu))
    assert "registers" in text and "occupancy" in text and "floor" in text


@extended
@pytest.mark.parametrize("system", explain.SYSTEMS)
def test_every_lesson_is_explained(system: str):
    text = "\n".join(explain.explain_lines(65536, 4096, "bfloat16", "h200", system=system))
    assert "floor" in text and ("registers" in text or system == "01_naive")


@extended
def test_the_commands_forms(tmp_path: Path):
    old = CLI.invoke(app, ["explain", "4x128", "fp32", "--device", "sm_80"])
    assert old.exit_code == 0 and "softmax of 4 x 128 float32 on A100" in old.stdout and "launch binds" in old.stdout
    picture = tmp_path / "r.svg"
    line = "explain --rows 4096 --cols 128256 --dtype bf16 --op cross_entropy --gpu b200 --json --svg"
    new = CLI.invoke(app, [*line.split(), str(picture)])
    assert (
        new.exit_code == 0
        and json.loads(new.stdout)["op"] == "cross_entropy"
        and picture.read_text().startswith("<svg")
    )
