"""Each Chinese page has what its English twin has, and was looked at after the twin's last change.

Code is equal but for comments and docstrings, drawings (``text``) have as many lines, tables have the same numbers and
names in each cell, and the text the same figures. The head of a Chinese page has a hash of the English one, which this
test compares. After a change of an English page, look at its twin and translate what has changed. This prints the heads
that Chinese pages should have::

    python tests/project/test_chinese_pages.py
"""

import ast
import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ZH = ROOT / "docs" / "zh"
TWINS = {folder / "README_CN.md": folder / "README.md" for folder in (ROOT, ROOT / "sample_code")} | {
    page: ROOT / "docs" / page.relative_to(ZH) for page in sorted(ZH.rglob("*.md"))
}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}\S.*\n)+")
# Of shells and of diffs; Python's are no part of its syntax tree.
_COMMENT = re.compile(r"(^|\s)#.*$", re.M)
# Months are words in English.
_NUMBER = re.compile(r"\b\d+(?:[.,]\d+)*(?:e-?\d+)?(?! 月)", re.A)


def head_of(english):
    """The first line that the twin of an English page should have."""
    return f"<!-- {english.name} {hashlib.sha256(english.read_bytes()).hexdigest()[:12]} -->"


def code_of(text):
    """The blocks of a page, without what a translation changes."""
    return [(kind, _CODE.get(kind, _without_comments)(code)) for kind, code in _BLOCK.findall(text)] + [
        _without_comments(code) for code in _INDENTED.findall(_BLOCK.sub("", text))
    ]


def _without_comments(code):
    return [line.rstrip() for line in _COMMENT.sub("", code).splitlines() if line.strip()]


def _syntax(code):
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


# The words of a drawing are translated; it has as many lines.
_CODE = {"python": _syntax, "text": lambda code: code.count("\n"), "mermaid": lambda code: code.count("\n")}


def cells_of(text):
    """Return the words of each cell of a page's tables that a translation keeps, by table, row and column."""
    rows = [line if line.startswith("|") else "" for line in _BLOCK.sub("", text).splitlines()]
    tables = [table.split("\n") for table in re.split(r"\n\n+", "\n".join(rows).strip("\n"))]
    return {
        (i, j, k): facts_of(cell)
        for i, table in enumerate(tables)
        for j, row in enumerate(table)
        for k, cell in enumerate(row.split(" | "))
    }


def facts_of(cell):
    plain = re.sub(r"`[^`]+`|\]\([^)]*\)|\[[\w.]+\.md", "", cell)
    return sorted(re.findall(r"`([^`]+)`", cell)), sorted(n.replace(",", "") for n in _NUMBER.findall(plain))


def figures_of(text):
    """The measured numbers in the text of a page: those with a point, or of three and more digits."""
    text = re.sub(r"<!--.*?-->|`[^`]+`|\]\([^)]*\)", "", _INDENTED.sub("", _BLOCK.sub("", text)))
    numbers = {number.replace(",", "") for number in _NUMBER.findall(text)}
    return {number for number in numbers if "." in number or len(number) > 2}


def outline_of(text):
    return [len(level) for level in re.findall(r"^(#+) ", _BLOCK.sub("", text), re.M)]


def pairs():
    return [pytest.param(twin, page, id=str(twin.relative_to(ROOT))) for twin, page in TWINS.items()]


def test_each_page_has_a_twin_or_is_known_to_have_none():
    pages = {page for page in (ROOT / "docs").rglob("*.md") if not page.is_relative_to(ZH)}
    assert pages - set(TWINS.values()) <= {ROOT / "docs" / "architecture.md"}


@pytest.mark.parametrize("twin, page", pairs())
def test_a_chinese_page_was_looked_at_after_the_last_change_of_its_twin(twin, page):
    assert twin.read_text().partition("\n")[0] == head_of(page), f"{page.name} has changed: see {__file__}"


@pytest.mark.parametrize("of", [code_of, cells_of, figures_of, outline_of])
@pytest.mark.parametrize("twin, page", pairs())
def test_code_tables_figures_and_sections_are_the_same(twin, page, of):
    assert of(twin.read_text()) == of(page.read_text())


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: str(twin.relative_to(ROOT)))
def test_a_chinese_page_leads_to_chinese_pages(twin):
    """It leads to an English one only where there is no other."""
    links = re.findall(r"\]\(([^)#\s]+\.md)", twin.read_text())
    targets = {(twin.parent / link).resolve() for link in links if not link.startswith("http")}
    assert [str(page) for page in targets if page != TWINS[twin] and page in TWINS.values()] == []


if __name__ == "__main__":
    for twin, page in TWINS.items():
        is_new = "" if twin.read_text().startswith(head_of(page)) else "  (new)"
        print(f"{twin.relative_to(ROOT)}: {head_of(page)}{is_new}")
