"""The command from the outside: arguments, exit statuses, files; a tiny interpreted benchmark end to end."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from typer.testing import CliRunner, Result

from fused_softmax.lab.bench.cases import TABLES, random_cases
from fused_softmax.lab.bench.systems import outcome
from fused_softmax.lab.cli import app
from fused_softmax.lab.lessons import LESSONS
from fused_softmax.lab.record import Record, from_json, header, to_json
from fused_softmax.launch import availability

ROOT = Path(__file__).resolve().parents[2]
CLI = CliRunner()


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    where = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **environment}
    line = [sys.executable, "-m", "fused_softmax", *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=where, timeout=300)


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command in this process, which has the imports; `command` is for what the process itself does."""

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["fused-softmax", *arguments])  # what a record says that it was made by
        return CLI.invoke(app, arguments, catch_exceptions=False)

    return run


# what is given, and what the one line on stderr must say; FILES are in the folder that the command runs in
REFUSED = [
    ("nosuch", "nosuch"),
    ("bench --nosuch", "--nosuch"),
    ("bench extra", "extra"),
    ("bench --dtype int8", "'int8' is none of bf16"),
    ("bench --dtype ,", "names nothing"),
    ("bench --widths 12,x", "integers"),
    ("bench --widths 0", "positive"),
    ("bench --widths ,", "names nothing"),
    ("bench --widths 99999999999999999999", "below 2^60"),
    ("bench --rows 0", "--rows 0"),
    ("bench --rows x", "--rows x"),
    ("bench --rows 9999999999999", "fewer rows"),
    ("bench --rows 9999999999999 --op masked_softmax", "fewer rows"),
    ("bench --op sofmax", "masked_softmax"),
    ("bench --op ''", "--op"),
    ("bench --op ,", "--op"),
    ("bench --table nosuch", "few_rows"),
    ("bench --table losses --dtype fp32", "float32"),
    ("bench --systems toch", "torch.compile"),
    ("bench --systems 05_published --op log_softmax", "fused_softmax"),
    ("bench --elements 0", "--elements 0"),
    ("bench --seconds=-1", "--seconds"),
    ("bench --seconds nan", "--seconds"),
    ("bench --seconds inf", "--seconds"),
    ("bench --workers=-1", "--workers"),
    ("bench --seed 3", "--random-widths"),
    ("bench --random-widths=-1", "--random-widths=-1"),
    ("bench --columns 1:255", "--random-widths"),
    ("bench --shapes 2x3", "'2x3' is no shape: give outer x columns x positions, such as 16x19x524288"),
    ("bench --shapes 2x3x4 --op token_logprobs", "--shapes serves softmax"),
    ("bench --shapes 9999999x999999x99999", "fewer rows"),
    ("bench --random-widths 4 --columns 9:4", "LOW is at least 1"),
    ("bench --random-widths 9 --columns 1:8", "4 odd and 4 even widths"),
    ("bench --widths 4 --out bad.pt", "bad.pt"),
    ("bench --widths 4 --record bad.pt", "bad.pt"),
    ("bench --input bad.safetensors", "bad.safetensors cannot be read"),
    ("bench --input bad.pt", "bad.pt cannot be read"),
    ("bench --input bad.npy", "bad.npy cannot be read"),
    ("bench --input empty.pt", "empty.pt cannot be read"),
    ("bench --input empty.npy", "empty.npy cannot be read"),
    ("bench --input ids.npy", "ids.npy holds no tensor in float16"),
    ("bench --input none.npy", "none.npy: no such file"),
    ("bench --input x.txt", ".safetensors, .npy or .pt"),
    ("bench --input whole.pt --op cross_entropy", "more than one tensor"),
    ("verify --input bad.pt", "bad.pt cannot be read"),
    ("verify --input bad.safetensors", "bad.safetensors cannot be read"),
    ("verify --input none.npy", "none.npy: no such file"),
    ("fuzz --op nosuch", "'nosuch' is none of softmax"),
    ("fuzz --op softmax,linear_cross_entropy", "leave out softmax"),
    ("fuzz --columns x:4", "LOW:HIGH"),
    ("fuzz --columns 9:4", "LOW is at least 1"),
    ("fuzz --replay []", "--replay '[]' is no JSON object"),
    ("fuzz --replay '{bad'", "is not JSON"),
    ('fuzz --replay \'{"op": "softmax"}\'', "has no way, dtype, shape, dims"),
    ('fuzz --replay \'{"op": "linear_cross_entropy"}\'', "has no way, dtype, rows, hidden"),
    ('fuzz --replay \'{"op": "sofmax"}\'', "'sofmax' is none of softmax"),
    ('fuzz --replay \'{"op": "softmax", "shape": 3}\'', "shape 3 is no list"),
    ("fuzz --record half.json", "half.json"),
    ("fuzz --record hollow.json", "hollow.json is no record of the fuzzer"),
    ("accuracy --op sofmax", "masked_softmax"),
    ("accuracy --op ,", "names nothing"),
    ("accuracy --dtype int8", "'int8' is none of"),
    ("accuracy --rows 0", "--rows 0"),
    ("accuracy --seed=-1", "--seed=-1"),
    ("accuracy --record .", "is a directory"),
    ("accuracy --record bad.pt/x.json", "bad.pt"),
    ("explain", "shape"),
    ("explain x", "rows x columns"),
    ("explain 4096x", "rows x columns"),
    ("explain x4096", "rows x columns"),
    ("explain 4096", "rows x columns"),
    ("explain 4x4x4", "rows x columns"),
    ("explain 0x4", "positive"),
    ("explain 4x128 --hidden 8", "--hidden"),
    ("explain 4x128 --op linear_cross_entropy", "needs --hidden: give the hidden size, such as --hidden 4096"),
    ("explain 4x128 fp32 --op linear_cross_entropy --hidden 8", "float32 products"),
    ("explain 9999999999x9999999999", "2^60"),
    ("explain 4x128 bfloat16,float32", "give one of"),
    ("explain 4x128 ''", "give one of"),
    ("explain 4x128 int8", "'int8' is none of"),
    ("explain 4x128 --device sm_1", "gfx942"),
    ("explain 4x128 --device interpreter", "gfx942"),
    ("explain 4x128 --dtype int8", "'int8' is none of"),
    ("explain 4x128 --gpu x", "h200, h100"),
    ("explain 4x128 --gpu h100 --device sm_90", "one of the two"),
    ("explain 4x128 --op nosuch", "cross_entropy"),
    ("explain 4x128 --system nosuch", "07_online"),
    ("explain 4x128 --system 07_online --op log_softmax", "computes softmax"),
    ("explain --rows 4", "--cols go together"),
    ("explain 4x128 --rows 4 --cols 128", "without SHAPE"),
    ("explain --rows x --cols 4", "integers"),
    ("profile --systems nosuch", "07_online"),
    ("profile --widths x", "integers"),
    ("profile --op softmax,nosuch", "'nosuch' is none of all, softmax"),
    ("profile --dtype bf16,fp32", "give one of bfloat16, float16, float32, or several with --shapes"),
    ("profile --dtype bf16,fp32 --inner 64 --widths 100", "give one of"),
    ("profile --shapes 2x3x4 --dtype ''", "give one of"),
    ("profile --inner 64", "give --widths"),
    ("profile --inner 64 --widths 100 --floors", "counts fused_softmax alone"),
    ("profile --inner 64 --widths 100 --systems 07_online", "counts fused_softmax alone"),
    ("profile --inner 64 --widths 100 --op token_logprobs", "counts fused_softmax alone"),
    ("profile --shapes 2x3", "'2x3' is no shape: give outer x columns x positions, such as 2x112x17172"),
    ("profile --shapes 2x3x4,0x3x4", "'0x3x4' is no shape"),
    ("profile --shapes 2x3x4x5", "'2x3x4x5' is no shape"),
    ("profile --shapes 2xax4", "'2xax4' is no shape"),
    ("profile --shapes ,", "names nothing"),
    ("profile --shapes 2x3x9999999999999999999", "is no shape"),
    ("profile --shapes 2x3x4 --widths 100", "--shapes names whole shapes: leave out --widths"),
    ("profile --shapes 2x3x4 --random-widths 4", "leave out --widths, --random-widths"),
    ("profile --shapes 2x3x4 --inner 64", "--inner and --floors"),
    ("profile --shapes 2x3x4 --floors", "--inner and --floors"),
    ("profile --shapes 2x3x4 --systems 07_online", "--shapes counts fused_softmax alone"),
    ("profile --shapes 2x3x4 --op token_logprobs", "--shapes counts fused_softmax alone"),
    ("profile --shapes 2x3x4 --op all", "--shapes counts fused_softmax alone, and of its ops softmax"),
    ("tune --op x", "softmax_backward"),
    ("tune --widths x", "integers"),
    ("tune --dtype int8", "'int8' is none of"),
    ("tune --elements 0", "must be positive"),
    ("tune --elements 4,5", "tensors of one size"),
    ("tune --op softmax,log_softmax", "give one op for widths"),
    ("tune --widths 4 --shapes 19x64", "one of the two"),
    ("tune --columns 3:9", "--columns belongs to --random-shapes"),
    ("tune --shapes 19", "give columns x positions"),
    ("tune --shapes 19x64x2", "give columns x positions"),
    ("tune --shapes ax2", "give columns x positions"),
    ("tune --shapes 0x2", "give columns x positions"),
    ("tune --shapes 65536x32768", "2^31 elements or more"),
    ("tune --plans 4", "--plans belongs to --shapes"),
    ("tune --widths 9 --seconds 1", "--seconds belongs to --shapes"),
    ("tune --record none.json", "--record belongs to --shapes"),
    ("tune --shapes 2x2 --seconds inf", "not a number of seconds"),
    ("tune --random-shapes 9 --inner 2:99999999999999999999", "below 2^60"),
    ("tune --random-shapes 9 --inner 2:999999999", "elements or more"),
    ("tune --shapes 19x64 --op cross_entropy", "log_softmax_backward"),
    ("tune --random-shapes 9 --inner 9:2", "LOW is at least 1"),
    ("tune --random-shapes 9 --columns 2:2 --inner 2:4", "more than half"),
    ("lesson 99", "not one of 1, 2, 3"),
    ("lesson --puzzle", "--puzzle needs the number"),
    ("lesson --try bad.pt", "--try needs the number"),
    ("lesson 2 --puzzle --out bad.pt", "bad.pt exists already"),
    ("lesson 2 --puzzle --out none/x.py", "no such file"),
    ("lesson 2 --try none.py", "none.py is no file"),
    ("lesson 7 --try notes.txt", "--try notes.txt: give a Python file (.py), as --puzzle writes it"),
    ("lesson 7 --puzzle --try lesson_07.py", "give one of the two"),
    ("lesson 0", "lesson 0"),
    ("lesson x", "lesson x"),
    ("report --root none", "--root"),
    ("report list.json", "list.json has no header and records"),
    ("report half.json", "half.json is not JSON"),
    ("report hollow.json", "hollow.json is a damaged results file"),
    ("report int8.json", "dtype is 'int8'"),
    ("report text.json", "n_cols is 'many'"),
    ("report bad.npy", "bad.npy is not JSON"),
    ("report none.json", "none.json: no such file"),
    ("report .", "is a directory"),
    ("report --compare half.json", "--compare"),
    ("report --compare half.json half.json", "half.json is not JSON"),
    ("report --compare half.json none.json", "half.json is not JSON"),
    ("report --compare half.json half.json other.json", "leave out"),
]


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    for suffix in ("safetensors", "pt", "npy"):
        (folder / f"bad.{suffix}").write_text("garbage\n")
        (folder / f"empty.{suffix}").write_text("")
    torch.save({"x": torch.randn(2, 3)}, folder / "whole.pt")
    numpy.save(folder / "ids.npy", numpy.zeros((2, 3), dtype=numpy.int64))
    (folder / "list.json").write_text("[]")
    (folder / "half.json").write_text('{"header": ')
    (folder / "hollow.json").write_text('{"header": {}, "records": []}')
    head = header(torch.device("cpu"), interpreted=False)
    record = Record("softmax", "torch", "float32", 2, 3, "ok")
    (folder / "int8.json").write_text(to_json(head, [replace(record, dtype="int8")]))
    (folder / "text.json").write_text(to_json(head, [record]).replace('"n_cols": 3', '"n_cols": "many"'))
    return folder


