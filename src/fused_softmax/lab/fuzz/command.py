"""`fused-softmax fuzz`: checks what was asked for, runs it, and says how it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from fused_softmax.lab.registry import LINEAR_OPS, OPS, WAYS
from fused_softmax.lab.terminal import Refused, refusing


def fuzz(
    ops: tuple[str, ...], ways: tuple[str, ...], dtypes: tuple[str, ...], seconds: float | None, cases: int | None,
    per_cell: int | None, columns: tuple[int, int] | None, seed: int, workers: int, record: Path | None, sanitize: str,
    replayed: str, stop: bool, huge: bool, added: Sequence[Path] = (),
) -> int:  # fmt: skip
    """The exit status: 0 where nothing is wrong, 1 where a case is, 130 where it was interrupted.

    Raises:
        Refused: The request is no request.
    """
    console = Console(width=None if sys.stdout.isatty() else 150)
    from . import case_fields, replay
    from . import record as records
    from . import sanitize as sanitizer
    from .session import Request, run

    with refusing(ValueError, OSError):
        if added:
            return _add(added, record, console)
        _known("op", ops, (*OPS, *LINEAR_OPS))
        _known("way", ways, WAYS)
        if replayed:
            try:
                case_fields(replayed)
            except ValueError as error:
                raise Refused(str(error), "--replay") from None
        linear_ops, ops = tuple(op for op in ops if op in LINEAR_OPS), tuple(op for op in ops if op in OPS)
        if linear_ops:
            refused = dict(columns=columns, record=record, sanitize=sanitize, huge=huge, per_cell=per_cell)
            given = ", ".join("--" + name.replace("_", "-") for name, value in refused.items() if value)
            if ops or given:
                raise Refused(f"{', '.join(linear_ops)} runs by itself: leave out {given or ', '.join(ops)}", "--op")
        if record is not None:
            records.check(record, None if sanitize else seed)
        request = Request(
            ops, ways, dtypes, seconds, cases, per_cell, seed, workers, columns, record, huge, stop
        )  # fmt: skip
        if sanitize:
            _known("sanitize", (sanitize,), sanitizer.TOOLS)
            sanitizer.check(request)
            sanitizer.find()
    if replayed:
        from .worker import prepare

        prepare("cuda" if torch.cuda.is_available() else "cpu")
        return int(bool(replay(replayed)))
    if linear_ops:
        from . import linear

        with refusing(ValueError):
            return int(linear.run(linear_ops, ways, dtypes, seconds, cases, seed, stop, _shown(console)) > 0)
    if sanitize:
        summary = sanitizer.run(sanitize, request, console)
        if record is not None:
            records.add_sanitizer(record, request, summary.row())
            console.print(f"recorded in {record}", markup=False)
        return int(not summary.clean)
    findings = run(request, console)
    return 130 if findings.interrupted else int(bool(findings.wrong.total()))


def _add(added: Sequence[Path], record: Path | None, console: Console) -> int:
    """Sum up records, and draw nothing."""
    from . import record as records

    if record is None:
        raise ValueError("--add needs --record, the file that the sum is written to")
    cases = records.add_records(record, added)
    fewest = min(cases.values(), default=0)
    console.print(f"{cases.total()} cases in {len(cases)} cells, at least {fewest} in each: {record}", markup=False)
    return 0


def _shown(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)


def _known(option: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    unknown = [name for name in given if name not in allowed]
    if unknown:
        raise Refused(f"{', '.join(unknown)!r} is none of {', '.join(allowed)}", f"--{option}")
