"""Data sink mode, in which MindSpore's epochs can be shorter and longer than a pass over the data.

On CPU MindSpore trains without the sink, but counts by its size. What it does on a device is done here in its place:
its loop for a sink runs with a network that takes the batches by itself.
"""

import functools
import itertools

import mindspore as ms
import numpy as np
import pytest
from linear_toy import AtStep, Recorder, X, batches, descend, line, mse, toy, weight_of
from mindspore import nn, ops, train
from mindspore.dataset import GeneratorDataset
from mindspore.train.callback._callback import InternalCallbackParam
from open_window import reducer_of
from refusal import refuses
from step_probe import Around, Listener

from ms_gradaccum import EMA, Model, ProgressBar, StateCheckpoint, load_state, save_state
from ms_gradaccum.loops.epoch import PassSteps

pytestmark = pytest.mark.usefixtures("eager")


class Sink(nn.Cell):
    """The network of a sink, and the helper that says how often it is called in an epoch."""

    def __init__(self, step, dataset, size, epochs):
        super().__init__(auto_prefix=False)
        is_graph = ms.get_context("mode") == ms.GRAPH_MODE
        self.step, self.size = Around(step) if is_graph else step, dataset.get_dataset_size() if size == -1 else size
        passes = dataset.create_tuple_iterator(num_epochs=epochs)
        self.batches = itertools.chain.from_iterable(passes for _ in range(epochs))
        self.calls = 1 if is_graph else self.size

    def sink_size(self):
        return self.size

    def __iter__(self):
        return iter([()] * self.calls)

    def __call__(self):
        for _ in range(self.size // self.calls):
            output = self.step(*next(self.batches))
        return output

    def continue_send(self):
        pass

    stop_send = release = continue_send


@pytest.fixture(params=[ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["GRAPH", "PYNATIVE"])
def sinks(request, eager, monkeypatch):
    """Let MindSpore train with the sink that a device has. In GRAPH mode a sink is one call, and a batch one graph."""
    ms.set_context(mode=request.param)
    if request.param == ms.GRAPH_MODE:
        monkeypatch.delenv("MS_JIT")
    sizes = []

    def prepared(model, is_train, dataset, dataset_sink_mode, sink_size=-1, epoch_num=1, dataset_helper=None):
        helper = dataset_helper or Sink(model.train_network, dataset, sink_size, epoch_num)
        return helper, helper

    def trained(model, epoch, dataset, callbacks, params, initial_epoch, valid):
        return model._train_dataset_sink_process(epoch, dataset, callbacks, params, sizes[0], initial_epoch, valid)

    def given(model, epoch, dataset, **kwargs):
        sizes.append(kwargs["sink_size"])
        return _train(model, epoch, dataset, **kwargs)

    _train = Model._train
    monkeypatch.setattr(Model, "_train", given)
    monkeypatch.setattr(Model, "_exec_preprocess", prepared)
    monkeypatch.setattr(Model, "_train_process", trained)
    return request.param


def trained(epochs, sink_size=None, rows=2, seen=None, **settings):
    network, model = toy(**settings)
    sink = {} if sink_size is None else {"dataset_sink_mode": True, "sink_size": sink_size}
    model.train(epochs, batches(rows), seen, **sink)
    assert model.train_network.open_batches() == 0 or settings.get("last_window") == "carry"
    return weight_of(network)


@pytest.mark.parametrize("sink_size", [1, 3, 4, 6])
def test_on_cpu_a_sink_size_changes_nothing(sink_size):
    plain, sunk = Recorder(), Recorder()
    trained(2, None, seen=plain, accumulation_steps=3)
    trained(2, sink_size, seen=sunk, accumulation_steps=3)
    assert plain.weights == sunk.weights and len(sunk.outputs) == 8
    assert [output.is_updated for output in sunk.outputs] == [False, False, True, True] * 2


def test_on_cpu_a_training_with_a_sink_is_resumed_where_it_stopped(tmp_path):
    whole = trained(3, 8, learning_rate=0.002)
    trained(3, 8, seen=[StateCheckpoint(tmp_path), Recorder(stop_after=6)], learning_rate=0.002)
    network, model = toy(learning_rate=0.002)
    model.train(3, batches(2), StateCheckpoint(tmp_path), dataset_sink_mode=True, sink_size=8, resume=True)
    assert weight_of(network) == whole


# Each size of a sink with one end of the data, and a sink of two passes with all of them.
SINKS = [(1, 8, "apply"), (2, 4, "drop"), (4, 2, "carry"), (-1, 2, "apply")]
SINKS += [(8, 1, "apply"), (8, 1, "drop"), (8, 1, "carry")]


@pytest.mark.parametrize("sink_size, epochs, last_window", SINKS)
def test_a_window_ends_with_its_batches_and_not_with_the_sink(sinks, sink_size, epochs, last_window):
    """In windows of 3, 1, 3 and 1 batches, or of 3, 3 and 2."""
    settings = {"accumulation_steps": 3, "last_window": last_window, "check_loss": False}
    if (sinks, sink_size) == (ms.GRAPH_MODE, 8) and last_window != "carry":
        with refuses(ValueError, "'sink_size'"):
            trained(epochs, sink_size, **settings)
    else:
        assert trained(epochs, sink_size, **settings) == pytest.approx(_without_sink(sinks, 2, **settings))


@functools.cache
def _without_sink(mode, epochs, **settings):
    """Return the weight after a training in this mode, which the test has set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "_train", ms.Model._train)
        network, model = toy(**settings)
    steps, step = epochs * 4, model.train_network
    for number, batch in zip(range(1, steps + 1), itertools.cycle(list(batches(2).create_tuple_iterator()))):
        step(*batch)
        if number % 4 == 0 and settings["last_window"] != "carry":
            {"apply": step.flush, "drop": step.drop}[settings["last_window"]]()
    return weight_of(network)


@pytest.mark.parametrize("last_window, weight", [("apply", 0.6), ("drop", 0.0), ("carry", 0.0)])
def test_a_training_that_ends_within_a_pass_ends_its_window(sinks, last_window, weight):
    """Two of four batches, as one update with the mean over rows 1 to 4: 0.02 * 2 * 2 * 7.5 is 0.6."""
    assert trained(2, 1, accumulation_steps=4, last_window=last_window) == pytest.approx(weight)


def test_a_pass_that_fits_no_sink_is_no_matter_where_windows_fit_it(sinks):
    assert trained(4, 3, accumulation_steps=4) == pytest.approx(
        _without_sink(sinks, 3, accumulation_steps=4, last_window="apply")
    )


def test_states_know_no_sinks(sinks, tmp_path):
    with refuses(ValueError, "'sink_size'"):
        trained(4, 1, seen=StateCheckpoint(tmp_path))
    _, model = toy()

    saving = AtStep(lambda _: save_state(model, tmp_path / "state"))
    with refuses(ValueError, "'sink_size'"):
        model.train(4, batches(2), saving, dataset_sink_mode=True, sink_size=1)


def test_a_sink_of_a_pass_is_a_pass(sinks, tmp_path):
    whole = trained(3, 4, learning_rate=0.002)
    trained(2, 4, seen=StateCheckpoint(tmp_path), learning_rate=0.002)
    network, model = toy(learning_rate=0.002)
    load_state(model, tmp_path)
    model.train(3, batches(2), dataset_sink_mode=True, sink_size=4, resume=True)
    assert weight_of(network) == pytest.approx(whole)


def test_processes_that_have_fewer_batches_end_with_their_data_and_not_in_a_sink():
    """A process with three of four batches. MindSpore has put its number of batches in the place of -1."""
    _, model = toy()
    steps = PassSteps(model, [], batches(3), 0, 1)
    steps.passes.steps = 4
    params = InternalCallbackParam()
    params.update(dataset_sink_mode=True, sink_size=3, batch_num=3)
    with refuses(ValueError, "'dataset_sink_mode'"):
        steps.on_train_begin(train.RunContext(params))


@pytest.mark.parametrize("sinks", [ms.PYNATIVE_MODE], indirect=True, ids=["PYNATIVE"])
@pytest.mark.parametrize("sink_size, epochs", [(3, 2), (6, 1)])
@pytest.mark.parametrize("last_window, windows", [("apply", 3), ("drop", 1)])
def test_a_pass_may_end_inside_a_sink_and_the_training_inside_a_pass(sinks, sink_size, epochs, last_window, windows):
    """Six of eight batches: windows of 3, 1 and 2, the last of which a training must not leave open."""
    rows = [range(1, 7), (7, 8), range(1, 5)][:windows]
    settings = {"accumulation_steps": 3, "last_window": last_window}
    assert trained(epochs, sink_size, **settings) == pytest.approx(descend(*rows), rel=1e-5)


@pytest.mark.parametrize("bad, updates", [(None, [4, 8]), (3, [3, 6])])
def test_the_windows_of_a_sink_are_counted(sinks, bad, updates, tmp_path, capsys):
    """Two passes of eight batches in windows of two. In one window of a pass a value may be infinite."""
    x = X.copy()
    x[bad if bad is not None else []] = np.inf
    settings, listener = {"accumulation_steps": 2, "learning_rate": 0.002}, Listener()
    callbacks = [listener, ProgressBar(live=False), StateCheckpoint(tmp_path)]
    toy(**settings)[1].train(2, batches(1, x), callbacks, dataset_sink_mode=True)
    told = [each[1:] for each in listener.told if each[0] == "update_end"]
    ends = told if sinks == ms.GRAPH_MODE else told[3::4]
    assert ends == [(8, updates[0], 4 - updates[0]), (16, updates[1], 8 - updates[1])]
    assert f"{updates[1]} updates" in capsys.readouterr().out
    assert load_state(toy(**settings)[1], tmp_path)[1:3] == (16, updates[1])


def test_averages_in_a_sink_begin_with_the_weights_of_the_first_update(sinks):
    network, model = toy()
    ema = EMA(0.5, warmup_updates=0)
    model.train_network.add_callback(ema)
    network.weight.set_data(ms.Tensor([[1.0]]))  # As a checkpoint that is loaded later does.
    model.train(1, batches(8), ema, dataset_sink_mode=True, sink_size=1)
    assert ema.parameters[0].asnumpy() == pytest.approx((1 + descend(range(1, 9), weight=1.0)) / 2)


def test_callbacks_find_the_step_that_shows_whole_parameters(sinks):
    """MindSpore puts a cell around the step, of which a checkpoint would hold this rank's shards."""
    _, model = toy()
    step = model.train_network
    weight = step.network.trainable_params()[0]
    weight.gather = lambda shard: shard
    reducer_of(step).stand_ins = {id(weight): weight}
    found = []
    noting = AtStep(lambda context: found.append(context.original_args().train_network))
    model.train(1, batches(2), noting, dataset_sink_mode=True)
    assert {*map(id, found)} == {id(model.train_network)}


def test_a_batch_that_is_measured_before_a_sink_draws_no_random_numbers(sinks, monkeypatch):
    class Noisy:
        def __getitem__(self, row):
            return X[row] + np.float32(np.random.rand()), 2 * X[row]

        def __len__(self):
            return 8

    def weight_on(device):
        monkeypatch.setattr("ms_gradaccum.loops.model.has_data_sink", lambda: device != "CPU")
        np.random.seed(1)
        network, model = toy()
        data = GeneratorDataset(Noisy(), ["x", "y"], shuffle=False, num_parallel_workers=1)
        model.train(1, data.batch(4), dataset_sink_mode=True)
        return weight_of(network)

    assert weight_on("Ascend") == weight_on("CPU")


class Uncounted(nn.Optimizer):
    """An optimizer as the one in MindSpore's documentation, which leaves its `global_step` at 0."""

    def construct(self, gradients):
        return ops.assign_sub(self.parameters[0], self.learning_rate * gradients[0])


@pytest.mark.parametrize("last", [8, np.inf])
def test_the_windows_of_a_sink_are_counted_for_an_optimizer_that_does_not_count(sinks, last):
    network, x = line(), X.copy()
    x[-1] = last
    optimizer = Uncounted(0.002, network.trainable_params())
    model = Model(mse(network), optimizer=optimizer, accumulation_steps=2, check_loss=False)
    model.train(1, batches(1), dataset_sink_mode=True)
    model.train(1, batches(1, x), dataset_sink_mode=True)
    events, skipped = model.train_network.events, int(np.isinf(last))
    assert (events.updates, events.skipped_updates) == (8 - skipped, skipped)
