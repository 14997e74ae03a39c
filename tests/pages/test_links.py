"""README's links hold on a package index: each is absolute and leads to a file or to a page of the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import readme

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def broken(text: str, root: Path) -> list[str]:
    """Links that are relative, or lead to a file or page that is not there."""
    address = readme.address(root)
    owner, name = address.rstrip("/").split("/")[-2:]
    site = f"https://{owner}.github.io/{name}/"
    found = []
    for link in LINK.findall(text):
        for start in (f"{address}/blob/main/", f"{address}/raw/main/"):
            if link.startswith(start) and not (root / link.removeprefix(start)).is_file():
                found.append(link)
        if link.startswith(site):
            page = link.removeprefix(site).rstrip("/")
            # what `make docs` writes is not in the repository
            files = (f"docs/{page}.md", f"docs/{page}/index.md")
            if page not in ("", "performance") and not any((root / file).is_file() for file in files):
                found.append(link)
        if not link.startswith("https://"):
            found.append(link)
    return found


def test_readmes_links_hold():
    assert broken((ROOT / "README.md").read_text(encoding="utf-8"), ROOT) == []


@pytest.mark.parametrize("target", ["docs/index.md", "{0}/blob/main/docs/none.md", "{0}/raw/main/none.svg"])
def test_a_broken_link_is_found(target: str):
    link = target.format(readme.address(ROOT))
    assert broken(f"[x]({link})", ROOT) == [link]


def test_links_between_the_repositorys_own_pages_lead_to_files():
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"):
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (ROOT / link.split("#")[0]).exists(), (page.name, link)


PATH = re.compile(r"`([\w./*-]+(?:\.py|\.json|\.md|\.html|/))`")
# where the pages' paths begin
FOLDERS = ("", "src/fused_softmax", "src/fused_softmax/parallel", "src/fused_softmax/integrations")


def missing_paths(text: str) -> list[str]:
    """Files and folders in code font that are not there."""
    return [path for path in PATH.findall(text) if not any(list((ROOT / top).glob(path)) for top in FOLDERS)]


@pytest.mark.parametrize("page", ["docs/design.md", "docs/how-it-works.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert PATH.findall(text) and missing_paths(text) == []
    assert missing_paths(text + "`launch/none.py` `nowhere/`") == ["launch/none.py", "nowhere/"]


def test_readme_has_at_most_100_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100
