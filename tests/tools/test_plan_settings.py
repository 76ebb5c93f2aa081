"""TrainingPlan: what it refuses, what it prints, and what several ranks will cost."""

import re

import pytest
from modelled_window import plan

COUNTS = {
    "batch_size": "It counts the rows of one batch on one rank.",
    "ranks": "It counts the processes; 1 is a single one.",
    "micro_size": "It counts the micro batches of one batch; 1 means no split.",
    "accumulation_steps": "It counts the batches of one update; 1 means an update per batch.",
    "global_batch": "It counts the rows of one update on all ranks together.",
    "epochs": "It counts the passes over the data.",
    "dataset_size": "It counts the rows of the data.",
}
WINDOW = "'apply' makes one more update, 'drop' discards the window, 'carry' continues it in the next pass."
MULTIPLE = "a multiple of batch_size * ranks = 32"
# The settings, whose last one is refused, and what is said: the rule, the value, the way out.
REFUSED = [
    (
        {"drop_remainder": True, "ranks": 2, "dataset_size": 14},
        "at least one batch of 8 rows on each rank",
        "7 rows on each",
        "Use drop_remainder=False.",
    ),
    (
        {"ranks": 4, "global_batch": 250},
        MULTIPLE,
        "250",
        "Use 224 (accumulation_steps=7) or 256 (accumulation_steps=8).",
    ),
    (
        {"ranks": 4, "global_batch": 25},
        MULTIPLE,
        "25",
        "Use 32 (accumulation_steps=1).",
    ),
    ({"global_batch": 16, "accumulation_steps": 3}, "2 for a global_batch of 16", "3", "Give one of the two."),
    ({"drop_remainder": 1}, "a bool", "1 of type int", "It is the argument of Dataset.batch()."),
    ({"last_window": "keep"}, "one of 'apply', 'drop', 'carry'", "'keep'", WINDOW),
    *[({name: "8"}, "a positive int", "'8' of type str", remedy) for name, remedy in COUNTS.items()],
    ({"ranks": None}, "a positive int", "None of type NoneType", COUNTS["ranks"]),
    ({"dataset_size": (9, 8)}, "a positive int", "(9, 8) of type tuple", COUNTS["dataset_size"]),
    ({"epochs": None, "steps": 0}, "a positive int", "0", "It counts the batches to train on."),
]


@pytest.mark.parametrize("settings,rule,got,remedy", REFUSED)
def test_wrong_settings_are_refused(settings, rule, got, remedy):
    name = list(settings)[-1]
    sentence = f"For 'TrainingPlan', the argument '{name}' must be {rule}, but got {got}. {remedy}"
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(sentence)}$") as caught:
        plan(**settings)
    is_type = " of type " in got
    assert caught.type is (TypeError if is_type else ValueError)


@pytest.mark.parametrize("settings,got", [({"epochs": None}, "neither"), ({"steps": 3}, "epochs=1 and steps=3")])
def test_either_epochs_or_steps_are_given(settings, got):
    sentence = f"For 'TrainingPlan', either epochs or steps must be given, but got {got}. Say how long it trains."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        plan(**settings)


def test_the_text_of_a_plan():
    got = plan(
        dataset_size=1001,
        epochs=3,
        ranks=4,
        micro_size=2,
        accumulation_steps=5,
        last_window="drop",
    )
    assert str(got) == "\n".join(
        [
            "data       1001 rows for 4 ranks in batches of 8",
            "epochs     3 of 32 batches on each rank: 96 batches",
            "window     5 batches, 10 micro batches on each rank: 160 rows",
            "updates    18: 6 per epoch, of 160 rows",
            "left over  an epoch has 2 batches more than whole windows: dropped; 6 batches in no update",
        ]
    )


def test_the_text_of_a_small_plan():
    assert str(plan(dataset_size=18, ranks=2, steps=1, epochs=None, accumulation_steps=2, last_window="carry")) == (
        "data       18 rows for 2 ranks in batches of 8\n"
        "epochs     0.5 of 2 batches on each rank: 1 batch\n"
        "window     2 batches, 2 micro batches on each rank: 32 rows\n"
        "updates    none: no window is ever whole\n"
        "left over  1 batch in no update"
    )
