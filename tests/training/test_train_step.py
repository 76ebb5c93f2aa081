"""TrainOneStepCell: what each call does to the weights, the window and the report."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, momentum, sgd, toy_step, weight_of
from loop_toy import batch
from mindspore import Parameter, Tensor, nn, ops
from open_window import buffer_of, window_of
from step_probe import Weights, changed, keeping_step, number, tensors, values_of

from ms_gradaccum import ClipByGlobalNorm, ClipByValue, GradAccumulation, StepOutput, TrainOneStepCell
from ms_gradaccum.training import micro_steps


def rows(first, last):
    return batch(*range(first, last + 1))


def test_a_diary_of_two_windows(mode):
    network, step = toy_step(learning_rate=0.1, accumulation_steps=2)
    buffer = buffer_of(step)
    # x of a batch; the weight, the open window's sum of gradients, sum of losses, rows and batches; what is reported.
    diary = [
        # The weight is 0. x = 1: the error is -2, the loss 4, its gradient 2 * 1 * -2.
        (1, (0, -4, 4, 1, 1), (False, 4, 1)),
        # x = 2: the error is -4, the loss 16, its gradient 2 * 2 * -4. The mean gradient of the window is -10.
        (2, (1, 0, 0, 0, 0), (True, 10, 2, 10)),
        # The weight is 1, so the errors are -1 and -2.
        (1, (1, -2, 1, 1, 1), (False, 1, 1)),
        (2, (1.5, 0, 0, 0, 0), (True, 2.5, 2, 5)),
    ]
    for x, state, report in diary:
        output = step(*batch(x))
        window = [number(each) for each in (buffer.sums[0], buffer.loss, buffer.weight, buffer.batches)]
        assert (weight_of(network), *window) == state
        said = output.is_updated, number(output.loss), number(output.weight), number(output.grad_norm)
        assert said[: len(report)] == report and not number(output.overflow)


def test_batches_of_many_sizes_do_not_fill_the_memory(eager, monkeypatch):
    monkeypatch.setattr(micro_steps, "_MANY_STARTS", 3)
    _, step = toy_step(learning_rate=0.0, micro_size=2, check_loss=False)
    for size in range(2, 9):
        # The mean of 4 * x * x over 1 to size.
        assert number(step(*rows(1, size)).loss) == pytest.approx(4 * (size + 1) * (2 * size + 1) / 6)
        assert 0 < window_of(step).micro_steps.starts.cache_info().currsize <= 3


# Wrong ways end elsewhere: the sum of the micro batches at 8.16, an update for each at 1.75052, an update one
# micro batch too early at 1.99025, and MindSpore's own GradAccumulation at 0.
@pytest.mark.parametrize("micro_size", [1, 3, 25])
def test_the_toy_ends_at_2_04_for_every_micro_size(micro_size, eager):
    network, step = toy_step(micro_size)
    output = step(*rows(1, 8))
    assert weight_of(network) == pytest.approx(2.04)
    assert number(output.loss) == pytest.approx(102)
    assert isinstance(output, StepOutput) and number(output.weight) == 8
    # Every call closes its window: there is nothing left.
    assert step.open_batches() == 0 and step.flush() is None and step.drop() == 0


def test_one_process_sends_no_counts(eager, monkeypatch):
    """It would compile a collective if its program has called `init`."""
    sent = []
    monkeypatch.setattr(
        "ms_gradaccum.parallel.reducer.gather_counts", lambda doing, count: sent.append(count) or [count]
    )
    _, step = toy_step(accumulation_steps=2)
    step(*rows(1, 2))
    assert number(step.flush().updated) and sent == []


def test_weights_keep_the_bits_of_the_start_until_the_last_batch_of_the_window(eager):
    _, step = toy_step(2, make_optimizer=momentum, accumulation_steps=4)
    start = values_of(step)
    window = {"accu_grads.weight", *(f"accu_grads.weight.window_{name}" for name in ("loss", "weight", "batches"))}
    for _ in range(3):
        assert not number(step(*rows(1, 8)).updated)
        # Compared with the start, not with the call before: an update in the very first call would not be seen.
        assert changed(start, values_of(step)) == window
    assert number(step(*rows(1, 8)).updated)
    assert changed(start, values_of(step)) == {"weight", "moments.weight", "global_step"}


def test_the_buffer_is_float32_whatever_the_weights_are(eager):
    step = keeping_step(Weights(1, ms.float16), 4, accumulation_steps=2)
    # The gradients of the rows are the rows. A float16 sum would swallow the ones: 2048 + 1 is 2048 there.
    x = np.array([[2048], [1], [1], [1]], np.float16)
    step(Tensor(x))
    assert buffer_of(step).sums[0].dtype == ms.float32 and number(buffer_of(step).sums[0]) == 2051
    step(Tensor(x))
    (mean,) = step.optimizer.gradients()
    assert mean.dtype == np.float16 and mean == np.float16(4102 / 8) != np.float16(4096 / 8)
    # A mean beyond float16 is an overflow.
    step(Tensor(np.full((2, 1), 1e5, np.float32)))
    output = step(Tensor(np.full((2, 1), 1e5, np.float32)))
    assert (number(output.overflow), output.is_updated) == (True, False)
    assert step.optimizer.gradients() == [mean]


def test_a_window_with_an_invalid_gradient_is_skipped_and_the_next_one_trains(mode):
    network, step = toy_step(2, make_optimizer=momentum, accumulation_steps=2)
    step(*rows(1, 4)), step(*rows(5, 8))
    before = values_of(step)
    for poison in (np.nan, np.inf):
        x = X[:4].copy()
        x[2] = poison
        step(*tensors(x, 2 * x))
        output = step(*rows(5, 8))
        assert (number(output.overflow), output.is_updated) == (True, False)
        # Weights, momentum, global_step; and the buffer, which times 0 would be NaN for ever.
        assert not changed(before, values_of(step))
    step(*rows(1, 4))
    output = step(*rows(5, 8))
    assert (number(output.overflow), output.is_updated) == (False, True)
    # The velocity was -102 and is 0.9 * -102 + 51 * 0.04 now: 2.04 + 0.02 * 89.76.
    assert weight_of(network) == pytest.approx(3.8352)
    assert number(step.optimizer.global_step) == 2


@pytest.mark.parametrize("clip", [ClipByGlobalNorm(2.5), ClipByGlobalNorm(100), ClipByValue(3.5)], ids=repr)
def test_clipping_is_done_once_on_the_mean_gradient_of_the_window(clip):
    step = keeping_step(Weights(2), 2, accumulation_steps=2, clip=clip)
    # The gradients of the four micro batches; their mean is (3, 4). Clipped one by one they would have another.
    step(Tensor(np.float32([[12, 0], [0, 0]])))
    output = step(Tensor(np.float32([[0, 16], [0, 0]])))
    assert number(output.grad_norm) == 5
    expected = {2.5: [1.5, 2], 100.0: [3, 4]}.get(getattr(clip, "max_norm", None), [3, 3.5])
    np.testing.assert_allclose(step.optimizer.gradients(), [expected], rtol=1e-6)
    assert number(output.clipped_grad_norm) == pytest.approx(np.hypot(*expected))


class InverseTime(nn.learning_rate_schedule.LearningRateSchedule):
    def construct(self, global_step):
        return 0.5 / (1 + global_step)


@pytest.mark.parametrize("rates", [[0.5, 0.25, 0.125], InverseTime()], ids=["list", "schedule"])
def test_the_reported_learning_rate_is_the_one_of_this_update(rates, eager):
    _, step = toy_step(make_optimizer=lambda network, _: sgd(network, rates), accumulation_steps=2)
    reported = [number(step(*rows(1, 1)).learning_rate) for _ in range(4)]
    # An update, not a call, is a step of the schedule.
    assert reported[1::2] == [0.5, 0.25] and np.isnan(reported[::2]).all()
    # Nor is an update that is skipped. Op by op, the schedule of a user is asked by the optimizer alone.
    is_list = isinstance(rates, list)
    third = pytest.approx(0.125 if is_list else 0.5 / 3)
    for x, rate in ((np.nan, third if is_list else pytest.approx(np.nan, nan_ok=True)), (1.0, third)):
        step(*tensors(np.float32([[x]]), np.float32([[1]])))
        assert number(step.flush().learning_rate) == rate


class Noisy(nn.Cell):
    """Its gradient is the dropout mask, scaled."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(ops.ones((64,)), "weight")
        self.dropout = nn.Dropout(p=0.5)

    def construct(self, x):
        return self.dropout(x * self.weight).sum(-1).mean()


