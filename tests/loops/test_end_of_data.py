"""The end of the data belongs to the batch that is trained last, however a loop comes by its batches."""

import itertools

import numpy as np
import pytest
from linear_toy import batches, descend, weight_of
from loop_toy import FOUR, batch, toy_loop, train, updates_of
from mindspore import Tensor
from mindspore.dataset import NumpySlicesDataset
from refusal import warns

from ms_gradaccum import load_state, save_state

pytestmark = pytest.mark.usefixtures("eager")

SIX = [batch(row) for row in range(1, 7)]
ENDS_OF_SIX = [False, False, False, True, False, True]


def prefetched(data, depth=1):
    data, held = iter(data), []
    for each in data:
        held.append(each)
        if len(held) > depth:
            yield held.pop(0)
    yield from held


def converted(data):
    """The batches of `data` as new tensors, by which nothing is recognised."""
    return (tuple(Tensor(each.asnumpy()) for each in pair) for pair in data)


WAYS = {
    "plain": lambda prepared: prepared,
    "one ahead": prefetched,
    "three ahead": lambda prepared: prefetched(prepared, 3),
    "further ahead than there are batches": lambda prepared: prefetched(prepared, 20),
    "a list": list,
    "as arrays, one ahead": lambda prepared: prefetched(converted(prepared)),
    "as arrays, three ahead": lambda prepared: prefetched(converted(prepared), 3),
    "as arrays, five ahead": lambda prepared: prefetched(converted(prepared), 5),
    "as arrays, further ahead than there are batches": lambda prepared: prefetched(converted(prepared), 20),
    "as arrays": converted,
}


