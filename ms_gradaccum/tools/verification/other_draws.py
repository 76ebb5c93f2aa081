"""The random state of a run's start, replaced by another one."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ms_gradaccum.loops.random_state import as_json
from ms_gradaccum.tools.verification.experiment import Start

_SEED = 20_201_209
# The generators whose draws a graph does not know, and how a report calls them; and the one whose draws it knows.
ONCE_IN_A_GRAPH = {"python": "Python's random", "numpy": "NumPy's random"}
MINDSPORE = "mindspore"


@contextmanager
def other_draws(start: Start, sources: Sequence[str]) -> Iterator[None]:
    """Let runs begin with other states of these generators."""
    before = start.random
    hosts = {"python": random.Random(_SEED).getstate(), "numpy": np.random.RandomState(_SEED).get_state()}
    # The seed of MindSpore's is in its first bytes.
    words = [before[MINDSPORE][0] ^ 1, *before[MINDSPORE][1:]]
    others = {**as_json(hosts), MINDSPORE: words}
    start.random = {**before, **{source: others[source] for source in sources}}
    try:
        yield
    finally:
        start.random = before
