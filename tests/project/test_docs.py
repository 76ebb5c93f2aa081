"""Every Python block in the documentation runs, and links lead somewhere."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("*.md", "docs/**/*.md", "benchmarks/*.md", "sample_code/*.md", "tests/*.md")
PAGES = [page for folder in FOLDERS for page in sorted(ROOT.glob(folder))]
BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S), 1)
]
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)


# Pages in Chinese have the code of their twins: test_chinese_pages.py.
@pytest.mark.parametrize("code", [block for block in BLOCKS if not block.id.startswith(("README_CN", "docs/zh/"))])
def test_documented_code_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "GRAPH_MODE" not in code and "compile=True" not in code and "jit" not in code:
        monkeypatch.setenv("MS_JIT", "0")  # In PYNATIVE mode the package compiles its sums, the same everywhere.
    file = tmp_path / "block.py"  # GRAPH mode reads the source again and needs it in a file
    file.write_text(code)
    runpy.run_path(str(file), run_name="__main__")


def test_the_tolerances_are_those_of_the_tests():
    rows = re.findall(
        r"^\|.*\| `([^`]+)`[^|]* \| `(\w[\w/]+\.py)` \|$", (ROOT / "tests" / "README.md").read_text(), re.M
    )
    assert len(rows) > 5
    assert [row for row in rows if row[0] not in (ROOT / row[1]).read_text()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_are_there(page):
    files = re.findall(r"`((?:tests|benchmarks|ms_gradaccum|sample_code)/[\w/]+\.\w+)`", page.read_text())
    assert [file for file in files if not (ROOT / file).exists()] == []


def links_of(text):
    """Targets of the links and pictures of a page, outside code."""
    return re.findall(r"\]\(([^)\s]+)\)", _CODE.sub("", text))


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
