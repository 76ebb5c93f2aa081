"""The hosted CI and the issue template: they can be read, and what they call is there."""

import re
from pathlib import Path

import pytest
import yaml

from ms_gradaccum import __version__
from ms_gradaccum.__main__ import parse

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"


def read(name):
    text = (GITHUB / name).read_text()
    return text, yaml.safe_load(text)


@pytest.fixture(scope="module")
def workflow():
    return read("workflows/ci.yml")[1]


def steps_of(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def pythons_of(job):
    matrix = job["strategy"]["matrix"]
    return matrix.get("python") or [each["python"] for each in matrix["include"]]


def test_the_workflow_runs_with_each_mindspore_that_the_package_names(workflow):
    project = (ROOT / "pyproject.toml").read_text()
    first, end = map(int, re.search(r'"mindspore>=2\.(\d+),<2\.(\d+)"', project).groups())
    pinned = re.search(r"mindspore==(2\.\d+)", project).group(1)
    run = {
        each["mindspore"].rpartition(".")[0] for each in workflow["jobs"]["versions"]["strategy"]["matrix"]["include"]
    }
    assert run | {pinned} == {f"2.{minor}" for minor in range(first, end)}
    assert workflow["jobs"]["versions"]["env"]["MINDSPORE"] == "${{ matrix.mindspore }}"


def test_the_workflow_runs_on_each_python_that_the_package_names(workflow):
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert pythons_of(workflow["jobs"]["tests"]) == pythons_of(workflow["jobs"]["package"]) == named


def test_the_workflow_runs_commands_that_there_are(workflow):
    matrix = workflow["jobs"]["tests"]["strategy"]["matrix"]["include"]
    assert [each["command"] for each in matrix if each["command"] != "quick"] == ["test all"]
    commands = {each["command"].split()[0] for each in matrix}
    commands |= {word for step in steps_of(workflow) for word in re.findall(r"\./run\.sh (\w+)", step.get("run", ""))}
    assert commands == {"check", "docs", "quick", "test"}
    script = (ROOT / "run.sh").read_text()
    assert [command for command in commands if not re.search(rf"^  {command}\)$", script, re.M)] == []


def test_the_template_asks_for_the_files_of_commands_that_there_are():
    text, template = read("ISSUE_TEMPLATE/hardware.yml")
    asked = {item["id"]: item["validations"]["required"] for item in template["body"] if "id" in item}
    assert asked == {"device": True, "test": True, "env": True, "remarks": False}
    assert {"name", "description", "body"} <= template.keys()
    assert set(re.findall(r"python -m ms_gradaccum (\w+)", text)) == {"env", "test"}
    assert parse(["env"]).command == "env"


@pytest.mark.parametrize("file", sorted(GITHUB.rglob("*.yml")), ids=lambda file: file.name)
def test_no_host_is_named(file):
    """The index that a runner installs from is left to the runner."""
    assert re.findall(r"\w+://|\b\w+\.(?:org|com|io|cn)\b|index-url", file.read_text()) == []


def test_the_changelog_begins_with_the_version_or_with_what_is_not_released():
    heading = re.search(r"^## \[(.+?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading.group(1) in ("Unreleased", __version__)
    assert re.fullmatch(r"" if heading.group(1) == "Unreleased" else r" - \d{4}-\d\d-\d\d", heading.group(2))
