"""The report in a real browser: at phone and desktop width, light and dark, from a file on disk.

Its titles name the ops of the run, every plot is there and is drawn, nothing is logged as an error, axe finds nothing,
the page does not scroll sideways, and it is below 1 MB and open within a second.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.browser import open_within

from fused_softmax.lab.bench import plots
from fused_softmax.lab.bench.output import Output
from fused_softmax.lab.bench.report import recorded_results
from fused_softmax.lab.record import Header, Record
from fused_softmax.lab.results import gpu_folder, read_folder

pytestmark = pytest.mark.extended
ROOT = Path(__file__).resolve().parents[3]
VIEWS = [(width, scheme) for width in (390, 1280) for scheme in ("light", "dark")]
LARGEST, SLOWEST = 2**20, 1.0
MEASURE = """found => found.map(f => {
  const box = f.getBoundingClientRect();
  return [box.width, box.height, f.querySelectorAll("path").length, f.querySelectorAll("text").length];
})"""
# out of a folder of screenshots a person can see what the test saw
SHOTS = os.environ.get("FUSED_SOFTMAX_SHOTS")


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[Header, list[Record]]]:
    """Runs to show: of a GPU as recorded, all ops at once, and one without a GPU."""
    found = {file.stem: run for file, run in read_folder(gpu_folder(ROOT)).items()}
    head = found["softmax"][0]
    several = [r for _, records in found.values() for r in records if r.op != "softmax"]
    untimed: dict[str, Any] = dict.fromkeys(("ms", "ms_p10", "ms_p90", "gbps", "fraction", "peak_bytes"))
    here = [replace(r, **untimed, timed_by="", n_rows=3) for r in found["ladder"][1] if r.system != "copy"][:60]
    return {
        "ladder": found["ladder"],
        "softmax": found["softmax"],
        "several ops": (head, several),
        "no GPU": (replace(head, device="CPU (x86_64)", interpreted=True), here),
    }


@pytest.fixture(scope="module")
def pages(runs: dict[str, tuple[Header, list[Record]]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    recorded = recorded_results(gpu_folder(ROOT))
    folder = tmp_path_factory.mktemp("reports")
    return {name: Output(folder / name, recorded=recorded).finish(*run)[0] for name, run in runs.items()}


def drawn_ops(records: list[Record]) -> dict[str, list[str]]:
    return {op: list(panels) for op, panels in plots.panels_of(records).items()}


@pytest.mark.parametrize("name", ["ladder", "softmax", "several ops", "no GPU"])
def test_the_report_is_right_at_every_width_and_in_both_schemes(
    name: str, browser: Any, pages: dict[str, Path], runs: dict[str, tuple[Header, list[Record]]]
):
    from axe_playwright_python.sync_playwright import Axe

    head, records = runs[name]
    assert pages[name].stat().st_size < LARGEST
    ops = list(dict.fromkeys(r.op for r in records))
    backgrounds = set()
    for width, scheme in VIEWS:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        page = context.new_page()
        errors: list[str] = []
        page.on("console", lambda message, errors=errors: errors.append(message.text) if message.type == "error" else 0)
        page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
        open_within(SLOWEST, page, pages[name])
        if SHOTS:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=Path(SHOTS) / f"{name}-{width}-{scheme}.png")

        verb = "measured" if name != "no GPU" else "checked"
        assert page.title() == f"{', '.join(ops)} · fused-softmax bench"
        title = ", ".join(ops) if len(ops) < 4 else f"{len(ops)} ops"
        assert page.locator("h1").inner_text() == f"{title}: {verb} on {head.device}"
        if len(ops) > 3:
            assert page.locator("nav li").all_inner_texts() == ops
        shown = page.eval_on_selector_all("figure", "found => found.map(f => [f.dataset.op, f.dataset.dtype])")
        if name == "no GPU":
            assert {op for op, _ in shown} == {"softmax"}
            assert "recorded" in page.locator("section h2").first.inner_text()
            assert "NVIDIA H200" in page.locator(".mark").first.inner_text()
        else:
            wanted = [[op, dtype] for op, dtypes in drawn_ops(records).items() for dtype in dtypes]
            assert shown == wanted
        # each plot has a name, a place, and lines and text of its own
        drawn = page.eval_on_selector_all("figure svg", MEASURE)
        least = (300, 200, 10, 8)
        assert drawn and all(found > low for each in drawn for found, low in zip(each, least, strict=True))
        assert page.locator('figure svg[role="img"][aria-label]').count() == len(drawn)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        # the large pages have the small ones' parts, and axe takes seconds for their tables
        if name in ("ladder", "no GPU") or (width, scheme) == VIEWS[1]:
            result = Axe().run(page)
            assert not result.response["violations"], result.generate_report()
        levels = page.eval_on_selector_all("h1, h2, h3, h4", "found => found.map(h => +h.tagName[1])")
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(b <= a + 1 for a, b in zip(levels, levels[1:], strict=False))
        assert errors == []
        context.close()
    assert len(backgrounds) == 2, "light and dark look the same"


def test_tables_sort_and_filter_by_keyboard(browser: Any, pages: dict[str, Path]):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(pages["ladder"].as_uri())
    head = page.locator("#every th", has_text="ms").first
    head.locator("button").focus()
    column = head.evaluate("th => th.cellIndex")

    def values() -> list[float]:
        cells = page.eval_on_selector_all(
            "#every tbody tr:not([hidden])", f"rows => rows.map(r => r.cells[{column}].textContent).filter(Boolean)"
        )
        return [float(cell) for cell in cells]

    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending" and values() == sorted(values())
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending" and values() == sorted(values(), reverse=True)

    page.get_by_role("searchbox").fill("quack 65536")
    kept = page.eval_on_selector_all("#every tbody tr:not([hidden])", "rows => rows.map(r => r.textContent)")
    assert 0 < len(kept) < 10 and all("quack" in row and "65536" in row for row in kept)
    assert page.locator("#shown").inner_text().startswith(f"{len(kept)} of ")
    page.get_by_role("searchbox").fill("")
    page.get_by_role("combobox", name="status").select_option("wrong")
    kept = page.eval_on_selector_all("#every tbody tr:not([hidden])", "rows => rows.map(r => r.textContent)")
    assert kept and all("wrong" in row for row in kept)
    page.close()