@pytest.mark.sampled(3)
@pytest.mark.interpreted
@pytest.mark.parametrize(("line", "said"), REFUSED)
def test_a_bad_input_is_one_line_on_stderr_and_status_2(
    line: str, said: str, bad_files: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(bad_files)
    result = CLI.invoke(app, shlex.split(line))
    assert result.exit_code == 2 and result.stdout == "", result.output
    (only,) = result.stderr.splitlines()
    assert only.startswith(f"fused-softmax{' ' * (line != 'nosuch')}") and said in only
    assert line.startswith("nosuch") or only.startswith(f"fused-softmax {line.split()[0]}: ")


@pytest.mark.parametrize(
    "line",
    [
        "tune", "tune --shapes 19x64", "profile", "profile --shapes 2x3x4,5x6x1 --dtype bf16,fp32", "linear", "host",
        "parallel", "parallel --ranks 4",
    ],
)  # fmt: skip
def test_commands_that_need_gpus_say_what_to_do(line: str):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CLI.invoke(app, line.split())
    assert result.exit_code == 2 and result.stdout == ""
    assert " GPU" in result.stderr and "run it on a machine with" in result.stderr


def test_both_of_puzzle_and_try_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = CLI.invoke(app, ["lesson", "7", "--puzzle", "--try", "lesson_07.py"])
    assert result.exit_code == 2 and not list(tmp_path.iterdir())


def test_bench_help_names_every_table():
    shown = " ".join(CLI.invoke(app, ["bench", "--help"], env={"COLUMNS": "400"}).output.split())
    assert ", ".join(TABLES) in shown


def test_report_shows_no_colors_of_a_recorded_error(tmp_path: Path, run_here: Callable[..., Result]):
    head = header(torch.device("cpu"), interpreted=False)
    note = "\x1b[91m\x1b[1merror[INTERNAL]:\x1b[0m no valid IR"
    (tmp_path / "a.json").write_text(to_json(head, [Record("softmax", "quack", "float32", 2, 3, "refused", note)]))
    shown = run_here("report", str(tmp_path / "a.json")).output
    assert "error[INTERNAL]: no valid IR" in shown and "\x1b" not in shown
    assert outcome(ValueError(note), "peer") == ("refused", "error[INTERNAL]: no valid IR")


@pytest.mark.extended
def test_report_needs_the_extra_cli_alone(tmp_path: Path):
    names = "numpy", "matplotlib", "safetensors", "jinja2"
    (tmp_path / "a.json").write_text(
        to_json(header(torch.device("cpu"), interpreted=False), [Record("softmax", "torch", "float32", 2, 3, "ok")])
    )
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({names})); sys.argv = ['fused-softmax', 'report', 'a.json']; "
        "from fused_softmax.__main__ import main; main()"
    )
    where = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=where, cwd=tmp_path)
    assert done.returncode == 0 and "torch" in done.stdout, done.stderr


