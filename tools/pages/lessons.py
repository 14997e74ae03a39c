"""The site's pages of the lessons: text, formula, diagram of reads and writes, kernel, mistakes, recorded results.

All of it comes from the lesson's module, from its kernel as the interpreter runs it, and from the records of an H200.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fused_softmax.lab import lessons
from fused_softmax.lab.grading.accesses import Diagram, diagrams
from fused_softmax.lab.grading.puzzle import answer, core_lines, has_puzzle
from fused_softmax.lab.grading.subjects import subject_of
from fused_softmax.lab.grading.worker import lesson_mistakes
from fused_softmax.lab.lessons.sources import SOURCES
from fused_softmax.lab.record import Header, Record
from fused_softmax.lab.results import gpu_folder, read_folder
from fused_softmax.lab.roofline.counters import STALLS
from fused_softmax.lab.roofline.predict import OURS
from pages import performance
from pages.formulas import FORMULAS
from pages.lesson_pictures import bars_svg, diagram_svg

FOLDER = Path("docs") / "lessons"
PROFILE = Path("benchmarks") / "results" / "h200-profile" / "profile.json"
FLOORS = PROFILE.with_name("floors.json")
DTYPE = "bfloat16"
MOST_WIDTHS = 4
SHIPPED = "kernels/softmax_resident.py"
# lessons on another op than softmax -> the shipped op
SHIPPED_OPS = {12: "softmax_backward", 13: "cross_entropy", 14: "masked_softmax_causal", 15: ""}


def systems_of(n: int) -> tuple[str, ...]:
    """The systems of the benchmark that a lesson's measurement names."""
    words = _command(n).split()
    return tuple(words[words.index("--systems") + 1].split(","))


def _command(n: int) -> str:
    return next(line for line in lessons.parts(n)["Measurement"].splitlines() if line.startswith("$ "))


def results(n: int, records: Sequence[Record]) -> list[str]:
    """Bars of the recorded fractions at the widths of the lesson's measurement: the lesson next to the one before."""
    words = _command(n).split()
    widths = [int(w) for w in words[words.index("--widths") + 1].split(",")]
    # a measurement of another op shows the shipped kernel
    own, op = (
        ("fused_softmax", words[words.index("--op") + 1]) if "--op" in words else (lessons.load(n).SYSTEM, "softmax")
    )
    out = []
    for width in widths[:MOST_WIDTHS]:
        found: dict[str, Record] = {}
        for r in records:
            big = r.n_rows * r.n_cols > 2**26
            if r.op == op and r.dtype == DTYPE and r.n_cols == width and r.fraction and r.status == "ok" and big:
                found.setdefault(r.system, r)
        named = [name for name in systems_of(n) if name in found]
        if named:
            ceiling = found[named[0]].ceiling
            title = f"{found[named[0]].n_rows:,} x {width:,}, fraction of the {ceiling} (higher is better)"
            out.append(bars_svg(title, [(name, found[name].fraction or 0.0, name == own) for name in named]))
    return out


def profiled(n: int, profiles: Sequence[Mapping[str, Any]]) -> str:
    """A table of Nsight Compute's counters of this lesson, or nothing where none are recorded."""
    # the tenth lesson's kernel is the shipped softmax; its other ops are not the lesson's
    system = lessons.load(n).SYSTEM
    mine = [p for p in profiles if p["system"] == system and not p["failed"] and (n != 10 or p["op"] == "softmax")]
    if not mine:
        return ""
    rows = [
        "| shape | read, MB (model) | written, MB (model) | of the peak | L2 hits | sectors a load | mostly, a warp |",
        "|---|---|---|---|---|---|---|",
    ]
    for p in mine:
        c = p["counters"]
        stall = max((name for name in c if name.startswith("stall_")), key=lambda name: c[name], default="")
        rows.append(
            f"| {p['n_rows']:,} x {p['n_cols']:,} | {p['read'] / 1e6:,.0f} ({p['predicted_read'] / 1e6:,.0f}) "
            f"| {p['written'] / 1e6:,.0f} ({p['predicted_written'] / 1e6:,.0f}) | {c.get('peak', 0) / 100:.2f} "
            f"| {c.get('l2_hits', 0):.0f}% | {c.get('load_sectors', 0):.1f} | {STALLS.get(stall[6:], '')} |"
        )
    return "\n".join(rows)


