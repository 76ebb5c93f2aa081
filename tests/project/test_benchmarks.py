"""The benchmarks start. What they measure is no test."""

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

import ms_gradaccum

FOLDER = Path(__file__).parents[2] / "benchmarks"
# Before any test: MindSpore adds folders of its own where it rewrites a network, and one has a transformer.py.
PATH = [str(FOLDER), *sys.path]
# Those with arguments that need nothing but MindSpore.
PROGRAMS = [
    file
    for file in sorted(FOLDER.glob("*.py"))
    if "ArgumentParser" in (text := file.read_text()) and "import torch" not in text
]


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: file.stem)
def test_it_starts(file, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)  # Some go to a folder of their own, and would leave this process where it was.
    monkeypatch.setattr(sys, "path", PATH.copy())
    # Each name is loaded before: a module that is loaded below is forgotten, and the package would keep its classes.
    assert all(hasattr(ms_gradaccum, name) for name in ms_gradaccum.__all__)
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    # In this process, and without a trace: each of its own would take most of its time to import MindSpore.
    with mock.patch.dict(sys.modules), mock.patch.dict(os.environ), pytest.raises(SystemExit) as end:
        runpy.run_path(str(file), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage:")
