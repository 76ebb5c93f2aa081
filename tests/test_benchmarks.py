"""The benchmarks start. What they measure is no test."""

import subprocess
import sys
from pathlib import Path

import pytest

# Those with arguments that need nothing but MindSpore.
PROGRAMS = [
    file
    for file in sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))
    if "ArgumentParser" in (text := file.read_text()) and "import torch" not in text
]


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: file.stem)
def test_it_starts(file):
    result = subprocess.run([sys.executable, file, "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage:")
