"""Links between the pages, and from them to other files and to headings, lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("*.md", "docs/**/*.md", "benchmarks/*.md", "sample_code/*.md", "tests/*.md")
PAGES = [page for folder in FOLDERS for page in sorted(ROOT.glob(folder))]
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def links_of(text):
    """Targets of the links and pictures of a page, outside code."""
    return _LINK.findall(_CODE.sub("", text))


def anchors_of(text):
    """Return the anchors that GitHub and Gitee give to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def why_dead(page, link):
    """Say why a link of a page leads nowhere; None if it leads somewhere, or out of the project."""
    if re.match(r"\w+:", link):
        return None
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return f"{link}: there is no such file"
    if anchor and anchor not in anchors_of(target.read_text()):
        return f"{link}: there is no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    dead = [why_dead(page, link) for link in links_of(page.read_text())]
    assert [why for why in dead if why] == []


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page, and `more`\n[x](page.md#a-page-and-more) [x](#b) [x](c.md) `[x](d.md)` [x](https://e)\n")
    dead = [why_dead(page, link) for link in links_of(page.read_text())]
    assert dead == [None, "#b: there is no such heading", "c.md: there is no such file", None]
