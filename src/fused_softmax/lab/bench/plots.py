"""Plots of a run: columns against the fraction of the ceiling, one SVG for each op and dtype.

Only records that passed their check have a line. A wrong, refused or resource-limited record is a cross at 0. The SVG
depends on the records alone. Its colors are CSS variables, so that one picture serves a light and a dark page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fused_softmax.lab.bench.inputs import SHORT
from fused_softmax.lab.bench.report import by_width, ceilings_of, plural, system_names
from fused_softmax.lab.bench.systems import LESSON_NUMBERS
from fused_softmax.lab.record import Record

# powers of two that people know, and the vocabularies
TICKS = (256, 1024, 4096, 16384, 50257, 128256, 262144, 1048576)
OURS = "fused_softmax"


@dataclass(frozen=True)
class Line:
    """How a system is drawn: colors on a light and on a dark page, marker, dashes, width."""

    light: str
    dark: str
    marker: str = ""
    dashes: str = "-"
    width: float = 1.3


LESSONS = Line("#9a9a9a", "#7d7d7d", width=0.7)
OTHERS = Line("#5f5f5f", "#b0b0b0", "X", ":")
LINES: Mapping[str, Line] = {
    OURS: Line("#c62800", "#ff7b54", "o", width=2.6),
    f"{OURS}_in_place": Line("#c62800", "#ff7b54", "o", "--", 1.6),
    "torch": Line("#0067a5", "#5cb3f0", "s"),
    "torch.compile": Line("#00735c", "#43c59e", "^"),
    "liger": Line("#7d5f00", "#d8b53a", "v"),
    "quack": Line("#7440b4", "#bd98f5", "D"),
}
# the page's own colors; contrast with the background is at least 4.5 for ink and 3 for lines
INK, GRID, PAPER = ("#1d1d1f", "#e8e8ea"), ("#dcdce0", "#3a3d44"), ("#ffffff", "#16181d")
_PALETTE: list[Any] = [*dict.fromkeys((*LINES.values(), LESSONS, OTHERS)), INK, GRID, PAPER]
# matplotlib draws in these, and each is then replaced by a CSS variable
_DRAWN = {f"#f5{i:02d}{i:02d}": f"--plot-{i}" for i in range(len(_PALETTE))}


def drawn_in(color: Any) -> str:
    """The color that matplotlib draws in, which `finish` replaces by a CSS variable."""
    return list(_DRAWN)[_PALETTE.index(color)]


def css(selector: str, dark: bool) -> str:
    """The rule that gives the plots' variables their colors, for a light or a dark page."""
    pairs = [(c.light, c.dark) if isinstance(c, Line) else c for c in _PALETTE]
    names = [f"{name}:{pair[dark]}" for name, pair in zip(_DRAWN.values(), pairs, strict=True)]
    return f"{selector}{{{';'.join(names)}}}"


def line_of(system: str) -> Line:
    """How a system is drawn, on every page."""
    return LESSONS if system in LESSON_NUMBERS else LINES.get(system, OTHERS)


def panels_of(records: Sequence[Record]) -> dict[str, dict[str, list[Record]]]:
    """The records of each plot, by op and dtype: those with a time against a ceiling, without the ceiling's own."""
    records = by_width(records)
    ceilings = ceilings_of(records)
    mine = [r for r in records if r.system not in ceilings]
    found: dict[str, dict[str, list[Record]]] = {}
    for op in dict.fromkeys(r.op for r in mine):
        panels = {d: [r for r in mine if r.op == op and r.dtype == d] for d in SHORT}
        timed = {d: rows for d, rows in panels.items() if any(r.fraction and r.status == "ok" for r in rows)}
        if timed:
            found[op] = timed
    return found


def describe(op: str, dtype: str, records: Sequence[Record]) -> str:
    """The plot in a sentence, for readers who do not see it."""
    ours = [r.fraction for r in records if r.system == OURS and r.fraction and r.status == "ok"]
    mine = f"; {OURS} {min(ours):.2f} to {max(ours):.2f} in {plural(len(ours), 'case')}" if ours else ""
    what = "/".join(ceilings_of(records)) or "copy"
    return f"{op}, {SHORT[dtype]}: fraction of the device's own {what} by number of columns (higher is better){mine}"


