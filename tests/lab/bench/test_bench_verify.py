"""`verify` goes through every regime, finds what is wrong, and its exit status says so."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from fused_softmax.lab import verify
from fused_softmax.lab.cli import app
from fused_softmax.lab.verify import Check, edge_rows, examine, summary

CPU = torch.device("cpu")


def test_edge_rows_hold_what_breaks_kernels():
    x = edge_rows(33, torch.float16, CPU)
    y = torch.softmax(x, -1)
    assert y[3:6].isnan().all() and not y[[0, 1, 2, 6, 7]].isnan().any()
    assert all((x[row] == -torch.inf).sum() == 11 for row in range(3))


def test_a_wrong_path_is_found_and_an_exception_is_a_finding():
    x = edge_rows(33, torch.float32, CPU)

    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    calls = {
        "right": lambda x: torch.softmax(x, -1),
        "unmasked": lambda x: torch.softmax(x.nan_to_num(), -1),
        "refuses": refuses,
        "halves": lambda x: torch.softmax(x, -1).half(),
    }
    found = {name: examine(Check(name, "float32", "edges", x, call)) for name, call in calls.items()}
    assert [name for name, f in found.items() if f.ok] == ["right"]
    assert found["refuses"].why == "ValueError: no" and "dtype" in found["halves"].why
    assert ("right", "float32", "1 of 1") in [row[:3] for row in summary(list(found.values()))]


@pytest.mark.interpreted
def test_every_regime_is_checked_and_is_right(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "WIDTHS", (33, 1000, 4097))
    monkeypatch.setattr(verify, "DTYPES", {"bfloat16": torch.bfloat16})
    checks = [c for c in verify.checks(CPU) if not c.about.startswith("real")]
    forced = {c.path for c in checks if c.path.endswith("forced")}
    assert forced == {f"{regime}, forced" for regime in verify.REGIMES}
    assert [f for f in map(examine, checks) if not f.ok] == []


@pytest.mark.interpreted
def test_exit_status_says_that_a_path_is_wrong(monkeypatch: pytest.MonkeyPatch):
    x = torch.randn(2, 9)
    for call, status in ((lambda x: torch.softmax(x, -1), 0), (torch.empty_like, 1)):
        check = Check("block, forced", "float32", "2x9", x, call)
        monkeypatch.setattr(verify, "checks", lambda device, file, check=check: iter([check]))
        result = CliRunner().invoke(app, ["verify"])
        assert result.exit_code == status and ("WRONG" in result.output) is bool(status)
