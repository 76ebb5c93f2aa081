"""Loops over prepared datasets: the end of the data, breaks, nested loops, validation in mid-window."""

import copy
import itertools

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, batches, descend, mse, sgd, toy_step, weight_of
from loop_toy import FOUR, own_loop, toy_loop, train, updates_of
from mindspore import Parameter, Tensor, nn, ops, value_and_grad
from mindspore.dataset import NumpySlicesDataset
from refusal import no_warning, refuses, told
from step_probe import compilations, number

from ms_gradaccum import Accumulator, load_state, save_state

pytestmark = pytest.mark.usefixtures("eager")

AFTER_THREE = descend((1, 2, 3, 4, 5, 6))  # 1.2133333
LAST = {True: descend((1, 2, 3, 4, 5, 6), (7, 8)), False: AFTER_THREE}


def ends_of(accumulator, dataset):
    ends = []
    for _ in dataset:
        with accumulator.accumulate():
            ends.append(accumulator.sync_gradients)
    return ends


DATASETS = {
    "list": lambda: FOUR,
    "generator": lambda: (each for each in FOUR),
    "mindspore.dataset": lambda: batches(2),
    "iterator": lambda: batches(2).create_tuple_iterator(num_epochs=1),
    "numpy": lambda: [tuple(tensor.asnumpy() for tensor in each) for each in FOUR],
}


@pytest.mark.parametrize("apply", [True, False], ids=["applied", "carried"])
@pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS)
def test_the_last_window_is_applied_with_its_true_size_or_carried(dataset, apply):
    network, accumulator = toy_loop(3, sync_with_dataloader=apply)
    weights = [weight_of(network) for _ in train(accumulator, accumulator.prepare(dataset()))]
    assert weights == pytest.approx([0, 0, 1.2133333, LAST[apply]])
    assert LAST[True] == pytest.approx(2.9912)
    # Divided by the three batches that it does not have, the last window moves the weight by a third.
    assert AFTER_THREE + (LAST[True] - AFTER_THREE) / 3 == pytest.approx(1.8059556)


@pytest.mark.parametrize("name", ["create_tuple_iterator", "create_dict_iterator"])
def test_iterators_of_a_prepared_dataset_end_their_windows(name):
    """As MindSpore's: one iterator gives pass after pass, and goes on where a loop was left."""
    network, accumulator = toy_loop(3)
    dataset = NumpySlicesDataset({"data": X, "label": 2 * X}, shuffle=False).batch(2)
    iterator = getattr(accumulator.prepare(dataset), name)(num_epochs=2)

    def ends(batches):
        return updates_of(accumulator, (list(each.values()) if isinstance(each, dict) else each for each in batches))

    assert ends(iterator) == [False, False, True, True]
    assert weight_of(network) == pytest.approx(LAST[True])
    assert ends(itertools.islice(iterator, 2)) == [False, False] and ends(iterator) == [True, True]
    assert len(iterator) == 4


def test_an_iterator_gives_what_it_is_told():
    network, accumulator = toy_loop(4)
    dataset = accumulator.prepare(NumpySlicesDataset({"data": X, "label": 2 * X}, shuffle=False).batch(2))
    for (label,) in dataset.create_tuple_iterator(["label"], output_numpy=True):
        assert isinstance(label, np.ndarray) and label[0] % 2 == 0
    for each in dataset.create_dict_iterator(output_numpy=True):
        assert list(each) == ["data", "label"] and isinstance(each["data"], np.ndarray)
        with accumulator.accumulate():
            accumulator.backward(**each)
            accumulator.step()
    assert weight_of(network) == pytest.approx(2.04)
    assert not hasattr(accumulator.prepare(FOUR), "create_dict_iterator")


def test_data_with_an_iterator_of_its_own_of_that_name_is_refused():
    class Loader(list):
        def create_tuple_iterator(self, num_epochs=1):
            return iter(self)

    prepared = toy_loop(3)[1].prepare(Loader(FOUR))
    assert not hasattr(prepared, "create_tuple_iterator")
    with refuses(AttributeError, "'dataset'"):
        prepared.create_tuple_iterator(num_epochs=1)


