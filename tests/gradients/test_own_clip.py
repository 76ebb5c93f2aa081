"""A clip of one's own: a cell with `construct(grads, norm)`, here one with a state from a paper, too."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import line, mse, sgd
from mindspore import ParameterTuple, Tensor, amp, nn, ops
from refusal import refuses
from step_probe import Around, KeepGradients, Weights, changed, keeping_step, number, values_of

from ms_gradaccum import (
    HSDP,
    Accumulator,
    GradAccumulation,
    MixedPrecision,
    StepOutput,
    TrainOneStepCell,
    load_state,
    save_state,
)
from ms_gradaccum.gradients.clipping import OwnClip
from ms_gradaccum.parallel import factory
from ms_gradaccum.parallel.semi_auto import SemiAuto
from ms_gradaccum.static_graph.settings import check_step


def at_most(limit, grad):
    return ops.minimum(grad, limit)


class HalfOf(nn.Cell):
    def construct(self, grads, norm):
        return ops.HyperMap()(ops.partial(at_most, norm * 0.5), grads)


# Rows whose mean gradient is (6, 0).
FIRST = np.float32([[12, 0], [0, 0]])


def moved(share, average, grad):
    return ops.assign(average, share * average + (1 - share) * grad)


def amplified(factor, grad, average):
    return grad + factor * average


class GrokFast(nn.Cell):
    """Add an average of earlier gradients ("Grokfast", Lee et al., 2024)."""

    def __init__(self, parameters, share=0.5, factor=2.0):
        super().__init__(auto_prefix=False)
        self.averages = ParameterTuple(parameters).clone("grokfast", "zeros")
        for average in self.averages:
            average.requires_grad = False
        self.share = share
        self.factor = factor
        self.map = ops.HyperMap()

    def construct(self, grads, norm):
        averages = self.map(ops.partial(moved, self.share), tuple(self.averages), grads)
        return self.map(ops.partial(amplified, self.factor), grads, averages)


RANDOM = np.random.default_rng(5)
X, Y = RANDOM.normal(size=(6, 8, 3)).astype(np.float32), RANDOM.normal(size=(6, 8, 2)).astype(np.float32)
START = RANDOM.normal(size=(2, 3)).astype(np.float32)
RATE = 0.3


def dense():
    return nn.Dense(3, 2, Tensor(START), has_bias=False)


def step_of(make_clip, micro_size=2, **settings):
    network = dense()
    settings = {"check_loss": False, "clip": make_clip(network.trainable_params()), **settings}
    return TrainOneStepCell(GradAccumulation(mse(network), micro_size), sgd(network, RATE), **settings)


def by_numpy(clip, windows):
    weight = START.astype(np.float64)
    for batches in windows:
        x, y = np.concatenate(X[batches]), np.concatenate(Y[batches])
        grad = (x @ weight.T - y).T @ x * 2 / y.size
        weight = weight - RATE * clip(grad)
    return weight


def half_of(grad):
    return np.minimum(grad, np.linalg.norm(grad) / 2)


class Grokking:
    average = 0.0

    def __call__(self, grad):
        self.average = 0.5 * self.average + 0.5 * grad
        return grad + 2.0 * self.average


CLIPS = {"HalfOf": (lambda _: HalfOf(), lambda: half_of), "GrokFast": (GrokFast, Grokking)}
WINDOWS = [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("wrap", [lambda step: step, Around], ids=["step", "larger graph"])
def test_a_cell_trains_as_numpy_does_on_the_whole_batch(wrap, name, mode):
    make_clip, make_reference = CLIPS[name]
    step = step_of(make_clip, accumulation_steps=2)
    run = wrap(step)
    outputs = [run(Tensor(x), Tensor(y)) for x, y in zip(X, Y)]
    # Items of a larger graph come in a plain tuple.
    output = outputs[1] if isinstance(outputs[1], StepOutput) else StepOutput(*outputs[1])
    expected = by_numpy(make_reference(), WINDOWS)
    np.testing.assert_allclose(step.optimizer.parameters[0].asnumpy(), expected, rtol=1e-5, atol=1e-6)
    x, y = np.concatenate(X[:2]), np.concatenate(Y[:2])
    grad = (x @ START.T - y).T @ x * 2 / y.size
    assert number(output.grad_norm) == pytest.approx(np.linalg.norm(grad), rel=1e-5)
    assert number(output.clipped_grad_norm) == pytest.approx(np.linalg.norm(make_reference()(grad)), rel=1e-5)
    # Without a clip, and clipped batch by batch, the weights are others.
    assert not np.allclose(expected, by_numpy(lambda grad: grad, WINDOWS), rtol=1e-3)
    assert not np.allclose(expected, by_numpy(make_reference(), [[i] for i in range(6)]), rtol=1e-3)


class Scaled(nn.Cell):
    """Multiply by a number of Python that the program changes, and count the calls."""

    def __init__(self, factor=2.0):
        super().__init__(auto_prefix=False)
        self.factor = factor
        self.seen = []

    def construct(self, grads, norm):
        self.note(norm)
        return [grad * self.factor for grad in grads]  # A list is as good as a tuple.

    def note(self, norm):
        self.seen.append(norm)


def test_op_by_op_it_obeys_what_the_program_changes():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    clip = Scaled()
    step = keeping_step(Weights(2), clip=clip, check_loss=False)
    step(Tensor(FIRST))
    np.testing.assert_allclose(step.optimizer.gradients(), [[12, 0]])
    clip.factor = 3.0
    step(Tensor(FIRST))
    np.testing.assert_allclose(step.optimizer.gradients(), [[18, 0]])
    assert [number(norm) for norm in clip.seen] == [6, 6]


def test_it_gets_float32_and_an_optimizer_with_a_scale_gets_that_scale(mode):
    class Seen(nn.Cell):
        def construct(self, grads, norm):
            return (ops.minimum(grads[0], 4.0),)

    network = Weights(2)
    manager = amp.FixedLossScaleManager(128, drop_overflow_update=False)
    optimizer = nn.Momentum(network.trainable_params(), 1.0, 0.0, loss_scale=128.0)
    step = TrainOneStepCell(network, optimizer, clip=Seen(), mixed_precision=manager, check_loss=False)
    output = step(Tensor(FIRST))  # a gradient of 6
    assert number(output.clipped_grad_norm) == 4
    np.testing.assert_allclose(network.weight.asnumpy(), [-4, 0])


def test_weights_of_16_bits_get_sums_of_32(mode):
    class Tiny(nn.Cell):
        """Its product underflows in float16."""

        def construct(self, grads, norm):
            return (grads[0] * 1e-8 * 1e8,)

    loss_cell = Weights(2, ms.float16)
    optimizer = KeepGradients(loss_cell.trainable_params())
    step = TrainOneStepCell(loss_cell, optimizer, clip=Tiny(), check_loss=False)
    step(Tensor(FIRST.astype(np.float16)))
    np.testing.assert_allclose(optimizer.gradients(), [[6, 0]], rtol=1e-3)


@pytest.mark.parametrize("at", [1, 3])
def test_its_parameters_are_saved_with_the_step(at, tmp_path, eager):
    step = step_of(GrokFast, accumulation_steps=2)
    for x, y in zip(X[:at], Y[:at]):
        step(Tensor(x), Tensor(y))
    save_state(step, tmp_path)
    ms.save_checkpoint(step, str(tmp_path / "step.ckpt"))
    for x, y in zip(X[at:], Y[at:]):
        step(Tensor(x), Tensor(y))
    resumed, loaded = step_of(GrokFast, accumulation_steps=2), step_of(GrokFast, accumulation_steps=2)
    load_state(resumed, tmp_path)
    ms.load_checkpoint(str(tmp_path / "step.ckpt"), loaded)
    for again in (resumed, loaded):
        for x, y in zip(X[at:], Y[at:]):
            again(Tensor(x), Tensor(y))
        assert changed(values_of(step), values_of(again)) == set()
    assert "grokfast.weight" in values_of(step)


def test_a_skipped_window_leaves_its_parameters_alone(eager):
    step = step_of(GrokFast, skip_above=1e-6, mixed_precision=MixedPrecision(level="O0"))
    before = values_of(step)
    step(Tensor(X[0]), Tensor(Y[0]))
    step(Tensor(np.full_like(X[0], np.inf)), Tensor(Y[0]))
    assert changed(before, values_of(step)) == {"mixed_precision.loss_scale"}


class Fewer(nn.Cell):
    def construct(self, grads, norm):
        return grads[:1]


class Summed(nn.Cell):
    def construct(self, grads, norm):
        return grads[0].sum(), grads[1]


class Silent(nn.Cell):
    def construct(self, grads, norm):
        return None


class Numbers(nn.Cell):
    def construct(self, grads, norm):
        return (0.5,) * len(grads)


@pytest.mark.parametrize("kind", [Fewer, Summed, Silent, Numbers])
def test_other_gradients_than_it_got_are_refused(kind, mode):
    network = nn.Dense(2, 1)
    step = TrainOneStepCell(mse(network), sgd(network, 0.1), clip=kind(), check_loss=False)
    with refuses(ValueError, "'clip'", "cell must return"):
        step(Tensor(np.ones((2, 2), np.float32)), Tensor(np.ones((2, 1), np.float32)))


@pytest.mark.parametrize("make_clip", [lambda: nn.Dense(1, 1), lambda: sgd(line())], ids=["Dense", "SGD"])
def test_a_cell_that_takes_something_else_is_refused(make_clip, eager):
    with refuses(TypeError, "'clip'", "cell with construct(grads"):
        keeping_step(Weights(2), clip=make_clip())


def test_several_optimizers_or_networks_are_refused(eager):
    cells = [mse(line()) for _ in range(2)]
    with refuses(ValueError, "own is for one network"):
        Accumulator(cells, [sgd(cell) for cell in cells], clip=HalfOf())
    network = nn.Dense(2, 1)
    with refuses(ValueError, "'clip'", "optimizers of a network"):
        Accumulator(network, [nn.SGD([each], 0.1) for each in network.trainable_params()], clip=HalfOf())


def test_shards_of_gradients_are_refused(eager):
    optimizer = sgd(line())
    with refuses(ValueError, "your own needs"):
        factory._check_clip("Model", HSDP(threshold=0), optimizer, OwnClip(HalfOf()))
    cell = GradAccumulation(mse(line()), 2)
    with refuses(ValueError, "'clip'"):
        check_step(SemiAuto(None), cell, sgd(cell), clip=OwnClip(HalfOf()))
