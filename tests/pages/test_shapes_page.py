"""The page of other dimensions shows what the records of random shapes say, by class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import device

from fused_softmax.lab.record import Record, header, to_json, write_atomically
from pages import shapes


def record(system: str, n_cols: int, inner: int, ms: float, dtype: str = "bfloat16", **more: object) -> Record:
    fields = dict(ms=ms, timed_by="CUDA events", fraction=0.1 / ms, ceiling="copy", outer=4, inner=inner) | more
    return Record("softmax", system, dtype, 4 * inner, n_cols, "ok", **fields)  # type: ignore[arg-type]


def test_the_page_has_a_table_by_class(tmp_path: Path):
    assert set(shapes.tables(tmp_path).values()) == {"No run is recorded yet."}
    head = replace(header(device("cpu"), False), seed=9, command="fused-softmax bench --random-shapes 3 --seed 9")
    records = [
        record("fused_softmax", 5000, 2048, 0.2),
        record("torch", 5000, 2048, 4.0),
        record("fused_softmax", 19, 4096, 0.125),
        record("fused_softmax", 20, 4096, 0.2, dtype="float32"),
        record("torch", 19, 4096, 0.25),
    ]
    write_atomically(tmp_path / shapes.RESULTS / "softmax.json", to_json(head, records))
    text = shapes.tables(tmp_path)["shapes"]
    table = text[text.index("| `softmax`") :].split("\n\n")[0].splitlines()
    assert table[2:] == [
        "| up to 64 columns | 0.800 / 0.800 (1) | 0.500 / 0.500 (1) |",
        "| more columns | 0.500 / 0.500 (1) |  |",
    ]
    assert "| softmax | bf16 4x19x4096 | 0.50 |" in text and "--random-shapes 3 --seed 9" in text


def test_older_seeds_are_counted_and_not_shown(tmp_path: Path):
    for seed in range(1, shapes.SHOWN + 3):
        made = dict(date=f"2026-11-{seed:02d}", command=f"fused-softmax bench --random-shapes 1 --seed {seed}")
        head = replace(header(device("cpu"), False), seed=seed, **made)
        records = [record("fused_softmax", 5000, 2048, 0.2)]
        write_atomically(tmp_path / shapes.RESULTS / f"seed_{seed}.json", to_json(head, records))
    text = shapes.tables(tmp_path)["shapes"]
    shown = [f"Seed {seed}." in text for seed in range(1, shapes.SHOWN + 3)]
    assert shown == [False, False] + [True] * shapes.SHOWN, "the newest are shown"
    assert text.endswith("has runs of 2 older seeds, too.") and f"Seed {shapes.SHOWN + 2}." in text


def test_the_comparison_with_torch_stays(tmp_path: Path):
    for seed in range(1, shapes.SHOWN + 4):
        made = dict(date=f"2026-11-{seed:02d}", command=f"fused-softmax bench --random-shapes 1 --seed {seed}")
        head = replace(header(device("cpu"), False), seed=seed, **made)
        records = [record("fused_softmax", 19, 4096, 0.125)]
        if seed <= 2:  # the second is the newest with torch
            records.append(record("torch", 19, 4096, 0.25))
        write_atomically(tmp_path / shapes.RESULTS / f"seed_{seed}.json", to_json(head, records))
    text = shapes.tables(tmp_path)["shapes"]
    assert [f"Seed {seed}." in text for seed in (1, 2, 3)] == [False, True, False]
    assert "has runs of 2 older seeds, too." in text and "| softmax | bf16 4x19x4096 | 0.50 |" in text


def test_a_named_shape_has_the_newest_fraction_of_each_op(tmp_path: Path):
    for day, ms in ((1, 0.4), (2, 0.125)):
        made = dict(date=f"2026-11-0{day}", command="fused-softmax bench --table shapes")
        head = replace(header(device("cpu"), False), **made)
        records = [record("fused_softmax", 1000, 1024, ms, outer=64)]
        if day == 1:  # the newest run has ours only
            records.append(record("torch", 1000, 1024, 2.0, dtype="float32", outer=64))
        write_atomically(tmp_path / shapes.RESULTS / f"named_{day}.json", to_json(head, records))
    rows = shapes.tables(tmp_path)["named"].split("\n\n")[0].splitlines()[2:]
    assert rows == ["| (64, 1000, 1024) | 0.80 /  |  |  |  / 0.05 |  |"]