def draw(op: str, dtype: str, records: Sequence[Record], *, standalone: bool = False) -> str:
    """One plot as SVG. A standalone one brings its colors and background; the others get them from their page."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ink, grid = drawn_in(INK), drawn_in(GRID)
    style: Any = {
        **{"svg.hashsalt": f"{op} {dtype}", "svg.fonttype": "none", "font.size": 10.5, "axes.titlesize": 11},
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), ink),
    }
    what = "/".join(ceilings_of(records)) or "copy"
    with plt.rc_context(style):
        figure, panel = plt.subplots(figsize=(5.4, 4.1), facecolor=drawn_in(PAPER) if standalone else "none")
        panel.set_facecolor("none")
        highest = _lines(panel, records)
        panel.axhline(1.0, color=ink, linewidth=1.2, linestyle=(0, (4, 3)), label=f"{what} (ceiling)", zorder=1.5)
        panel.set_xscale("log", base=2)
        narrowest, widest = min(r.n_cols for r in records), max(r.n_cols for r in records)
        shown = [narrowest]
        for width in (w for w in TICKS if narrowest < w <= widest):
            if width > 2.5 * shown[-1]:  # nearer ones would touch
                shown.append(width)
        panel.set_xticks(shown, [_thousands(w) for w in shown])
        panel.minorticks_off()
        panel.set_ylim(-0.03, max(1.1, highest * 1.05))
        panel.set_title(f"{op}, {SHORT[dtype]}", loc="left", fontweight="bold")
        panel.set_xlabel("columns")
        panel.set_ylabel(f"fraction of {what} (higher is better)")
        panel.grid(color=grid, linewidth=0.7)
        panel.spines[["top", "right"]].set_visible(False)
        named = list(zip(*panel.get_legend_handles_labels(), strict=True))
        handles = {label: line for line, label in sorted(named, key=lambda pair: pair[1] != OURS)}
        figure.legend(
            handles.values(), handles.keys(), loc="lower center", ncol=3, frameon=False, fontsize=9.5, columnspacing=1.2
        )
        figure.tight_layout(rect=(0, 0.01 + 0.05 * -(-len(handles) // 3), 1, 1))
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return finish(out.getvalue(), describe(op, dtype, records), standalone)


def _lines(panel: Any, records: Sequence[Record]) -> float:
    """Columns against fraction: a line for each system, ours last and so on top; returns the highest fraction."""
    names = sorted(system_names(records), key=lambda name: (name == OURS, name not in LESSON_NUMBERS))
    highest, seen = 0.0, False
    for name in names:
        line, mine = line_of(name), [r for r in records if r.system == name]
        points: list[tuple[float, float]] = sorted(
            (r.n_cols, r.fraction) for r in mine if r.fraction and r.status == "ok"
        )
        label = name
        if line is LESSONS:
            label, seen = ("_" if seen else "lessons 01 to 09"), True
        drawn = dict(color=drawn_in(line), linewidth=line.width, linestyle=line.dashes, marker=line.marker or None)
        panel.plot(*zip(*points or [(float("nan"), float("nan"))], strict=True), label=label, markersize=4, **drawn)
        failed = sorted({r.n_cols for r in mine if r.status != "ok"})
        if failed:
            crosses = dict(linestyle="none", marker="x", markersize=5, color=drawn_in(line), clip_on=False)
            panel.plot(failed, [0.0] * len(failed), **crosses)
        highest = max([highest, *(fraction for _, fraction in points)])
    return highest


def _thousands(width: int) -> str:
    if width % 2**20 == 0:
        return f"{width >> 20}M"
    return f"{width >> 10}k" if width % 2**10 == 0 else f"{width / 1000:.0f}k" if width > 9999 else str(width)


def finish(svg: str, about: str, standalone: bool) -> str:
    """matplotlib's SVG with CSS variables for colors, a name for screen readers, the page's font, and less of it."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"font-family: [^;\"]*|font: ([\d.]+px)[^;\"]*", _font, svg)
    for color, name in _DRAWN.items():
        svg = svg.replace(color, f"var({name})")
    svg = re.sub(r"(\d+\.\d\d)\d+", r"\1", svg)
    svg = re.sub(r"\s+", " ", svg).replace("> <", "><")
    # the width comes from the page; a picture of its own keeps matplotlib's
    opening, rest = svg.split(">", 1)
    opening = re.sub(r' (height|width)="[^"]*"', "" if not standalone else r"\g<0>", opening)
    rules = ""
    if standalone:
        rules = f"<style>{css('svg', False)}@media(prefers-color-scheme:dark){{{css('svg', True)}}}</style>"
    return f'{opening} role="img" aria-label="{escape(about)}">{rules}{rest}\n'


def _font(found: re.Match[str]) -> str:
    return f"font: {found[1]} system-ui, sans-serif" if found[1] else "font-family: system-ui, sans-serif"
