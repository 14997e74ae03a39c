"""Runs tests/programs in the programs that people run: their pinned releases, then the newest.

    programs.py pinned newest [--jobs 2]

Each set has an environment of its own, in front of the packages of the environment that runs this, so torch is not
installed again. An environment is kept and used again; `newest` is upgraded each time. A set whose packages cannot be
had is skipped, with a line that says so. torchtitan comes without its dependencies, except those that its loss imports.
verl needs ray, which is too large for this: its test is skipped, and runs where verl is installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEWEST = ("transformers", "trl", "accelerate", "kernels", "peft")
TORCHTITAN = ("torchtitan", "spmd_types", "tyro", "docstring-parser")
# the pinned releases run what depends on them; examples and benchmark run once, with the newest
PINNED_TESTS = ("test_families.py", "test_trl.py", "test_kernel_hub.py")
SHOWN = ("torch", "transformers", "trl", "accelerate", "kernels", "peft", "torchtitan")


class Unavailable(Exception):
    """The wheels cannot be had here."""


def pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable((errors or ["pip failed"])[-1])


def environment(place: Path, which: str) -> Path:
    """The Python of an environment with these releases."""
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
        # after the environment's own packages, so these come first
        (own / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if which == "pinned":
        pip(python, "-r", str(ROOT / "requirements" / "programs.txt"))
    else:
        pip(python, "-U", *NEWEST)
        pip(python, "-U", "--no-deps", *TORCHTITAN)
    return python


def versions(python: Path) -> str:
    code = (
        "import importlib.metadata as m, sys\n"
        "def v(p):\n    try: return m.version(p)\n    except m.PackageNotFoundError: return 'none'\n"
        "print(', '.join(f'{p} {v(p)}' for p in sys.argv[1:]))"
    )
    return subprocess.run([str(python), "-c", code, *SHOWN], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="+", choices=("pinned", "newest"))
    parser.add_argument("--folder", type=Path, default=Path(sys.prefix), help="where the environments are kept")
    parser.add_argument("--jobs", type=int, default=2, help="tests that run at a time")
    asked = parser.parse_args()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"FUSED_SOFTMAX_EXTENDED": "1", "FUSED_SOFTMAX_PROGRAMS": "1"}
    failed = False
    for which in asked.which:
        start = time.monotonic()
        try:
            python = environment((asked.folder / f"programs-{which}").resolve(), which)
        except Unavailable as error:
            print(f"== programs {which}: skipped, the packages cannot be had here: {error}", flush=True)
            continue
        print(f"== programs {which}: {versions(python)}; {time.monotonic() - start:.0f} s", flush=True)
        folder = ROOT / "tests" / "programs"
        tests = [str(folder / name) for name in PINNED_TESTS] if which == "pinned" else [str(folder)]
        command = [str(python), "-m", "pytest", "-q", "-n", str(asked.jobs), "--dist", "worksteal", *tests]
        status = subprocess.run(command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
        failed = failed or status != 0
        print(f"== programs {which}: status {status}, {time.monotonic() - start:.0f} s", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