def test_an_iterator_goes_on_where_a_loaded_state_was_saved(tmp_path):
    _, accumulator = toy_loop(3)
    iterator = accumulator.prepare(batches(2)).create_tuple_iterator(output_numpy=True)

    def first(count):
        rows = []
        for x, y in itertools.islice(iterator, count):
            with accumulator.accumulate():
                accumulator.backward(*map(Tensor, (x, y)))
                accumulator.step()
            rows.append(x.tolist())
        return rows

    assert first(1) == [[[1], [2]]]
    save_state(accumulator, tmp_path)
    assert first(2) == [[[3], [4]], [[5], [6]]]
    load_state(accumulator, tmp_path)
    assert first(3) == [[[3], [4]], [[5], [6]], [[7], [8]]]
    assert first(1) == []


def test_breaking_out_of_a_loop_keeps_the_window():
    network, accumulator = toy_loop(4)
    dataset = accumulator.prepare(FOUR)
    for _ in itertools.islice(train(accumulator, dataset), 2):
        pass
    assert accumulator.driver.batches == 2 and accumulator.driver.data._open == []
    # The next pass is from the beginning; its first two batches fill the window, its last two are one of their own.
    assert updates_of(accumulator, dataset) == [False, True, False, True]
    assert weight_of(network) == pytest.approx(descend((1, 2, 3, 4) * 2, (5, 6, 7, 8)), rel=1e-5)


@pytest.mark.parametrize("stop_after", [1, 2, 3, 9])
def test_a_loop_inside_a_loop_does_not_hide_the_end_of_the_outer_one_and_ends_with_its_own_data(stop_after):
    # After test_dataloader_break of Accelerate's test_sync.py.
    _, accumulator = toy_loop(10)
    outer, inner = accumulator.prepare(range(4), range(3))
    ends = []
    for _ in outer:
        for _ in itertools.islice(inner, stop_after):
            pass
        with accumulator.accumulate():
            ends.append(accumulator.sync_gradients)
    assert ends == [False, False, False, True]
    assert [ends_of(accumulator, inner) for _ in outer] == [[False, False, True]] * 4


def test_a_loop_that_was_left_without_an_end_is_over_with_the_batch_around_it():
    _, accumulator = toy_loop(10)
    outer, inner = accumulator.prepare(range(3), range(2))
    ends, held = [], []
    for index in outer:
        with accumulator.accumulate():
            ends.append(accumulator.sync_gradients)
        if index < 2:
            held.append(iter(inner))  # nobody closes it
            assert [next(held[-1]), next(held[-1])] == [0, 1]
    assert ends == [False, False, True]


def test_an_error_at_the_last_batch_does_not_make_the_next_one_a_last_one():
    _, accumulator = toy_loop(2)
    with pytest.raises(OSError):
        for _ in accumulator.prepare(range(1)):
            raise OSError
    assert ends_of(accumulator, range(3)) == [False, True, False]


def test_validation_in_mid_window_changes_nothing_and_compiles_nothing_anew():
    network, accumulator = toy_loop(4)
    list(train(accumulator, FOUR))
    network, accumulator = toy_loop(4)
    dataset, validation = accumulator.prepare(FOUR, FOUR)
    loss_cell = accumulator.windows[0].network.network
    with compilations() as compiled:
        for index, _ in enumerate(train(accumulator, dataset)):
            if index in (0, 2):
                before = len(compiled)
                loss_cell.set_train(False)
                losses = [number(loss_cell(*each)) for each in validation]
                loss_cell.set_train(True)
                assert losses == [10, 50, 122, 226] and accumulator.driver.batches == index + 1
                del compiled[before:]  # what the user's own call compiles
    assert compiled == [] and weight_of(network) == pytest.approx(2.04)


