"""Model: training, the last window, evaluation and prediction, next to MindSpore's own Model."""

import functools
import warnings

import mindspore as ms
import numpy as np
import pytest
from linear_toy import (
    ALL,
    Recorder,
    X,
    batches,
    descend,
    hsdp,
    line,
    mse,
    sgd,
    toy,
    toy_step,
    toy_with_metrics,
    weight_of,
)
from mindspore import Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.nn.utils import no_init_parameters
from refusal import refuses, warns
from step_probe import compilations

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, Model, TrainOneStepCell

pytestmark = pytest.mark.usefixtures("eager")

RANDOM = np.random.default_rng(3)
ROWS = RANDOM.normal(size=(10, 3)).astype(np.float32)
SHIFT = RANDOM.normal(size=(10, 3)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 10).astype(np.int32)
ROWS_OF_BATCH, MICRO_SIZE, EPOCHS = 5, 5, 2
LOSS = nn.CrossEntropyLoss


class Classifier(nn.SequentialCell):
    # Identity: the same weights each time, and unlike those of "ones" no two rows of a weight get the same gradient.
    def __init__(self):
        super().__init__(nn.Dense(3, 3, "identity", "zeros"), nn.Tanh(), nn.Dense(3, 3, "identity", "zeros"))


class ShiftedLoss(nn.Cell):
    """A loss cell of three inputs."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network, self.loss = network, LOSS()

    def construct(self, rows, shift, labels):
        return self.loss(self.network(rows + shift), labels)


def samples(*columns, rows=ROWS_OF_BATCH):
    return NumpySlicesDataset(columns, shuffle=False).batch(rows)


def momentum(network, learning_rate=0.1):
    return nn.Momentum(network.trainable_params(), learning_rate, 0.9)


def values(network):
    return {parameter.name: parameter.asnumpy() for parameter in network.trainable_params()}


def close(values, others):
    assert values.keys() == others.keys()
    return all(np.allclose(values[name], others[name], rtol=1e-5, atol=1e-6) for name in values)


@functools.cache
def stock_weights(shifted=False, rows=ROWS_OF_BATCH, learning_rate=0.1):
    """Train MindSpore's Model on the whole batches: the oracle of the tests below."""
    network = Classifier()
    if shifted:
        model = ms.Model(ShiftedLoss(network), optimizer=momentum(network, learning_rate))
        model.train(EPOCHS, samples(ROWS, SHIFT, LABELS, rows=rows))
    else:
        model = ms.Model(network, LOSS(), momentum(network, learning_rate))
        model.train(EPOCHS, samples(ROWS, LABELS, rows=rows))
    return values(network)


def loss_given(network):
    # The batch axis is that of the network's only input: the label's rows are on its first axis.
    return Model(GradAccumulation(network, MICRO_SIZE, batch_axis=(0,)), LOSS(), momentum(network))


def loss_given_to_auto_parallel(network):
    return Model(hsdp(GradAccumulation(network, MICRO_SIZE)), LOSS(), momentum(network))


@pytest.mark.parametrize("build", [loss_given, loss_given_to_auto_parallel])
def test_training_leaves_the_weights_of_stock_model_on_whole_batches(build):
    network = Classifier()
    build(network).train(EPOCHS, samples(ROWS, LABELS))
    assert close(values(network), stock_weights())


def test_the_comparison_with_stock_model_tells_wrong_trainings_apart():
    assert not close(stock_weights(), values(Classifier()))  # nothing was trained
    assert not close(stock_weights(), stock_weights(learning_rate=0.1 * MICRO_SIZE))  # a sum in place of the mean
    assert not close(stock_weights(), stock_weights(rows=1))  # an update after each micro batch
    assert not close(stock_weights(), stock_weights(shifted=True))  # the second column was dropped


def test_a_dataset_of_three_columns_feeds_a_loss_cell_of_three_inputs():
    network = Classifier()
    loss_cell = GradAccumulation(ShiftedLoss(network), MICRO_SIZE)
    Model(loss_cell, optimizer=momentum(network)).train(EPOCHS, samples(ROWS, SHIFT, LABELS))
    assert close(values(network), stock_weights(shifted=True))


