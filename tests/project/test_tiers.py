"""The two tiers of the tests: each entry of the list is there, and is the beginning of names of tests."""

from pathlib import Path

import pytest
from tiers import listed, of_second_tier

ROOT = Path(__file__).parents[2]
FILES = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.second_tier
def test_an_entry_of_the_second_tier_has_tests(request):
    nodeids = [item.nodeid for item in request.session.items]
    files = {nodeid.partition("::")[0] for nodeid in nodeids}
    if not files.issuperset([*FILES, "ms_gradaccum/loops/train_step.py"]):
        pytest.skip("it takes a run of all tests: ./run.sh test all")
    assert len(nodeids) > 1000
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