def test_prepared_objects_come_back_in_order():
    network, accumulator = toy_loop(2)
    dataset = batches(2)
    prepared, cell, again = accumulator.prepare(dataset, network, FOUR)
    assert cell is network and len(prepared) == len(again) == 4
    assert prepared.get_dataset_size() == 4 and prepared.dataset is dataset
    assert len(accumulator.prepare(accumulator.prepare(FOUR))) == 4
    assert ends_of(accumulator, accumulator.prepare(accumulator.prepare(range(3)))) == [False, True, True]
    assert list(copy.copy(again)) == FOUR


def multiplied(accumulator, weight):
    weight.set_data(weight * 0.9 + 0.01)


def put_back(accumulator, weight):
    multiplied(accumulator, weight)
    weight.set_data((weight - 0.01) / 0.9)


def after_updates(accumulator, weight):
    if accumulator.updated:
        multiplied(accumulator, weight)


@pytest.mark.parametrize("change, count", [(multiplied, 1), (put_back, 0), (after_updates, 0)])
def test_parameters_that_the_caller_changes_inside_a_window_are_named(change, count):
    """A clip of the weights after each batch makes the gradient of a window a mixture."""
    network, accumulator = own_loop(2)
    grad_fn = value_and_grad(mse(network), None, network.trainable_params())
    with told() as said:
        for each in FOUR:
            loss, grads = grad_fn(*each)
            accumulator(grads, 2, loss)
            change(accumulator, network.weight)
    assert ["mixes two models" in each and "'weight'" in each for each in said] == [True] * count


def test_a_frozen_parameter_that_the_loop_changes_inside_a_window_is_named():
    """A target network, which a loop moves after each batch."""
    network, accumulator = own_loop(2)
    network.target = Parameter(Tensor([True, False]), "target", requires_grad=False)
    grad_fn = value_and_grad(mse(network), None, network.trainable_params())
    with told("mixes two models") as said:
        for each in FOUR:
            loss, grads = grad_fn(*each)
            accumulator(grads, 2, loss)
            network.target.set_data(ops.logical_not(network.target))
    assert "'target'" in said[0]


def warnings_for(make):
    network = nn.Dense(4, 3, has_bias=False)
    accumulator = Accumulator(network, sgd(network, 0.02), 4)
    with told() as said:
        for _ in range(8):
            accumulator((Tensor(make().astype(np.float32)),), 2)
    return said


def test_a_clip_of_each_batch_by_hand_is_named_and_no_norm_that_is_one_by_nature():
    random = np.random.default_rng(0)
    rows = random.normal(size=(64, 4, 3))

    def clipped(limit):
        grad = random.normal(size=(3, 4))
        return grad * min(1, limit / np.linalg.norm(grad))

    (said,) = warnings_for(lambda: clipped(0.1))
    assert "clip=ClipByGlobalNorm(0.1)" in said
    assert warnings_for(lambda: clipped(1e6)) == []
    assert warnings_for(lambda: np.ones((3, 4))) == []
    assert warnings_for(lambda: np.sign(random.normal(size=(3, 4)))) == []
    # The sum over a batch in another order.
    assert warnings_for(lambda: np.add.reduce(random.permutation(rows).astype(np.float32)).T) == []


def test_parameters_that_change_before_a_window_or_come_with_its_sums_are_not_named(tmp_path):
    network, step = toy_step(accumulation_steps=2)
    with no_warning():
        with pytest.raises(TypeError):
            step(FOUR[0][0])
        network.weight.set_data(network.weight + 1)
        step(*FOUR[0]), step(*FOUR[1])
        step(*FOUR[0])
        ms.save_checkpoint(step, str(tmp_path / "open.ckpt"))
        step(*FOUR[1])
        step(*FOUR[2])
        ms.load_param_into_net(step, ms.load_checkpoint(str(tmp_path / "open.ckpt")))
        step(*FOUR[3])