def stepped(n: int, root: Path) -> list[str]:
    """Bars of a lesson's steps, from their record where there is one."""
    file = root / PROFILE.with_name(f"steps_{n}.json")
    if not file.exists():
        return []
    out = []
    for case in json.loads(file.read_text(encoding="utf-8"))["cases"]:
        title = f"{case['n_rows']:,} x {case['n_cols']:,}, fraction of the copy (higher is better)"
        last = case["steps"][-1]["step"]
        out.append(bars_svg(title, [(s["step"], s["fraction"], s["step"] == last) for s in case["steps"]]))
    return out


def timed(n: int, root: Path) -> str:
    """Bars of the lesson's time and of the shipped op's over their floors, or nothing where they are not recorded."""
    file = root / FLOORS
    if not file.exists():
        return ""
    floors = json.loads(file.read_text(encoding="utf-8"))["floors"]
    system = lessons.load(n).SYSTEM
    mine = [f for f in floors if f["system"] == system and f["op"] == subject_of(n).function]
    if n == 10 or not mine:
        return ""
    own = mine[0]
    rows = [(system, 1 / own["over"], True)]
    for f in floors:
        if f["system"] == OURS and f["op"] == SHIPPED_OPS.get(n, "softmax") and f["n_cols"] == own["n_cols"]:
            rows.append((f"shipped {f['op']}", 1 / f["over"], False))
    title = f"{own['n_rows']:,} x {own['n_cols']:,}, fraction of the floor's speed (higher is better)"
    return bars_svg(title, rows)


def kernel_source(n: int) -> tuple[str, list[int]]:
    """The lesson's kernel, or where it has none that of its puzzle's answer, and the numbers of its important lines.

    A lesson without a kernel and without a puzzle has neither: its file is shown as a whole.
    """
    kernel = _function(inspect.getsource(lessons.load(n)))
    if not has_puzzle(n):
        return "\n".join(kernel or ()), []
    kernel = kernel or _function(answer(n)) or []
    core = core_lines(n)
    marked = [i for i, line in enumerate(kernel, 1) if line.split("  #")[0].strip() in core]
    return "\n".join(kernel), marked


