"""`python -m fused_softmax` and the command `fused-softmax`: the command line, where its extra is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from fused_softmax import __version__
from fused_softmax.lab.ending import run_main

# packages of the extras in pyproject.toml, by the names that are imported; numpy is what triton's interpreter needs
EXTRAS = {
    **dict.fromkeys(("typer", "click", "rich"), "cli"),
    **dict.fromkeys(("numpy", "matplotlib", "safetensors", "jinja2"), "bench"),
}
# packages that a command imports, besides those of the command line; numpy if it interprets its kernels
NEEDS = {"bench": ("matplotlib", "safetensors"), "verify": ("safetensors",), "lesson": ()}


def _missing(package: str) -> bool:
    """Whether a package cannot be imported; one that stands in sys.modules as None cannot."""
    try:
        return find_spec(package) is None
    except ValueError:
        return sys.modules.get(package) is None


def _without_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def advice(missing: str, arguments: list[str]) -> str | None:
    """What to install where importing `missing` failed for these arguments; None where no extra has it."""
    package = missing.split(".")[0]
    command = next((argument for argument in arguments if argument in NEEDS), "")
    name = " ".join(["fused-softmax", *([command] if command else [])])
    if package == "triton":
        return f"{name} needs triton, which has wheels for Linux: pip install triton"
    if package not in EXTRAS:
        return None
    others = ["typer", "rich", *NEEDS.get(command, ())]
    if command and _missing("numpy") and _without_gpu():
        others.append("numpy")
    wanted = [package, *(p for p in others if p != package and _missing(p))]
    # the extra bench contains the extra cli
    extra = "bench" if any(EXTRAS[p] == "bench" for p in wanted) else "cli"
    return f"{name} needs {', '.join(wanted)}: pip install 'fused-softmax[{extra}]'"


def main() -> None:
    """Run the command line, or say which extra it needs."""
    run_main(_main)


def _main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"fused-softmax {__version__}")
        return
    if sys.argv[1:] == ["doctor"]:  # it says which extra is missing, and so needs none
        from fused_softmax.lab.doctor import main as doctor

        sys.exit(doctor())
    try:
        from fused_softmax.lab.cli import app

        app()
    except ModuleNotFoundError as missing:
        said = advice(missing.name or "", sys.argv[1:])
        if said is None:
            raise
        sys.exit(said)


if __name__ == "__main__":
    main()
