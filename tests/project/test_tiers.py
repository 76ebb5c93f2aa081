"""The two tiers of the tests: each entry of the list is there, and the commands choose what they say."""

import shutil
import subprocess
from pathlib import Path

import pytest
from tiers import FIRST_TIER, listed, of_second_tier

ROOT = Path(__file__).parents[2]
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
