"""The results of a run: one Record per case and system, and a Header with the machine and versions, as JSON and CSV.

Files are replaced atomically after every case, so an interrupted run has whole files with the results so far.
`results.py` reads them.
Units: ms of one call (median, p10, p90 of `rounds`), bytes that any implementation must move, GB/s = bytes / ms / 1e6.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fused_softmax.lab.timing import Timing

DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
# ends a commit that `git describe --always --dirty` names, where files were changed
DIRTY = "-dirty"
# the colors of a terminal, which errors of compilers contain
COLORS = re.compile(r"\x1b\[[0-9;]*m")
PACKAGES = ("torch", "triton", "numpy", "liger-kernel", "quack-kernels", "cut-cross-entropy", "trl")


@dataclass
class Record:
    """One system in one case. `status` is ok, wrong, out of resources, refused or error; `note` says why."""

    op: str
    system: str
    dtype: str
    n_rows: int
    n_cols: int
    status: str
    note: str = ""
    error: float | None = None
    torch_error: float | None = None
    ms: float | None = None
    ms_p10: float | None = None
    ms_p90: float | None = None
    rounds: int | None = None
    bytes: int | None = None
    gbps: float | None = None
    ceiling: str = ""
    ceiling_gbps: float | None = None
    fraction: float | None = None
    reads: int | None = None
    writes: int | None = None
    timed_by: str = ""
    # host time of the first call until the device has finished, including compilation or loads from caches
    first_ms: float | None = None
    plan: str = ""
    # device memory that one call took beyond its inputs, its results included, where it was measured
    peak_bytes: int | None = None
    case: str = ""
    # registers, spilled_bytes, shared_bytes and widest_load_bytes of the compiled kernel, if requested
    resources: dict[str, Any] | None = None
    # of a tensor (outer, n_cols, inner), which has n_rows = outer x inner softmaxes; layout: "" where it is contiguous
    outer: int | None = None
    inner: int | None = None
    layout: str = ""
    # of a call on several GPUs: the collectives' names, and the bytes that a rank gives to them
    collectives: dict[str, Any] | None = None

    def take(self, taken: Timing, timed_by: str) -> Record:
        """Put in a time; returns this record."""
        self.ms, self.ms_p10, self.ms_p90, self.rounds = taken.ms, taken.p10, taken.p90, taken.rounds
        self.timed_by = timed_by
        return self

    @property
    def key(self) -> tuple[Any, ...]:
        """The case and the system of a record."""
        return self.op, self.system, self.dtype, self.n_rows, self.n_cols, self.outer, self.layout


@dataclass
class Header:
    """Device, date, versions and command of a run; `ceilings` are GB/s over 512 MiB tensors: copy, read, add, write."""

    device: str
    capability: str
    sms: int
    driver: str
    versions: dict[str, str]
    python: str
    commit: str
    dirty: bool
    date: str
    command: str
    interpreted: bool
    finished: bool = False
    stopped: str = ""
    ceilings: dict[str, float] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    cpu: str = ""
    # of the random widths or shapes, where there are any: with `command` it says how the run is made again
    seed: int | None = None


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor, which host times depend on; its architecture where Linux names no model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def without_folders(command: str) -> str:
    """A command without the folders that its run wrote to: they say nothing of the run, and are a machine's own."""
    return re.sub(r" --(out|record|equality)[ =]\S+", "", command)


def without_colors(text: str) -> str:
    """A text without the escape codes that color it in a terminal."""
    return COLORS.sub("", text)


