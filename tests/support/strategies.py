"""Values that nobody should give, and what must come of a call with them: a result, or one of our sentences.

A test of one more call needs a `Call` with the known good values of its arguments; `arguments` mixes others in.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
import tiers
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from linear_toy import X, line, sgd
from loop_toy import batch as batch_of
from mindspore import Tensor
from refusal import loss_cell

import ms_gradaccum
from ms_gradaccum import GradAccumulation

# Whose sentences they are: public names alone.
OWNERS = set(ms_gradaccum.__all__)
SENTENCE = re.compile(r"For '(\w+)', .+[.?] .+", re.DOTALL)


def examples(number, **more):
    """Settings of a test: the same examples each time, and so many, or a tenth of them in the first tier."""
    too_slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(
        deadline=None, derandomize=True, max_examples=tiers.share_of(number), suppress_health_check=too_slow, **more
    )


class Nameless:
    def __repr__(self):
        return "Nameless()"


def endless():
    nest = [0]
    nest.append(nest)
    return nest


NUMBERS = [0, -1, 1, 2, 3, 2**31, 2**63, -(2**63), 10**30, 10**400, -(10**400)]
NUMBERS += [0.0, -0.5, 0.5, 1e-50, 1e39, 1e308, -1e308, math.nan, math.inf, -math.inf, 1j, np.float32(2), np.int64(3)]
TEXTS = ["", "auto", "apply", "O2", "fp16", "bf16", "level2", "a\0b", "\ud800", "1", b"bytes"]
FIXED = [None, True, False, Ellipsis, int, ms.float16, ms.int32, range(3), {1, 2}, lambda *_: None, lambda *_: "x"]
FIXED += [(), [], {}, [[]], [None], {"": 0}, {None: None}, {0: 0}, {"*": math.nan}, {0: 10**400}]
BUILT = [
    lambda: Tensor(1.0),
    lambda: Tensor([1, 2]),
    lambda: Tensor(np.zeros((0, 1), np.float32)),
    lambda: Tensor(np.nan, ms.float32),
    lambda: Tensor(2.0, ms.bfloat16),
    lambda: np.array([1.0, 2.0]),
    lambda: np.array(["a", None], object),
    lambda: np.array("auto"),
    line,
    loss_cell,
    lambda: GradAccumulation(loss_cell(), 2),
    lambda: sgd(line()),
    lambda: line().trainable_params(),
    lambda: [loss_cell(), loss_cell()],
    endless,
    lambda: (number for number in (1, 2)),
    Nameless,
]
# Each makes a value that has caught somebody before: a new one, for what is tried with it may change it.
ODD = [*(lambda value=value: value for value in (*NUMBERS, *TEXTS, *FIXED)), *BUILT]


def anything():
    """Values of any type: numbers out of range, texts, nests, tensors, cells, functions."""
    odd = st.sampled_from(ODD).map(lambda make: make())
    flat = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.integers(), st.floats(), st.text(max_size=3))
    nests = st.one_of(st.lists(flat, max_size=3), st.dictionaries(flat.filter(is_hashable), flat, max_size=2))
    return st.one_of(odd, odd, flat, nests)


def is_hashable(value):
    return value.__hash__ is not None


@dataclass(frozen=True)
class Call:
    """A public call.

    Attributes:
        make: Calls it with the arguments by name.
        good: Known good values of each argument.
        needed: Those that are always given.
        use: Does with the result what it is for, and asserts that it is right.
        takes_anything: Arguments that are not looked at when the others are good.
    """

    make: Callable[..., Any]
    good: dict[str, Any]
    needed: tuple[str, ...] = ()
    use: Callable[[Any], Any] = field(default=repr)
    takes_anything: list[str] = field(default_factory=list)

    def __str__(self):
        return self.make.__name__


@st.composite
def arguments(draw, call, most_bad=2):
    """Return arguments of a call, and the names of those that may be bad."""
    names = list(call.good)
    bad = draw(st.lists(st.sampled_from(names), max_size=most_bad, unique=True))
    given = [name for name in names if name in call.needed or name in bad or draw(st.booleans())]
    return {name: draw(anything() if name in bad else call.good[name]) for name in given}, bad


def attempt(call, *args, errors=(TypeError, ValueError), stock=None, **kwargs):
    """Call, and return the result and the sentence with which it was refused; one of them is None.

    ``stock`` is the pattern of what MindSpore itself may say.
    """
    try:
        return call(*args, **kwargs), None
    except errors as error:
        text = str(error)
        ours = SENTENCE.match(text)
        assert (ours and ours[1] in OWNERS) or (stock and re.match(stock, text)), f"{type(error).__name__}: {text}"
        return None, text


def refusal(call, *args, **kwargs):
    return attempt(call, *args, **kwargs)[1]


ALL_ROWS = batch_of(*X.ravel())