def test_an_error_of_the_program_is_no_bad_input(monkeypatch: pytest.MonkeyPatch):
    def broken(number: int) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("fused_softmax.lab.lessons.run", broken)
    monkeypatch.setattr("fused_softmax.lab.cli.options.interpret_without_gpu", lambda: None)
    assert isinstance(CLI.invoke(app, ["lesson", "1"]).exception, ZeroDivisionError)


@pytest.mark.parametrize(("stopped", "status"), [("", 0), ("interrupted", 130), ("device fault: a torch call", 1)])
def test_bench_ends_with_a_status_of_its_own_for_each_end(
    stopped: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    head = replace(header(torch.device("cpu"), interpreted=True), stopped=stopped)
    monkeypatch.setattr("fused_softmax.lab.bench.run.run", lambda prepared, console: (head, [], []))
    monkeypatch.setattr("fused_softmax.lab.cli.options.interpret_without_gpu", lambda: None)
    result = CLI.invoke(app, ["bench", "--systems", "torch", "--widths", "4", "--out", str(tmp_path)])
    assert result.exit_code == status, result.output
    assert result.stderr == ("interrupted\n" if status == 130 else "")


def test_rows_too_wide_for_the_kernels_are_explained_as_torchs():
    result = CLI.invoke(app, ["explain", "1x2147483648"])
    assert result.exit_code == 0 and "PyTorch's own kernel" in result.stdout and "32 bits" in result.stdout


def test_without_a_command_the_help_is_shown():
    result = CLI.invoke(app, [])
    assert result.exit_code in (0, 2) and all(name in result.output for name in ("bench", "verify", "report"))
    assert CLI.invoke(app, ["bench", "--help"]).exit_code == 0


def test_lessons_are_listed():
    result = CLI.invoke(app, ["lesson"])
    assert (
        result.exit_code == 0 and len(result.output.splitlines()) == len(LESSONS) and "naive" in result.output.lower()
    )


def test_lessons_with_kernels_are_refused_below_the_floor(monkeypatch: pytest.MonkeyPatch, run_here):
    monkeypatch.setattr("fused_softmax.lab.cli.options.interpret_without_gpu", lambda: None)
    monkeypatch.setattr(availability, "MIN_TRITON", (99, 0))
    done = run_here("lesson", "10")
    assert done.exit_code == 2 and "Mechanism" in done.stdout
    assert done.stderr == f"fused-softmax lesson: {availability.below_floor()}\n" and "Triton 99.0" in done.stderr
    assert run_here("lesson", "1").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "absent", "needs", "extra"),
    [
        ("explain 4x128", "typer", "fused-softmax needs typer", "cli"),
        ("report", "rich", "needs rich", "cli"),
        pytest.param(
            "lesson 5",
            "typer rich numpy",
            "fused-softmax lesson needs typer, rich, numpy",
            "bench",
            marks=pytest.mark.extended,
        ),
        pytest.param("lesson 5", "typer rich", "needs typer, rich", "cli", marks=pytest.mark.extended),
        pytest.param("lesson 5", "numpy", "fused-softmax lesson needs numpy", "bench", marks=pytest.mark.extended),
        pytest.param(
            "bench --widths 4 --rows 2",
            "typer rich safetensors numpy",
            "needs typer, rich, safetensors, numpy",
            "bench",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "verify", "safetensors", "fused-softmax verify needs safetensors", "bench", marks=pytest.mark.extended
        ),
    ],
)
def test_without_an_extra_the_command_names_what_is_missing(
    arguments: str, absent: str, needs: str, extra: str, tmp_path: Path
):
    # for import and find_spec alike these packages are not there
    hide = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def found(name, path=None, target=None):
    return None if name.split(".")[0] in {absent.split()!r} else find(name, path, target)