def header(device: torch.device, interpreted: bool) -> Header:
    """Describe this machine and this run."""
    on_gpu = device.type == "cuda"
    found = torch.cuda.get_device_properties(device) if on_gpu else None
    versions = {package: v for package in PACKAGES if (v := _version(package))}
    # of the modules that run: metadata may describe another copy that lies behind
    versions |= {name: module.__version__ for name in ("torch", "triton") if (module := sys.modules.get(name))}
    commit, named = _output("git", "rev-parse", "HEAD"), os.environ.get("FUSED_SOFTMAX_COMMIT", "")
    changed = named.endswith(DIRTY) if named else bool(commit and _output("git", "status", "--porcelain", "--", ".."))
    return Header(
        device=found.name if found else f"CPU ({platform.machine()})",
        capability=f"{found.major}.{found.minor}" if found else "",
        sms=found.multi_processor_count if found else 0,
        driver=_output(*DRIVER).split("\n")[0] if found else "",
        versions=versions,
        python=platform.python_version(),
        commit=named.removesuffix(DIRTY) or commit,
        # of the measured package; whoever names a commit states whether the copy is unchanged
        dirty=changed,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=without_folders("fused-softmax " + " ".join(sys.argv[1:])),
        interpreted=interpreted,
        cpu=_cpu(),
    )


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that readers see the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _plain(record: Record) -> dict[str, Any]:
    """Fields that are set, for JSON, which knows no infinity: an error without bound becomes the text 'inf'."""
    found = {k: v for k, v in asdict(record).items() if v is not None and v != ""}
    return {k: "inf" if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}


def to_json(head: Header, records: Sequence[Record]) -> str:
    """The run as JSON text: the header, then one record a line."""
    lines = [json.dumps(_plain(record), allow_nan=False) for record in records]
    body = ",\n    ".join(lines)
    opening = json.dumps(asdict(head), indent=2).replace("\n", "\n  ")
    return f'{{\n  "header": {opening},\n  "records": [\n    {body}\n  ]\n}}\n'


def from_json(text: str) -> tuple[Header, list[Record]]:
    """Read what to_json wrote; fields of another version are dropped, and so are colors in notes."""
    content: Mapping[str, Any] = json.loads(text)
    known = {f.name for f in fields(Header)}, {f.name for f in fields(Record)}
    head = Header(**{k: v for k, v in content["header"].items() if k in known[0]})
    records = [Record(**{k: v for k, v in r.items() if k in known[1]}) for r in content["records"]]
    for record in records:
        record.note = without_colors(record.note)
        for name in ("error", "torch_error"):  # without bound they are the text 'inf'
            value = getattr(record, name)
            setattr(record, name, None if value is None else float(value))
    return head, records


def to_csv(records: Sequence[Record]) -> str:
    """The records as CSV with a column for every field but the nested ones."""
    names = [f.name for f in fields(Record) if f.name not in ("resources", "collectives")]
    out = io.StringIO()
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(record) for record in records)
    return out.getvalue()


def in_words(record: Record) -> str:
    """A record of a command that shows one result a line."""
    parts = [f"{record.op} {record.n_rows}x{record.n_cols} {record.case} {record.system}: {record.status}"]
    if record.ms is not None:
        parts.append(f"{record.ms:.3f} ms")
    if record.fraction:
        parts.append(f"{1 / record.fraction:.3f} of {record.ceiling}")
    if record.peak_bytes is not None:
        parts.append(f"{record.peak_bytes / 1e9:.2f} GB")
    if record.collectives:
        parts.append(f"{len(record.collectives['names'])} collectives, {record.collectives['bytes_given']} bytes")
    return ", ".join([*parts, *([record.note] if record.note else [])])


class Results:
    """The header and the records of a run; `file`, where there is one, has all of them after each `add`."""

    def __init__(self, head: Header, file: Path | None, show: Callable[[Record], None] = lambda record: None) -> None:
        self.head, self.file, self.show = head, file, show
        self.records: list[Record] = []

    def add(self, *records: Record) -> None:
        """Keep, show and write more records."""
        self.records += records
        for record in records:
            self.show(record)
        self._write()

    def finish(self) -> list[Record]:
        """Write that the run came to its end; returns all records."""
        self.head.finished = True
        self._write()
        return self.records

    def _write(self) -> None:
        if self.file is not None:
            write_atomically(self.file, to_json(self.head, self.records))