def _function(source: str) -> list[str] | None:
    """The lines of the first Triton kernel of a file; of its only function where it has one."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    kernels = [f for f in functions if any("jit" in ast.unparse(d) for d in f.decorator_list)]
    if not kernels and len(functions) > 1:
        return None
    chosen = (kernels or functions)[0]
    first = chosen.decorator_list[0].lineno if chosen.decorator_list else chosen.lineno
    lines = source.splitlines()[first - 1 : chosen.end_lineno]
    # a puzzle's marks around its core
    return [line for line in lines if not line.strip().startswith("# write: ") and line.strip() != "# end"]


def page(
    n: int, shown: Diagram, records: Sequence[Record], profiles: Sequence[Mapping[str, Any]], root: Path = Path(".")
) -> str:
    """The page of lesson n as Markdown."""
    parts = lessons.parts(n)
    source, marked = kernel_source(n)
    lines = f' hl_lines="{" ".join(map(str, marked))}"' if marked else ""
    moved = f"{shown.reads:,} elements read and {shown.writes:,} written"
    out = [f"# {lessons.title(n)}", f"## Problem\n\n{parts['Problem']}"]
    out.append(f"## Mechanism\n\n{parts['Mechanism']}")
    if n in FORMULAS:
        out.append(f'<div class="scrolls">{FORMULAS[n]}</div>')
    if shown.accesses:
        out.append(
            "## What is read and written, and when\n\n"
            f"The accesses of the kernel on {shown.shape[0]:,} x {shown.shape[1]:,} elements, in order: {moved}. Each "
            "rectangle is the whole tensor; the filled part is what one access touches.\n\n"
            f'<div class="scrolls">{diagram_svg(shown)}</div>'
        )
    if source:
        whole = f" It runs one idea of `{SHIPPED}`, for one program." if n == 10 else ""
        out.append(f"## The kernel\n\nThe marked lines are its core.{whole}\n\n```{{.python{lines}}}\n{source}\n```")
    out.append(f"## Resource trade-off\n\n{parts['Resource trade-off']}")
    out.append(f"## Common failure mode\n\n{parts['Common failure mode']}")
    if has_puzzle(n):
        named = "\n".join(f"| {m.name} | {m.hint} |" for m in lesson_mistakes(n))
        out.append(
            "## Write it yourself\n\nThe first command writes the kernel with its core left out. The second grades "
            "what you wrote, without a GPU, too.\n\n"
            f"    fused-softmax lesson {n} --puzzle\n    fused-softmax lesson {n} --try lesson_{n:02}.py\n\n"
            f"The grader knows these mistakes by name:\n\n| mistake | what to do |\n|---|---|\n{named}"
        )
    measurement = parts["Measurement"].replace(_command(n), f"\n    {_command(n)[2:]}")
    out.append(f"## Measurement\n\n{measurement}")
    if bars := results(n, records):
        out.append(f'Recorded on one H200, bfloat16:\n\n<div class="scrolls">{"<br>".join(bars)}</div>')
    if steps := stepped(n, root):
        out.append(f'The steps, recorded on one H200, bfloat16:\n\n<div class="scrolls">{"<br>".join(steps)}</div>')
    if drawn := timed(n, root):
        out.append(
            "The call timed on one H200, bfloat16, next to the shipped op if there is one. The floor is predicted by "
            f'`fused-softmax explain`.\n\n<div class="scrolls">{drawn}</div>'
        )
    if table := profiled(n, profiles):
        out.append(
            "Counted by Nsight Compute on one H200 (`fused-softmax profile`), next to the bytes that the model of "
            f"`fused-softmax explain` counts:\n\n{table}"
        )
    cited = "\n".join(f"- {source.text}: {what}. <{source.url}>" for source, what in SOURCES[n])
    out.append(f"## Sources\n\n{cited}")
    text = inspect.getsource(lessons.load(n)).rstrip()
    out.append(f'??? note "The whole file"\n\n    ```python\n{_indented(text)}\n    ```')
    return "\n\n".join(out) + "\n"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def _named(one: Mapping[str, Any]) -> str:
    return f"`{one['system']}`" + (f" {one['op']}" if one["system"] == OURS else "")


def profile_records(root: Path) -> list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """(header, profiles) of each record of `fused-softmax profile`, the oldest first."""
    files = sorted((root / PROFILE).parent.glob(f"{PROFILE.stem}*.json"))
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return sorted(((one["header"], one["profiles"]) for one in found), key=lambda one: one[0]["date"])


def newest(profiles: Sequence[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """Each system, op and width from the last record that has it."""
    return list({(p["system"], p["op"], p["n_cols"]): p for record in profiles for p in record}.values())


def counted(records: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]], floors: Mapping[str, Any]) -> str:
    """The page of predictions next to what was counted and timed, from records of `fused-softmax profile`."""
    machines = "\n\n".join(_machine(head) for head, _ in records)
    rows = ["| kernel | shape | counted, MB | model, MB | counted over model |", "|---|---|---|---|---|"]
    for p in newest([profiles for _, profiles in records]):
        name, shape = _named(p), f"{p['n_rows']:,} x {p['n_cols']:,}"
        if p["failed"]:
            rows.append(f"| {name} | {shape} | {p['failed']} | | |")
            continue
        both = p["read"] + p["written"], p["predicted_read"] + p["predicted_written"]
        rows.append(f"| {name} | {shape} | {both[0] / 1e6:,.0f} | {both[1] / 1e6:,.0f} | {p['over_model']:.3f} |")
    return (
        f"# Predicted and counted\n\n{machines}\n\n"
        "## Bytes between L2 and memory\n\n"
        "Nsight Compute's count, read and written together, next to the model's. The last lines of a result are in the "
        "L2 when a kernel ends, and are not counted: the model says 22 MB for each kernel that writes a tensor on an "
        "H200. `05_published` has two such kernels, because its output is filled first.\n\n"
        + "\n".join(rows)
        + "".join(f"\n\n    {performance.command(_header(head))}" for head, _ in records)
        + "\n\n## Times\n\n"
        "The median that was measured over the floor that `fused-softmax explain` predicts (lower is better). Above "
        "1.1 the model misses something: launches around a kernel, rows of different lengths, or a plan that is not "
        f"good enough.\n\n{_machine(floors['header'])}\n\n{_over_floors(floors['floors'])}\n\n"
        f"    {performance.command(_header(floors['header']))}\n"
    )


def _machine(head: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    return f"{head['device']}, driver {head['driver']}, {versions}, commit {head['commit'][:7]}, {head['date'][:10]}."


def _over_floors(floors: Sequence[Mapping[str, Any]]) -> str:
    """Our ops by width, then the lessons, each at its width."""
    ours: dict[str, dict[int, float]] = {}
    for f in floors:
        if f["system"] == OURS:
            ours.setdefault(f["op"], {})[f["n_cols"]] = f["over"]
    widths = sorted({n_cols for found in ours.values() for n_cols in found})
    rows = [f"| op | {' | '.join(f'{w:,}' for w in widths)} |", "|---" * (1 + len(widths)) + "|"]
    for op, found in ours.items():
        cells = (f"{found[w]:.2f}" if w in found else "" for w in widths)
        rows.append(f"| {op} | {' | '.join(cells)} |")
    rows += [
        "",
        "| lesson | shape | floor, us | measured, us | measured over floor | binds |",
        "|---|---|---|---|---|---|",
    ]
    for f in floors:
        if f["system"] != OURS:
            shape = f"{f['n_rows']:,} x {f['n_cols']:,}"
            times = f"{f['floor']:.1f} | {f['measured']:.1f} | {f['over']:.2f}"
            rows.append(f"| `{f['system']}` | {shape} | {times} | {f['binds']} |")
    return "\n".join(rows)


def _header(head: Mapping[str, Any]) -> Header:
    return Header(**head)


def recorded(root: Path) -> tuple[list[Record], list[Mapping[str, Any]]]:
    """The benchmark's records, the lessons' run first, and the profiles."""
    runs = read_folder(gpu_folder(root))
    ordered = sorted(runs.items(), key=lambda run: run[0].stem != "ladder")
    return [r for _, (_, records) in ordered for r in records], newest([p for _, p in profile_records(root)])


def write(root: Path) -> list[Path]:
    """Write a page for each lesson; returns the files."""
    records, profiles = recorded(root)
    shown = diagrams()
    files = []
    for n, name in zip(lessons.numbers(), lessons.LESSONS, strict=True):
        file = root / FOLDER / f"{name}.md"
        file.write_text(page(n, shown[n], records, profiles, root), encoding="utf-8")
        files.append(file)
    if (root / PROFILE).exists():
        file = root / FOLDER / "l_predicted_and_counted.md"
        floors = json.loads((root / FLOORS).read_text(encoding="utf-8"))
        file.write_text(counted(profile_records(root), floors), encoding="utf-8")
        files.append(file)
    return files
