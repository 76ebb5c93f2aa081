"""Mistakes of a first hour: each message sends to the right place. The wrong answers that were given once are named."""

import traceback
import warnings

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, line, mse, sgd
from mindspore import Tensor, nn, ops, value_and_grad
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from refusal import loss_cell, refuses, told, warns

from ms_gradaccum import Accumulator, GradAccumulation, GradAccumulationWarning, Model, TrainOneStepCell

pytestmark = pytest.mark.usefixtures("eager")
BATCH = Tensor(X), Tensor(2 * X)
LOSS = nn.MSELoss()
LOSS_INSIDE = "nn.WithLossCell(network, loss_fn)"


# What somebody wrote, and what the answer must have in it.
MISTAKES = {
    "a number third": (lambda cell, optimizer: TrainOneStepCell(cell, optimizer, 4), "'sens'", "accumulation_steps=4?"),
    "a loss second": (lambda cell, optimizer: TrainOneStepCell(cell, LOSS, optimizer), "'sens'", LOSS_INSIDE),
    "a loss for the optimizer": (lambda cell, optimizer: TrainOneStepCell(cell, LOSS), "'optimizer'", LOSS_INSIDE),
    "several optimizers": (
        lambda cell, optimizer: TrainOneStepCell(cell, [optimizer]),
        "'optimizer'",
        "Accumulator(network, [first, second])",
    ),
    "a loss for the number": (lambda cell, optimizer: GradAccumulation(cell, LOSS), "'micro_size'", LOSS_INSIDE),
    "a loss in a loop": (
        lambda cell, optimizer: Accumulator(cell, LOSS, optimizer),
        "'accumulation_steps'",
        LOSS_INSIDE,
    ),
    "a loss before the number": (lambda cell, optimizer: GradAccumulation(cell, LOSS, 4), "'micro_size'", LOSS_INSIDE),
    "a loss after the number": (lambda cell, optimizer: GradAccumulation(cell, 4, LOSS), "need a name", LOSS_INSIDE),
    "more by place": (lambda cell, optimizer: Accumulator(cell, optimizer, 2, "fp16"), "need a name", "but got 'fp16'"),
    "a loss by name": (lambda cell, optimizer: GradAccumulation(cell, 4, loss_fn=LOSS), "'loss_fn'", LOSS_INSIDE),
    "a loss around": (
        lambda cell, optimizer: TrainOneStepCell(mse(GradAccumulation(line(), 4)), optimizer),
        "'network'",
        "Put it outside: GradAccumulation(WithLossCell(...), 4)",
    ),
    "rows": (
        lambda cell, optimizer: TrainOneStepCell(cell, optimizer, micro_batch_size=4),
        "micro_size",
        "not their rows",
    ),
    "rows of a cell": (
        lambda cell, optimizer: GradAccumulation(cell, micro_batch_size=4),
        "micro_size?",
        "not their rows",
    ),
    "an optimizer class": (lambda cell, optimizer: TrainOneStepCell(cell, nn.SGD), "the class SGD", "Build it: SGD("),
    "no loss": (
        lambda cell, optimizer: TrainOneStepCell(cell._backbone, optimizer)(*BATCH),
        "too many positional arguments",
        LOSS_INSIDE,
    ),
    "a loss and gradients": (
        lambda cell, optimizer: Accumulator(cell, optimizer)(value_and_grad(cell, None, optimizer.parameters)(*BATCH)),
        "a tuple of Tensor, tuple",
        "loss, grads =",
    ),
}


