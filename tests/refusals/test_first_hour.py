"""Mistakes of a first hour: each message sends to the right place. The wrong answers that were given once are named."""

import traceback
import warnings

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, line, sgd
from mindspore import Tensor, nn, ops, value_and_grad
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from refusal import loss_cell, refuses, warns

from ms_gradaccum import Accumulator, GradAccumulation, GradAccumulationWarning, Model, TrainOneStepCell

pytestmark = pytest.mark.usefixtures("eager")
BATCH = Tensor(X), Tensor(2 * X)
LOSS_INSIDE = "nn.WithLossCell(network, loss_fn)"


def accumulation_steps_as_the_third_argument(cell, optimizer):
    """Answered with a loss scale."""
    TrainOneStepCell(cell, optimizer, 4)


def a_loss_as_the_second_argument(cell, optimizer):
    """Answered with a loss scale, since the optimizer is the third."""
    TrainOneStepCell(cell, nn.MSELoss(), optimizer)


def a_loss_in_place_of_the_optimizer(cell, optimizer):
    TrainOneStepCell(cell, nn.MSELoss())


def a_loss_in_place_of_a_number(cell, optimizer):
    GradAccumulation(cell, nn.MSELoss())


def a_loss_before_the_optimizer_of_a_loop(cell, optimizer):
    Accumulator(cell, nn.MSELoss(), optimizer)


def a_loss_before_the_number(cell, optimizer):
    """Answered with 'takes from 2 to 3 positional arguments', as the next two were."""
    GradAccumulation(cell, nn.MSELoss(), 4)


def a_loss_after_the_number(cell, optimizer):
    GradAccumulation(cell, 4, nn.MSELoss())


def a_loss_before_the_optimizer_and_the_number(cell, optimizer):
    Accumulator(cell, nn.MSELoss(), optimizer, 4)


def a_loss_before_the_optimizer_and_the_number_of_a_step(cell, optimizer):
    TrainOneStepCell(cell, nn.MSELoss(), optimizer, 4, True)


def a_loss_by_name(cell, optimizer):
    """Answered with `losses`."""
    GradAccumulation(cell, 4, loss_fn=nn.MSELoss())


def a_loss_around(cell, optimizer):
    """Answered with the product of two micro_size."""
    TrainOneStepCell(nn.WithLossCell(GradAccumulation(line(), 4), nn.MSELoss()), optimizer)


def rows_of_a_micro_batch(cell, optimizer):
    """Answered with micro_size alone, which is a number of micro batches."""
    TrainOneStepCell(cell, optimizer, micro_batch_size=4)


def rows_of_a_micro_batch_of_the_loss_cell(cell, optimizer):
    """Answered by Python, with a missing 'micro_size'."""
    GradAccumulation(cell, micro_batch_size=4)


def an_optimizer_class(cell, optimizer):
    """Answered with 'got type'."""
    TrainOneStepCell(cell, nn.SGD)


def no_loss(cell, optimizer):
    """Answered with 'too many positional arguments', without the word loss."""
    TrainOneStepCell(cell, optimizer)(*BATCH)


def a_loss_and_gradients(cell, optimizer):
    """Answered with 'must be a tuple of tensors, but got tuple'."""
    Accumulator(cell, optimizer)(value_and_grad(cell, None, optimizer.parameters)(*BATCH))


MISTAKES = {
    accumulation_steps_as_the_third_argument: ("'sens'", "Did you mean accumulation_steps=4?"),
    a_loss_as_the_second_argument: ("'sens'", LOSS_INSIDE),
    a_loss_in_place_of_the_optimizer: ("'optimizer'", LOSS_INSIDE),
    a_loss_in_place_of_a_number: ("'micro_size'", LOSS_INSIDE),
    a_loss_before_the_optimizer_of_a_loop: ("'accumulation_steps'", LOSS_INSIDE),
    a_loss_before_the_number: ("'micro_size'", LOSS_INSIDE),
    a_loss_after_the_number: ("after 'micro_size' need a name", LOSS_INSIDE),
    a_loss_before_the_optimizer_and_the_number: ("'accumulation_steps'", LOSS_INSIDE),
    a_loss_before_the_optimizer_and_the_number_of_a_step: ("'sens'", LOSS_INSIDE),
    a_loss_by_name: ("'loss_fn'", LOSS_INSIDE),
    a_loss_around: ("'network'", "Put it outside: GradAccumulation(WithLossCell(...), 4)"),
    rows_of_a_micro_batch: ("Did you mean micro_size", "not their rows"),
    rows_of_a_micro_batch_of_the_loss_cell: ("Did you mean micro_size?", "not their rows"),
    an_optimizer_class: ("the class SGD", "Build it: SGD("),
    no_loss: ("too many positional arguments", LOSS_INSIDE),
    a_loss_and_gradients: ("a tuple of Tensor, tuple", "loss, grads ="),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_answered_with_its_remedy(mistake):
    cell = line() if mistake is no_loss else loss_cell()
    with warnings.catch_warnings(), refuses((TypeError, ValueError), *MISTAKES[mistake]):
        warnings.simplefilter("ignore")
        mistake(cell, sgd(cell))


@pytest.mark.parametrize("compile", [None, True])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_labels_of_64_bits_are_answered_with_a_cast_in_the_last_line(dtype, compile, monkeypatch):
    """It was in line 1 of a long message, and sent to PYNATIVE mode, which takes no such labels either."""
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
    """It was shown in thousands."""
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
    """Return the warnings about the rows of a dataset."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GradAccumulationWarning)
        train(*args)
    return [str(each.message) for each in caught if "batch()" in str(each.message)]


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
    """In evaluation mode it trained without a word, with the activations of all micro batches."""
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
