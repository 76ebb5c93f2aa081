"""Inputs that were once let through, or refused in the words of Python: one of our sentences, nothing changed."""

import copy

import numpy as np
import pytest
from linear_toy import X, line, sgd, toy, weight_of
from loop_toy import FOUR, toy_loop
from mindspore import Parameter, Tensor, nn
from refusal import AXIS, new_step, raises, typed
from step_probe import changed, values_of
from strategies import ALL_ROWS, endless, loss_cell

from ms_gradaccum import (
    AccumulationConfig,
    AccumulationSchedule,
    Accumulator,
    GradAccumulation,
    MetricsLogger,
    Model,
    ProgressBar,
    verify,
)

FITS = "For 'GradAccumulation', the inputs must fit the network's construct(data, label), but got {}. "
INPUTS = {
    "too many": ((X, X, X), TypeError, FITS.format("too many positional arguments")),
    "too few": ((X,), TypeError, FITS.format("a missing argument")),
    "objects": (
        (np.array([[None]] * 8), X),
        TypeError,
        "For 'GradAccumulation', the inputs must be tensors, or arrays of what a tensor can hold, but got an array of "
        "object. Convert it, for example with astype(np.float32).",
    ),
    "endless": (
        (endless(), X),
        ValueError,
        "For 'GradAccumulation', the inputs must be tensors, or tuples, lists and dicts of them, but got a nest "
        "without an end. Take out what holds itself.",
    ),
}


@pytest.mark.parametrize("case", INPUTS)
def test_inputs_that_no_network_has(case):
    inputs, error, sentence = INPUTS[case]
    if case.startswith("too"):
        sentence = sentence.replace("a missing argument", "missing a required argument: 'label'")
        sentence += "Give them as the network takes them."
    step = new_step()
    before = values_of(step)
    with raises(error, sentence):
        step(*inputs)
    with raises(error, sentence):
        verify(loss_cell(), inputs, 2)
    assert not changed(before, values_of(step)) and step.events.batches == 0


def test_a_batch_axis_without_an_end():
    rule = "an int, None or one of these per input"
    begin = f"For 'GradAccumulation', the argument 'batch_axis' must be {rule}, but got "
    with raises(ValueError, f"{begin}a nest without an end. {AXIS}"):
        GradAccumulation(loss_cell(), 2, batch_axis=endless())


def test_settings_that_are_arrays():
    rest = "must be 'auto', DataParallel() or HSDP(), but got array([1, 2]). 'auto' looks at the number of processes."
    with raises(TypeError, f"For 'TrainOneStepCell', the argument 'parallel' {rest}"):
        new_step(parallel=np.array([1, 2]))
    _, accumulator = toy_loop()
    rest = "must be one of its networks, but got ndarray. Give a network that the Accumulator was built with."
    for call in (accumulator.step, accumulator.zero_grad):
        with raises(ValueError, f"For 'Accumulator', the argument 'network' {rest}"):
            call(network=np.array([1, 2]))


def test_networks_and_optimizers_of_an_accumulator():
    several = "Several networks take a list with the optimizer (or optimizers) of each."
    begin = "For 'Accumulator', the argument"
    with raises(ValueError, f"{begin} 'optimizer' must be at least one per network, but got an empty list. {several}"):
        Accumulator(loss_cell(), [[]])
    cell = loss_cell()
    remedy = "Nobody could tell its batches apart: put its losses into one cell."
    with raises(ValueError, f"{begin} 'network' must be different networks, but got one of them twice. {remedy}"):
        Accumulator([cell, cell], [sgd(cell), sgd(cell)])


LOSS = "For 'Accumulator', the argument 'loss' must be a number, a tensor of one or None, but got {}. "
GRADS = "Take them with value_and_grad(forward, None, optimizer.parameters)."
REPORTED = [("3", typed("3")), ([1.0], typed([1.0])), (10**400, str(10**400)), (Tensor([1, 2]), repr(Tensor([1, 2])))]


@pytest.mark.parametrize("loss, got", REPORTED, ids=["text", "list", "too large", "two"])
def test_a_loss_that_is_none(loss, got):
    _, accumulator = toy_loop(2)
    accumulator.backward(*FOUR[0])
    before = values_of(accumulator)
    with raises(TypeError, LOSS.format(got) + "It is for the report alone."):
        accumulator(Tensor([[1.0]]), 1, loss)
    assert not changed(before, values_of(accumulator)) and accumulator.drop() == 1


@pytest.mark.parametrize("dtype", [np.int32, np.complex64], ids=lambda dtype: dtype.__name__)
def test_gradients_are_floating_point_numbers(dtype):
    _, accumulator = toy_loop(2)
    grad = Tensor(np.ones((1, 1), dtype))
    sentence = f"For 'Accumulator', the argument 'grads' must be floating-point tensors, but got one of {grad.dtype}. "
    with raises(TypeError, sentence + GRADS):
        accumulator(grad)


