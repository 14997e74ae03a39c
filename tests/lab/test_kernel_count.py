"""The number of kernels that an op can ask for is small, and the page has it as it is."""

from __future__ import annotations

import pytest
import torch

from fused_softmax.lab import kernel_count

pytestmark = pytest.mark.compiled  # the interpreter's kernels are others


@pytest.mark.parametrize("op", list(kernel_count.FIND))
def test_few_kernels_serve_all_widths(op):
    found = kernel_count.kernels(op, torch.bfloat16)
    assert 10 < len(found) <= kernel_count.TARGET


def test_the_page_is_written_and_checked(tmp_path, monkeypatch):
    page = tmp_path / "host-time.md"
    page.write_text(f"before\n{kernel_count.BEGIN}\nold\n{kernel_count.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(kernel_count, "table", lambda: iter(["| a |", "| 1 |"]))
    assert kernel_count.main(check=True, page=page) == 1
    assert kernel_count.main(check=False, page=page) == 0
    assert kernel_count.main(check=True, page=page) == 0
    text = page.read_text(encoding="utf-8")
    assert "| 1 |" in text and "old" not in text and text.startswith("before") and text.endswith("after\n")
