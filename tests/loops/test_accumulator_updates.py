"""The end of a window of a hand-written loop: clipping, NaN, learning rate schedulers, flush and drop."""

import mindspore as ms
import mindspore.experimental.optim as experimental
import numpy as np
import pytest
from linear_toy import descend, line, mse, sgd, weight_of
from loop_toy import FOUR, adjustable_sgd, nan_batch, optimizer_of, own_loop, rate, toy_loop, train, updates_of
from mindspore import Tensor, nn, ops
from mindspore.experimental.optim import lr_scheduler
from refusal import warns
from step_probe import Weights, compilations, number

from ms_gradaccum import Accumulator, ClipByGlobalNorm, ClipByValue

pytestmark = pytest.mark.usefixtures("eager")

THREE_FOUR = Tensor(np.float32([[3.0, 4.0], [3.0, 4.0]]))  # the gradient of Weights(2): norm 5


def two_weights_loop(**settings):
    """Weights whose update is minus the gradient, so that they show what the optimizer was given."""
    network = Weights(2)
    return network, Accumulator(network, sgd(network, 1.0), 2, **settings)


two_weights = pytest.fixture(two_weights_loop, scope="module")


def clipped_update(two_weights, clip):
    """The update of a window with the mean gradient (3, 4), what ``clip`` returned in its batches, and the report."""
    network, accumulator = two_weights
    network.weight.set_data(ops.zeros_like(network.weight))
    returned = []
    for _ in range(2):
        with accumulator.accumulate():
            accumulator.backward(THREE_FOUR)
            returned.append(clip(accumulator))
            output = accumulator.step()
    return -network.weight.asnumpy(), returned, output


def test_a_new_limit_in_each_update_compiles_nothing_anew(two_weights):
    clipped_update(two_weights, lambda accumulator: accumulator.clip_grad_norm(1.0))
    with compilations() as compiled:
        for max_norm in (0.5, 2.0, 4.99, 5.0, 7.0, 2):
            update, norms, output = clipped_update(two_weights, lambda a, limit=max_norm: a.clip_grad_norm(limit))
            expected = ClipByGlobalNorm(max_norm)((Tensor([3.0, 4.0]),), Tensor(5.0))[0].asnumpy()
            np.testing.assert_array_equal(update, expected)
            assert norms[0] is None and number(norms[1]) == number(output.grad_norm) == 5
            assert number(output.clipped_grad_norm) == pytest.approx(min(max_norm, 5))
    assert "Update" not in compiled and "MicroStep" not in compiled
    # Each is for one update.
    np.testing.assert_array_equal(clipped_update(two_weights, lambda accumulator: None)[0], [3, 4])


@pytest.mark.parametrize("clip", [ClipByGlobalNorm(2.5), ClipByValue(3.5)], ids=repr)
def test_a_clip_of_the_accumulator_holds_where_the_loop_chooses_none(clip):
    loop = two_weights_loop(clip=clip)
    update, _, output = clipped_update(loop, lambda accumulator: None)
    expected = clip((Tensor([3.0, 4.0]),), Tensor(5.0))[0].asnumpy()
    np.testing.assert_array_equal(update, expected)
    assert number(output.clipped_grad_norm) == pytest.approx(np.hypot(*expected))
    update, _, _ = clipped_update(loop, lambda accumulator: accumulator.clip_grad_norm(1.0))
    np.testing.assert_allclose(update, [0.6, 0.8], rtol=1e-6)


def halving(optimizer):
    return lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("apply", [True, False], ids=["applied", "carried"])
