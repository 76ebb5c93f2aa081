"""The mistakes that `./run.sh mutations` makes can be made in the sources as they are."""

import ast
import re

import pytest
from mutations import MUTATIONS, ROOT
from tiers import listed, of_second_tier


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: re.sub(r"\W+", "_", mutation.name))
def test_it_can_be_made_and_there_are_tests_to_see_it(mutation):
    source = (ROOT / "ms_gradaccum" / mutation.file).read_text()
    broken = ast.parse(mutation.applied(source))
    assert ast.dump(broken) != ast.dump(ast.parse(source))
    assert all((ROOT / "tests" / file).is_file() for file in mutation.tests)
    entries = frozenset(listed())
    assert not all(of_second_tier(f"tests/{file}", entries) for file in mutation.tests)


def test_the_page_lists_them():
    page = (ROOT / "tests" / "README.md").read_text()
    assert [each.name for each in MUTATIONS if f"| {each.name} |" not in page] == []
