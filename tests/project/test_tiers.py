"""The two tiers of the tests: each entry of the list is there, and the commands choose what they say."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
from tiers import FIRST_TIER, listed, of_second_tier

ROOT = Path(__file__).parents[2]
# Whatever a caller adds to each pytest, such as -v, would change what is read here.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
FILES = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.second_tier
def test_an_entry_of_the_second_tier_has_tests(request):
    nodeids = [item.nodeid for item in request.session.items]
    files = {nodeid.partition("::")[0] for nodeid in nodeids}
    if not files.issuperset([*FILES, "ms_gradaccum/loops/train_step.py"]):
        pytest.skip("it takes a run of all tests: ./run.sh test all")
    assert len(nodeids) > 3000
    entries = listed()
    assert len(set(entries)) == len(entries)
    assert [each for each in entries if not any(of_second_tier(nodeid, frozenset([each])) for nodeid in nodeids)] == []


def test_each_room_has_files_in_the_first_tier():
    first = [file for file in FILES if not of_second_tier(file, frozenset(listed()))]
    assert 0 < len(first) < len(FILES)
    assert {Path(file).parent for file in first} == {Path(file).parent for file in FILES}


@pytest.mark.parametrize(
    "entry, nodeid, has_it",
    [
        ("tests/a", "tests/a/test_b.py::test_c", True),
        ("tests/a/test_b.py", "tests/a/test_b.py::test_c", True),
        ("tests/a/test_b.py::test_c", "tests/a/test_b.py::test_c[GRAPH-1]", True),
        ("tests/a/test_b.py::test_c[GRAPH", "tests/a/test_b.py::test_c[GRAPH-1]", True),
        ("tests/a/test_b.py::test_c[GRAPH", "tests/a/test_b.py::test_c[PYNATIVE-1]", False),
        ("tests/a/test_b.py::test_c[GRAPH-1", "tests/a/test_b.py::test_c[GRAPH-12]", False),
        ("tests/a/test_b.py::test_c", "tests/a/test_b.py::test_c_and_d", False),
    ],
)
def test_an_entry_is_the_beginning_of_a_name(entry, nodeid, has_it):
    assert of_second_tier(nodeid, frozenset([entry])) is has_it


def test_the_first_tier_tries_a_tenth_of_the_examples(monkeypatch):
    ordinary = tiers.settings.get_profile("default")
    before = tiers.settings.default
    try:
        tiers.settings.load_profile("default")
        assert tiers.share_of(300) == 300
        tiers.try_few_examples()
        assert tiers.settings.default.max_examples == ordinary.max_examples // 10
        assert tiers.share_of(300) == 30 and tiers.share_of(5) == 2
    finally:
        tiers.settings.register_profile("as before", before)
        tiers.settings.load_profile("as before")


HOOK = """
import pathlib, pytest, tiers
tiers.FILE = pathlib.Path(__file__).with_name('second_tier.txt')

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items): tiers.mark(items)
"""
TRIED = """
import pytest

@pytest.fixture
def four():
    pass

@pytest.fixture(params=["two", "four"])
def reports(request):
    pass

def test_listed(): pass
def test_first(): pass
def test_ranks(four): pass
def test_reports(reports): pass
@pytest.mark.parametrize("name", __import__("tiers").some(["a", "b", "c"], "b"))
def test_some(name): pass
@pytest.mark.parametrize("name, number", __import__("tiers").some([("a", 1), ("b", 2)], ("b", 2)))
def test_pairs(name, number): pass
"""


@pytest.mark.parametrize(
    "choice, chosen",
    [
        (FIRST_TIER, ["test_first", "test_reports[two]", "test_some[b]", "test_pairs[b-2]"]),
        (
            "second_tier",
            ["test_listed", "test_ranks", "test_reports[four]", "test_some[a]", "test_some[c]", "test_pairs[a-1]"],
        ),
    ],
)
def test_what_is_listed_marked_or_needs_four_processes_is_the_second_tier(choice, chosen, tmp_path):
    (tmp_path / "test_tried.py").write_text(TRIED)
    (tmp_path / "second_tier.txt").write_text("# Why.\n\ntest_tried.py::test_listed\n")
    (tmp_path / "conftest.py").write_text(HOOK)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = second_tier: see the file\n")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    command += ["-m", choice, "test_tried.py"]
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "tests" / "support")}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert [line.partition("::")[2] for line in ran.stdout.splitlines() if "::" in line] == chosen, ran.stdout


@pytest.mark.parametrize(
    "arguments, given",
    [
        ([], f"-m {FIRST_TIER}"),
        (["all"], ""),
        (["all", "-x"], "-x"),
        (["tests/tools/test_cli.py", "-x"], "tests/tools/test_cli.py -x"),
    ],
    ids=str,
)
def test_the_command_chooses_a_tier(arguments, given, tmp_path):
    (tmp_path / "ms_gradaccum").mkdir()
    for name in ("run.sh", "pyproject.toml", "setup.py", "ms_gradaccum/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "ruff", "mypy", "pytest"):
        (programs / name).write_text('#!/bin/bash\n[[ $0 != */pytest ]] || echo "pytest $@"\n')
        (programs / name).chmod(0o755)
    ran = subprocess.run(["bash", "run.sh", "test", *arguments], cwd=tmp_path, capture_output=True, text=True)
    last = ran.stdout.splitlines()[-1]
    assert last == f"pytest -n 3 --dist loadfile --no-loadscope-reorder {given}".rstrip()