PathFinder.find_spec = found
"""
    (tmp_path / "sitecustomize.py").write_text(hide)
    done = command(*arguments.split(), PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT / "src")]))
    said = done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert done.returncode == 1 and said.endswith(f"{needs}: pip install 'fused-softmax[{extra}]'"), done.stderr


def test_importing_the_package_needs_no_extra():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['typer', 'rich', 'matplotlib', 'safetensors'])); "
        "import fused_softmax"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 0


@pytest.mark.interpreted
def test_tiny_bench_shows_wrong_as_wrong_and_leaves_its_files(tmp_path: Path):
    out = tmp_path / "out"
    systems = "torch,01_naive,02_one_row,05_published"
    done = command(
        "bench", "--widths", "640", "--rows", "2", "--dtype", "fp32", "--systems", systems, "--out", str(out)
    )
    assert done.returncode == 0, done.stderr
    head, records = from_json((out / "results.json").read_text())
    assert {r.system: r.status for r in records} == {
        "torch": "ok",
        "01_naive": "ok",
        "02_one_row": "ok",
        "05_published": "wrong",
    }
    assert all(r.ms is None for r in records) and head.interpreted and head.finished
    by_name = {r.system: r for r in records}
    assert by_name["02_one_row"].reads == by_name["02_one_row"].writes == 1280
    resources = by_name["02_one_row"].resources
    assert resources is not None and resources["registers"] > 0 and resources["widest_load_bytes"] == 16
    assert "times need a GPU" in done.stdout and "wrong" in done.stdout
    assert {"index.html", "results.csv"} <= {f.name for f in out.iterdir()}


@pytest.mark.interpreted
@pytest.mark.extended
def test_several_ops_are_recorded_in_a_file_each(tmp_path: Path, run_here: Callable[..., Result]):
    ops = "log_softmax_backward,cross_entropy,cross_entropy_forward,masked_softmax"
    shape = ["--widths", "33", "--rows", "3", "--dtype", "bf16"]
    done = run_here("bench", "--op", ops, *shape, "--out", str(tmp_path / "out"), "--record", str(tmp_path / "kept"))
    assert done.exit_code == 0, done.output
    found = {file.stem: from_json(file.read_text())[1] for file in (tmp_path / "kept").iterdir()}
    assert set(found) == {"log_softmax_backward", "cross_entropy", "masked_softmax"}
    assert {r.op for r in found["cross_entropy"]} == {"cross_entropy", "cross_entropy_forward"}
    assert {r.system for r in found["cross_entropy"]} == {"fused_softmax", "fused_softmax_in_place", "torch"}
    assert {r.status for records in found.values() for r in records} == {"ok"}
    assert all(r.plan.startswith("warp: 1 CTA") for r in found["masked_softmax"] if r.system == "fused_softmax")


@pytest.mark.interpreted
@pytest.mark.extended
def test_random_widths_are_recorded_with_their_seed(tmp_path: Path, run_here: Callable[..., Result]):
    shape = ["--random-widths", "2", "--rows", "2", "--systems", "fused_softmax", "--out", str(tmp_path / "out")]
    # this seed's widths are narrow, and so is the range of masked_softmax: the interpreter takes seconds for wide rows
    done = run_here("bench", "--op", "log_softmax_backward,masked_softmax_causal", *shape, "--seed", "4")
    assert done.exit_code == 0, done.output
    head, records = from_json((tmp_path / "out" / "results.json").read_text())
    drawn = {op: sorted({r.n_cols for r in records if r.op == op}) for op in dict.fromkeys(r.op for r in records)}
    assert {op: [w % 2 for w in sorted(widths)].count(1) for op, widths in drawn.items()} == dict.fromkeys(drawn, 1)
    assert drawn == {
        op: sorted({c.n_cols for c in random_cases(op, 2, 4)})
        for op in ("log_softmax_backward", "masked_softmax_causal")
    }
    assert head.seed == 4 and "--seed 4" in head.command and "seed 4" in done.stdout
    assert {(r.system, r.status) for r in records} == {("fused_softmax", "ok")} and all(
        r.error is not None for r in records
    )
    done = run_here("bench", "--op", "masked_softmax_causal", *shape)
    assert done.exit_code == 0, done.output
    head, records = from_json((tmp_path / "out" / "results.json").read_text())
    assert head.seed is not None and f"seed {head.seed}" in done.stdout
    assert {r.n_cols for r in records} == {c.n_cols for c in random_cases("masked_softmax_causal", 2, head.seed)}


@pytest.mark.interpreted
def test_bench_reads_a_file_and_refuses_one_it_cannot_use(tmp_path: Path, run_here: Callable[..., Result]):
    torch.save({"scores": torch.randn(2, 3, 17)}, tmp_path / "x.pt")
    options = ["--systems", "torch,01_naive", "--out", str(tmp_path / "out")]
    assert run_here("bench", "--input", str(tmp_path / "x.pt"), *options).exit_code == 0
    _, records = from_json((tmp_path / "out" / "results.json").read_text())
    assert {(r.n_rows, r.n_cols, r.case) for r in records} == {(6, 17, "real: scores")}
    done = run_here("bench", "--input", str(tmp_path / "none.txt"), *options)
    assert done.exit_code == 2 and "none.txt" in done.stderr


@pytest.mark.interpreted
@pytest.mark.extended
def test_ctrl_c_leaves_the_results_so_far(tmp_path: Path):
    where = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "1"}
    widths = ",".join(["64", *["200000"] * 400])
    line = [sys.executable, "-m", "fused_softmax", "bench", "--widths", widths, "--systems", "torch,06_three_pass"]
    # a shell starts what it runs in the background with SIGINT ignored, and children inherit that
    process = subprocess.Popen(
        [*line, "--out", str(tmp_path)],
        env=where,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "results.json").exists() and time.monotonic() < until:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err and "stopped early: interrupted" in out and err.splitlines()[-1] == "interrupted"
    head, records = from_json((tmp_path / "results.json").read_text())
    assert head.stopped == "interrupted" and len(records) >= 2 and (tmp_path / "index.html").exists()


@pytest.mark.interpreted
@pytest.mark.parametrize("module", ["fused_softmax lesson", "fused_softmax.lab.lessons"])
@pytest.mark.extended
def test_a_reader_that_has_gone_ends_a_lesson_without_a_traceback(module: str):
    line = f"set -o pipefail; {shlex.quote(sys.executable)} -m {module} 1 | true; exit ${{PIPESTATUS[0]}}"
    where = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    where["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300, env=where)
    assert (done.returncode, done.stderr) == (1, "")
