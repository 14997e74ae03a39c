"""README's plot and table and the pages of performance are what the records give, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fused_softmax.lab.record import Header, Record, header, to_json, write_atomically
from fused_softmax.lab.results import gpu_folder
from pages import markers, performance, readme

ROOT = Path(__file__).resolve().parents[2]


def record(op: str, system: str, n_cols: int, fraction: float | None, **more: object) -> Record:
    timed: dict[str, object] = {}
    if fraction:
        timed = {"ms": 0.25 / fraction, "fraction": fraction, "gbps": 4200 * fraction, "ceiling": "copy"}
        timed["timed_by"] = "CUDA events"
    fields = {"status": "ok", **timed, **more}
    return Record(op, system, "bfloat16", 2**28 // n_cols, n_cols, **fields)  # type: ignore[arg-type]


RECORDS = [
    record("softmax", "fused_softmax", 4096, 0.99),
    record("softmax", "torch", 4096, 0.31),
    record("softmax", "quack", 4096, None, status="wrong"),
    record("softmax", "copy", 4096, 1.0),
    record("cross_entropy", "fused_softmax", 128256, 0.9),
    record("cross_entropy", "torch", 128256, 0.95),
]


@pytest.fixture
def head() -> Header:
    made = header(torch.device("cpu"), interpreted=True)
    return replace(made, device="NVIDIA H200", commit="abcdef0123", date="2026-11-21T00:00:00+00:00", command="bench")


@pytest.fixture
def repository(tmp_path: Path, head: Header) -> Path:
    (tmp_path / "README.md").write_text(
        "# top\n<!-- results:begin -->\n<!-- results:end -->\n<!-- where:begin -->\n<!-- where:end -->\nend\n"
    )
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://example.org/x"\n')
    write_atomically(gpu_folder(tmp_path) / "all.json", to_json(head, RECORDS))
    return tmp_path


def test_readme_is_written_checked_and_found_stale(repository: Path, head: Header):
    arguments = repository, readme.PAGE, readme.tables
    assert not markers.update(*arguments, check=True) and readme.stale_plot(repository)
    assert markers.update(*arguments, check=False) and readme.write_plot(repository) == repository / readme.PLOT
    assert markers.update(*arguments, check=True) and not readme.stale_plot(repository)
    text = (repository / "README.md").read_text()
    assert text.startswith("# top\n") and text.endswith("\nend\n")
    assert "| softmax | 65,536 x 4,096 | copy | **0.99** | 0.31 | – | – | wrong |" in text
    assert "abcdef0 (2026-11-21)" in text and "(https://example.org/x/raw/main/docs/images/softmax.svg)" in text
    changed = [replace(RECORDS[0], fraction=0.5), *RECORDS[1:]]
    write_atomically(gpu_folder(repository) / "all.json", to_json(head, changed))
    assert not markers.update(*arguments, check=True) and "make pages" in readme.stale_plot(repository)


def test_results_of_another_triton_are_not_in_readme(repository: Path, head: Header):
    before = readme.tables(repository)
    other = gpu_folder(repository).with_name("h200-triton3.9") / "softmax.json"
    write_atomically(other, to_json(head, [replace(RECORDS[0], fraction=0.5)]))
    assert readme.tables(repository) == before


def test_readme_without_results_or_without_markers(repository: Path):
    (gpu_folder(repository) / "all.json").unlink()
    assert readme.tables(repository)["results"] == "Not recorded."
    assert readme.write_plot(repository) is None and not readme.stale_plot(repository)
    (repository / "README.md").write_text("nothing here\n")
    with pytest.raises(ValueError, match="results:begin"):
        markers.update(repository, readme.PAGE, readme.tables, check=False)


def test_readmes_table_is_small():
    table = readme.tables(ROOT)["results"]
    assert 4 <= sum(line.startswith("| ") for line in table.splitlines()) <= 9


def test_performance_has_a_page_for_each_recorded_op_and_says_what_is_lost(repository: Path):
    files = {file.relative_to(repository).as_posix(): file.read_text() for file in performance.write(repository)}
    pages = {name: text for name, text in files.items() if "/op-" in name}
    assert set(pages) == {"docs/performance/op-softmax.md", "docs/performance/op-cross_entropy.md"}
    softmax, loss = (pages[f"docs/performance/op-{op}.md"] for op in ("softmax", "cross_entropy"))
    assert "is the fastest, within 2%, in every case" in softmax and "`torch` is 1.06 times as fast" in loss
    # a plot and the bars
    assert softmax.count("<svg") == 2 and "| bf16 65536x4096 | **0.990** | 0.310 | wrong | 4200 |" in softmax
    assert "`softmax` | bf16 | copy | **0.99 to 0.99** | `torch` 0.31 |" in files["docs/performance/index.md"]
    assert all(f'data-md-color-scheme="{s}"' in files["docs/stylesheets/plots.css"] for s in ("default", "slate"))


def test_a_command_is_shown_without_folders_of_its_machine(head: Header):
    head = replace(head, command="fused-softmax bench --op softmax --out /tmp/o --record /root/out/x.json --seed 1")
    assert performance.command(head) == "fused-softmax bench --op softmax --seed 1"
