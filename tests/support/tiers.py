"""The two tiers of the tests: the first one is what `./run.sh test` runs, `./run.sh test all` runs both."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

FILE = Path(__file__).parents[1] / "second_tier.txt"
# The one choice of tests that is the first tier alone.
FIRST_TIER = "not second_tier"


def listed() -> list[str]:
    lines = FILE.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def of_second_tier(nodeid: str, entries: frozenset[str]) -> bool:
    """Return whether one of the entries has this test in it."""
    # Each beginning of its name that ends with a folder, a file, a test or a parameter.
    ends = [part.start() for part in re.finditer(r"[/:\[\]-]", nodeid)]
    return not {nodeid, *(nodeid[:end] for end in ends)}.isdisjoint(entries)


def needs_four(item: pytest.Item) -> bool:
    needed = list(getattr(item, "fixturenames", ()))
    if hasattr(item, "callspec"):
        needed += item.callspec.params.values()
    return "four" in needed or "job_of_four" in needed


def mark(items: Iterable[pytest.Item]) -> None:
    entries = frozenset(listed())
    for item in items:
        if of_second_tier(item.nodeid, entries) or needs_four(item):
            item.add_marker(pytest.mark.second_tier)


def try_few_examples() -> None:
    """Let tests by hypothesis try a tenth of their examples."""
    settings.register_profile("first tier", max_examples=settings.default.max_examples // 10)
    settings.load_profile("first tier")


def share_of(number: int) -> int:
    """Return how many examples a test tries that has so many in all."""
    share = settings.default.max_examples / settings.get_profile("default").max_examples
    return max(2, round(number * share))


def some(values: Iterable[Any], *first: Any) -> list[Any]:
    """Return the values of a parameter, or of several: only the ``first`` ones are in the first tier."""
    values = list(values)
    assert all(value in values for value in first)
    parameters = []
    for value in values:
        marks = () if value in first else pytest.mark.second_tier
        parts = value if isinstance(value, tuple) else (value,)
        parameters.append(pytest.param(*parts, marks=marks))
    return parameters
