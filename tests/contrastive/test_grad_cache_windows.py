"""Windows of a GradCacheLoss: through all faces, in all modes, with what makes two passes hard to get right."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import sgd
from mindspore import Parameter, Tensor, nn, ops
from open_window import window_of
from quick_mindspore import restored
from refusal import refuses
from step_probe import Listener, Of, changed, number, sgd_step
from step_probe import values_of as parameters_of
from whole_batch_losses import Tower, distance, movement, unit, values_of

from ms_gradaccum import (
    Accumulator,
    ClipByGlobalNorm,
    GradAccumulation,
    GradCacheLoss,
    MixedPrecision,
    TrainOneStepCell,
)

LEARNING_RATE = 0.5
# Micro batches of 2 to 6 rows: so many shapes that a graph for changing lengths takes over.
SIZES = [6, 10, 14, 18, 22, 9]


class Busy(nn.Cell):
    """A float output, an int and a bool one, one that no loss looks at, frozen weights, and state."""

    def __init__(self):
        super().__init__()
        self.image = nn.Dense(6, 4)
        self.frozen = nn.Dense(6, 4)
        for parameter in self.frozen.get_parameters():
            parameter.requires_grad = False
        self.norm = nn.BatchNorm1d(6)
        self.calls = Parameter(Tensor(0, ms.int32), name="calls", requires_grad=False)

    def construct(self, x, y):
        calls = ops.assign_add(self.calls, Tensor(1, ms.int32))
        features = ops.tanh(self.image(x)) + self.frozen(x)
        return features, ops.depend(y, calls), x[:, 0] > 0, self.norm(x)


class BusyLoss(nn.Cell):
    def __init__(self, network):
        super().__init__()
        self.temperature = Parameter(Tensor(1.0, ms.float32), name="temperature")
        self.shared = network.image.weight

    def construct(self, features, classes, positive, unused, weights, scale):
        features = unit(features)
        similarities = ops.matmul(features, features.T) * ops.exp(self.temperature)
        alike = (classes.reshape(-1, 1) == classes.reshape(1, -1)).astype(ms.float32)
        each = -(ops.log_softmax(similarities, 1) * alike).sum(1) * weights.reshape(-1)
        return scale * (each * positive.astype(ms.float32)).mean() + 0.1 * ops.square(self.shared).sum()


def build():
    random = np.random.default_rng(3)
    network = Busy()
    for part in (network.image, network.frozen):
        for parameter in part.get_parameters():
            parameter.set_data(Tensor(random.normal(size=parameter.shape).astype(np.float32)))
    return GradCacheLoss(network, BusyLoss(network), labels=2).set_train()


def batch(number, rows):
    random = np.random.default_rng(number)
    x, y = random.normal(size=(rows, 6)).astype(np.float32), random.integers(0, 3, rows).astype(np.int64)
    # The weights have their rows on axis 1, the scale has none.
    return x, y, random.uniform(0.5, 2, (1, rows)).astype(np.float32), np.float32([1.5])


AXES = (0, 0, 1, None)


def windows_by_hand(sizes, batches_of_window):
    """Weights after windows of whole batches, and their losses: gradients of MindSpore, the rest in NumPy."""
    cell = build()
    parameters = cell.trainable_params()
    with_gradient = ops.value_and_grad(cell, None, ms.ParameterTuple(parameters))
    losses = []
    for begin in range(0, len(sizes), batches_of_window):
        rows = np.float64(sizes[begin : begin + batches_of_window])
        runs = [with_gradient(*map(Tensor, batch(begin + i, int(each)))) for i, each in enumerate(rows)]
        losses.append(float(np.average([number(loss) for loss, _ in runs], weights=rows)))
        means = [
            np.average([grad.asnumpy() for grad in grads], axis=0, weights=rows) for grads in zip(*(g for _, g in runs))
        ]
        norm = np.sqrt(sum(np.square(mean).sum() for mean in means))
        for parameter, mean in zip(parameters, means):
            step = LEARNING_RATE * mean * min(1.0, 0.5 / norm)
            parameter.set_data(Tensor((parameter.asnumpy() - step).astype(np.float32)))
    return values_of(parameters), losses


def state_by_hand(sizes):
    cell = build()
    for i, rows in enumerate(sizes):
        x, y, *_ = batch(i, rows)
        for part, classes in zip(np.array_split(x, 4), np.array_split(y, 4)):
            cell.backbone(Tensor(part), Tensor(classes))
    return values_of(cell.backbone.untrainable_params())


@pytest.fixture(scope="module")
def expected():
    with restored():
        ms.set_context(mode=ms.PYNATIVE_MODE)
        return windows_by_hand(SIZES, 2), state_by_hand(SIZES)


def new_step(**settings):
    cell = build()
    network = GradAccumulation(cell, 4, batch_axis=AXES)
    settings = {"accumulation_steps": 2, "clip": ClipByGlobalNorm(0.5), **settings}
    return TrainOneStepCell(network, sgd(cell, LEARNING_RATE), **settings).set_train()


def step_of(network, loss, **settings):
    cell = GradCacheLoss(network, loss)
    return sgd_step(cell, **settings)


def run(step, sizes=SIZES, first=0):
    return [step(*map(Tensor, batch(first + i, rows))) for i, rows in enumerate(sizes)]


def test_windows_of_two_batches_are_those_by_hand(expected, mode):
    (weights, losses), state = expected
    step = new_step(mixed_precision=MixedPrecision(level="O0", init_scale=1024.0))
    outputs = run(step)
    cell = step.network.network
    np.testing.assert_allclose([number(each.loss) for each in outputs[1::2]], losses, rtol=2e-6)
    assert [number(each.weight) for each in outputs[1::2]] == [16, 32, 31]
    assert distance(values_of(cell.trainable_params()), weights) < 1e-6
    # Clipping has done something, or it would prove nothing.
    assert all(number(each.grad_norm) > 0.5 for each in outputs[1::2])
    # As after one forward pass, bit for bit.
    for found, wanted in zip(cell.backbone.untrainable_params(), state):
        assert found.asnumpy().tobytes() == wanted.tobytes(), found.name
    assert number(cell.backbone.calls) == 4 * len(SIZES)
    if mode == ms.GRAPH_MODE:
        forward, loss = window_of(step).micro_steps.preparation.compiled_cells()
        # One graph of the loss for each number of rows, and never one for changing lengths.
        assert (forward.code.what, loss.code.what) == ("the network", "the loss")
        assert len(loss.fixed) == len(SIZES)
        assert loss.general_cell is None
        assert forward.general_cell is not None


def test_a_hand_written_loop_trains_the_same(expected, eager):
    (weights, losses), _ = expected
    cell = build()
    network = GradAccumulation(cell, 4, batch_axis=AXES)
    accumulator = Accumulator(network, sgd(cell, LEARNING_RATE), accumulation_steps=2)
    found = []
    for i, rows in enumerate(SIZES):
        with accumulator.accumulate():
            found.append(number(accumulator.backward(*map(Tensor, batch(i, rows)))))
            accumulator.clip_grad_norm(0.5)
            accumulator.step()
    assert distance(values_of(cell.trainable_params()), weights) < 1e-6
    np.testing.assert_allclose(np.average(found[:2], weights=SIZES[:2]), losses[0], rtol=1e-6)


def test_events_are_told_once(eager):
    step, listener = new_step(), Listener()
    step.add_callback(listener)
    run(step, [11, 13])
    rows = [3, 3, 3, 2, 4, 3, 3, 3]
    micro_batches = [(f"micro_batch_{end}", i % 4, each) for i, each in enumerate(rows) for end in ("begin", "end")]
    assert [(told[0], *told[2:4]) for told in listener.told[:-2]] == micro_batches
    assert step.events.micro_batches == 8 and listener.ends() == [(1, 0)]


def test_a_failure_between_the_passes_leaves_no_trace(eager):
    step = new_step()
    run(step, [11])
    before = parameters_of(step)
    loss = step.network.network.loss_fn
    good, loss.construct = loss.construct, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(step, [13], 1)
    assert changed(before, parameters_of(step)) == set()  # Nor has the forward pass left one.
    assert (step.open_batches(), step.events.batches, step.events.micro_batches) == (1, 1, 4)
    loss.construct = good
    expected = new_step()
    run(expected, [11, 13])
    run(step, [13], 1)
    assert changed(parameters_of(step), parameters_of(expected)) == set()


def test_a_frozen_network_trains_its_loss_alone(eager):
    cell = build()
    optimizer = nn.SGD([cell.loss_fn.temperature], LEARNING_RATE)
    step = TrainOneStepCell(GradAccumulation(cell, 4, batch_axis=AXES), optimizer)
    inputs = [Tensor(array) for array in batch(0, 11)]
    grad = ops.value_and_grad(cell, None, cell.loss_fn.temperature)(*inputs)[1]
    cell.backbone.calls.set_data(Tensor(0, ms.int32))
    before = number(cell.loss_fn.temperature)
    step(*inputs)
    np.testing.assert_allclose(number(cell.loss_fn.temperature), before - LEARNING_RATE * number(grad), rtol=1e-6)
    assert number(cell.backbone.calls) == 4


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_in_16_bits_it_trains_as_the_whole_batch_does(level, eager):
    ends = []
    # In float16 in micro batches, in one piece, and in float32.
    for micro_size, precision in ((4, MixedPrecision(level=level)), (1, MixedPrecision(level=level)), (1, None)):
        cell = build()
        network = GradAccumulation(cell, micro_size, batch_axis=AXES)
        optimizer = sgd(cell, LEARNING_RATE)
        step = TrainOneStepCell(network, optimizer, mixed_precision=precision).set_train()
        start = values_of(cell.trainable_params())
        outputs = run(step, [11, 13])
        assert all(each.is_updated for each in outputs)
        ends.append(values_of(cell.trainable_params()))
        if precision:
            assert number(outputs[1].loss_scale) == 65536
    micro, whole_batch, full = ends
    assert distance(micro, whole_batch, movement(start, full)) < 5e-3
    assert 1e-5 < distance(micro, full, movement(start, full)) < 5e-3


class Alike(nn.Cell):
    def construct(self, *outputs):
        return ops.addn([ops.square(unit(rows).sum(0)).sum() for rows in outputs])


@pytest.mark.parametrize("compiles", [True, None], ids=["compile", "PYNATIVE"])
def test_a_network_that_computes_something_else_the_second_time_is_refused(compiles):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = nn.SequentialCell(Tower(), nn.Dropout(p=0.1))
    step = step_of(network, Alike(), accumulation_steps=2, compile=compiles).set_train()
    before = parameters_of(step)
    with refuses(RuntimeError, "because of Dropout '1'", "ReplayDropout in place"):
        step(Tensor(batch(0, 16)[0]))
    assert changed(before, parameters_of(step)) == set() and step.open_batches() == 0
    if compiles:
        return  # What is compiled stays in the mode that it was compiled in.
    # In evaluation mode it is the same each time.
    network[1].set_train(False)
    step(Tensor(batch(0, 16)[0]))
    assert step.open_batches() == 1


class Changing(nn.Cell):
    """Its second pass of the first micro batch returns what a function makes of the outputs, beside far larger ones."""

    def __init__(self, function):
        super().__init__()
        self.tower, self.function, self.calls = Tower(), function, 0

    def construct(self, x):
        self.calls += 1
        rows = self.tower(x) * Tensor([[1e4]] + [[1.0]] * (len(x) - 1))
        return (self.function(rows) if self.calls == 3 else rows), 1e9 * rows


CHANGES = {
    "a row that is small beside another": lambda rows: rows * Tensor([[1.0]] * 7 + [[1.1]]),
    "a NaN": lambda rows: rows / Tensor([[1.0]] * 7 + [[0.0]]) * 0.0,
    "an Inf": lambda rows: rows / Tensor([[1.0]] * 7 + [[0.0]]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_one_row_is_seen(name, eager):
    step = step_of(Changing(CHANGES[name]), Alike())
    with refuses(RuntimeError, "other outputs in the second forward pass"):
        step(Tensor(batch(0, 16)[0]))


@pytest.mark.filterwarnings("ignore:For 'TrainOneStepCell', the gradient must be finite")
def test_what_is_no_number_in_both_passes_skips_the_window(eager):
    step = step_of(Tower(), Alike())
    rows = batch(0, 16)[0]
    rows[3] = np.nan
    output = step(Tensor(rows))
    assert number(output.overflow) and not output.is_updated
    assert number(step(Tensor(batch(0, 16)[0])).updated)


BAD_OUTPUTS = {
    "a mean": (lambda rows: rows.mean(0), ValueError, "one of shape (4,)"),
    "a scalar beside them": (lambda rows: (rows, rows.mean()), ValueError, "one of shape ()"),
    "a dict": (lambda rows: {"rows": rows}, TypeError, "a tuple of tensors"),
    "no float": (lambda rows: rows > 0, ValueError, "floating-point tensor, but got Bool"),
}


@pytest.mark.parametrize("function, error, key", BAD_OUTPUTS.values(), ids=BAD_OUTPUTS)
def test_outputs_without_the_rows_are_refused(function, error, key, eager):
    step = step_of(Of(Tower(), function), Alike())
    with refuses(error, "backbone", key):
        step(Tensor(batch(0, 6)[0]))