def test_the_program_of_the_tutorial_trains_parameters_that_are_initialized_late(mode):
    with no_init_parameters():
        network = Classifier()
        optimizer = momentum(network)
    assert all(parameter.has_init for parameter in network.trainable_params())
    loss_cell = GradAccumulation(nn.WithLossCell(network, LOSS()), MICRO_SIZE)
    Model(hsdp(loss_cell), optimizer=optimizer).train(EPOCHS, samples(ROWS, LABELS))
    assert close(values(network), stock_weights())


# The last of the four batches is alone in its window: divided by three batches it would leave 1.8059556.
@pytest.mark.parametrize("last_window, weight", [("apply", 2.9912), ("drop", 1.2133333)])
def test_the_last_window_is_applied_or_dropped(last_window, weight):
    network, model = toy(accumulation_steps=3, last_window=last_window)
    recorder = Recorder()
    model.train(1, batches(2), recorder)
    assert recorder.weights[:3] == pytest.approx([0, 0, 1.2133333])
    assert weight_of(network) == pytest.approx(weight)
    assert model.train_network.open_batches() == 0


def test_a_pass_that_is_shorter_than_its_size_says_ends_its_window_too():
    """MindSpore begins with the second batch of the second pass."""
    network, model = toy(accumulation_steps=2)
    dataset, recorder = batches(2), Recorder()
    dataset.set_init_step(5)
    with warns("windows end"):
        model.train(3, dataset, recorder, initial_epoch=1)
    assert len(recorder.outputs) == 7
    assert weight_of(network) == pytest.approx(descend(ALL[2:6], [7, 8], ALL[:4], ALL[4:]))


@pytest.mark.parametrize(
    "last_window, weight, open_batches",
    [("apply", descend(ALL[:4]), 0), ("drop", 0, 0), ("carry", 0, 2)],
)
def test_a_stop_in_mid_window_finishes_the_window_as_the_end_of_the_data_does(last_window, weight, open_batches):
    network, model = toy(accumulation_steps=3, last_window=last_window)
    recorder = Recorder(stop_after=2)
    model.train(5, batches(2), recorder)
    assert len(recorder.outputs) == 2
    assert weight_of(network) == pytest.approx(weight)
    assert model.train_network.open_batches() == open_batches


def test_validation_in_fit_sees_the_applied_last_window():
    network, model = toy_with_metrics(accumulation_steps=3)
    history = ms.train.History()
    model.fit(2, batches(2), batches(4), callbacks=history)
    after_epoch = [descend(ALL[:6], [7, 8]), descend(ALL[:6], [7, 8], ALL[:6], [7, 8])]
    assert history.history["mse"] == pytest.approx([(2 - weight) ** 2 * 25.5 for weight in after_epoch], rel=1e-5)


def test_validation_in_fit_leaves_a_carried_window_alone():
    network, model = toy_with_metrics(accumulation_steps=8, last_window="carry")
    model.fit(2, batches(2), batches(4))
    # One window of all the rows, twice.
    assert weight_of(network) == pytest.approx(2.04)


def test_the_step_counter_and_the_schedule_move_once_per_update():
    network, model = toy(accumulation_steps=2, learning_rate=[0.02, 0.01, 0.005, 0.0025])
    recorder = Recorder()
    model.train(1, batches(2), recorder)
    assert weight_of(network) == pytest.approx(descend(ALL[4:], weight=descend(ALL[:4]), learning_rate=0.01))
    assert model._optimizer.global_step.asnumpy() == 2
    rates = [output.learning_rate.asnumpy().item() for output in recorder.outputs]
    assert rates == pytest.approx([np.nan, 0.02, np.nan, 0.01], nan_ok=True)


def test_evaluation_gives_the_metrics_of_stock_model(network_mode):
    stock = ms.Model(Classifier(), LOSS(), metrics={"loss", "accuracy"})
    model = Model(GradAccumulation(Classifier(), MICRO_SIZE), LOSS(), metrics={"loss", "accuracy"})
    assert model.eval(samples(ROWS, LABELS)) == pytest.approx(stock.eval(samples(ROWS, LABELS)))


