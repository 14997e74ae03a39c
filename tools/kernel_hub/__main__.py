"""Writes the core in the layout of the `kernels` package, which loads it from a folder or from the hub.

    PYTHONPATH=tools python -m kernel_hub OUT

    OUT/build/torch-cuda/            what runs on a GPU; torch-cpu is the same, for tests with TRITON_INTERPRET=1
        __init__.py, functional.py, ...  the package without the lab, the command line and the integrations
        layers.py                        ForCausalLMLoss
        metadata.json                    name, version, backend, and an id of the files' contents

Only __init__ is rewritten: it also imports the layers. All imports of the core are relative, and its operators lie in a
namespace with the name of the package. The package that `kernels` loads is named by its id, so it runs next to the
installed one.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "src" / "fused_softmax"
NAME = "fused-softmax"
BACKENDS = ("cuda", "cpu")
IMPORTED = "\nfrom .warmup import warmup\n"  # the last import of the package's __init__
# what a kernel repository does without
LEFT_OUT = {"lab", "integrations", "adapters.py", "__main__.py"}


def sources() -> dict[str, str]:
    """Path inside the package -> text."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE)
        if path.parts[0] not in LEFT_OUT:
            found[str(path)] = file.read_text()
    found["layers.py"] = (HERE / "layers.py").read_text()
    if IMPORTED not in found["__init__.py"]:
        raise SystemExit(f"the package's __init__ has no line {IMPORTED.strip()!r} to put the layers next to")
    found["__init__.py"] = found["__init__.py"].replace(IMPORTED, f"{IMPORTED}from . import layers\n")
    return found


def absolute_imports(files: dict[str, str]) -> list[str]:
    """Imports of the package by its name, which would load the installed one."""
    wrong = []
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            wrong += [f"{path}:{node.lineno}" for name in names if name.split(".")[0] == PACKAGE.name]
    return wrong


def write(out: Path) -> list[Path]:
    """Write the repository, and return the folder of each backend."""
    files = sources()
    if wrong := absolute_imports(files):
        raise SystemExit(f"absolute imports of {PACKAGE.name}: {', '.join(wrong)}")
    digest = hashlib.sha256("".join(f"{path}\0{text}\0" for path, text in files.items()).encode()).hexdigest()[:10]
    folders = []
    for backend in BACKENDS:
        folder = out / "build" / f"torch-{backend}"
        shutil.rmtree(folder, ignore_errors=True)
        for path, text in files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        metadata = {
            "id": f"_fused_softmax_{backend}_{digest}",
            "name": NAME,
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
        folders.append(folder)
    return folders


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m kernel_hub OUT")
    for folder in write(Path(sys.argv[1])):
        print(folder)