def test_a_scheduler_moves_once_per_epoch_if_it_is_called_so(apply):
    _, accumulator = toy_loop(3, adjustable_sgd, sync_with_dataloader=apply)
    scheduler, dataset = accumulator.prepare(halving(optimizer_of(accumulator)), FOUR)
    rates = []
    for _ in range(3):
        list(train(accumulator, dataset))
        scheduler.step()
        rates.append(rate(accumulator))
    # Carried, the first two epochs end in mid-window.
    assert rates == [0.01, 0.005, 0.0025]
    assert scheduler.last_epoch == 3  # what it does not change is that of the scheduler


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("place", ["before the loop", "top", "before step"])
def test_a_scheduler_that_is_called_before_the_first_update_is_named(place, steps):
    """MindSpore's own scheduler moves the rate of the first update there; a prepared one follows it."""
    _, accumulator = toy_loop(steps, adjustable_sgd)
    scheduler = accumulator.prepare(halving(optimizer_of(accumulator)))
    rates = []
    with warns("scheduler.step() came before the update"):
        if place == "before the loop":
            scheduler.step()
        for each in FOUR[:steps]:
            with accumulator.accumulate():
                if place == "top":
                    scheduler.step()
                accumulator.backward(*each)
                if place == "before step":
                    scheduler.step()
                rates.append(accumulator.step())
    assert number(rates[-1].learning_rate) == pytest.approx(0.02)


def test_the_schedulers_of_two_networks_follow_the_updates_of_their_own():
    """As in a GAN: the first network has its update, skipped or not, when the other one's is still to come."""
    losses = [mse(line()) for _ in range(2)]
    optimizers = [adjustable_sgd(each) for each in losses]
    accumulator = Accumulator(losses, optimizers)
    schedulers = [accumulator.prepare(halving(each)) for each in optimizers]
    for batches in ([nan_batch()] * 2, FOUR[:2], [nan_batch(), FOUR[2]]):
        with accumulator.accumulate():
            for loss, scheduler, each in zip(losses, schedulers, batches):
                accumulator.backward(*each, network=loss)
                accumulator.step(network=loss)
                scheduler.step()
    assert [round(number(each.lrs[0]), 6) for each in optimizers] == [0.01, 0.005]


def test_a_scheduler_that_stays_where_it_was_in_a_later_window_gets_no_warning(recwarn):
    _, accumulator = toy_loop(1, adjustable_sgd)
    scheduler = accumulator.prepare(halving(optimizer_of(accumulator)))
    for number_of_batch, each in enumerate(FOUR[:3]):
        with accumulator.accumulate():
            if number_of_batch != 1:  # A batch that the loop leaves out.
                accumulator.backward(*each)
                accumulator.step()
            scheduler.step()
    assert not [each for each in recwarn if "scheduler" in str(each.message)]
    assert rate(accumulator) == pytest.approx(0.005)


def test_a_scheduler_that_cannot_see_the_updates_of_a_graph_is_named(monkeypatch):
    monkeypatch.delenv("MS_JIT", raising=False)
    network, accumulator = own_loop(make_optimizer=adjustable_sgd, check_loss=False)
    optimizer = optimizer_of(accumulator)
    scheduler = accumulator.prepare(halving(optimizer))
    grad = ms.value_and_grad(mse(network), None, optimizer.parameters)

    @ms.jit
    def train_batch(x, y):
        loss, grads = grad(x, y)
        return accumulator(grads, 2.0, loss)

    train_batch(*FOUR[0])
    with warns("prepared scheduler does"):
        scheduler.step()
    assert rate(accumulator) == pytest.approx(0.02)


@pytest.mark.parametrize("numbers", [(0,), (0, 1)])
def test_rates_that_are_numbers_in_some_groups_are_reported(numbers, mode):
    network = nn.Dense(1, 1)
    groups = [{"params": [network.weight], "lr": 0.01}, {"params": [network.bias]}]
    optimizer = experimental.SGD(groups, 0.02)
    for i in numbers:
        optimizer.param_groups[i]["lr"] = 0.5
    accumulator = Accumulator(mse(network), optimizer, check_loss=False)
    accumulator.backward(*FOUR[0])
    expected = [0.5, 0.5 if 1 in numbers else 0.02]
    np.testing.assert_allclose(accumulator.step().learning_rate.asnumpy(), expected, rtol=1e-6)


