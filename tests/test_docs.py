"""Every Python block in the documentation runs."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S), 1)
]


def test_the_readme_has_a_block():
    assert any(block.id.startswith("README.md") for block in BLOCKS)


@pytest.mark.parametrize("code", BLOCKS)
def test_documented_code_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "block.py"  # GRAPH mode reads the source again and needs it in a file
    file.write_text(code)
    runpy.run_path(str(file), run_name="__main__")
