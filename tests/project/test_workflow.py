"""The hosted CI can be read, and what it calls is there."""

import re
from pathlib import Path

import yaml

from ms_gradaccum import __version__

ROOT = Path(__file__).parents[2]


JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]


def test_the_workflow_runs_with_each_mindspore_that_the_package_names():
    project = (ROOT / "pyproject.toml").read_text()
    first, end = map(int, re.search(r'"mindspore>=2\.(\d+),<2\.(\d+)"', project).groups())
    pinned = re.search(r"mindspore==(2\.\d+)", project).group(1)
    matrix = JOBS["versions"]["strategy"]["matrix"]["include"]
    run = {each["mindspore"].rpartition(".")[0] for each in matrix}
    assert run | {pinned} == {f"2.{minor}" for minor in range(first, end)}
    assert JOBS["versions"]["env"]["MINDSPORE"] == "${{ matrix.mindspore }}"


def test_the_workflow_runs_on_each_python_that_the_package_names():
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    tests, package = (JOBS[name]["strategy"]["matrix"] for name in ("tests", "package"))
    assert [each["python"] for each in tests["include"]] == package["python"] == named


def test_the_changelog_begins_with_the_version_or_with_what_is_not_released():
    heading = re.search(r"^## \[(.+?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading.group(1) in ("Unreleased", __version__)
    assert re.fullmatch(r"" if heading.group(1) == "Unreleased" else r" - \d{4}-\d\d-\d\d", heading.group(2))
