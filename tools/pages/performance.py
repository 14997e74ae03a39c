"""The site's pages of performance: for each op plots, bars, what is lost and the command, from benchmarks/results/h200.

An op without a recorded result has no page, and no op or number stands here by hand.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from fused_softmax.lab.bench import plots
from fused_softmax.lab.bench.inputs import SHORT
from fused_softmax.lab.bench.ops import OPS
from fused_softmax.lab.bench.report import Rows, by_width, ceilings_of, matrix, plural, shape, system_names
from fused_softmax.lab.record import Header, Record, without_folders
from fused_softmax.lab.results import gpu_folder, read_folder
from pages.readme import origins

FOLDER = Path("docs") / "performance"
STYLES = Path("docs") / "stylesheets" / "plots.css"
# of the many widths those that a reader looks for: narrow, odd, wide, and the vocabularies
TABLE_WIDTHS = (256, 1000, 1024, 2048, 4096, 8192, 16384, 32000, 50257, 65536, 128256, 151936, 262144, 1048576)
# a difference of less than this is the spread of a run
SPREAD = 0.02
MOST_LOSSES = 12
Runs = Sequence[tuple[Header, Sequence[Record]]]


def runs_by_op(found: Mapping[Path, tuple[Header, list[Record]]]) -> dict[str, list[tuple[Header, list[Record]]]]:
    """The runs of each op that was timed against a ceiling, in the registry's order, the lessons' run last."""
    runs: dict[str, list[tuple[Header, list[Record]]]] = {}
    for op in OPS:
        for head, records in sorted(found.values(), key=lambda run: len({r.system for r in run[1]})):
            mine = [r for r in records if r.op == op]
            if any(r.fraction for r in mine):
                runs.setdefault(op, []).append((head, mine))
    return runs


def bars(op: str, records: Sequence[Record]) -> str:
    """The geometric mean of the fractions of each system, as bars: one SVG of all dtypes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ceilings = ceilings_of(records)
    names = [name for name in system_names(records) if name not in ceilings]
    means = {name: _mean(name, records) for name in names}
    shown = sorted((name for name in names if means[name]), key=lambda name: means[name])
    ink = plots.drawn_in(plots.INK)
    style: Any = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), ink)
    with plt.rc_context({**style, "svg.hashsalt": f"bars {op}", "svg.fonttype": "none", "font.size": 10.5}):
        figure, panel = plt.subplots(figsize=(5.4, 0.8 + 0.3 * len(shown)), facecolor="none")
        panel.set_facecolor("none")
        colors = [plots.drawn_in(plots.line_of(name)) for name in shown]
        drawn = panel.barh(shown, [means[name] for name in shown], color=colors, height=0.7)
        panel.bar_label(drawn, [f"{means[name]:.2f}" for name in shown], padding=3)
        panel.axvline(1.0, color=ink, linewidth=1.2, linestyle=(0, (4, 3)))
        panel.set_xlim(0, max(1.15, 1.12 * max(means.values())))
        panel.set_xlabel(f"fraction of {'/'.join(ceilings)}, geometric mean (higher is better)")
        panel.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    about = ", ".join(f"{name} {means[name]:.2f}" for name in reversed(shown))
    return plots.finish(out.getvalue(), f"{op}, geometric mean of the fractions: {about}", False)


def _mean(system: str, records: Sequence[Record]) -> float:
    fractions = [r.fraction for r in records if r.system == system and r.fraction and r.status == "ok"]
    return geometric_mean(fractions) if fractions else 0.0


def losses(records: Sequence[Record]) -> list[str]:
    """Cases where another system takes less time than ours by more than the spread, the largest difference first."""
    ceilings = ceilings_of(records)
    cases: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        if r.ms and r.status == "ok" and r.system not in ceilings:
            cases.setdefault((shape(r), r.timed_by), []).append(r)
    found = []
    for (at, timed_by), met in cases.items():
        ours = next((r for r in met if r.system == plots.OURS), None)
        best = min((r for r in met if not r.system.startswith(plots.OURS)), key=lambda r: r.ms or 0.0, default=None)
        if ours and best and (ours.ms or 0.0) > (1 + SPREAD) * (best.ms or 0.0):
            ratio = (ours.ms or 0.0) / (best.ms or 1.0)
            how = "" if timed_by == "CUDA events" else f" ({timed_by})"
            found.append((ratio, f"{at}: `{best.system}` is {ratio:.2f} times as fast{how}"))
    return [line for _, line in sorted(found, reverse=True)]