def test_a_rate_that_is_a_number_in_a_group_is_the_one_reported():
    """MindSpore's optimizers take ``param_groups[0]["lr"] = 0.01`` in place of their parameter."""
    network, accumulator = own_loop(2, make_optimizer=adjustable_sgd)
    optimizer = optimizer_of(accumulator)
    first, second = FOUR[:2], FOUR[2:]
    list(train(accumulator, first))
    optimizer.param_groups[0]["lr"] = 0.01
    accumulator.backward(*second[0])
    accumulator.backward(*second[1])
    assert number(accumulator.step().learning_rate) == pytest.approx(0.01)  # and not 0.02
    expected = descend((5, 6, 7, 8), weight=descend((1, 2, 3, 4)), learning_rate=0.01)
    assert weight_of(network) == pytest.approx(expected)
    accumulator.backward(*first[0])
    optimizer.param_groups[0]["lr"] = 0.005
    accumulator.backward(*first[1])
    with warns("rate has changed"):
        accumulator.step()


def test_an_epoch_that_ends_in_a_skipped_update_moves_the_scheduler_for_the_others():
    _, accumulator = toy_loop(2, adjustable_sgd)
    scheduler, dataset = accumulator.prepare(halving(optimizer_of(accumulator)), [*FOUR, nan_batch()])
    assert updates_of(accumulator, dataset) == [False, True, False, True, False]
    scheduler.step(), scheduler.step()
    assert rate(accumulator) == 0.01


def test_reduce_on_plateau_takes_its_metric():
    _, accumulator = toy_loop(2, adjustable_sgd)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer_of(accumulator), patience=0, factor=0.5)
    scheduler = accumulator.prepare(plateau)
    rates = []
    for index, each in enumerate(FOUR * 2):
        with accumulator.accumulate():
            accumulator.backward(*each)
            accumulator.step()
            scheduler.step(Tensor(1.0) if index != 0 else Tensor(-1.0))
        rates.append(rate(accumulator))
    # The metric of batch 0 was not looked at; those of the updates do not get better after the first.
    assert rates == [0.02, 0.02, 0.02, 0.01, 0.01, 0.005, 0.005, 0.0025]


@pytest.mark.parametrize("clip,clipped", [("clip_grad_norm", [0.6, 0.8]), ("clip_grad_value", [1.0, 1.0])])
def test_flush_clips_as_the_loop_does(clip, clipped):
    network, accumulator = loop = two_weights_loop()
    clipped_update(loop, lambda accumulator: getattr(accumulator, clip)(1.0))
    network.weight.set_data(ops.zeros_like(network.weight))
    accumulator.backward(THREE_FOUR)
    output = accumulator.flush()
    np.testing.assert_allclose(-network.weight.asnumpy(), clipped, rtol=1e-6)
    assert number(output.clipped_grad_norm) == pytest.approx(np.linalg.norm(clipped))


@pytest.mark.parametrize(
    "how, before, ends, result",
    [
        ("flush", True, [2, 5, 9], 4),
        ("flush", False, [2, 6, 10], 6),
        ("drop", True, [5, 9], 2),
        ("drop", False, [6, 10], 3),
    ],
)
def test_flush_and_drop_inside_a_batch_do_not_shift_the_next_boundary(how, before, ends, result):
    """The third batch belongs to the next window, or to the one that ends."""
    _, accumulator = toy_loop(4)
    updates = []
    for index, each in enumerate(FOUR * 3):
        with accumulator.accumulate():
            if index == 2 and before:
                found = getattr(accumulator, how)()
            accumulator.backward(*each)
            if index == 2 and not before:
                found = getattr(accumulator, how)()
            accumulator.step()
        updates.append(accumulator.updated)
    assert result == (number(found.weight) if how == "flush" else found)
    assert [index for index, update in enumerate(updates) if update] == ends
