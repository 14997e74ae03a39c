"""Pictures of the lessons' pages as SVG: who reads and writes what and when, and recorded results as bars."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fused_softmax.lab.grading.accesses import Diagram

MOST_PROGRAMS, MOST_STEPS = 4, 12
MAP_WIDTH, MAP_HEIGHT, GAP, LABEL = 84, 44, 12, 74
TEXT = 'font-family="system-ui,sans-serif" font-size="10" fill="currentColor"'


def short(name: str) -> str:
    """x_ptr -> x."""
    return name.removesuffix("_ptr")


def diagram_svg(shown: Diagram) -> str:
    """A line for each of some programs; in it a small picture of the tensor for each access, in order."""
    programs = sorted({access[0] for access in shown.accesses})
    if len(programs) > MOST_PROGRAMS:
        step = (len(programs) - 1) / (MOST_PROGRAMS - 1)
        programs = [programs[round(i * step)] for i in range(MOST_PROGRAMS)]
    lines = [[a for a in shown.accesses if a[0] == program] for program in programs]
    steps = min(MOST_STEPS, max(map(len, lines)))
    width = LABEL + steps * (MAP_WIDTH + GAP)
    height = len(lines) * (MAP_HEIGHT + 34) + 6
    unit = "pass" if shown.lesson == 1 else "program"
    about = (
        f"Reads and writes of {shown.shape[0]} x {shown.shape[1]} elements in order: {len(lines)} of the {unit}s, "
        f"{shown.reads:,} elements read and {shown.writes:,} written in all"
    )
    parts = [
        f'<svg class="accesses" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" role="img" aria-label="{escape(about)}">'
    ]
    for i, (program, accesses) in enumerate(zip(programs, lines, strict=True)):
        top = i * (MAP_HEIGHT + 34) + 16
        parts.append(f'<text x="0" y="{top + MAP_HEIGHT / 2 + 4}" {TEXT}>{unit} {program}</text>')
        for j, access in enumerate(accesses[:steps]):
            parts += _cell(access, LABEL + j * (MAP_WIDTH + GAP), top, shown.shape)
        if len(accesses) > steps:
            parts.append(f'<text x="{width - GAP}" y="{top - 4}" text-anchor="end" {TEXT}>and so on</text>')
    return "".join([*parts, "</svg>"])


def _cell(access: Sequence[object], x: float, y: float, shape: tuple[int, int]) -> list[str]:
    _, kind, name, first, last, count = access
    assert isinstance(first, int) and isinstance(last, int) and isinstance(count, int)
    parts = [f'<text x="{x}" y="{y - 4}" {TEXT}>{kind} {escape(short(str(name)))}: {count:,}</text>']
    if last < shape[0] * shape[1] and (count > 1 or last >= shape[0]):
        parts.append(f'<rect class="tensor" x="{x}" y="{y}" width="{MAP_WIDTH}" height="{MAP_HEIGHT}"/>')
        for left, top, wide, high in areas(first, last, count, shape):
            parts.append(
                f'<rect class="{kind}" x="{x + left * MAP_WIDTH:.2f}" y="{y + top * MAP_HEIGHT:.2f}" '
                f'width="{max(1.0, wide * MAP_WIDTH):.2f}" height="{max(1.0, high * MAP_HEIGHT):.2f}"/>'
            )
    else:  # a number for each row, or more than one tensor
        whole = count > shape[0]
        wide = MAP_WIDTH if whole else 6
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{wide}" height="{MAP_HEIGHT}"/>')
    return parts


def areas(first: int, last: int, count: int, shape: tuple[int, int]) -> list[tuple[float, float, float, float]]:
    """The parts (left, top, width, height) of a tensor of that shape that an access touches, in fractions of 1."""
    n_rows, n_cols = shape
    (top, left), (bottom, right) = divmod(first, n_cols), divmod(last, n_cols)
    if (bottom - top + 1) * (right - left + 1) == count:  # a rectangle
        return [(left / n_cols, top / n_rows, (right - left + 1) / n_cols, (bottom - top + 1) / n_rows)]
    found = []
    for row in range(top, bottom + 1):
        begin, end = (left if row == top else 0), (right if row == bottom else n_cols - 1)
        found.append((begin / n_cols, row / n_rows, (end - begin + 1) / n_cols, 1 / n_rows))
    return found


def bars_svg(title: str, values: Sequence[tuple[str, float, bool]]) -> str:
    """Fractions as bars: (label, value, whether it is this lesson's); the dashed line is the copy."""
    width, left, line = 460, 130, 24
    most = max(1.1, *(1.05 * value for _, value, _ in values))
    scale = (width - left - 40) / most
    height = 26 + line * len(values)
    said = ", ".join(f"{label} {value:.2f}" for label, value, _ in values)
    parts = [
        f'<svg class="bars" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" aria-label="{escape(title)}: {escape(said)}">',
        f'<text x="0" y="12" {TEXT} font-weight="bold">{escape(title)}</text>',
    ]
    for i, (label, value, own) in enumerate(values):
        y = 22 + i * line
        parts.append(f'<text x="{left - 6}" y="{y + 12}" text-anchor="end" {TEXT}>{escape(label)}</text>')
        kind = "own" if own else "other"
        parts.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{value * scale:.1f}" height="16"/>')
        parts.append(f'<text x="{left + value * scale + 5:.1f}" y="{y + 12}" {TEXT}>{value:.2f}</text>')
    at = left + scale
    parts.append(f'<line class="copy" x1="{at:.1f}" y1="18" x2="{at:.1f}" y2="{height}"/>')
    return "".join([*parts, "</svg>"])
