"""`python -m fused_softmax` and the command `fused-softmax`: the command line, where its extra is installed."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say which extra it needs."""
    try:
        from fused_softmax.cli import app

        app()
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in ("typer", "rich", "click", "matplotlib", "safetensors"):
            raise
        sys.exit(f"the command line needs {missing.name}: pip install 'fused-softmax[bench]'")


if __name__ == "__main__":
    main()
