"""Builds the wheel and the source distribution and installs them into an empty environment, extra by extra.

    packages.py DIST         builds into the folder DIST, and checks what it built

The environment is made anew. The wheel goes in first, without an extra, then with each extra, then the source
distribution in its place. After each, `fused-softmax doctor` must say which extras are missing, and no more.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LARGEST_WHEEL = 2**20
BUILD = "import sys; from setuptools import build_meta as b; d = sys.argv[1]; b.build_wheel(d); b.build_sdist(d)"
# what a test of the source distribution needs besides the package
NEEDED = ("tests/support/cases.py", "tests/conftest.py", "tools/pages/__main__.py", "requirements/ci.txt", "Makefile")
PROGRAM = (
    "import torch, fused_softmax as fs; print(fs.softmax(torch.zeros(2)).tolist(), fs.plan_for(torch.zeros(2)).why)"
)


def call(*line: str | Path, cwd: Path | None = None) -> str:
    """Run a command; its output, or an end of this process with what it said."""
    done = subprocess.run([str(part) for part in line], capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, line))} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def build(dist: Path) -> tuple[Path, Path]:
    """Build from a copy of what git tracks, so that no stray file gets in; returns wheel and source distribution."""
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        tracked = call("git", "ls-files", "-z", cwd=ROOT).split("\0")
        for name in filter(None, tracked):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder) / name)
        call(sys.executable, "-c", BUILD, dist.resolve(), cwd=Path(folder))
        (sdist,) = dist.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            inside = {name.partition("/")[2] for name in archive.getnames()}
        missing = [name for name in tracked if name and (ROOT / name).is_file() and name not in inside]
        if missing or not inside >= set(NEEDED):
            sys.exit(f"{sdist.name} lacks {', '.join(missing or sorted(set(NEEDED) - inside))}: see MANIFEST.in")
    (wheel,) = dist.glob("*.whl")
    return wheel, sdist


def check_wheel(wheel: Path) -> None:
    """The wheel is small, and has the package's data and nothing but the package."""
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("py.typed", "lab/bench/page.html", "lab/data/README.md"):
        if f"fused_softmax/{name}" not in names:
            sys.exit(f"{wheel.name} lacks {name}")
    strange = [name for name in names if not name.startswith(("fused_softmax/", "fused_softmax-"))]
    size = wheel.stat().st_size
    if strange or size >= LARGEST_WHEEL:
        sys.exit(f"{wheel.name} has {size:,} bytes (below {LARGEST_WHEEL:,} is allowed), and {strange}")
    print(f"{wheel.name}: {size / 1024:.0f} KiB, {len(names)} files")


def check_installed(python: Path, extras: set[str]) -> None:
    """A first program runs, and doctor and the command say what is missing and what is not."""
    # not from the repository, whose files would be imported
    with tempfile.TemporaryDirectory() as elsewhere:
        said = call(python, "-c", PROGRAM, cwd=Path(elsewhere))
        if not said.startswith("[0.5, 0.5]"):
            sys.exit(f"the first program printed {said}")
        command = python.with_name("fused-softmax")
        found = {line.split()[1]: line.split()[2] for line in call(command, "doctor").splitlines() if "extra" in line}
        wanted = {extra: "ok" if extra in extras else "missing" for extra in ("cli", "bench")}
        if found != wanted:
            sys.exit(f"doctor says {found}, and {wanted} is true")
        help = subprocess.run([str(command), "--help"], capture_output=True, text=True, cwd=elsewhere)
        if (help.returncode == 0) is not bool(extras):
            sys.exit(f"--help with {extras or 'no extra'} ended with {help.returncode}: {help.stderr}")
        if "bench" in extras:
            line = ("bench", "--widths", "64", "--rows", "2", "--dtype", "fp32", "--systems", "fused_softmax,torch")
            call(command, *line, "--out", "out", cwd=Path(elsewhere))
            if "Every result" not in (Path(elsewhere) / "out" / "index.html").read_text():
                sys.exit("bench wrote no page")
    print(f"extras {', '.join(sorted(extras)) or 'none'}: a program, doctor and the command do what they should")


def main() -> int:
    """Build, install, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="the folder to build into; what it holds is removed")
    dist = parser.parse_args().dist
    wheel, sdist = build(dist)
    check_wheel(wheel)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        pip = [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "-c",
            "requirements/constraints.txt",
        ]
        for extra, ready in (("", set()), ("[cli]", {"cli"}), ("[bench]", {"cli", "bench"})):
            call(*pip, f"{wheel.resolve()}{extra}", cwd=ROOT)
            check_installed(python, ready)
        call(*pip, "setuptools>=77", cwd=ROOT)
        call(*pip, "--no-build-isolation", "--no-deps", "--force-reinstall", sdist.resolve(), cwd=ROOT)
        check_installed(python, {"cli", "bench"})
    print(f"{sdist.name}: installed from source")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
