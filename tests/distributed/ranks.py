"""Tests that each process of a job runs: what fails in one of them fails in pytest, with its traceback.

A file marks them with `on_ranks`. `many_parts.py` imports it in each process and calls `run`; under pytest a test looks
up what became of it.
What waits for other ranks must not follow an assertion that can fail on one of them alone.
"""

import os
import time
import traceback
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import mindspore as ms
import pytest
from mindspore import Tensor, communication
from mindspore.dataset import NumpySlicesDataset
from quick_mindspore import eagerly
from refusal import all_warnings
from scenarios import BOUNDS, batch, share, uneven_data

from ms_gradaccum.parallel.world import gather_values

# Under pytest neither matters.
RANK, SIZE = 0, 1
if "MS_ROLE" in os.environ:
    # Where MindSpore can compile for GPU, it would look for one.
    ms.set_context(device_target="CPU")
    communication.init()
    RANK, SIZE = communication.get_rank(), communication.get_group_size()
NAMES = {2: "two", 4: "four"}
# By module and test: what to call, on how many processes, and whether something is compiled.
_tests = defaultdict(dict)


def on_ranks(*sizes, cases=((),), compiled=False):
    """Mark a test that each of so many processes runs, for each of the cases: its arguments, or a dict of them by name.

    It runs op by op, for which nothing is compiled, if it is not ``compiled``, which begins in GRAPH mode.
    """
    named = cases
    if not isinstance(cases, dict):
        named = {"-".join(map(str, case)) if isinstance(case, tuple) else str(case): case for case in cases}

    def mark(function):
        parameters = []
        for name, case in named.items():
            # The same function may be marked for other sizes.
            key = f"{function.__name__}[{name}] on {sizes}"
            arguments = case if isinstance(case, tuple) else (case,)
            _tests[function.__module__][key] = partial(function, *arguments), sizes, compiled
            parameters += [pytest.param(NAMES[size], key, id=f"{NAMES[size]}-{name}".strip("-")) for size in sizes]

        @pytest.mark.parametrize("processes, key", parameters)
        def test(processes, key, request):
            for rank, report in enumerate(request.getfixturevalue(processes)):
                assert not report[key], f"rank {rank}:\n{report[key]}"

        test.__name__ = function.__name__
        return test

    return mark


def tests_of(module, size):
    """The tests of a module for so many processes, by name: what to call, and whether something is compiled."""
    return {key: (test, compiled) for key, (test, sizes, compiled) in _tests[module].items() if size in sizes}


def run(module):
    """Run the tests of a module, and return the traceback of each, which is empty if it has passed."""
    outcomes = {}
    for key, (test, compiled) in tests_of(module, SIZE).items():
        begin, outcomes[key] = time.process_time(), ""
        ms.set_context(mode=ms.GRAPH_MODE)
        try:
            with nullcontext() if compiled else eagerly():
                test()
        except (Exception, pytest.fail.Exception):
            outcomes[key] = traceback.format_exc()
            print(outcomes[key], flush=True)
        print(f"{key}: {time.process_time() - begin:.1f} s of a core", flush=True)
    return outcomes


def folder():
    return Path(os.environ["REPORT_FOLDER"])


def states():
    """The folder of states, which the jobs share."""
    path = Path(os.environ["STATES"])
    path.mkdir(parents=True, exist_ok=True)
    return path


def own_share(number, bounds=BOUNDS):
    return [Tensor(array) for array in share(batch(number), RANK, SIZE, bounds)]


def own_data():
    """The batches of two rows of this rank, of which rank 0 has one more."""
    return NumpySlicesDataset(tuple(uneven_data(RANK)), shuffle=False).batch(2)


def train_batches(step, numbers, bounds=BOUNDS):
    """Train on this rank's share of some batches and return what the step reported last."""
    for number in numbers:
        output = step(*own_share(number, bounds))
    return output


def everyone(value):
    return gather_values("compares", value)


def assert_same(value):
    assert everyone(value) == [value] * SIZE


@contextmanager
def told(*keys):
    """Give a list of the warnings with each of the keys, when the context has ended."""
    found = []
    with all_warnings() as caught:
        yield found
    texts = [str(each.message) for each in caught]
    found += [text for text in texts if all(key in text for key in keys)]
