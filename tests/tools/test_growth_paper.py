"""The table of the page on growth is what its program prints."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_the_large_job_is_what_the_program_prints():
    table = runpy.run_path(str(ROOT / "benchmarks" / "growth_paper.py"))["paper_table"]()
    assert len(table.splitlines()) == 12
    assert table in (ROOT / "benchmarks" / "README.md").read_text()
