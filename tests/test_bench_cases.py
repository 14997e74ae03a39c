"""The tables hold the shapes that the issues name, and real data is read from every format that the command takes."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

from fused_softmax.bench.cases import (
    FORWARD_WIDTHS,
    LADDER_WIDTHS,
    TABLES,
    load_tensors,
    random_widths,
    real_cases,
    sweep,
    table,
)
from fused_softmax.bench.ops import DTYPES, OPS


def test_forward_table_has_its_24_widths_in_three_dtypes_at_2_to_the_28_elements():
    cases = table("forward").cases
    assert len(FORWARD_WIDTHS) == 24 and len(cases) == 72
    assert {50257, 100277, 128256, 151936, 200019, 1048576} <= {case.n_cols for case in cases}
    assert all(2**28 - case.n_cols < case.n_rows * case.n_cols <= 2**28 for case in cases)
    assert table("softmax") == table("forward")


def test_ladder_covers_the_vocabularies_in_both_dtypes():
    cases = table("ladder").cases
    assert {(c.dtype, c.n_cols) for c in cases} == {(d, w) for d in ("bfloat16", "float32") for w in LADDER_WIDTHS}
    assert {50257, 128256, 151936, 262144} <= set(LADDER_WIDTHS)


def test_short_cases_are_timed_by_graph_replay_and_long_ones_by_events():
    assert {case.timed_by for case in table("few_rows").cases} == {"graph"}
    assert {case.timed_by for case in table("small").cases} == {"graph"}
    assert {case.timed_by for case in table("forward").cases} == {"events"}
    assert len(table("small").cases) == 3 * 5 * 7
    assert len(table("few_rows").cases) == 2 * 5 * 3


def test_random_widths_are_always_the_same_odd_and_even():
    widths = random_widths()
    assert widths == random_widths() and len(set(widths)) == 10
    assert 3 <= sum(w % 2 for w in widths) <= 7
    assert all(300 <= w <= 262_144 for w in widths) and not set(widths) & set(FORWARD_WIDTHS)


def test_unknown_table_names_those_there_are():
    with pytest.raises(KeyError, match="few_rows"):
        table("sofmax")
    assert all(table(name).cases for name in TABLES)


def test_excerpt_of_real_logits_comes_with_the_package():
    cases = {case.reason: case for case in real_cases("softmax")}
    assert cases["real: logits"].n_cols == 30522 and cases["real: logits"].dtype == "float16"
    assert cases["real: attention_scores"].n_cols == 31 and cases["real: attention_scores"].n_rows == 12 * 31


def test_input_files_of_each_format(tmp_path: Path):
    x = torch.randn(3, 5)
    save_file({"a": x, "ids": torch.zeros(2, dtype=torch.int64)}, tmp_path / "x.safetensors")
    numpy.save(tmp_path / "x.npy", x.numpy())
    torch.save({"a": x}, tmp_path / "x.pt")
    for name in ("x.safetensors", "x.npy", "x.pt"):
        (found,) = load_tensors(tmp_path / name).values()
        assert torch.equal(found, x), name
    save_file({"ids": torch.zeros(2, dtype=torch.int64)}, tmp_path / "ids.safetensors")
    for name in ("ids.safetensors", "x.txt"):
        with pytest.raises(ValueError, match=name.split(".")[0]):
            load_tensors(tmp_path / name)


@pytest.mark.parametrize("op", OPS)
def test_inputs_and_references_agree_with_torch(op: str):
    entry = OPS[op]
    inputs = entry.inputs(4, 33, torch.float64, torch.device("cpu"), 0)
    torch.testing.assert_close(entry.torch_call(*inputs), entry.reference(*inputs))
    assert sum(entry.elements(4, 33)) == 4 * 33 * (len(inputs) + 1)


def test_sweep_respects_rows_and_elements():
    (case,) = sweep("softmax", ["float32"], [1000], elements=10_500)
    assert case.n_rows == 10 and case.itemsize == DTYPES["float32"].itemsize
    (case,) = sweep("softmax", ["float32"], [1000], n_rows=7)
    assert case.n_rows == 7
