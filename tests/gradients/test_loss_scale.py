"""The loss scale: one per window, what a skipped update leaves, and the rule by which it changes."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import batches, descend, line, sgd, weight_of
from mindspore import Tensor, amp, nn
from refusal import refuses
from step_probe import Around, Weights, changed, number, values_of
from tiers import some

from ms_gradaccum import Accumulator, GradAccumulation, MixedPrecision, Model, StepOutput, TrainOneStepCell
from ms_gradaccum.gradients.loss_scaler import dynamic_loss_scale

SCALE, CLEAN = "mixed_precision.loss_scale", "mixed_precision.clean_windows"
COLUMNS, ROWS = 3, 8


def only_scaled(**settings):
    return MixedPrecision(level="O0", **settings)


def momentum_step(micro_size=4, mixed_precision=None, **settings):
    """A step with state and a schedule, over one weight per column."""
    cell = Weights(COLUMNS)
    optimizer = nn.Momentum(cell.trainable_params(), nn.ExponentialDecayLR(0.1, 0.5, 1), 0.9)
    settings = {"check_loss": False, "mixed_precision": mixed_precision, **settings}
    return TrainOneStepCell(GradAccumulation(cell, micro_size), optimizer, **settings)


def rows(bad=None, micro_size=4):
    x = np.ones((ROWS, COLUMNS), np.float32)
    if bad is not None:
        x[bad * ROWS // micro_size, 0] = np.inf
    return Tensor(x)


def trajectory(finite, scale, growth=2.0, backoff=0.5, interval=2):
    """The scale that each window uses, from the rule as it is written down."""
    used, clean = [], 0
    for is_finite in finite:
        used.append(scale)
        if not is_finite:
            scale, clean = max(scale * backoff, 1.0), 0
            continue
        clean += 1
        if clean == interval:
            scale, clean = scale * growth, 0
    return used


FATES = [True, True, True, False, True, False, False, True, True, True, True, False, True, True]


def scales_of(mixed_precision, build=lambda step: step):
    step = build(momentum_step(2, mixed_precision))
    outputs = [step(rows(None if fate else 1)) for fate in FATES]
    # Inside a larger graph the step returns its items in a plain tuple.
    outputs = [output if isinstance(output, StepOutput) else StepOutput(*output) for output in outputs]
    assert [output.is_updated for output in outputs] == FATES
    assert [number(output.overflow) for output in outputs] == [not fate for fate in FATES]
    return [number(output.loss_scale) for output in outputs]


@pytest.mark.parametrize("bad", range(4))
def test_an_overflow_in_any_micro_batch_leaves_everything_but_the_scale(bad, eager):
    step, twin = [momentum_step(mixed_precision=only_scaled(growth_interval=9)) for _ in range(2)]
    step(rows()), twin(rows())
    before = values_of(step)
    output = step(rows(bad))
    assert (number(output.overflow), output.is_updated, number(output.loss_scale)) == (True, False, 65536)
    assert changed(before, values_of(step)) == {SCALE, CLEAN}
    assert (values_of(step)[SCALE], values_of(step)[CLEAN]) == (32768, 0)
    # The next clean window trains, with the learning rate and the moments that the bad one has left alone.
    output, expected = step(rows()), twin(rows())
    assert (output.is_updated, number(output.loss_scale)) == (True, 32768)
    assert number(output.learning_rate) == number(expected.learning_rate) == pytest.approx(0.05)
    after, expected_after = values_of(step), values_of(twin)
    assert after["global_step"] == 2
    for name in after.keys() - {SCALE, CLEAN}:
        np.testing.assert_allclose(after[name], expected_after[name], rtol=1e-6, err_msg=name)


def test_the_scale_neither_leaves_float32_nor_falls_below_1():
    scale, yes, no = dynamic_loss_scale(2.0**127, 2.0, 0.5, 1), Tensor(True), Tensor(False)
    scale(yes, no)
    assert number(scale.scale) == 2.0**127
    scale = dynamic_loss_scale(1.0, 2.0, 0.5, 1)
    scale(no, yes)
    assert number(scale.scale) == 1
    # A window without weight says nothing.
    scale(no, no)
    assert (number(scale.scale), number(scale.clean_windows)) == (1, 0)


class Halving(amp.LossScaler):
    def __init__(self):
        self.value = 64.0

    def scale(self, inputs):
        return inputs * self.value

    def unscale(self, inputs):
        return inputs / self.value

    def adjust(self, grads_finite):
        self.value *= 1.0 if grads_finite.asnumpy() else 0.5
        return True


# What chooses the scale, and the scales that it chooses.
CHOOSERS = {
    "ours": (lambda: only_scaled(init_scale=4.0, growth_interval=2), trajectory(FATES, 4.0)),
    "ours with other numbers": (
        lambda: only_scaled(init_scale=6.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=3),
        trajectory(FATES, 6.0, 3.0, 0.25, 3),
    ),
    "DynamicLossScaler": (lambda: amp.DynamicLossScaler(4.0, 2, 2), trajectory(FATES, 4.0)),
    "DynamicLossScaleManager": (lambda: amp.DynamicLossScaleManager(4.0, 2, 2), trajectory(FATES, 4.0)),
    "StaticLossScaler": (lambda: amp.StaticLossScaler(8.0), [8] * len(FATES)),
    "FixedLossScaleManager": (lambda: amp.FixedLossScaleManager(16.0), [16] * len(FATES)),
    "the cell of MindSpore's own steps": (lambda: nn.DynamicLossScaleUpdateCell(4.0, 2, 2), trajectory(FATES, 4.0)),
    "its fixed one": (lambda: nn.FixedLossScaleUpdateCell(16.0), [16] * len(FATES)),
    "a class of one's own": (Halving, trajectory(FATES, 64.0, 1.0)),
}


@pytest.mark.parametrize("make, expected", CHOOSERS.values(), ids=CHOOSERS)
def test_the_scale_follows_its_rule_or_that_of_an_object_of_mindspore(make, expected, eager):
    assert scales_of(make()) == expected


def test_a_manager_that_keeps_overflow_updates_makes_them(eager):
    step = momentum_step(mixed_precision=amp.FixedLossScaleManager(16.0, drop_overflow_update=False))
    output = step(rows(1))
    assert (number(output.overflow), output.is_updated, number(output.loss_scale)) == (True, True, 16)
    assert values_of(step)["global_step"] == 1


@pytest.mark.parametrize("chooser", [only_scaled(init_scale=4.0, growth_interval=2), amp.DynamicLossScaler(4.0, 2, 2)])
def test_inside_a_larger_graph_it_is_the_same_rule(chooser):
    ms.set_context(mode=ms.GRAPH_MODE)
    assert scales_of(chooser, lambda step: Around(step).set_train()) == trajectory(FATES, 4.0)


def test_a_rule_in_python_is_refused_inside_a_larger_graph():
    ms.set_context(mode=ms.GRAPH_MODE)
    graph = Around(momentum_step(mixed_precision=amp.DynamicLossScaleManager(4.0, 2, 2))).set_train()
    with refuses(ValueError, "a DynamicLossScaleManager", "from Python"):
        graph(rows())


def test_accumulator_makes_one_decision_for_all_optimizers(eager):
    network = nn.Dense(1, 1, "zeros", "zeros")
    optimizers = [nn.SGD([each], 0.1) for each in network.trainable_params()]
    precision = only_scaled(init_scale=8.0, growth_interval=1)
    accumulator = Accumulator(network, optimizers, 2, mixed_precision=precision)
    reports = []
    # Only the gradient of the second parameter overflows, in the second batch of the second window.
    for grad in (1.0, 1.0, 1.0, np.inf, 1.0, 1.0):
        grads = (accumulator.scale(Tensor([[1.0]])), accumulator.scale(Tensor([grad])))
        reports.append(accumulator(grads, 1.0))
    assert [number(report.loss_scale) for report in reports[1::2]] == [8, 16, 8]
    assert [report.is_updated for report in reports[1::2]] == [True, False, True]
    for parameter in network.trainable_params():
        assert number(parameter) == pytest.approx(-0.2)


@pytest.mark.parametrize("fixed", [amp.FixedLossScaleManager(64, False), amp.StaticLossScaler(64)])
def test_two_networks_may_share_a_scale_that_stays(fixed, eager):
    cells = Weights(COLUMNS), Weights(COLUMNS)
    divisor = 64.0 if isinstance(fixed, amp.FixedLossScaleManager) else 1.0
    optimizers = [nn.Momentum(cell.trainable_params(), 0.1, 0.0, loss_scale=divisor) for cell in cells]
    accumulator = Accumulator(cells, optimizers, mixed_precision=fixed)
    with accumulator.accumulate():
        for cell in cells:
            accumulator.backward(rows(), network=cell)
        assert [number(output.loss_scale) for output in accumulator.step()] == [64, 64]
    for cell in cells:
        np.testing.assert_allclose(cell.trainable_params()[0].asnumpy(), [-0.1] * COLUMNS, rtol=1e-6)


def test_model_takes_the_names_that_mindspores_has(eager):
    network = line()
    manager = amp.DynamicLossScaleManager(64.0, 2, 2)
    model = Model(network, nn.MSELoss(), sgd(network), amp_level="O2", loss_scale_manager=manager)
    model.train(1, batches(4))
    assert manager.get_loss_scale() == 128  # two clean windows
    assert weight_of(network) == pytest.approx(descend(range(1, 5), range(5, 9)), rel=1e-3)


def test_a_scale_is_at_least_1_grows_and_falls():
    for name, wrong in (("init_scale", 0.5), ("growth_factor", 0.5), ("backoff_factor", 1.0), ("loss_scale", 128)):
        with refuses((TypeError, ValueError), f"'{name}'", f"but got {wrong}"):
            MixedPrecision(**{name: wrong})


@pytest.mark.parametrize("compiles", some([False, True], False))
def test_gradients_that_a_function_of_the_loop_takes_follow_the_scale_of_a_manager(compiles, mode):
    network = line()
    optimizer = sgd(network)
    manager = amp.DynamicLossScaleManager(64, 2, 1)  # doubles in each window
    accumulator = Accumulator(network, optimizer, mixed_precision=manager, check_loss=False)

    def forward(x):
        return accumulator.scale(network(x).sum())

    grad_fn = ms.value_and_grad(forward, None, optimizer.parameters)
    grad_fn = ms.jit(grad_fn) if compiles else grad_fn
    norms = []
    for scale in (64, 128, 256):
        loss, grads = grad_fn(Tensor([[3.0]], ms.float32))
        assert number(grads[0]) == 3 * scale
        norms.append(number(accumulator(grads, 1.0, loss=loss / scale).grad_norm))
    assert norms == [3.0, 3.0, 3.0] and manager.get_loss_scale() == 512
