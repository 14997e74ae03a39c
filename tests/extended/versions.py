"""Runs tests with other versions of torch and Triton than those that are installed, and records what came out.

    versions.py compiled 3.6.0 newest           compiled tests with other Tritons, beside the installed torch
    versions.py below-floor 2.4.1 2.6.0         a fresh environment for each torch, with its own Triton
    versions.py interpreted 2.10.0 newest       interpreted tests of the ops, in a fresh environment for each torch
    versions.py interpreted newest --installed-torch    the same with other Tritons, beside the installed torch

A fresh environment takes up to 7 GB: it is removed after its run, unless --keep is given. --record writes
benchmarks/compatibility.json, which the page on compatibility is made from. Wheels that cannot be had are said so and
skipped; a test that fails is a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import xml.etree.ElementTree as ET
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from pages.version_runs import RECORDS, Run, record  # noqa: E402

# torch -> the Triton that its GPU builds depend on; a CPU build depends on none
TRITON_OF = {
    "2.4.1": "3.0.0",
    "2.6.0": "3.2.0",
    "2.8.0": "3.4.0",
    "2.10.0": "3.6.0",
    "2.13.0": "3.7.1",
    "2.15.0": "3.9.0",
}
NEWEST = "newest"
# triton's interpreter takes no newer numpy up to 3.6
TEST_PACKAGES = ("numpy<2.4", "pytest", "pytest-xdist", "hypothesis", "expecttest")
COMMAND_LINE = ("numpy<2", "typer", "rich", "safetensors", "setuptools")
CORE_TESTS = tuple(
    f"tests/{name}.py"
    for name in (
        "test_softmax",
        "test_cross_entropy",
        "test_masked_softmax",
        "test_other_dims",
        "test_token_logprobs",
        "test_logsumexp",
        "torch_ops/test_operators",
        "test_patch",
        "torch_ops/test_transforms",
        "test_fallback",
        "lab/fuzz/test_interpreter",
    )
)


class Unavailable(Exception):
    """The wheels cannot be had here."""


def pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable((errors or ["pip failed"])[-1])


def environment(folder: Path, torch: str, packages: tuple[str, ...]) -> Path:
    """The Python of an environment with this torch, its Triton and the packages; made where it is not there."""
    place = folder / f"torch-{torch}"
    python = place / "bin" / "python"
    done = place / ".installed"
    if torch == NEWEST or not done.exists():
        if not python.exists():
            venv.create(place, with_pip=True)
        versions = ("-U", "torch", "triton") if torch == NEWEST else (f"torch=={torch}", f"triton=={TRITON_OF[torch]}")
        pip(python, "--no-cache-dir", *versions, *packages)
        done.touch()
    return python


def triton_folder(folder: Path, triton: str) -> Path:
    """A folder with this Triton and nothing else, to be put first in PYTHONPATH."""
    place = folder / f"triton-{triton}"
    done = place / ".installed"
    if triton == NEWEST or not done.exists():
        wanted = ("-U", "triton") if triton == NEWEST else (f"triton=={triton}",)
        pip(Path(sys.executable), "--no-deps", "--target", str(place), *wanted)
        done.touch()
    return place


def versions_in(python: Path, env: dict[str, str]) -> tuple[str, str, str]:
    """(torch, Triton, Python) as that process imports them."""
    code = "import torch, triton, platform; print(torch.__version__, triton.__version__, platform.python_version())"
    done = subprocess.run([str(python), "-c", code], env=env, capture_output=True, text=True, check=True)
    torch, triton, version = done.stdout.split()
    return torch, triton, version


def commit() -> str:
    """The commit's short hash, with + where files differ from it."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=ROOT, capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def tests(python: Path, env: dict[str, str], *arguments: str) -> tuple[int, int, int]:
    """(passed, failed, skipped) of a run of pytest, whose output is shown."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
        status = subprocess.run(command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
        if status not in (0, 1) or not report.exists():
            raise SystemExit(f"pytest ended with status {status} before its tests did: nothing is recorded")
        suite = next(ET.parse(report).getroot().iter("testsuite"))
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return total - failed - skipped, failed, skipped


def checks(python: Path, env: dict[str, str]) -> tuple[int, int, int]:
    """(passed, failed, 0) of below_floor.py, with and without the interpreter."""
    failed = 0
    script = str(ROOT / "tests" / "extended" / "below_floor.py")
    for mode in ({}, {"TRITON_INTERPRET": "1"}):
        failed += subprocess.run([str(python), script], env={**env, **mode}, stdin=subprocess.DEVNULL).returncode != 0
    return 2 - failed, failed, 0


def run(what: str, version: str, folder: Path, jobs: int, files: tuple[str, ...], installed_torch: bool = False) -> Run:
    """Runs `what` with a version of torch, over the named test files or its own.

    It is a version of Triton for "compiled", and where the installed torch stays.
    """
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    env["PYTHONPATH"] = str(ROOT / "src")
    env["FUSED_SOFTMAX_WHOLE"] = "1"  # also what the pinned versions run in part by default
    # kernels that another version compiled are not this one's
    env["TRITON_CACHE_DIR"] = str(folder / f"cache-{what}-{version}")
    if what == "compiled" or installed_torch:
        env["PYTHONPATH"] = os.pathsep.join([str(triton_folder(folder, version)), env["PYTHONPATH"]])
    if what == "compiled":
        python, shown = Path(sys.executable), files or ("tests",)
        counts = tests(python, env, "-m", "compiled and not extended", *shown)
    elif what == "interpreted":
        python = Path(sys.executable) if installed_torch else environment(folder, version, TEST_PACKAGES)
        shown = files or CORE_TESTS
        kept = "not compiled and not gpu and not extended"
        counts = tests(python, {**env, "TRITON_INTERPRET": "1"}, "-n", str(jobs), "-m", kept, *shown)
    else:
        python, shown = environment(folder, version, COMMAND_LINE), ("tests/extended/below_floor.py",)
        counts = checks(python, env)
    torch, triton, python_version = versions_in(python, env)
    names = tuple(re.sub(r"^tests/(.*/)?(test_)?|\.py$", "", name) for name in shown)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Run(what.replace("-", " the "), torch, triton, python_version, *counts, names, commit(), date)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compiled", "interpreted", "below-floor"))
    parser.add_argument(
        "versions", nargs="+", metavar="VERSION", help=f"of Triton for compiled, else of torch; {NEWEST}"
    )
    parser.add_argument("--folder", type=Path, default=Path(sys.prefix), help="where environments are kept")
    parser.add_argument("--keep", action="store_true", help="keep a fresh environment, and use it again")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDS}")
    parser.add_argument("--installed-torch", action="store_true", help="interpreted: VERSION is of Triton")
    parser.add_argument("--jobs", type=int, default=2, help="interpreted tests that run at a time")
    parser.add_argument("--tests", nargs="+", default=(), help="test files in the place of the usual ones")
    asked = parser.parse_args()
    if asked.installed_torch and asked.what != "interpreted":
        parser.error(f"--installed-torch belongs to interpreted, not to {asked.what}")
    if asked.what != "compiled" and not asked.installed_torch:
        unknown = [v for v in asked.versions if v != NEWEST and v not in TRITON_OF]
        if unknown:
            parser.error(f"TRITON_OF names no Triton for torch {', '.join(unknown)}")
    asked.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for version in asked.versions:
        start, place = time.monotonic(), asked.folder / f"torch-{version}"
        temporary = not (asked.keep or place.exists())
        print(f"== {asked.what} {version}", flush=True)
        try:
            where = asked.folder.resolve()
            found = run(asked.what, version, where, asked.jobs, tuple(asked.tests), asked.installed_torch)
        except Unavailable as error:
            print(f"== {asked.what} {version}: skipped, the wheels cannot be had here: {error}", flush=True)
            continue
        finally:
            if temporary:
                shutil.rmtree(place, ignore_errors=True)
        failed = failed or found.failed > 0
        if asked.record:
            record(ROOT / RECORDS, found)
        said = f"{found.passed} passed, {found.failed} failed, {found.skipped} skipped"
        took = time.monotonic() - start
        print(f"== {asked.what}, torch {found.torch}, Triton {found.triton}: {said}, {took:.0f} s", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
