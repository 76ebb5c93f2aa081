"""bad_micro_batch="drop": a micro batch with an Inf or a NaN is as if it had never been there."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import sgd
from mindspore import Tensor, nn, ops
from refusal import refuses
from step_probe import Around, KeepGradients, Learned, Weights, changed, number, values_of

from ms_gradaccum import Accumulator, ClipByGlobalNorm, GradAccumulation, MixedPrecision, StepOutput, TrainOneStepCell

START = np.float32([0.5, -1, 2])
COLUMNS, ROWS, PARTS = 3, 7, 3  # micro batches of 3, 2 and 2 rows
BOUNDS = [0, 3, 5, 7]
SCALE, CLEAN = "mixed_precision.loss_scale", "mixed_precision.clean_windows"


def squares(weight, x):
    return ops.square((x * weight).sum(-1)).mean()


def new_cell():
    """Has a gradient that depends on the weights; the loss is a mean over the rows."""
    return Learned(START, squares)


def data(seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, COLUMNS)).astype(np.float32)


def with_bad(x, bad, value=np.nan):
    x = x.copy()
    for part in bad:
        x[BOUNDS[part + 1] - 1, 1] = value
    return Tensor(x)


def without(x, bad):
    return np.concatenate([x[BOUNDS[part] : BOUNDS[part + 1]] for part in range(PARTS) if part not in bad])


def build(cell, accumulation_steps=1, **settings):
    network = GradAccumulation(cell, PARTS)
    optimizer = nn.Momentum(cell.trainable_params(), 0.1, 0.9)
    settings = {"bad_micro_batch": "drop", "accumulation_steps": accumulation_steps, **settings}
    return TrainOneStepCell(network, optimizer, clip=ClipByGlobalNorm(1.0), **settings)


def mean_gradient(x):
    x = x.astype(np.float64)
    return (2 * (x @ START)[:, None] * x).mean(0)


def clipped(gradient):
    return gradient / max(1.0, np.linalg.norm(gradient))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("bad", [(0,), (1,), (2,), (0, 2)])
def test_the_update_is_that_of_the_other_micro_batches(bad, value, eager):
    cell = new_cell()
    output = build(cell)(with_bad(data(), bad, value))
    rest = without(data(), bad)
    gradient = mean_gradient(rest)
    assert (output.is_updated, number(output.overflow), number(output.weight)) == (True, False, len(rest))
    assert number(output.grad_norm) == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
    assert number(output.loss) == pytest.approx(np.square(rest.astype(np.float64) @ START).mean(), rel=1e-5)
    np.testing.assert_allclose(cell.weight.asnumpy(), START - 0.1 * clipped(gradient), rtol=1e-5)
    # Left in, the same rows would make no update: the known wrong answer.
    twin = new_cell()
    output = build(twin, bad_micro_batch="skip_window")(with_bad(data(), bad, value))
    assert not output.is_updated and number(output.overflow)
    np.testing.assert_array_equal(twin.weight.asnumpy(), START)


def test_inside_a_larger_graph():
    ms.set_context(mode=ms.GRAPH_MODE)
    cell = new_cell()
    step = build(cell, mixed_precision=MixedPrecision(level="O0", init_scale=8.0))
    graph = Around(step).set_train()
    output = StepOutput(*graph(with_bad(data(), (1,))))
    assert (output.is_updated, number(output.overflow), number(output.weight)) == (True, False, 5)
    gradient = mean_gradient(without(data(), (1,)))
    np.testing.assert_allclose(cell.weight.asnumpy(), START - 0.1 * clipped(gradient), rtol=1e-5)
    assert values_of(step)[SCALE] == 4
    before = values_of(step)
    output = StepOutput(*graph(with_bad(data(), (0, 1, 2))))
    assert (output.is_updated, number(output.overflow)) == (False, True)
    counted = {"accu_grads.weight.window_skipped"} if ms.get_context("device_target") == "CPU" else set()
    assert changed(before, values_of(step)) == {SCALE} | counted


def test_a_window_of_bad_micro_batches_alone_makes_no_update(eager):
    step = build(new_cell(), mixed_precision=MixedPrecision(level="O0", init_scale=64.0))
    step(Tensor(data()))
    before = values_of(step)
    output = step(with_bad(data(), range(PARTS)))
    assert (output.is_updated, number(output.overflow), number(output.weight)) == (False, True, 0)
    assert changed(before, values_of(step)) == {SCALE, CLEAN}
    assert (values_of(step)[SCALE], values_of(step)[CLEAN]) == (32, 0)


def test_the_scale_backs_off_though_the_update_is_made(eager):
    step = build(new_cell(), 2, mixed_precision=MixedPrecision(level="O0", init_scale=64.0))
    scales = []
    for bad in ((2,), (), (), ()):
        scales.append(number(step(with_bad(data(), bad)).loss_scale))
    assert scales == [64, 64, 32, 32]
    assert values_of(step)["global_step"] == 2 and values_of(step)["accu_grads.weight.window_dropped"] == 0


def test_a_loss_that_is_not_finite_counts_though_its_gradient_is(eager):
    cell = Weights(COLUMNS)  # the gradient is the mean row, whatever the weights are
    step = build(cell)
    cell.weight.set_data(Tensor(np.float32([3e38, 3e38, 0])))
    x = np.zeros((ROWS, COLUMNS), np.float32)
    x[0] = 3  # the loss of the first micro batch is Inf
    x[3:] = [0, 0, 1]
    output = step(Tensor(x))
    assert (output.is_updated, number(output.weight), number(output.loss)) == (True, 4, 0)
    # Without the argument it stops no update, as in MindSpore's own step.
    cell.weight.set_data(Tensor(np.float32([3e38, 3e38, 0])))
    output = build(cell, bad_micro_batch="skip_window")(Tensor(x))
    assert (output.is_updated, number(output.weight), number(output.loss)) == (True, ROWS, np.inf)


def test_sparse_gradients_are_refused():
    cell = nn.EmbeddingLookup(4, 2, target="CPU")
    with refuses(ValueError, "'bad_micro_batch'", "Use nn.Embedding"):
        TrainOneStepCell(cell, sgd(cell, 0.1), bad_micro_batch="drop")


def test_accumulator_leaves_out_batches_of_either_way(eager):
    x, bad = Tensor(data()), with_bad(data(1), (0, 1, 2))
    for functional in (False, True):
        cell = new_cell()
        optimizer = KeepGradients(cell.trainable_params())
        accumulator = Accumulator(cell, optimizer, 2, bad_micro_batch="drop")
        grad_fn = ms.value_and_grad(cell, None, optimizer.parameters)
        for batch in (bad, x):
            if functional:
                _, grads = grad_fn(batch)
                output = accumulator(grads, weight=ROWS)
            else:
                accumulator.backward(batch)
                output = accumulator.step()
        np.testing.assert_allclose(optimizer.gradients()[0], mean_gradient(data()), rtol=1e-5)
        assert (output.is_updated, number(output.weight)) == (True, ROWS)
