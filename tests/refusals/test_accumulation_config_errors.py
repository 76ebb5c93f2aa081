"""AccumulationConfig and AccumulationSchedule: every wrong argument is refused with one sentence."""

import pytest
from refusal import typed

from ms_gradaccum import AccumulationConfig, AccumulationSchedule
from ms_gradaccum.loops.schedule import merge_config

STEPS_REMEDY = "It counts the batches of one update; 1 means an update per batch."
DICT, EXAMPLE = "a dict from counts to numbers of batches", "For example {0: 1, 4: 2}."
UNITS = "one of 'epoch', 'update', 'token'"
WRONG = [
    (lambda: AccumulationConfig(0), ValueError, "accumulation_steps", "a positive int", "0", STEPS_REMEDY),
    (lambda: AccumulationConfig(True), TypeError, "accumulation_steps", "a positive int", typed(True), STEPS_REMEDY),
    (lambda: AccumulationConfig(2.0), TypeError, "accumulation_steps", "a positive int", typed(2.0), STEPS_REMEDY),
    (
        lambda: AccumulationConfig(2, 1),
        TypeError,
        "sync_with_dataloader",
        "a bool",
        typed(1),
        "False carries the last window over.",
    ),
    (lambda: AccumulationConfig(2, True, None), TypeError, "sync_each_batch", "a bool", typed(None), "The default is"),
    (
        lambda: AccumulationConfig(schedule=3),
        TypeError,
        "schedule",
        "an AccumulationSchedule, a dict, a function or None",
        typed(3),
        "For example schedule={0: 1, 4: 2}.",
    ),
    (lambda: AccumulationSchedule([1]), TypeError, "milestones", DICT, typed([1]), EXAMPLE),
    (lambda: AccumulationSchedule({}), ValueError, "milestones", DICT, "an empty one", EXAMPLE),
    (
        lambda: AccumulationSchedule({1.0: 1}),
        TypeError,
        "milestones",
        "a dict whose keys are ints",
        typed(1.0),
        EXAMPLE,
    ),
    (
        lambda: AccumulationConfig(schedule={True: 1}),
        TypeError,
        "milestones",
        "a dict whose keys are ints",
        typed(True),
        EXAMPLE,
    ),
    (
        lambda: AccumulationSchedule({-1: 1}),
        ValueError,
        "milestones",
        "a dict whose keys are not negative",
        "-1",
        EXAMPLE,
    ),
    (
        lambda: AccumulationSchedule({0: 0}),
        ValueError,
        "milestones[0]",
        "a positive int",
        "0",
        "It counts the batches of one update.",
    ),
    (lambda: AccumulationSchedule({0: 1}, "step"), ValueError, "unit", UNITS, "'step'", "It says what the milestones"),
    (lambda: AccumulationSchedule({0: 1}, 1), TypeError, "unit", UNITS, typed(1), "It says what the milestones count."),
    (
        lambda: merge_config("Accumulator", 1, 4),
        TypeError,
        "config",
        "an AccumulationConfig or None",
        typed(4),
        "Build one, or leave it out.",
    ),
    (
        lambda: merge_config("Accumulator", 0, None),
        ValueError,
        "accumulation_steps",
        "a positive int",
        "0",
        STEPS_REMEDY,
    ),
]


@pytest.mark.parametrize("call, error, name, rule, got, remedy", WRONG)
def test_wrong_arguments(call, error, name, rule, got, remedy):
    with pytest.raises(error) as caught:
        call()
    owner, _, rest = str(caught.value).partition(", the argument ")
    assert owner in ("For 'AccumulationConfig'", "For 'AccumulationSchedule'", "For 'Accumulator'")
    assert rest.startswith(f"'{name}' must be {rule}, but got {got}. {remedy}")
