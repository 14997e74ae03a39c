"""The roofline as SVG: operations a second against operations for each byte, with the call as a point.

The SVG is made without a plotting package. Its colors are those of the page that shows it, or follow the reader's
choice of light or dark.
"""

from __future__ import annotations

import math
from html import escape

from fused_softmax.lab.roofline.predict import Prediction

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 34, 48
COLORS = (
    "svg{--ink:#1d1d1f;--line:#9a9a9a;--mark:#c62800;--paper:#fff}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e8e8ea;--line:#7d7d7d;--mark:#ff7b54;--paper:#16181d}}"
)


def roofline_svg(said: Prediction) -> str:
    """The roofline of said.gpu and the point of the call at its floor, as a standalone SVG."""
    gpu = said.gpu
    reached = said.operations * said.n_rows * said.n_cols / said.floor.least / 1e3  # 10^9 operations a second
    low_x, high_x = 2.0 ** math.floor(math.log2(min(said.intensity, 0.25))), 2.0 ** math.ceil(math.log2(4 * gpu.ridge))
    high_y = 2.0 ** math.ceil(math.log2(1.5 * gpu.gflops))
    low_y = 2.0 ** math.floor(math.log2(min(low_x * gpu.gbps, reached)))

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low_x) / math.log(high_x / low_x)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(value / low_y) / math.log(high_y / low_y)

    about = (
        f"Roofline of {gpu.name}: {said.intensity:.2f} operations for each byte, "
        f"the ridge point is at {gpu.ridge:.1f}; {said.floor.binds} binds"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(about)}" font-family="system-ui,sans-serif" font-size="12">',
        f"<style>{COLORS}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="var(--paper)"/>',
        _text(LEFT, 20, f"{said.op}, {said.n_rows:,} x {said.n_cols:,} {said.dtype} on {gpu.name}", weight=True),
    ]
    for tick in _powers(low_x, high_x):
        parts.append(_line(x(tick), HEIGHT - BOTTOM, x(tick), HEIGHT - BOTTOM + 4))
        parts.append(_text(x(tick), HEIGHT - BOTTOM + 17, f"{tick:g}", anchor="middle"))
    for tick in _powers(low_y, high_y):
        parts.append(_line(LEFT - 4, y(tick), LEFT, y(tick)))
        label = f"{tick / 1e3:.3g}k" if tick >= 1000 else f"{tick:g}"
        parts.append(_text(LEFT - 7, y(tick) + 4, label, anchor="end"))
    parts += [
        _line(LEFT, TOP, LEFT, HEIGHT - BOTTOM),
        _line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "operations for each byte", anchor="middle"),
        _text(LEFT + 6, TOP + 8, "10^9 operations a second"),
    ]
    start = max(low_x, low_y / gpu.gbps)
    roof = [(start, start * gpu.gbps), (gpu.ridge, gpu.gflops), (high_x, gpu.gflops)]
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in roof)
    parts.append(f'<polyline points="{path}" fill="none" stroke="var(--ink)" stroke-width="2"/>')
    parts.append(_line(x(gpu.ridge), y(gpu.gflops), x(gpu.ridge), HEIGHT - BOTTOM, dashes=True))
    parts.append(_text(x(gpu.ridge) + 5, HEIGHT - BOTTOM - 8, f"ridge point {gpu.ridge:.1f}"))
    at = x(said.intensity), y(reached)
    parts.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="5" fill="var(--mark)"/>')
    parts.append(_text(at[0] + 9, at[1] + 14, f"at least {said.floor.least:,.1f} us: {said.floor.binds} binds"))
    return "".join([*parts, "</svg>\n"])


def _powers(low: float, high: float) -> list[float]:
    """About eight powers of two between two numbers."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    return [2.0**n for n in range(first, last + 1, max(1, -(-(last - first) // 8)))]


def _line(x1: float, y1: float, x2: float, y2: float, dashes: bool = False) -> str:
    dashed = ' stroke-dasharray="4 3"' if dashes else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="var(--line)"{dashed}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", weight: bool = False) -> str:
    bold = ' font-weight="bold"' if weight else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="var(--ink)"{bold}>{escape(text)}</text>'
