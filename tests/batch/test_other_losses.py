"""Losses that a network returns beside the first one: StepOutput.other_losses against NumPy, wherever windows run."""

import copy
import json
import pickle

import mindspore as ms
import numpy as np
import pytest
from linear_toy import AtStep
from mindspore import Parameter, Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset
from refusal import refuses
from step_probe import Around, KeepGradients, number, tensors

from ms_gradaccum import (
    Accumulator,
    GradAccumulation,
    MetricsLogger,
    Model,
    ProgressBar,
    StepOutput,
    StepReporter,
    TrainOneStepCell,
    load_state,
    save_state,
)

X = np.float32([[1, 2], [3, 1], [0, 2], [2, 4], [1, 1], [4, 0], [2, 5]])
Y = np.float32([[1], [0], [2], [1], [3], [2], [0]])
# Batches of a window: micro batches of 3, 2 and of 1, 1 rows with micro_size=2.
FIRST, SECOND = (X[:5], Y[:5]), (X[5:], Y[5:])


class Losses(nn.Cell):
    """A mean loss, and with it two more that are means over the rows; between them what is no loss."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((2, 1), np.float32)), "weight")

    def construct(self, x, y):
        out = ops.matmul(x, self.weight)
        return ops.square(out - y).mean(), ops.abs(out).mean(), out, (3, ops.exp(-y).mean())


class Pairs(Losses):
    """The same as a sum and a weight of its own: the sum of y."""

    def construct(self, x, y):
        out = ops.matmul(x, self.weight)
        return (y * ops.square(out - y)).sum(), y.sum(), ops.abs(out).mean(), ops.exp(-y).mean()


def means(*parts, weigh=lambda x, y: len(x)):
    """The two further losses over some micro batches, each weighted, in float64."""
    weights = [np.float64(weigh(x, y)) for x, y in parts]
    values = [(np.abs(x.sum(1)).mean(), np.exp(-y.astype(np.float64)).mean()) for x, y in parts]
    return np.average(values, axis=0, weights=weights)


def halves(x, y):
    """The micro batches of a batch with micro_size=2."""
    middle = -(-len(x) // 2)
    return (x[:middle], y[:middle]), (x[middle:], y[middle:])


ALL = means((X, Y))
NAMES = ("size", "label")


def step_of(network=None, micro_size=2, losses="first", weighted=False, **settings):
    network = network or Losses()
    loss_cell = GradAccumulation(network, micro_size, losses=losses, weighted=weighted)
    return TrainOneStepCell(loss_cell, KeepGradients(network.trainable_params()), **settings)


def check(output, expected):
    found = output.other_losses
    assert isinstance(found, tuple) and all(isinstance(loss, Tensor) and loss.shape == () for loss in found)
    np.testing.assert_allclose([number(loss) for loss in found], expected, rtol=1e-5)


@pytest.mark.parametrize("losses", ["first", "sum", NAMES])
def test_they_are_means_over_the_rows_of_the_window(losses, mode):
    # A mean of the means of the micro batches would be another number.
    assert abs(means(*halves(*FIRST), *halves(*SECOND), weigh=lambda x, y: 1) - ALL).min() > 0.01
    step = step_of(losses=losses, accumulation_steps=2)
    check(step(*tensors(*FIRST)), means(FIRST))
    output = step(*tensors(*SECOND))
    check(output, ALL)
    assert len(output) == 3 and output.is_updated
    first = np.square(X.sum(1, keepdims=True) - Y).mean()
    assert number(output.loss) == pytest.approx(first + (ALL.sum() if losses == "sum" else 0), rel=1e-5)
    # The next window begins with nothing of this one.
    check(step(*tensors(*SECOND)), means(SECOND))


def test_a_network_of_one_loss_and_a_cell_without_the_word_report_none(network_mode):
    class One(Losses):
        def construct(self, x, y):
            return ops.square(ops.matmul(x, self.weight) - y).mean(), x

    for losses in ("first", None):
        step = step_of(One(), losses=losses)
        output = step(*tensors(X, Y))
        assert output.other_losses == () and "other_losses" not in repr(output)
        assert ("accu_grads.weight.window_other_losses" in step.parameters_dict()) == (losses is not None)


@pytest.mark.parametrize("losses", ["first", NAMES])
def test_with_a_weight_of_their_own_they_count_as_the_loss_does(losses, network_mode):
    expected = means(*halves(*FIRST), weigh=lambda x, y: y.sum())
    assert abs(expected - means(FIRST)).min() > 0.01
    check(step_of(Pairs(), losses=losses, weighted=True)(*tensors(*FIRST)), expected)


def test_a_micro_batch_that_weighs_nothing_has_no_part_in_them(eager):
    class Nothing(Pairs):
        def construct(self, x, y):
            loss_sum, weight, one, two = super().construct(x, y)
            return loss_sum, weight, one * weight / weight, two

    labels = Y[:5] * np.float32([[1], [1], [1], [0], [0]])
    check(step_of(Nothing(), weighted=True)(*tensors(X[:5], labels)), means((X[:3], labels[:3])))


@pytest.mark.parametrize("losses", ["first", NAMES])
def test_inside_a_larger_graph_they_are_the_ninth_item(losses):
    ms.set_context(mode=ms.GRAPH_MODE)
    step = step_of(losses=losses, accumulation_steps=2)
    graph = Around(step).set_train()
    check(StepOutput(*graph(*tensors(*FIRST))), means(FIRST))
    items = graph(*tensors(*FIRST))
    assert len(items) == 9
    check(StepOutput(*items), means(FIRST))


@pytest.mark.parametrize(("losses", "keys"), [("first", ("1", "2")), (NAMES, NAMES)])
def test_a_model_gives_them_to_its_callbacks_and_they_are_shown_and_logged(losses, keys, tmp_path, capsys, eager):
    seen, calls = [], []
    network = Losses()
    optimizer = KeepGradients(network.trainable_params())
    model = Model(GradAccumulation(network, 2, losses=losses), optimizer=optimizer, accumulation_steps=2)
    data = NumpySlicesDataset((X[:6], Y[:6]), shuffle=False).batch(3)
    logger = MetricsLogger(tmp_path / "run.jsonl", log=lambda numbers, step: calls.append(numbers))
    seeing = AtStep(lambda context: seen.append(context.original_args().net_outputs))
    callbacks = [seeing, logger, ProgressBar(live=False)]
    model.train(1, data, callbacks)
    expected = means((X[:6], Y[:6]))
    check(seen[-1], expected)
    line = json.loads((tmp_path / "run.jsonl").read_text())
    for numbers in (line, *calls):
        np.testing.assert_allclose([numbers[f"other_loss_{key}"] for key in keys], expected, rtol=1e-5)
        assert not {"other_losses", "loss_names"} & set(numbers)
    assert f"other losses {expected[0]:.4g} {expected[1]:.4g}, lr" in capsys.readouterr().out


def test_a_loop_reports_them_of_its_window_also_with_several_optimizers(mode):
    class TwoWeights(Losses):
        def __init__(self):
            super().__init__()
            self.other = Parameter(Tensor([1.0]), "other")

        def construct(self, x, y):
            loss, one, out, two = super().construct(x, y)
            return self.other.sum() * loss, one, out, two

    network = TwoWeights()
    optimizers = [KeepGradients([network.weight]), KeepGradients([network.other])]
    accumulator = Accumulator(GradAccumulation(network, 2, losses="first"), optimizers, 2)
    for batch in (FIRST, SECOND):
        with accumulator.accumulate():
            loss = accumulator.backward(*tensors(*batch))
            accumulator.clip_grad_norm(1.0)
            output = accumulator.step()
    check(output, ALL)
    assert number(loss) == pytest.approx(np.square(SECOND[0].sum(1, keepdims=True) - SECOND[1]).mean(), rel=1e-5)
    assert StepReporter().report(output).other_losses == pytest.approx(ALL, rel=1e-5)


@pytest.mark.parametrize("inside", [False, True], ids=["called", "inside a graph"])
def test_what_is_left_out_of_the_window_is_left_out_of_them(inside):
    ms.set_context(mode=ms.GRAPH_MODE if inside else ms.PYNATIVE_MODE)
    step = step_of(bad_micro_batch="drop")
    x = X[:5].copy()
    x[4] = np.inf  # in the second micro batch
    run = Around(step).set_train() if inside else step
    output = run(*tensors(x, Y[:5]))
    output = output if isinstance(output, StepOutput) else StepOutput(*output)
    assert output.is_updated and number(output.weight) == 3
    check(output, means((X[:3], Y[:3])))
    # The window with it would report what it was.
    assert not np.isfinite(number(step_of()(*tensors(x, Y[:5])).other_losses[0]))


def test_one_that_is_not_finite_itself_skips_nothing(eager):
    class Endless(Losses):
        def construct(self, x, y):
            loss, one, out, (_, two) = super().construct(x, y)
            return loss, one / 0, two

    output = step_of(Endless(), bad_micro_batch="drop")(*tensors(*FIRST))
    assert output.is_updated and number(output.weight) == 5
    check(output, [np.inf, means(FIRST)[1]])


def test_they_are_not_scaled_with_the_loss(eager):
    precision = ms.amp.FixedLossScaleManager(1024.0, False)
    check(step_of(mixed_precision=precision)(*tensors(*FIRST)), means(FIRST))


def test_float64_weights_report_them_too(eager):
    network = Losses()
    network.weight = Parameter(Tensor(np.ones((2, 1))), "weight")
    check(step_of(network)(Tensor(X.astype(np.float64)), Tensor(Y.astype(np.float64))), means((X, Y)))


@pytest.mark.parametrize("losses", ["first", "sum", NAMES])
def test_a_state_of_an_open_window_holds_them(losses, tmp_path, eager):
    step = step_of(losses=losses, accumulation_steps=2)
    step(*tensors(*FIRST))
    save_state(step, tmp_path)
    fresh = step_of(losses=losses, accumulation_steps=2)
    load_state(fresh, tmp_path)
    check(fresh(*tensors(*SECOND)), ALL)  # without those of the state: means(SECOND)
    step.drop()
    check(step(*tensors(*SECOND)), means(SECOND))


def test_names_give_their_number_before_the_first_batch():
    assert step_of(losses=NAMES).parameters_dict()["accu_grads.weight.window_other_losses"].shape == (2, 2)


@pytest.mark.parametrize("names", [("size",), ("size", "label", "more")])
def test_another_number_of_names_than_of_losses_is_refused(names, network_mode):
    step = step_of(losses=names)
    before = step.network.network.weight.asnumpy().copy()
    with refuses(ValueError, "'losses'", f"2 scalars after the loss, but got {names}"):
        step(*tensors(X, Y))
    np.testing.assert_array_equal(step.network.network.weight.asnumpy(), before)


@pytest.mark.parametrize("names", [(), ("size", "size"), ("size", 1), ("size", "")])
def test_what_gives_no_name_to_each_loss_is_refused(names):
    with refuses(ValueError, "'losses'", "different name"):
        GradAccumulation(Losses(), 2, losses=names)


def test_more_than_a_report_has_room_for_are_refused(network_mode):
    class Many(Losses):
        def construct(self, x, y):
            out = ops.matmul(x, self.weight)
            loss = ops.square(out - y).mean()
            return (loss,) * 66

    with refuses(ValueError, "'network'", "return at most"):
        step_of(Many())(*tensors(X, Y))


def test_an_output_keeps_them_in_copies(eager):
    output = step_of()(*tensors(X, Y))
    raw = output._replace(weight=Tensor(3.0))
    others = [number(loss) for loss in output.other_losses]
    for same in (raw, copy.copy(output), copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert [number(loss) for loss in same.other_losses] == others
    changed = output._replace(other_losses=(Tensor(2.0),))
    assert [number(loss) for loss in changed.other_losses] == [2.0]
    assert repr(changed).endswith("weight=7.0, other_losses=(2.0))")
    assert "other_losses" not in output._asdict()  # which has scalars


def test_nothing_is_read_until_they_are_asked_for(eager):
    class Unread(Tensor):
        def asnumpy(self):
            raise AssertionError("read")

    output = step_of()(*tensors(X, Y))
    late = output._replace(other_losses=Unread(np.ones((2, 2), np.float32)))._replace(weight=Tensor(1.0))
    with pytest.raises(AssertionError, match="read"):
        late.other_losses  # noqa: B018


def test_the_loss_alone_does_not_mind_them(eager):
    loss_cell = GradAccumulation(Losses(), 2, losses="sum").set_train()
    with pytest.warns(UserWarning, match="not one of ms_gradaccum"):
        loss = loss_cell(*tensors(X, Y))
    assert number(loss) == pytest.approx(np.square(X.sum(1, keepdims=True) - Y).mean() + ALL.sum(), rel=1e-5)
