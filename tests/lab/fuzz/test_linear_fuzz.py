"""Random calls of the linear losses are right, and the judge sees a fault."""

from __future__ import annotations

import pytest
from cases import INTERPRETED
from typer.testing import CliRunner

from fused_softmax.lab.cli import app
from fused_softmax.lab.fuzz import linear
from fused_softmax.torch_ops import linear_cross_entropy

pytestmark = pytest.mark.interpreted


def judged(seeds: range) -> dict[int, list[str]]:
    cases = {seed: linear.draw(seed, most_columns=300, most_rows=8) for seed in seeds}
    return {seed: wrong for seed, case in cases.items() if (wrong := linear.judge(case, "cpu", INTERPRETED))}


def test_random_calls():
    assert judged(range(6)) == {}


@pytest.mark.extended
def test_many_random_calls():
    assert judged(range(1000, 1200)) == {}


def fuzz(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["fuzz", *arguments])
    return found.exit_code, found.output


@pytest.mark.extended
def test_the_command_runs_and_replays_them(monkeypatch):
    status, shown = fuzz("--op", "linear_token_logprobs,linear_cross_entropy", "--cases", "2", "--dtype", "float32")
    assert status == 0 and "linear losses: 2 cases, 0 wrong" in shown
    through = linear_cross_entropy.put_back
    monkeypatch.setattr(linear_cross_entropy, "put_back", lambda t, *rest: through(t * 1.01, *rest))
    wanted = "--op", "linear_cross_entropy", "--way", "function", "--dtype", "float32", "--cases", "20", "--stop"
    status, shown = fuzz(*wanted)
    assert status == 1 and "WRONG" in shown
    case = shown.split("--replay '")[1].split("'")[0]
    assert fuzz("--replay", case)[0] == 1
    monkeypatch.undo()
    assert fuzz("--replay", case)[0] == 0
    assert fuzz("--op", "linear_cross_entropy,softmax")[0] == 2


def test_the_judge_sees_a_fault(monkeypatch):
    through = linear_cross_entropy.put_back
    monkeypatch.setattr(linear_cross_entropy, "put_back", lambda t, *rest: through(t * 1.01, *rest))
    found = [seed for seed in range(30) if linear.draw(seed).op == "linear_cross_entropy"][:4]
    assert any(linear.judge(linear.draw(seed, 300, 8), "cpu", INTERPRETED) for seed in found)


@pytest.mark.parametrize(
    ("text", "said"),
    [("[]", "is no JSON object"), ("{bad", "is not JSON"), ('{"op": "softmax"}', "no way, dtype, shape")],
)
def test_what_is_no_case_is_refused_in_one_line(text, said):
    status, shown = fuzz("--replay", text)
    assert status == 2 and said in shown and "Traceback" not in shown
