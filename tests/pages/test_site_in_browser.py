"""The site in a real browser, from files on disk: phone and desktop, light and dark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.browser import open_within

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "index.html", "programs/index.html", "api/functions/index.html", "design/index.html", "performance/index.html",
    "lessons/l11_a_row_over_gpus/index.html", "lessons/l_predicted_and_counted/index.html",
)  # fmt: skip
VIEWS = ((390, "light"), (1280, "dark"))
LARGEST, SLOWEST = 1_000_000, 1.0
# of the theme's navigation: two lists with one name
OF_THE_THEME = {"landmark-unique"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    path = os.pathsep.join(str(ROOT / name) for name in ("src", "tools"))
    for command in (["pages", "--site"], ["mkdocs", "build", "-q", "--strict", "--site-dir", str(folder)]):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_are_small(site: Path):
    found = list(site.rglob("*.html"))
    assert len(found) > 40 and not [page for page in found if page.stat().st_size >= LARGEST]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_readable(name: str, site: Path, browser: Any):
    from axe_playwright_python.sync_playwright import Axe

    backgrounds = set()
    for width, scheme in VIEWS:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        page, errors = context.new_page(), []
        page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
        open_within(SLOWEST, page, site / name)
        assert errors == [] and page.evaluate("document.documentElement.scrollWidth") <= width
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        images = page.eval_on_selector_all("article img", "all => all.map(i => i.complete && i.naturalWidth > 0)")
        assert all(images)
        found = [v for v in Axe().run(page).response["violations"] if v["id"] not in OF_THE_THEME]
        assert not found, [(v["id"], [node["html"][:100] for node in v["nodes"][:3]]) for v in found]
        context.close()
    assert len(backgrounds) == 2, "light and dark look the same"
