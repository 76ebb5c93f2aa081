"""Model: training, the last window, evaluation and prediction, next to MindSpore's own Model."""

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
from mindspore.nn.utils import no_init_parameters
from refusal import no_warning, refuses, warns
from step_probe import Of, compilations

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, Model

pytestmark = pytest.mark.usefixtures("eager")

BOTH = pytest.mark.parametrize("wrap", [lambda cell: cell, hsdp], ids=["alone", "AutoParallel"])
METRICS = {"loss", "mse"}


@BOTH
def test_a_network_and_its_loss_train_as_the_whole_batch_does(wrap):
    network = line()
    # The batch axis is that of the network's only input: the label's rows are on its first axis.
    loss_cell = wrap(GradAccumulation(network, 3, batch_axis=(0,)))
    Model(loss_cell, nn.MSELoss(), sgd(network)).train(2, batches(8))
    assert weight_of(network) == pytest.approx(descend(ALL, ALL))


def test_the_program_of_the_tutorial_trains_parameters_that_are_initialized_late(mode):
    with no_init_parameters():
        network = line()
        optimizer = sgd(network)
    assert network.weight.has_init
    Model(hsdp(GradAccumulation(mse(network), 3)), optimizer=optimizer).train(2, batches(8))
    assert weight_of(network) == pytest.approx(descend(ALL, ALL))


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
    "last_window, weight, open_batches", [("apply", descend(ALL[:4]), 0), ("drop", 0, 0), ("carry", 0, 2)]
)
def test_a_stop_in_mid_window_finishes_the_window_as_the_end_of_the_data_does(last_window, weight, open_batches):
    network, model = toy(accumulation_steps=3, last_window=last_window)
    recorder = Recorder(stop_after=2)
    model.train(5, batches(2), recorder)
    assert len(recorder.outputs) == 2
    assert weight_of(network) == pytest.approx(weight)
    assert model.train_network.open_batches() == open_batches


FIRST = [ALL[:6], [7, 8]]


# With eight batches to a window, there is one window of all the rows, twice.
@pytest.mark.parametrize("steps, last_window, windows", [(3, "apply", [FIRST, FIRST * 2]), (8, "carry", [[], [ALL]])])
def test_validation_in_fit_sees_the_applied_last_window_and_leaves_a_carried_one_alone(steps, last_window, windows):
    network, model = toy_with_metrics(accumulation_steps=steps, last_window=last_window)
    history = ms.train.History()
    model.fit(2, batches(2), batches(4), callbacks=history)
    errors = [(2 - descend(*each)) ** 2 * 25.5 for each in windows]
    assert history.history["mse"] == pytest.approx(errors, rel=1e-5)


def stock_metrics(network):
    return pytest.approx(ms.Model(network, nn.MSELoss(), metrics=METRICS).eval(batches(8)))


def test_evaluation_gives_the_metrics_of_stock_model(network_mode):
    network = line()
    assert Model(GradAccumulation(network, 3), nn.MSELoss(), metrics=METRICS).eval(batches(8)) == stock_metrics(network)


@BOTH
def test_a_network_with_its_loss_inside_is_evaluated_too(wrap, network_mode):
    network = line()
    model = Model(wrap(GradAccumulation(mse(network), 3)), metrics=METRICS)
    assert model.eval(batches(8)) == stock_metrics(network)
    network, step = toy_step(3)
    model = Model(step, metrics=METRICS)
    model.train(1, batches(8))
    assert weight_of(network) == pytest.approx(2.04)
    assert model.eval(batches(8)) == stock_metrics(network)


def test_a_loss_cell_of_the_users_needs_a_cell_that_evaluates_it():
    cell = GradAccumulation(Of(line(), lambda out, shift, labels: (out + shift - labels).square().mean()), 3)
    with refuses(ValueError, "'eval_network'", "loss_fn), or network"):
        Model(cell, metrics={"mse"})
    given = nn.WithEvalCell(line(), nn.MSELoss())
    assert Model(cell, metrics={"loss"}, eval_network=given, eval_indexes=[0, 1, 2])._eval_network is given


# More rows than micro batches, and fewer.
@pytest.mark.parametrize("wrap, rows", [(lambda cell: cell, 8), (hsdp, 2)], ids=["alone", "AutoParallel"])
def test_prediction_neither_sums_nor_splits(wrap, rows, network_mode):
    network = nn.Dense(1, 1, "ones", has_bias=False)
    model = Model(wrap(GradAccumulation(network, 3)), nn.MSELoss(), sgd(network))
    np.testing.assert_array_equal(model.predict(Tensor(X[:rows])).asnumpy(), X[:rows])


def test_a_prediction_after_an_evaluation_evaluates_the_loss_cell_too(mode):
    network = line()
    loss_cell = GradAccumulation(mse(network), 3)
    model = Model(loss_cell, optimizer=sgd(network), metrics={"loss"})
    model.train(1, batches(8))
    model.eval(batches(8))
    with no_warning():  # Of a train cell that is not ours, where the loss cell is in training mode.
        model.predict(Tensor(X), Tensor(X))
    assert not loss_cell.training
    model.train(1, batches(8))
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


@BOTH
def test_a_model_trains_with_a_step_of_its_own_settings(wrap):
    network, train_step = toy_step(2, accumulation_steps=3, clip=ClipByGlobalNorm(10.0))
    model = Model(wrap(train_step))
    recorder = Recorder()  # It finds the optimizer in the callback parameters.
    model.train(1, batches(2), recorder)
    assert model.train_network is train_step
    assert weight_of(network) == pytest.approx(0.02 * 10 + 0.02 * 10)  # Two updates, both clipped.


def test_stock_model_trains_our_grad_accumulation_rightly_and_warns(mode):
    # Stock Model looks for the class name of its own GradAccumulation, and with that would train nothing.
    network = line()
    loss_cell = GradAccumulation(mse(network), 3)  # 3, 3 and 2 rows
    model = ms.Model(loss_cell, optimizer=sgd(network))
    with warns("train cell around"):
        model.train(2, batches(8))
    assert weight_of(network) == pytest.approx(descend(ALL, ALL))
