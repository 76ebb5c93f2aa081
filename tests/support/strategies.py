"""Values that nobody should give, and what must come of a call with them: a result, or one of our sentences."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
import tiers
from hypothesis import HealthCheck, settings
from linear_toy import X, line, sgd
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


@dataclass(frozen=True)
class Call:
    """A public call.

    Attributes:
        make: Calls it with the arguments by name.
        names: The arguments that odd values are tried for.
        good: Returns good values of those that are always given.
        use: Does with the result what it is for, and asserts that it is right.
        takes_anything: Arguments that are not looked at when the others are good.
    """

    make: Callable[..., Any]
    names: str
    good: Callable[[], dict[str, Any]] = dict
    use: Callable[[Any], Any] = field(default=repr)
    takes_anything: list[str] = field(default_factory=list)

    def __str__(self):
        return self.make.__name__


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


ALL_ROWS = Tensor(X), Tensor(2 * X)