@pytest.mark.parametrize("make", [lambda: SIX, lambda: (each for each in SIX)], ids=["list", "generator"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_loop_may_fetch_batches_before_it_trains_them(way, make):
    network, accumulator = toy_loop(4)
    for _ in range(2):
        assert updates_of(accumulator, way(accumulator.prepare(make()))) == ENDS_OF_SIX
    assert weight_of(network) == pytest.approx(descend(*[(1, 2, 3, 4), (5, 6)] * 2), rel=1e-5)
    assert not accumulator.driver.is_open


def test_batches_of_a_pipeline_are_fetched_ahead_over_the_end_of_a_pass():
    network, accumulator = toy_loop(3)
    prepared = accumulator.prepare(batches(2))
    chained = itertools.chain.from_iterable(prepared for _ in range(3))
    assert updates_of(accumulator, prefetched(chained, 2)) == [False, False, True, True] * 3
    assert weight_of(network) == pytest.approx(descend(*[(1, 2, 3, 4, 5, 6), (7, 8)] * 3), rel=1e-5)


@pytest.mark.parametrize("order", [(2, 0, 1), (2, 1, 0)])
def test_a_list_may_be_trained_with_the_last_batch_first(order):
    _, accumulator = toy_loop(4)
    prepared = accumulator.prepare(SIX[:3])
    for _ in range(2):
        fetched = list(prepared)
        assert updates_of(accumulator, [fetched[i] for i in order]) == [False, False, True]


def test_a_loop_that_only_seems_to_fetch_ahead_is_named():
    """Its first batches are skipped, and what it trains is new tensors: so do loops that fetch ahead."""
    _, accumulator = toy_loop(3)
    prepared = accumulator.prepare(SIX)
    assert updates_of(accumulator, itertools.islice(converted(prepared), 1, None)) == [False, False, True] + [False] * 2
    with warns("when the next"):
        ends = updates_of(accumulator, converted(prepared))
    assert ends == [True, False, False, True, False, True]


def test_a_second_dataset_that_is_drawn_by_hand_ends_nothing():
    """As a semi-supervised loop does: its second data begins anew where it ends."""
    network, accumulator = toy_loop(4)
    labelled, unlabelled = accumulator.prepare(SIX, [batch(9), batch(10)])
    again, ends = itertools.chain.from_iterable(unlabelled for _ in range(9)), []
    for each in labelled:
        next(again)
        ends += updates_of(accumulator, [each])
    assert ends == ENDS_OF_SIX
    assert weight_of(network) == pytest.approx(descend((1, 2, 3, 4), (5, 6)), rel=1e-5)


def updates_of_pairs(accumulator, pairs):
    ends = []
    for pair in pairs:
        with accumulator.accumulate():
            accumulator.driver.recognise(pair)
            accumulator.backward(*pair[0])
            accumulator.step()
        ends.append(accumulator.updated)
    return ends


@pytest.mark.parametrize("order", [1, -1], ids=["shorter first", "longer first"])
def test_two_datasets_side_by_side_end_with_the_shorter_one(order):
    _, accumulator = toy_loop(4)
    others = [batch(row) for row in range(11, 20)]
    for _ in range(2):
        pairs = zip(*accumulator.prepare(*(SIX, others)[::order]), strict=False)
        assert updates_of_pairs(accumulator, pairs) == ENDS_OF_SIX


def test_a_dataset_that_is_trained_with_another_one_and_begins_anew_ends_one_window():
    _, accumulator = toy_loop(8)
    outer, inner = accumulator.prepare(SIX, [batch(9), batch(10)])
    again = itertools.chain.from_iterable(inner for _ in range(9))
    ends = updates_of_pairs(accumulator, zip(outer, again, strict=False))
    assert ends == [False, True, False, False, False, True]


def slices(data, rows):
    for x, y in data:
        for begin in range(0, len(x), rows):
            yield x[begin : begin + rows], y[begin : begin + rows]


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("pairs", [[(1, 2, 3, 4), (5, 6, 7, 8)], [(1, 2, 3, 4), (5, 6)], [(1, 2, 3, 4)]])
def test_slices_of_the_last_batch_end_with_the_last_of_them(rows, pairs):
    network, accumulator = toy_loop(20)
    prepared = accumulator.prepare([batch(*each) for each in pairs])
    for _ in range(2):
        ends = updates_of(accumulator, slices(prepared, rows))
        assert ends == [False] * (len(ends) - 1) + [True]
    every = tuple(itertools.chain.from_iterable(pairs))
    assert weight_of(network) == pytest.approx(descend(every, every), rel=1e-5)


def skipping(way):
    return lambda prepared: itertools.islice(WAYS[way](prepared), 1, None, 2)


# The batches of a dataset, what a loop trains of them, and into how many batches.
OTHER_LOOPS = {
    "every second one": (SIX, skipping("plain"), 3),
    "every second one, fetched ahead": (SIX, skipping("one ahead"), 3),
    "every second one of a list": (SIX, skipping("a list"), 3),
    "every second one as arrays": (SIX, skipping("as arrays"), 3),
    "two as arrays, one ahead": (SIX[:2], WAYS["as arrays, one ahead"], 2),
    "three as arrays, one ahead": (SIX[:3], WAYS["as arrays, one ahead"], 3),
    "each three times": (SIX, lambda prepared: (each for each in prepared for _ in range(3)), 18),
    "without their first rows": (FOUR, lambda prepared: ((x[1:], y[1:]) for x, y in prepared), 4),
}


@pytest.mark.parametrize("data, trained, count", OTHER_LOOPS.values(), ids=OTHER_LOOPS)
def test_a_window_ends_with_the_last_batch_that_is_trained(data, trained, count):
    _, accumulator = toy_loop(20)
    for _ in range(2):
        assert updates_of(accumulator, trained(accumulator.prepare(data))) == [False] * (count - 1) + [True]


def test_slices_of_gradients_that_the_caller_takes():
    _, accumulator = toy_loop(20)
    ends = []
    for x, _ in slices(accumulator.prepare([batch(1, 2, 3, 4), batch(5, 6, 7)]), 2):
        accumulator((Tensor([[1.0]]),), len(x))
        ends.append(accumulator.updated)
    assert ends == [False, False, False, True]


def test_it_is_known_at_the_beginning_of_a_batch():
    _, accumulator = toy_loop(4)
    for way in (WAYS["one ahead"], lambda prepared: slices(prepared, 1)):
        known = []
        for each in way(accumulator.prepare(SIX)):
            with accumulator.accumulate():
                known.append(accumulator.sync_gradients)
                accumulator.backward(*each)
                accumulator.step()
        assert known == ENDS_OF_SIX


def test_a_state_knows_what_was_fetched_and_not_trained(tmp_path):
    network, accumulator = toy_loop(4)
    prepared = accumulator.prepare(SIX)
    for index, _ in enumerate(train(accumulator, prefetched(prepared, 2))):
        if index == 2:
            save_state(accumulator, tmp_path)
    expected = weight_of(network)
    load_state(accumulator, tmp_path)
    assert updates_of(accumulator, prefetched(prepared, 2)) == ENDS_OF_SIX[3:]
    assert weight_of(network) == expected


def test_batches_of_other_ranks_come_after_those_that_were_fetched(monkeypatch):
    """A process that has run out of data joins in the batches of others once it has trained its own."""
    _, accumulator = toy_loop(20)
    prepared = accumulator.prepare(FOUR)
    order = []
    monkeypatch.setattr(prepared, "ranks", 2)
    monkeypatch.setattr("ms_gradaccum.loops.dataloader.gather_counts", lambda doing, length: [length, length + 2])
    monkeypatch.setattr(accumulator.driver, "join", lambda join: order.append(join))
    for each in train(accumulator, prefetched(prepared)):
        order.append(each.sync_gradients)
    assert order == [False, False, False, (False, 0), (True, 0), False]
    order.clear()
    for each in train(accumulator, prepared):
        order.append(each.sync_gradients)
    assert order == [False] * 4 + [(False, 1), (True, 1)]


def test_a_pipeline_of_arrays_is_known_again():
    _, accumulator = toy_loop(4)
    data = NumpySlicesDataset({"x": np.ones((6, 1), np.float32), "y": np.ones((6, 1), np.float32)}, shuffle=False)
    fetched = prefetched(accumulator.prepare(data.batch(1)).create_tuple_iterator(output_numpy=True))
    assert updates_of(accumulator, fetched) == ENDS_OF_SIX
