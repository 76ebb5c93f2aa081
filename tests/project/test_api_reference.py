"""The pages that Sphinx makes of docs/ and of the docstrings."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ms_gradaccum

DOCS = Path(__file__).parents[2] / "docs"
NAMES = ms_gradaccum.__all__


def test_pages_are_built_without_a_warning_and_the_reference_has_every_public_name_and_its_sections(tmp_path):
    """As ``./run.sh docs`` builds them."""
    command = ["-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-d", f"{tmp_path}/doctrees"]
    result = subprocess.run([sys.executable, *command, DOCS, tmp_path / "html"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for page in DOCS.rglob("*.md"):
        assert (tmp_path / "html" / page.relative_to(DOCS).with_suffix(".html")).exists(), page
    reference = (tmp_path / "html" / "api.html").read_text()
    assert [name for name in NAMES if f'id="ms_gradaccum.{name}"' not in reference] == []
    for section in ("Parameters", "Keyword Arguments", "Inputs", "Outputs", "Raises", "Supported Platforms"):
        assert f">{section}<" in reference, section


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_refer_to_public_names(name):
    docstring = inspect.getdoc(getattr(ms_gradaccum, name))
    assert set(re.findall(r":(?:class|func):`([^`]+)`", docstring)) <= set(NAMES)
