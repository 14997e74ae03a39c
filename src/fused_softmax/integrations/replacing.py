"""Names of other packages that are replaced: the versions that are known, the checks, and the way back.

A replacement that finds another name or another signature than it knows raises: a patch that does nothing is worse than
none.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

# tested: tests/extended/programs.py runs each adapter with the pinned and the newest release
TRANSFORMERS = "5.17.0 to 5.23.0"
TRL = "1.14.2 to 1.16.0"
TORCHTITAN = "0.3.0"
VERL = "0.9.1"

_logger = logging.getLogger("fused_softmax")


def installed(package: str) -> str:
    """The installed version of a package, or "none"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


class Name(NamedTuple):
    """A function or class of another package, the parameters that it has to have, and what stands in for it."""

    module: str
    name: str
    parameters: Sequence[str]
    ours: Any
    # of a class: the method whose parameters these are
    method: str = ""

    def found(self) -> Any:
        """What the name stands for now, or None."""
        try:
            return getattr(importlib.import_module(self.module), self.name, None)
        except ModuleNotFoundError:
            return None


def expect(name: Name, package: str, known: str) -> Any:
    """What the name stands for; RuntimeError where there is nothing, or its parameters are others."""
    version = installed(package)
    has = f"{package} is not installed" if version == "none" else f"{package} {version} is installed"
    told = f"this adapter knows {package} {known}, and {has}"
    shown, thing = f"{name.module}.{name.name}", name.found()
    if thing is None:
        raise RuntimeError(f"{shown} does not exist: {told}")
    parameters = list(inspect.signature(getattr(thing, name.method) if name.method else thing).parameters)
    if parameters != list(name.parameters):
        raise RuntimeError(f"{shown} takes ({', '.join(parameters)}), not ({', '.join(name.parameters)}): {told}")
    return thing


class Replaced:
    """What a `patch_*` function replaced in another package. `undo()` restores it, as the end of a `with` block does.

    A name is replaced in its own module and in all modules of the package that imported it by name.
    """

    def __init__(self, package: str, known: str, names: Sequence[Name]):
        self._package, self._done = package, False
        # all checks come before the first change
        self._names = [(name, expect(name, package, known)) for name in names]
        self._places = [self._swap(name.name, theirs, name.ours) for name, theirs in self._names]
        _logger.info("%s", self)

    def _swap(self, name: str, old: Any, new: Any) -> list[str]:
        places = []
        for path, module in list(sys.modules.items()):
            # None stands there for a module that must not be imported
            if path.partition(".")[0] == self._package and getattr(module, "__dict__", {}).get(name) is old:
                setattr(module, name, new)
                places.append(path)
        return places

    def undo(self) -> None:
        """Restore all names, also in modules that were imported since.

        Raises:
            RuntimeError: They were restored already.
        """
        if self._done:
            raise RuntimeError(f"what was replaced in {self._package} was restored already")
        self._done = True
        lost = [name.name for name, theirs in self._names if not self._swap(name.name, name.ours, theirs)]
        if lost:
            raise RuntimeError(
                f"{', '.join(lost)} in {self._package}: something else replaced it since, and it is left as it is; "
                "undo what came last first"
            )

    def __enter__(self) -> Replaced:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.undo()
        except RuntimeError:
            if exception[0] is None:
                raise

    def __repr__(self) -> str:
        told = "; ".join(
            f"{name.name} in {', '.join(places)}" for (name, _), places in zip(self._names, self._places, strict=True)
        )
        return f"{self._package} {installed(self._package)}: replaced {told}"
