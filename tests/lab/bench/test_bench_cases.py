"""The tables hold the shapes that the issues name, and real data is read from every format that the command takes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

from fused_softmax.lab.bench.cases import (
    FORWARD_WIDTHS,
    LADDER_WIDTHS,
    LOSS_FAMILIES,
    LOSS_SHAPES,
    RANDOM_RANGE,
    RANDOM_RANGES,
    TABLES,
    TINY,
    random_cases,
    random_widths,
    real_cases,
    sweep,
    table,
)
from fused_softmax.lab.bench.inputs import DTYPES, batches, excerpt, load_tensors
from fused_softmax.lab.bench.ops import OPS, family, ops_named
from fused_softmax.lab.bench.workload import parts_of

MASKED = (
    *("masked_softmax_causal", "masked_softmax_additive", "masked_softmax_boolean", "masked_softmax_bias"),
    *("masked_softmax_causal_backward", "masked_softmax_additive_backward", "masked_softmax_boolean_backward"),
)


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
    assert {case.timed_by for case in table("few_rows_cold").cases} == {"graph_cold"}
    assert len(table("few_rows").cases) == len(table("few_rows_cold").cases) == 2 * 5 * 12


def test_random_table_keeps_the_widths_that_were_recorded():
    widths = {c.n_cols for c in table("random").cases}
    assert widths == {1579, 1808, 2346, 4822, 7240, 8767, 38457, 41615, 73664, 122191}
    assert not widths & set(FORWARD_WIDTHS)


def test_random_widths_follow_from_the_seed_half_of_them_odd():
    widths = random_widths(41, 7, 256, 262_144)
    assert widths == random_widths(41, 7, 256, 262_144) != random_widths(41, 8, 256, 262_144)
    assert len(set(widths)) == 41 and sum(w % 2 for w in widths) == 20
    assert 256 <= widths[0] < 700 and 90_000 < widths[-1] <= 262_144
    # log-uniform: as many below the range's geometric middle as above it, give or take
    assert 12 <= sum(w < 8192 for w in widths) <= 29


def test_random_widths_of_a_small_range_are_all_drawn_or_refused():
    for fewest, most in ((1, 9), (3, 11), (2, 10)):
        assert random_widths(8, 3, fewest, most) == tuple(range(fewest, most))
        with pytest.raises(ValueError, match=f"4 odd and 4 even widths from {fewest} to {most - 1}"):
            random_widths(9, 3, fewest, most)


def test_random_cases_of_other_columns():
    widths = {c.n_cols for c in random_cases("cross_entropy", 10, 3, columns=(1, 255))}
    assert len(widths) == 10 and max(widths) <= 255
    assert {c.n_cols for c in random_cases("softmax", 1, 3, columns=(300, 300))} == {300}


@pytest.mark.parametrize("op", ops_named("all"))
def test_every_op_has_random_cases_of_its_range(op: str):
    cases = random_cases(op, 40, 3)
    fewest, most = RANDOM_RANGES.get(family(op), RANDOM_RANGE)
    widths = {c.n_cols for c in cases}
    assert len(widths) == 40 and all(fewest <= w <= most for w in widths) and sum(w % 2 for w in widths) == 20
    losses = family(op) in LOSS_FAMILIES
    assert {c.dtype for c in cases} == ({"bfloat16"} if losses else {"bfloat16", "float32"})
    assert {c.timed_by for c in cases} == {"events"} and {c.op for c in cases} == {op}
    for case in cases:
        if family(op) == "masked_softmax":
            n_batches, n_heads, n_queries = case.scores
            assert case.n_rows == n_batches * n_heads * n_queries and case.n_rows * case.n_cols >= 2**28
        else:
            assert 2**28 - case.n_cols < case.n_rows * case.n_cols <= 2**28
    if family(op) == "masked_softmax":
        assert 5 < sum(case.scores[2] == case.n_cols for case in cases) < 25 and {c.scores[0] for c in cases} == {
            1,
            2,
            4,
        }
    assert {c.dtype for c in random_cases(op, 2, 3, ("float16",))} == {"float16"}
    assert {c.n_rows for c in random_cases(op, 4, 3, n_rows=5)} == {5}


def test_all_ops_are_those_that_run_on_the_device_alone():
    assert set(OPS) - set(ops_named("all")) == {"softmax_autograd", "log_softmax_autograd"}


def test_unknown_table_names_those_there_are():
    with pytest.raises(KeyError, match="few_rows"):
        table("sofmax")
    assert all(table(name).cases for name in TABLES)


def test_host_table_has_forward_and_backward_through_autograd_where_there_is_one():
    for op, ops in (("softmax", {"softmax", "softmax_autograd"}), ("cross_entropy", {"cross_entropy"})):
        cases = table("host", op).cases
        assert {(c.op, c.dtype) for c in cases} == {(o, d) for o in ops for d in DTYPES}
        assert {(c.n_rows, c.n_cols, c.timed_by) for c in cases} == {(8, 128, "host")}
    again = table("host", "log_softmax_autograd").cases
    assert again == table("host", "log_softmax").cases[3:] and {family(c.op) for c in again} == {"log_softmax"}


def test_first_calls_are_of_both_directions_and_never_of_what_went_before():
    first, *cases = table("first_call").cases
    assert (first.op, first.dtype, first.n_rows, first.n_cols) == ("softmax", *TINY)
    assert {c.op for c in cases} == {"softmax", "softmax_backward"} and len(cases) == len(set(cases)) == 16
    assert {128256, 262144} <= {c.n_cols for c in cases} and all(c.dtype != TINY[0] for c in cases)
    assert {c.timed_by for c in (first, *cases)} == {"first_call"}


def test_real_logits_serve_the_ops_that_take_nothing_else():
    for op in OPS:
        cases = table("cpu", op).cases
        assert any(c.source for c in cases) is (op in ("softmax", "log_softmax", "logsumexp"))
        assert any(not c.source for c in cases)


def test_excerpt_of_real_logits_comes_with_the_package():
    cases = {case.reason: case for case in real_cases("softmax")}
    assert cases["real: logits"].n_cols == 30522 and cases["real: logits"].dtype == "float16"
    assert cases["real: attention_scores"].n_cols == 31 and cases["real: attention_scores"].n_rows == 4 * 31


def test_the_wheel_and_the_sdist_take_the_data():
    root = Path(__file__).resolve().parents[3]
    (globs,) = re.findall(r"^fused_softmax = \[(.*)\]$", (root / "pyproject.toml").read_text(), re.MULTILINE)
    package = root / "src" / "fused_softmax"
    taken = {file for glob in re.findall(r'"(.*?)"', globs) for file in package.glob(glob)}
    others = {file for file in package.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert excerpt() in taken and taken == others
    manifest = (root / "MANIFEST.in").read_text()
    assert {f"graft {name}" for name in ("tests", "benchmarks", "docs", "requirements")} <= set(manifest.splitlines())


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
    for name, got, want in zip(
        entry.parts, parts_of(entry.torch_call(*inputs)), parts_of(entry.reference(*inputs)), strict=True
    ):
        torch.testing.assert_close(got, want.sum() if got.dim() == 0 else want, msg=name)
    assert all(t.shape[0] == 4 for t in inputs[: entry.by_row])


@pytest.mark.parametrize("op", [op for op in OPS if family(op) == "masked_softmax"])
def test_scores_of_any_batches_heads_and_queries(op: str):
    entry = OPS[op]
    inputs = entry.inputs(2 * 3 * 5, 7, torch.float64, torch.device("cpu"), 0, scores=(2, 3, 5))
    scores, *_ = entry.planned(*inputs)
    assert scores.shape[-2:] == (5, 7) and scores.numel() == 2 * 3 * 5 * 7
    if op == "masked_softmax_bias":
        assert inputs[-1].shape == (3, 5, 7)
    torch.testing.assert_close(entry.torch_call(*inputs), entry.reference(*inputs))


def test_bytes_are_those_that_must_move():
    elements = {name: OPS[name].elements(8, 4) for name in OPS}
    assert elements["softmax"] == elements["cross_entropy"] == elements["token_logprobs_backward"] == (32, 32)
    assert elements["softmax_backward"] == (64, 32)
    assert elements["cross_entropy_forward"] == elements["token_logprobs"] == (32, 0)
    # two heads of four queries: 1 + 2 + 3 + 4 columns each, and what is hidden is written too
    assert elements["masked_softmax_causal"] == (20, 32)
    assert elements["masked_softmax_additive"] == (48, 32)
    # a bias for both heads and, of one head, a byte for each of its 16 columns
    assert elements["masked_softmax_bias"] == (48, 32) and batches(8, 4) == 2
    assert elements["masked_softmax_boolean"] == (32, 32)
    assert OPS["masked_softmax_boolean"].bytes_moved(8, 4, 2) == 2 * 64 + 16
    # the result and its gradient as far as they are seen
    assert elements["masked_softmax_causal_backward"] == (40, 32)
    assert elements["masked_softmax_additive_backward"] == elements["softmax_backward"]
    # two batches of three heads of five queries and four columns: queries see 1, 2, 3, 4 and 4 columns
    of = (30, 4, (2, 3, 5))
    assert OPS["masked_softmax_causal"].elements(*of) == (6 * 14, 120)
    assert OPS["masked_softmax_additive"].elements(*of) == (120 + 20, 120)
    assert OPS["masked_softmax_bias"].elements(*of) == (120 + 60, 120)
    assert OPS["masked_softmax_boolean"].bytes_moved(30, 4, 2, (2, 3, 5)) == 2 * 240 + 20
    # autograd writes and reads the result in between
    assert elements["softmax_autograd"] == (32 + 64, 32 + 32)


def test_losses_table_has_the_vocabularies_and_each_family_alone():
    every = table("losses").cases
    shapes = {(c.n_rows, c.n_cols) for c in every if c.op == "cross_entropy"}
    assert shapes == set(LOSS_SHAPES) and {(4096, 128256), (8192, 50257), (32768, 4096)} <= shapes
    by_family = [table("losses", name).cases for name in ("cross_entropy", "token_logprobs", "masked_softmax_causal")]
    assert [{c.op for c in cases} for cases in by_family] == [
        {"cross_entropy", "cross_entropy_forward"},
        {"token_logprobs", "token_logprobs_backward"},
        set(MASKED),
    ]
    assert sorted(c.label for cases in by_family for c in cases) == sorted(c.label for c in every)


def test_an_op_or_a_family_of_ops_is_named():
    assert ops_named("cross_entropy") == ("cross_entropy",)
    assert ops_named("masked_softmax") == MASKED
    with pytest.raises(KeyError, match="masked_softmax"):
        ops_named("sofmax")


def test_sweep_respects_rows_and_elements():
    (case,) = sweep("softmax", ["float32"], [1000], elements=10_500)
    assert case.n_rows == 10 and case.itemsize == DTYPES["float32"].itemsize
    (case,) = sweep("softmax", ["float32"], [1000], n_rows=7)
    assert case.n_rows == 7