def test_gradients_may_be_kept_in_parameters(mode):
    network, accumulator = toy_loop(2)
    kept = Parameter(Tensor([[3.0]]), "weight")
    accumulator((kept,), 1)
    kept.set_data(Tensor([[1.0]]))
    accumulator((kept,), 1)
    assert weight_of(network) == pytest.approx(-0.02 * 2)


def test_what_is_scaled_is_a_tensor():
    _, accumulator = toy_loop()
    sentence = f"For 'Accumulator', the argument 'loss' must be a tensor, but got {typed('x')}. "
    with raises(TypeError, sentence + "Give what is differentiated."):
        accumulator.scale("x")


def test_a_schedule_that_refuses_a_batch_does_not_count_it():
    _, accumulator = toy_loop(schedule=lambda updates: 1 if updates == 0 else "two")
    accumulator.backward(*FOUR[0])
    accumulator.step()
    rule = "For 'AccumulationConfig', the argument 'schedule(1)' must be a positive int, but got "
    for _ in range(2):
        with raises(TypeError, f"{rule}{typed('two')}. It is called with the number of updates so far."):
            accumulator.backward(*FOUR[1])
        assert (accumulator.window.events.batches, accumulator.sync_gradients, accumulator.updated) == (1, True, True)


def test_a_clip_that_is_refused_is_not_that_of_a_process_that_joins():
    _, accumulator = toy_loop()
    accumulator.backward(*FOUR[0])
    accumulator.clip_grad_norm(1.0)
    clip = accumulator._networks[0].last_clip
    with pytest.raises(RuntimeError, match="by its norm or by value"):
        accumulator.clip_grad_value(1.0)
    assert accumulator._networks[0].last_clip is clip


def test_a_count_of_a_schedule():
    sentence = f"For 'AccumulationSchedule', the argument 'count' must be a number, but got {typed('x')}. "
    with raises(TypeError, sentence + "It counts epochs, updates or tokens."):
        AccumulationSchedule({0: 1}).steps_at("x")
    assert AccumulationConfig(schedule={0: 1}).steps_for(-1, 0, 0) == 1


def test_prepare():
    _, accumulator = toy_loop()
    rule = "a dataset, a learning rate scheduler or a Cell"
    sentence = f"For 'Accumulator', the argument 'objects' must be {rule}, but got {typed(list)}. "
    with raises(TypeError, sentence + "Give what the loop iterates over."):
        accumulator.prepare(list)
    assert list(copy.copy(accumulator.prepare(FOUR))) == FOUR


CELL = "For 'Model', the argument '{}' must be an nn.Cell, but got {}. {}"
CELLS = {
    "network": "Give a GradAccumulation, a loss cell, or a network and a loss_fn.",
    "loss_fn": "For example nn.MSELoss(); None if network has its loss inside.",
    "eval_network": "Leave it out to evaluate network and loss_fn.",
}


@pytest.mark.parametrize("name", CELLS)
def test_a_model_is_made_of_cells(name):
    network = line()
    settings = {"network": network, "loss_fn": nn.MSELoss(), "optimizer": sgd(network), name: 5}
    with raises(TypeError, CELL.format(name, typed(5), CELLS[name])):
        Model(**settings)


def test_a_model_trains_on_a_dataset():
    network, model = toy()
    sentence = (
        f"For 'Model', the argument 'train_dataset' must be a dataset of mindspore.dataset, but got {typed([1])}. "
    )
    for call in (model.train, model.fit):
        with raises(TypeError, sentence + "An Accumulator loops over anything."):
            call(1, [1])
    assert weight_of(network) == 0


@pytest.mark.parametrize("name", ["path", "tensorboard_dir"])
def test_a_path(name, tmp_path):
    remedy = "For example 'log_output/run.jsonl'." if name == "path" else "For example 'log_output/events'."
    begin = f"For 'MetricsLogger', the argument '{name}' must be"
    for value in (3, b"run"):
        with raises(TypeError, f"{begin} a str or an os.PathLike, but got {typed(value)}. {remedy}"):
            MetricsLogger(**{"path": tmp_path / "run.jsonl", name: value})
    for value in ("", "a\0b", "\ud800"):
        with raises(ValueError, f"{begin} a path that the system can have, but got {value!r}. {remedy}"):
            MetricsLogger(**{"path": tmp_path / "run.jsonl", name: value})


def test_the_outputs_of_several_networks_are_no_output():
    sentence = "For 'ProgressBar', the argument 'output' must be a StepOutput or None, but got tuple. "
    with raises(TypeError, sentence + "With several networks, give the output of one of them."):
        ProgressBar().update((None, None))


def test_settings_of_verify():
    remedy = "Settings of a GradAccumulation are its own: leave them out here."
    cell = GradAccumulation(loss_cell(), 2, batch_axis=(0, 0))
    with raises(TypeError, f"For 'verify', the argument 'weighted' must be a bool, but got {typed('no')}. {remedy}"):
        verify(cell, ALL_ROWS, None, weighted="no")
    assert verify(cell, ALL_ROWS, None, batch_axis=[0, 0]).equal
