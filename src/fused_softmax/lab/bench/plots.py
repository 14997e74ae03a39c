"""The plot that the write-ups draw: width against the fraction of the device's own copy, one line per system.

Only records that passed their check are drawn. The picture depends on the records alone: no dates in its metadata.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from fused_softmax.lab.bench.inputs import SHORT
from fused_softmax.lab.bench.record import Header, Record
from fused_softmax.lab.bench.report import by_width, system_names

# ours is black and thick; color-blind readers can tell the others apart (Okabe and Ito, 2008)
COLORS = ("#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#8C6D31", "#7F7F7F")
MARKS = ("o", "s", "^", "v", "D", "P", "X", "<", ">", "*")
# powers of two that people know, and the vocabularies
TICKS = (256, 1024, 4096, 16384, 50257, 128256, 262144, 1048576)


def _thousands(width: int) -> str:
    if width % 2**20 == 0:
        return f"{width >> 20}M"
    return f"{width >> 10}k" if width % 2**10 == 0 else f"{width:,}"


def panels_of(records: Sequence[Record]) -> dict[str, dict[str, list[Record]]]:
    """What is drawn, by op and dtype: records timed against a ceiling that passed their check, ceilings left out."""
    records = by_width(records)
    ceilings = {r.ceiling for r in records if r.ceiling}
    timed = [r for r in records if r.fraction is not None and r.status == "ok" and r.system not in ceilings]
    return {
        op: {d: found for d in SHORT if (found := [r for r in timed if r.op == op and r.dtype == d])}
        for op in dict.fromkeys(r.op for r in timed)
    }


def draw(head: Header, records: Sequence[Record], image: str = "png") -> bytes | None:
    """A picture (png or svg), a row of panels for each op, one for each dtype; None when nothing was timed."""
    by_op = panels_of(records)
    if not by_op:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    most = max(len(panels) for panels in by_op.values())
    # a system has the same color in every panel
    names = system_names([r for panels in by_op.values() for found in panels.values() for r in found])
    with plt.rc_context({"svg.hashsalt": "fused-softmax", "font.size": 9}):
        size = 6.2 * most, 4.2 * len(by_op)
        figure, grid = plt.subplots(len(by_op), most, figsize=size, sharey="row", squeeze=False)
        for row, (op, panels) in zip(grid, by_op.items(), strict=True):
            everything = [r for found in panels.values() for r in found]
            narrowest, widest = min(r.n_cols for r in everything), max(r.n_cols for r in everything)
            shown = [w for w in TICKS if narrowest <= w <= widest] or [narrowest]
            for panel in row[len(panels) :]:
                panel.set_visible(False)
            drawn = row[: len(panels)]
            for panel, (dtype, mine) in zip(drawn, panels.items(), strict=True):
                _lines(panel, mine, names)
                panel.set_xticks(shown, [_thousands(w) for w in shown], rotation=45)
                panel.minorticks_off()
                panel.set_xlabel("columns")
                panel.set_title(f"{op}, {SHORT[dtype]}, {head.device}")
                panel.grid(alpha=0.25)
            ceilings = sorted({r.ceiling for r in everything if r.ceiling})
            drawn[0].set_ylabel(f"fraction of the device's own {'/'.join(ceilings) or 'copy'}")
            drawn[0].set_ylim(bottom=0)
            # of all panels of the row: a system may be in one dtype alone
            found = {
                label: line for panel in drawn for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
            }
            order = [name for name in names if name in found]
            right = dict(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
            drawn[-1].legend([found[name] for name in order], order, **right)
        figure.tight_layout()
        out = io.BytesIO()
        metadata = {"Date": None, "Creator": None} if image == "svg" else {"Software": None}
        figure.savefig(out, format=image, dpi=110, metadata=metadata, bbox_inches="tight")
        plt.close(figure)
    return out.getvalue()


def _lines(panel: Any, records: Sequence[Record], names: Sequence[str]) -> None:
    """Width against fraction: one line for each system."""
    for i, name in enumerate(names):
        points = sorted((r.n_cols, r.fraction or 0.0) for r in records if r.system == name)
        if points:
            ours = name == "fused_softmax"
            panel.plot(
                *zip(*points, strict=True),
                label=name,
                color="black" if ours else COLORS[i % len(COLORS)],
                linewidth=2.2 if ours else 1.1,
                marker=MARKS[i % len(MARKS)],
                markersize=4,
                zorder=3 if ours else 2,
            )
    panel.axhline(1.0, color="0.6", linewidth=0.8, linestyle=":")
    panel.set_xscale("log", base=2)