@pytest.mark.parametrize("mistake, what, remedy", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_with_its_remedy(mistake, what, remedy):
    cell = loss_cell()
    with warnings.catch_warnings(), refuses((TypeError, ValueError), what, remedy):
        warnings.simplefilter("ignore")
        mistake(cell, sgd(cell))


@pytest.mark.parametrize("compile", [None, True])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_labels_of_64_bits_are_answered_with_a_cast_in_the_last_line(dtype, compile, monkeypatch):
    monkeypatch.delenv("MS_JIT")
    ms.set_context(mode=ms.PYNATIVE_MODE if compile else ms.GRAPH_MODE)
    network = nn.Dense(1, 3)
    step = TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), sgd(network), compile=compile)
    batch = Tensor(X), Tensor(np.zeros(8, dtype))
    if dtype is np.int32:
        step(*batch)
        return
    with pytest.raises(TypeError) as raised:
        step(*batch)
    last = "".join(traceback.format_exception(raised.value)).splitlines()[-1]
    assert last.startswith("TypeError: For 'TrainOneStepCell', MindSpore cannot compile the network: ")
    assert last.endswith("Cast inputs in the dataset, for example with astype(np.int32).")


def test_a_list_of_batches_is_shown_in_one_line():
    cell = loss_cell()
    batches = [BATCH] * 100
    with refuses(TypeError, "'train_dataset'", "of type list") as raised:
        Model(cell, optimizer=sgd(cell)).train(1, batches)
    assert str(raised.value).count("\n") == 0 and len(str(raised.value)) < 400


def by_model(dataset):
    network = line()
    Model(network, nn.MSELoss(), sgd(network), check_loss=False).train(1, dataset)


def by_loop(dataset, collated=1):
    """Train each row, or so many at once."""
    network = line()
    accumulator = Accumulator(nn.WithLossCell(network, nn.MSELoss()), sgd(network), check_loss=False)
    prepared = accumulator.prepare(dataset)
    for _ in range(2):
        rows = []
        for row in prepared:
            rows.append(row)
            if len(rows) == collated:
                columns = rows[0] if collated == 1 else [ops.stack(column) for column in zip(*rows)]
                accumulator.backward(*columns)
                accumulator.step()
                rows.clear()


def told_of_rows(train, *args):
    with told("batch()") as said:
        train(*args)
    return said


@pytest.mark.parametrize("train", [by_model, by_loop])
def test_a_dataset_without_batch_is_told(train):
    rows = NumpySlicesDataset((X, X[:, 0]), shuffle=False)
    (said,) = told_of_rows(train, rows)
    assert "it hands out single rows" in said
    # Batched, or with whole batches as its rows, or made by a generator, which may hand out batches.
    for fine in (
        rows.batch(4),
        NumpySlicesDataset((X.reshape(2, 4, 1),) * 2),
        GeneratorDataset(lambda: iter([(X, X)]), ["x", "y"]),
    ):
        assert told_of_rows(train, fine) == []


def test_a_generator_of_single_rows_is_told_where_their_values_are_split():
    """Nothing but the failure shows that a generator hands out rows."""
    network = nn.Dense(4, 3)
    rows = GeneratorDataset(lambda: iter([(np.ones(4, np.float32), np.int32(1))]), ["x", "y"])
    model = Model(GradAccumulation(nn.WithLossCell(network, nn.CrossEntropyLoss()), 2), optimizer=sgd(network))
    with warnings.catch_warnings(), refuses(ValueError, "takes only the 4 rows", "call dataset.batch(32)"):
        warnings.simplefilter("error", GradAccumulationWarning)
        model.train(1, rows)


def test_a_loop_that_collates_rows_itself_is_not_told():
    assert told_of_rows(by_loop, NumpySlicesDataset((X, X[:, 0]), shuffle=False), 4) == []


@pytest.mark.parametrize("trains", [False, True])
def test_mindspores_own_step_around_ours_is_told_in_either_mode(trains, mode):
    cell = loss_cell()
    step = nn.TrainOneStepCell(GradAccumulation(cell, 2), sgd(cell)).set_train(trains)
    with warns("train cell around it is not one of ms_gradaccum"):
        step(*BATCH)


def test_an_evaluation_is_told_nothing(mode):
    cell = loss_cell()
    accumulation = GradAccumulation(cell, 2)
    step = TrainOneStepCell(accumulation, sgd(cell))
    step(*BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradAccumulationWarning)
        accumulation.set_train(False)(*BATCH)
        step.network.set_train(False)(*BATCH)
