"""The plot that the write-ups draw: width against the fraction of the device's own copy, one line per system.

Only records that passed their check are drawn. The picture depends on the records alone: no dates in its metadata.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from fused_softmax.bench.ops import SHORT
from fused_softmax.bench.record import Header, Record
from fused_softmax.bench.report import by_width, system_names

# ours is black and thick; the others take colours that stay apart for the colour-blind (Okabe and Ito, 2008)
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#8C6D31", "#7F7F7F")
MARKS = ("o", "s", "^", "v", "D", "P", "X", "<", ">", "*")
# powers of two that people know, and the vocabularies
TICKS = (256, 1024, 4096, 16384, 50257, 128256, 262144, 1048576)


def _thousands(width: int) -> str:
    if width % 2**20 == 0:
        return f"{width >> 20}M"
    return f"{width >> 10}k" if width % 2**10 == 0 else f"{width:,}"


def draw(head: Header, records: Sequence[Record], image: str = "png") -> bytes | None:
    """A picture (png or svg) with one panel per dtype; None when nothing was timed against a ceiling."""
    records = by_width(records)
    ceilings = {r.ceiling for r in records if r.ceiling}
    timed = [r for r in records if r.fraction is not None and r.status == "ok" and r.system not in ceilings]
    if not timed:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    dtypes = [d for d in SHORT if any(r.dtype == d for r in timed)]
    names = system_names(timed)
    with plt.rc_context({"svg.hashsalt": "fused-softmax", "font.size": 9}):
        figure, panels = plt.subplots(1, len(dtypes), figsize=(6.2 * len(dtypes), 4.2), sharey=True, squeeze=False)
        for panel, dtype in zip(panels[0], dtypes, strict=True):
            for i, name in enumerate(names):
                points = sorted((r.n_cols, r.fraction) for r in timed if r.dtype == dtype and r.system == name)
                if points:
                    ours = name == "fused_softmax"
                    panel.plot(
                        *zip(*points, strict=True),
                        label=name,
                        color="black" if ours else COLOURS[i % len(COLOURS)],
                        linewidth=2.2 if ours else 1.1,
                        marker=MARKS[i % len(MARKS)],
                        markersize=4,
                        zorder=3 if ours else 2,
                    )
            panel.axhline(1.0, color="0.6", linewidth=0.8, linestyle=":")
            panel.set_xscale("log", base=2)
            shown = [w for w in TICKS if min(r.n_cols for r in timed) <= w <= max(r.n_cols for r in timed)]
            panel.set_xticks(shown, [_thousands(w) for w in shown], rotation=45)
            panel.minorticks_off()
            panel.set_xlabel("columns")
            panel.set_title(f"{timed[0].op}, {SHORT[dtype]}, {head.device}")
            panel.grid(alpha=0.25)
        panels[0][0].set_ylabel(f"fraction of the device's own {'/'.join(sorted(ceilings)) or 'copy'}")
        panels[0][0].set_ylim(bottom=0)
        panels[0][-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        figure.tight_layout()
        out = io.BytesIO()
        metadata = {"Date": None, "Creator": None} if image == "svg" else {"Software": None}
        figure.savefig(out, format=image, dpi=110, metadata=metadata, bbox_inches="tight")
        plt.close(figure)
    return out.getvalue()
