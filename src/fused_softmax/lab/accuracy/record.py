"""The record of a run: a header as bench's, a hash of the kernels' sources, one row for each result of each cell."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fused_softmax.lab.fuzz.record import kernel_hash

from .measure import Row


def to_json(head: dict[str, Any], rows: Sequence[Row]) -> str:
    """The record: a header, the kernels' hash, and one row a line. An infinite error is the text 'inf'."""
    unused = ("ceilings", "unavailable", "stopped", "finished")
    opening = json.dumps({k: v for k, v in head.items() if k not in unused}, indent=2).replace("\n", "\n  ")
    body = ",\n    ".join(json.dumps(_plain(asdict(row)), allow_nan=False) for row in rows)
    return f'{{\n  "header": {opening},\n  "kernel_hash": "{kernel_hash()}",\n  "rows": [\n    {body}\n  ]\n}}\n'


def from_json(text: str) -> tuple[dict[str, Any], list[Row]]:
    """(header, rows) of what to_json wrote."""
    content = json.loads(text)
    rows = []
    for fields in content["rows"]:
        pairs = {kind: (float(ours), float(own)) for kind, (ours, own) in fields["by_kind"].items()}
        known = {**fields, "ours": float(fields["ours"]), "torch": float(fields["torch"]), "by_kind": pairs}
        rows.append(Row(**{**known, "infinite": tuple(fields["infinite"])}))
    return content["header"] | {"kernel_hash": content["kernel_hash"]}, rows


def load(file: Path) -> tuple[dict[str, Any], list[Row]] | None:
    """(header, rows) of a record; None where there is no file."""
    return from_json(file.read_text(encoding="utf-8")) if file.is_file() else None


def _plain(value: Any) -> Any:
    """Numbers with four digits; JSON knows no infinity."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return "inf" if math.isinf(value) else float(f"{value:.4g}")
    return value
