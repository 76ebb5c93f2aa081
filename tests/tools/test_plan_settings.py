"""TrainingPlan: what it refuses, what it prints, and what several ranks will cost."""

import re

import mindspore as ms
import pytest
from mindspore import Parameter, nn
from mindspore.common.initializer import initializer
from mindspore.nn.utils import no_init_parameters
from modelled_window import plan

from ms_gradaccum import (
    HSDP,
    ClipByGlobalNorm,
    ClipByGroupNorm,
    ClipByValue,
    DataParallel,
    GradAccumulation,
    TrainOneStepCell,
)
from ms_gradaccum.parallel.layout import BUCKET_SIZE, Ranks, layout_of

COUNTS = {
    "batch_size": "It counts the rows of one batch on one rank.",
    "ranks": "It counts the processes; 1 is a single one.",
    "micro_size": "It counts the micro batches of one batch; 1 means no split.",
    "accumulation_steps": "It counts the batches of one update; 1 means an update per batch.",
    "global_batch": "It counts the rows of one update on all ranks together.",
    "epochs": "It counts the passes over the data.",
    "dataset_size": "It counts the rows of the data.",
}
WINDOW = "'apply' makes one more update, 'drop' none, and 'carry' goes on with the next pass."
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
    ({"device_target": "TPU"}, "one of 'CPU', 'GPU', 'Ascend'", "'TPU'", "None is that of the context."),
    (
        {"clip": 1.0},
        "a ClipByGlobalNorm, a ClipByGroupNorm, a ClipByValue or None",
        "1.0",
        "For example clip=ClipByGlobalNorm(1.0).",
    ),
    (
        {"parallel": "all"},
        "'auto', DataParallel(), HSDP() or Reduced()",
        "'all'",
        "'auto' looks at the number of processes.",
    ),
    ({"parameters": nn.Dense(1, 1)}, "a list of parameters", "Dense", "Give network.trainable_params()."),
    *[({name: 0}, "a positive int", "0", remedy) for name, remedy in COUNTS.items()],
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
    is_type = " of type " in got or name in ("clip", "parallel", "parameters")
    assert caught.type is (TypeError if is_type else ValueError)


@pytest.mark.parametrize("settings,got", [({"epochs": None}, "neither"), ({"steps": 3}, "epochs=1 and steps=3")])
def test_either_epochs_or_steps_are_given(settings, got):
    sentence = f"For 'TrainingPlan', either epochs or steps must be given, but got {got}. Say how long it trains."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        plan(**settings)