def markdown(rows: Rows) -> str:
    """A table as Markdown, ours in bold."""
    lines = ["| " + " | ".join(rows.columns) + " |", "|---" * len(rows.columns) + "|"]
    ours = [column.startswith(plots.OURS) for column in rows.columns]
    for row in rows.rows:
        lines.append("| " + " | ".join(f"**{c}**" if own and c else c for c, own in zip(row, ours, strict=True)) + " |")
    return "\n".join(lines)


def command(head: Header) -> str:
    """The command of a run, without the folders of the machine that it ran on."""
    return without_folders(head.command)


def page(op: str, runs: Runs) -> str:
    """The page of one op."""
    parts = [f"# {op}", f"`{op}` next to its peers, in fractions of the device's own pass over the same bytes."]
    for head, records in runs:
        lessons = any(plots.line_of(r.system) is plots.LESSONS for r in records)
        if len(runs) > 1:
            parts.append("## With the lessons' kernels" if lessons else "## Next to its peers")
        panels = plots.panels_of(records).get(op, {})
        figures = [f"<figure>{plots.draw(op, dtype, rows).strip()}</figure>" for dtype, rows in panels.items()]
        drawn = [r for rows in panels.values() for r in rows]
        figures.append(f"<figure>{bars(op, drawn).strip()}</figure>")
        parts.append(f'<div class="plots">{"".join(figures)}</div>')
        parts.append(
            "The dashed line is the device's own pass in the same run. A cross at 0 is a result that is wrong, refused "
            "or out of resources. The bars average the cases in which a system has a time."
        )
        lost = losses(records)
        parts.append("#" * (2 + (len(runs) > 1)) + " What we lose")
        fewest = f"`{plots.OURS}` is the fastest, within {SPREAD:.0%}, in every case of this run."
        parts.append("\n".join(f"- {line}" for line in lost[:MOST_LOSSES]) or fewest)
        if len(lost) > MOST_LOSSES:
            parts.append(f"And {plural(len(lost) - MOST_LOSSES, 'case')} more with a smaller difference.")
        parts.append("#" * (2 + (len(runs) > 1)) + " Table")
        kept = [r for r in by_width(records) if r.n_cols in TABLE_WIDTHS]
        parts += [matrix(op, kept).title.split(": ", 1)[1].capitalize() + ":", markdown(matrix(op, kept))]
        parts.append(f"{origins([head])} Run it again on a GPU:")
        parts.append(f"    {command(head)}")
    return "\n\n".join(parts) + "\n"


def index(runs: Mapping[str, Runs]) -> str:
    """The overview: a line for each op and dtype."""
    rows = ["| op | dtype | pass | ours, worst to best | best other system, mean | page |", "|---|---|---|---|---|---|"]
    for op, found in runs.items():
        for dtype, drawn in plots.panels_of(found[0][1]).get(op, {}).items():
            ours = [r.fraction for r in drawn if r.system == plots.OURS and r.fraction and r.status == "ok"]
            others = {r.system: _mean(r.system, drawn) for r in drawn if not r.system.startswith(plots.OURS)}
            best = max(others, key=lambda name: others[name], default="")
            span = f"**{min(ours):.2f} to {max(ours):.2f}**" if ours else "not timed"
            other = f"`{best}` {others[best]:.2f}" if best else ""
            what = "/".join(ceilings_of(drawn))
            rows.append(f"| `{op}` | {SHORT[dtype]} | {what} | {span} | {other} | [plots](op-{op}.md) |")
    text = (
        "# Performance\n\nFractions of the device's own copy, read or add of the same bytes in the same run (higher is "
        "better). [How it is measured](../benchmarks.md) defines each word. Every page is made from the JSON records "
        "in `benchmarks/results/h200`, and names what another system does faster.\n\n"
    )
    return text + "\n".join(rows) + "\n"


def write(root: Path) -> list[Path]:
    """Write the pages and the plots' colors; returns the files."""
    runs = runs_by_op(read_folder(gpu_folder(root)))
    texts = {
        FOLDER / "index.md": index(runs),
        **{FOLDER / f"op-{op}.md": page(op, found) for op, found in runs.items()},
    }
    schemes = ('[data-md-color-scheme="default"]', False), ('[data-md-color-scheme="slate"]', True)
    texts[STYLES] = "\n".join(plots.css(selector, dark) for selector, dark in schemes) + "\n"
    for old in (root / FOLDER).glob("op-*.md"):
        old.unlink()
    for file, text in texts.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text, encoding="utf-8")
    return [root / file for file in texts]