@pytest.mark.parametrize("wrap", [lambda cell: cell, hsdp], ids=["alone", "AutoParallel"])
def test_a_classifier_with_its_loss_inside_is_evaluated_too(wrap, network_mode):
    network, metrics = Classifier(), {"loss", "accuracy"}
    stock = ms.Model(Classifier(), LOSS(), metrics=metrics)
    model = Model(wrap(GradAccumulation(nn.WithLossCell(network, LOSS()), MICRO_SIZE)), metrics=metrics)
    assert model.eval(samples(ROWS, LABELS)) == pytest.approx(stock.eval(samples(ROWS, LABELS)))
    network = Classifier()
    step = TrainOneStepCell(GradAccumulation(nn.WithLossCell(network, LOSS()), MICRO_SIZE), momentum(network))
    model = Model(step, metrics=metrics)
    model.train(EPOCHS, samples(ROWS, LABELS))
    assert close(values(network), stock_weights())
    stock = ms.Model(network, LOSS(), metrics=metrics)
    assert model.eval(samples(ROWS, LABELS)) == pytest.approx(stock.eval(samples(ROWS, LABELS)))


def test_a_loss_cell_of_the_users_needs_a_cell_that_evaluates_it():
    cell = GradAccumulation(ShiftedLoss(Classifier()), MICRO_SIZE)
    with refuses(ValueError, "'eval_network'", "loss_fn), or network"):
        Model(cell, metrics={"accuracy"})
    network = Classifier()
    given = nn.WithEvalCell(network, LOSS())
    assert Model(cell, metrics={"loss"}, eval_network=given, eval_indexes=[0, 1, 2])._eval_network is given


# More rows than micro batches, and fewer.
@pytest.mark.parametrize("wrap, rows", [(lambda cell: cell, 10), (hsdp, 2)], ids=["alone", "AutoParallel"])
def test_prediction_neither_sums_nor_splits(wrap, rows, network_mode):
    network = Classifier()
    inputs = Tensor(ROWS[:rows])
    expected = ms.Model(network).predict(inputs).asnumpy()
    model = Model(wrap(GradAccumulation(network, MICRO_SIZE)), LOSS(), momentum(network))
    assert model.predict(inputs).asnumpy() == pytest.approx(expected)


def test_a_prediction_after_an_evaluation_evaluates_the_loss_cell_too(mode):
    network = Classifier()
    loss_cell = GradAccumulation(nn.WithLossCell(network, LOSS()), MICRO_SIZE)
    model = Model(loss_cell, optimizer=momentum(network), metrics={"loss"})
    model.train(1, samples(ROWS, LABELS))
    model.eval(samples(ROWS, LABELS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Of a train cell that is not ours, where the loss cell is in training mode.
        model.predict(Tensor(ROWS), Tensor(LABELS))
    assert not loss_cell.training
    model.train(1, samples(ROWS, LABELS))
    assert loss_cell.training and network.training


def test_changes_between_training_evaluation_and_prediction_compile_nothing_anew(mode):
    network, model = toy_with_metrics(accumulation_steps=2)
    counts = []
    with compilations() as compiled:
        for _ in range(3):
            model.train(1, batches(4))
            model.eval(batches(4))
            model.predict(Tensor(X))
            counts.append(len(compiled))
    assert weight_of(network) == pytest.approx(descend(ALL, ALL, ALL))
    # Op by op, a kernel may leave nothing to compile but the optimizer.
    assert counts == [counts[0]] * 3 and counts[0] >= 1


@pytest.mark.parametrize("wrap", [lambda cell: cell, hsdp], ids=["alone", "AutoParallel"])
def test_a_model_trains_with_a_step_of_its_own_settings(wrap):
    network, train_step = toy_step(2, accumulation_steps=3, clip=ClipByGlobalNorm(10.0))
    model = Model(wrap(train_step))
    recorder = Recorder()  # It finds the optimizer in the callback parameters.
    model.train(1, batches(2), recorder)
    assert model.train_network is train_step
    assert weight_of(network) == pytest.approx(0.02 * 10 + 0.02 * 10)  # Two updates, both clipped.


def test_the_optimizer_of_a_deleted_model_is_free_again():
    network = line()
    optimizer = sgd(network)
    model = Model(mse(network), optimizer=optimizer)
    model.train(1, batches(8))
    del model
    Model(mse(network), optimizer=optimizer)


def test_stock_model_trains_our_grad_accumulation_rightly_and_warns(mode):
    # Stock Model looks for the class name of its own GradAccumulation, and with that would train nothing.
    network = line()
    loss_cell = GradAccumulation(mse(network), 3)  # 3, 3 and 2 rows
    model = ms.Model(loss_cell, optimizer=sgd(network))
    with warns("train cell around"):
        model.train(2, batches(8))
    assert weight_of(network) == pytest.approx(descend(ALL, ALL))