def test_a_shard_size_that_does_not_divide_the_ranks_is_refused():
    sentence = (
        "For 'HSDP', the argument 'shard_size' must be a divisor of the 4 processes, but got 3. -1 means all processes."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        plan(ranks=4, parallel=HSDP(3))


def test_the_text_of_a_plan():
    network = nn.SequentialCell(nn.Dense(784, 512), nn.Dense(512, 10))
    got = plan(
        dataset_size=1001,
        epochs=3,
        ranks=4,
        micro_size=2,
        accumulation_steps=5,
        last_window="drop",
        parameters=network.trainable_params(),
        parallel=HSDP(2, optimizer_level="level2"),
    )
    assert str(got) == "\n".join(
        [
            "data           1001 rows for 4 ranks in batches of 8",
            "epochs         3 of 32 batches on each rank: 96 batches",
            "window         5 batches, 10 micro batches on each rank: 160 rows",
            "updates        18: 6 per epoch, of 160 rows",
            "left over      an epoch has 2 batches more than whole windows: dropped; 6 batches in no update",
            "gradient sums  825384 bytes on each rank",
            "messages       28 collectives and 24.5 MiB per window: 2 (2.3 MiB) per micro batch, 1 (16 bytes) per "
            "batch, 3 (1.6 MiB) per update",
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


class Weights(nn.Cell):
    def __init__(self, *shapes, dtype=ms.float32):
        super().__init__()
        for i, shape in enumerate(shapes):
            setattr(self, f"weight_{i}", Parameter(initializer("zeros", shape, dtype), f"weight_{i}"))


def costs(kind, *shapes, ranks=4, dtype=ms.float32, **settings):
    return plan(parameters=Weights(*shapes, dtype=dtype).trainable_params(), parallel=kind, ranks=ranks, **settings)


@pytest.mark.parametrize("dtype,itemsize", [(ms.float32, 4), (ms.float16, 4), (ms.float64, 8)])
def test_sums_are_float32_or_float64(dtype, itemsize):
    network = Weights((6, 4), (3,), dtype=dtype)
    step = TrainOneStepCell(GradAccumulation(network, 1), nn.SGD(network.trainable_params(), 0.1))
    got = plan(parameters=network.trainable_params())
    assert got.buffer_bytes == sum(total.nbytes for total in step.body.buffer.sums) == itemsize * 27
    assert got.window_messages == ()


# A weight of 8 rows and one of 3, which cannot be divided, on 4 ranks: 32 and 3 elements.
@pytest.mark.parametrize(
    "kind,whole_sums,parts",
    [
        ("auto", 35, 0),
        (DataParallel(), 35, 0),
        (DataParallel(sync_each_batch=True), 3, 8),
        (HSDP(-1, 0), 35, 8),
        (HSDP(2, 0), 35, 16),
        (HSDP(-1, 0, "level2"), 3, 8),
        (HSDP(2, 0, "level2"), 3, 16),
        (HSDP(2, 0, "level3"), 3, 16),
        (HSDP(2, 64, "level2"), 35, 0),
    ],
)
def test_sums_that_ranks_share_take_their_part_of_the_memory(kind, whole_sums, parts):
    assert costs(kind, (8, 4), (3,)).buffer_bytes == 4 * (whole_sums + parts)


# A square per tensor, the number of micro batches, and the second tensor with the loss and the weight.
NORM, COUNT, KEPT = ("AllReduce", 4, 2 * 4), ("AllGather", 4, 16), ("AllReduce", 4, 4 * (3 + 2))


def by_parts(elements, ranks=4, itemsize=4):
    """The messages on a GPU that stand in for an AllReduce: the sum is padded, so that all parts have one size."""
    part = -(-elements // ranks)
    return ("ReduceScatter", ranks, itemsize * ranks * part), ("AllGather", ranks, itemsize * part)


@pytest.mark.parametrize("device_target", ["CPU", "GPU", "Ascend"])
def test_data_parallelism_sends_all_sums_once(device_target):
    traffic = costs("auto", (8, 4), (3,), device_target=device_target, micro_size=8).traffic
    assert (traffic.per_micro_batch, traffic.per_batch) == ((), ())
    once = (("AllReduce", 4, 4 * (35 + 2)),)
    assert traffic.per_update == (by_parts(35 + 2) if device_target == "GPU" else once)


def test_on_a_gpu_parts_of_16_bits_are_counted_in_elements():
    tensors = Weights((8, 4), (3,)).trainable_params()
    layout = layout_of(DataParallel(), tensors, Ranks(4, 4, "GPU"), (1, 1), [ms.float16] * 2)
    assert layout.messages().per_update == (*by_parts(2), *by_parts(35, itemsize=2))


@pytest.mark.parametrize(
    "kind,device_target,scatter,gather",
    [
        (HSDP(-1, 0), "CPU", [("AllReduce", 4, 128)], [("AllGather", 4, 32)]),
        (HSDP(-1, 0), "GPU", [("ReduceScatter", 4, 128)], [("AllGather", 4, 32)]),
        (HSDP(2, 0), "CPU", [("AllReduce", 2, 128), ("AllReduce", 2, 64)], [("AllReduce", 2, 128)]),
        (HSDP(2, 0), "Ascend", [("ReduceScatter", 2, 128), ("AllReduce", 2, 64)], [("AllGather", 2, 64)]),
    ],
)
def test_shards_are_reduced_and_gathered(kind, device_target, scatter, gather):
    kept, norm = (by_parts(3 + 2), by_parts(2)) if device_target == "GPU" else ((KEPT,), (NORM,))
    level1 = costs(kind, (8, 4), (3,), device_target=device_target)
    assert level1.traffic.per_update == (*kept, *scatter, *norm, *gather)
    assert (level1.traffic.per_micro_batch, level1.traffic.per_batch) == ((), ())
    shared = HSDP(kind.shard_size, 0, "level2")
    traffic = costs(shared, (8, 4), (3,), device_target=device_target).traffic
    assert traffic.per_update == (*kept, *norm, *gather)
    assert (traffic.per_micro_batch, traffic.per_batch) == (tuple(scatter), (COUNT,))


def test_a_limit_of_the_values_or_of_groups_takes_more_norms():
    for clip, norms in ((None, 1), (ClipByGlobalNorm(1.0), 1), (ClipByValue(1.0), 2), (ClipByGroupNorm({"*": 1.0}), 3)):
        assert costs(HSDP(-1, 0), (8, 4), (3,), clip=clip).traffic.per_update.count(NORM) == norms


def test_large_gradients_go_in_several_messages():
    rows = BUCKET_SIZE // 1024
    with no_init_parameters():  # They need no memory to be planned with.
        one = costs("auto", (rows, 512), (rows, 512))
        three = costs("auto", (rows, 1024), (2 * rows, 1024), (1,))
    assert [message.nbytes for message in one.traffic.per_update] == [4 * BUCKET_SIZE + 8]
    # From the last to the first, as a backward pass makes them; the loss and the weight go with the first message.
    assert [message.nbytes for message in three.traffic.per_update] == [4 + 8, 8 * BUCKET_SIZE, 4 * BUCKET_SIZE]


def test_a_window_costs_what_its_batches_and_micro_batches_do():
    for micro_size, micro_batches in ((1, 3), (4, 12), (100, 24)):  # 8 rows cannot make more than 8
        got = costs(DataParallel(sync_each_batch=True), (8, 4), accumulation_steps=3, micro_size=micro_size)
        assert got.micro_batches_per_update == micro_batches
        messages = [*micro_batches * [128], *3 * [16], *[8, 4, 32]]
        assert sorted(message.nbytes for message in got.window_messages) == sorted(messages)


def test_nothing_is_known_of_the_costs_without_parameters():
    got = plan(ranks=4)
    assert [got.buffer_bytes, got.traffic, got.window_messages] == [None] * 3


def test_a_plan_keeps_no_weights():
    got = costs("auto", (8, 4))
    assert [(weight.shape, weight.itemsize) for weight in got.parameters] == [((8, 4), 4)]