def test_dropout_draws_a_mask_per_micro_batch_and_none_out_of_training():
    step = keeping_step(Noisy(), 2)
    assert not step.training  # As MindSpore's own step, which leaves the modes of all cells as they are.
    seen = []
    for training in (True, False, True):
        step.set_train(training)
        step(ops.ones((2, 64)))
        seen.append(set(np.unique(step.optimizer.gradients()[0])))
    # Rows are kept with probability 1/2 and doubled: 1 is the mean of a kept and a dropped one.
    assert seen == [{0, 1, 2}, {1}, {0, 1, 2}]


class StudentAndTeacher(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=False)
        self.student, self.teacher = (nn.Dense(4, 3, value, "zeros") for value in ("ones", "normal"))
        self.teacher.weight.set_data(Tensor(np.arange(12, dtype=np.float32).reshape(3, 4) / 12))

    def construct(self, x, y):
        return ops.square(self.student(x) - y - ops.stop_gradient(self.teacher(x))).mean()


def test_two_parameters_of_one_name_train_as_in_mindspores_step(mode):
    random = np.random.default_rng(0)
    data = tensors(*(random.normal(size=(8, size)).astype(np.float32) for size in (4, 3)))
    weights = []
    for step_of in (nn.TrainOneStepCell, TrainOneStepCell):
        cell = StudentAndTeacher()
        optimizer = nn.SGD(cell.student.trainable_params(), 0.1)
        step = step_of(cell if step_of is nn.TrainOneStepCell else GradAccumulation(cell, 4), optimizer).set_train()
        for _ in range(2):
            step(*data)
        weights.append([each.asnumpy() for each in (cell.student.weight, cell.student.bias, cell.teacher.weight)])
    assert not np.allclose(weights[0][0], 1)
    for expected, found in zip(*weights):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
