"""The levels of the package: each module imports levels below its own, the library never the lab, and chains of modules
do not grow.

Read from the imports themselves, those inside of functions too.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import fused_softmax

PACKAGE = Path(fused_softmax.__file__).parent
# from the top down; a module imports its own level and those below
LEVELS = ("public", "parallel", "torch_ops", "launch", "planning", "kernels")
# what each level may import of the package, besides itself
BELOW = {
    "public": {"parallel", "torch_ops", "launch", "planning"},
    "parallel": {"torch_ops", "launch", "planning"},
    "torch_ops": {"launch", "planning"},
    "launch": {"planning", "kernels"},
    "planning": set(),
    "kernels": set(),
}


# modules of the longest chain of imports
LONGEST_ABOVE, LONGEST_IN_KERNELS = 7, 4


def imports_of(name: str, source: str, modules: frozenset[str], package: bool) -> set[str]:
    """The package's modules that the source of module `name` imports; `package` is whether it is an __init__."""
    parts = name.split(".")
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + package] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            # a name of a module, or the module that it is in
            found |= {target} & modules or {target.rpartition(".")[0]} & modules
    return found


def read() -> dict[str, set[str]]:
    """Each module of the package -> those of the package that it imports."""
    files = {}
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(path[:-1] if path[-1] == "__init__" else path)] = file
    modules = frozenset(files)
    return {
        name: imports_of(name, file.read_text(), modules, file.name == "__init__.py") - {name}
        for name, file in files.items()
    }


MODULES = read()


def level_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in (*LEVELS, "lab") else "public"


def wrong_imports(modules: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {target}"
        for name, targets in modules.items()
        for target in sorted(targets)
        if level_of(name) != "lab" and level_of(target) not in {level_of(name), *BELOW[level_of(name)]}
    ]


# the command `python -m fused_softmax` is the lab's
LIBRARY = {name: targets for name, targets in MODULES.items() if level_of(name) != "lab"}
LIBRARY.pop("fused_softmax.__main__")


def chain(names: set[str]) -> list[str]:
    """The longest chain of imports within these modules."""

    @functools.cache
    def below(name: str) -> tuple[str, ...]:
        return max(((name, *below(target)) for target in LIBRARY[name] & names), key=len, default=(name,))

    return list(max(map(below, names), key=len))


def test_each_level_imports_only_levels_below():
    assert len(LIBRARY) > 40 and {level_of(name) for name in LIBRARY} == set(LEVELS)
    assert wrong_imports(LIBRARY) == []


def test_the_library_never_imports_the_lab():
    assert any(level_of(name) == "lab" for name in MODULES)
    assert [name for name, targets in LIBRARY.items() if any(level_of(target) == "lab" for target in targets)] == []
    for name in LIBRARY:  # nor by its name
        file = PACKAGE.parent / (name.replace(".", "/") + ".py")
        if file.exists():
            strings = [n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)]
            assert not any(isinstance(s, str) and s.startswith("fused_softmax.lab") for s in strings), name


def test_chains_are_short():
    # an __init__ of what is public imports all of it
    collects = ("fused_softmax", "fused_softmax.integrations")
    above = {name for name in LIBRARY if level_of(name) != "kernels" and name not in collects}
    kernels = {name for name in LIBRARY if level_of(name) == "kernels"}
    assert 4 <= len(chain(above)) <= LONGEST_ABOVE, chain(above)
    assert 2 <= len(chain(kernels)) <= LONGEST_IN_KERNELS, chain(kernels)


def test_files_of_kernels_share_only_what_is_common():
    files = {name for name in LIBRARY if level_of(name) == "kernels" and ".common" not in name}
    assert len(files) >= 9 and [(name, target) for name in files for target in LIBRARY[name] & files] == []


@pytest.mark.parametrize(
    ("name", "line", "target"),
    [
        ("fused_softmax.launch.compile", "from ..torch_ops import route", "fused_softmax.torch_ops.route"),
        ("fused_softmax.launch.compile", "def f():\n    from ..functional import softmax", "fused_softmax.functional"),
        ("fused_softmax.planning.types", "import fused_softmax.launch.layout", "fused_softmax.launch.layout"),
        (
            "fused_softmax.planning.types",
            "from ..kernels.softmax_resident import x",
            "fused_softmax.kernels.softmax_resident",
        ),
        ("fused_softmax.kernels.softmax_resident", "from ..planning.types import Plan", "fused_softmax.planning.types"),
        ("fused_softmax.torch_ops.route", "from .. import patch", "fused_softmax.patch"),
        ("fused_softmax.torch_ops.route", "from ..parallel import merge", "fused_softmax.parallel.merge"),
        ("fused_softmax.parallel.merge", "from ..losses import cross_entropy", "fused_softmax.losses"),
        ("fused_softmax.plan_for", "from fused_softmax.lab.registry import OPS", "fused_softmax.lab.registry"),
    ],
)
def test_the_check_sees_an_import_from_above(name, line, target):
    found = imports_of(name, line, frozenset(MODULES), False)
    assert found == {target}
    assert wrong_imports({name: found}) == [f"{name} imports {target}"]
