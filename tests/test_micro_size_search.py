"""The parts of `find_micro_size` that need no child process."""

import io
import json
import math
import re

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings, strategies
from memory_networks import misbehaving, wide
from mindspore import Tensor, nn, ops
from test_errors import raises, typed

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, MixedPrecision, TrainOneStepCell, find_micro_size
from ms_gradaccum.tools.probing import child, transport
from ms_gradaccum.tools.probing.memory import as_text, check_memory_limit
from ms_gradaccum.tools.probing.search import candidates, first_that_fits, largest_part
from ms_gradaccum.tools.probing.training import Training, check_training


@settings(max_examples=30, deadline=None)
@given(rows=strategies.integers(1, 600))
def test_the_candidates_are_the_smallest_count_for_each_size(rows):
    smallest = {}
    for count in range(1, rows + 1):
        smallest.setdefault(len(np.array_split(np.empty(rows), count)[0]), count)
    assert candidates(rows) == sorted(smallest.values())
    assert [largest_part(rows, count) for count in candidates(rows)] == sorted(smallest, reverse=True)


@settings(max_examples=200, deadline=None)
@given(rows=strategies.integers(1, 100_000), share=strategies.floats(0, 1.5))
def test_the_search_finds_the_first_that_fits_with_few_questions(rows, share):
    limit, asked = share * rows, []

    def fits(count):
        asked.append(count)
        return math.ceil(rows / count) <= limit

    counts = candidates(rows)
    found = first_that_fits(counts, fits)
    assert found == next((count for count in counts if math.ceil(rows / count) <= limit), None)
    assert len(asked) == len(set(asked)) <= 2 * math.log2(len(counts) + 1) + 1
    # The answer has been tried, and so has the one before it.
    assert found is None or {found, *counts[: counts.index(found)][-1:]} <= set(asked)


@pytest.mark.parametrize(
    "text, count",
    [(7, 7), ("1000", 1000), ("4GiB", 4 * 2**30), ("500MB", 500 * 10**6), (" 1.5 gi ", 3 * 2**29), ("2k", 2000)]
    + [("3 TB", 3 * 10**12), ("1KiB", 1024), ("0.5MiB", 2**19), ("12b", 12)],
)
def test_a_limit_is_a_number_or_a_text(text, count):
    assert check_memory_limit("find_micro_size", text) == count


def test_bytes_are_shown_for_people():
    assert [as_text(count) for count in (10, 3 * 2**19, 5 * 2**28)] == ["10 bytes", "1.5 MiB", "1.25 GiB"]


LIMIT = "For example 4 * 2**30, '4GiB' or '500MB'."
BYTES = "a number of bytes, as an int or a text"
OPTIMIZER = "an optimizer of mindspore.nn, mindspore.mint or mindspore.experimental"
OWN = "Build it from network.trainable_params()."


@pytest.mark.parametrize(
    "name, value, error, rule, got, remedy",
    [
        ("memory_limit", "much", ValueError, BYTES, "'much'", LIMIT),
        ("memory_limit", "4XB", ValueError, BYTES, "'4XB'", LIMIT),
        ("memory_limit", 4e9, TypeError, BYTES, typed(4e9), LIMIT),
        ("memory_limit", True, TypeError, BYTES, typed(True), LIMIT),
        ("memory_limit", None, TypeError, BYTES, typed(None), LIMIT),
        ("memory_limit", 0, ValueError, "a positive int", "0", LIMIT),
        ("memory_limit", "0.1", ValueError, "a positive int", "0", LIMIT),
        ("memory_limit", 2**63, ValueError, f"a positive int of at most {2**63 - 1}", 2**63, LIMIT),
        ("network", 3, TypeError, "an nn.Cell", typed(3), "Give a GradAccumulation or a loss cell."),
        ("optimizer", 3, TypeError, OPTIMIZER, "int", OWN),
        (
            "batch",
            3,
            TypeError,
            "a tensor, a tuple, a list or a dict",
            typed(3),
            "Give the inputs of network in a tuple, or by name in a dict.",
        ),
        (
            "clip",
            3,
            TypeError,
            "a ClipByGlobalNorm, a ClipByGroupNorm, a ClipByValue or None",
            3,
            "For example clip=ClipByGlobalNorm(1.0).",
        ),
        ("timeout", 0, ValueError, "a positive number", 0, "It is the time of one measurement, in seconds."),
        ("report", 3, TypeError, "a function or None", typed(3), "For example report=print."),
    ],
)
def test_a_wrong_argument_is_refused_in_one_sentence(name, value, error, rule, got, remedy):
    network, optimizer, batch = misbehaving("nothing")
    given = {"network": network, "optimizer": optimizer, "batch": batch, "memory_limit": "1GiB", name: value}
    with raises(error, f"For 'find_micro_size', the argument '{name}' must be {rule}, but got {got}. {remedy}"):
        find_micro_size(**given)


@pytest.mark.parametrize("setting", [{"mixed_precision": "fp17"}, {"bad_micro_batch": "keep"}])
def test_the_settings_are_those_of_a_training_step(setting):
    with pytest.raises(ValueError) as theirs:
        network, optimizer, _ = misbehaving("nothing")
        TrainOneStepCell(network, optimizer, **setting)
    ours = str(theirs.value).replace("'TrainOneStepCell'", "'find_micro_size'")
    with raises(ValueError, ours):
        find_micro_size(*misbehaving("nothing"), "1GiB", **setting)


def test_a_batch_that_the_network_does_not_take_is_refused_at_once():
    network, optimizer, batch = misbehaving("nothing")
    with pytest.raises(TypeError, match="^For 'GradAccumulation', the inputs must fit the network's construct"):
        find_micro_size(network, optimizer, (batch, batch), "1GiB")
    with pytest.raises(ValueError, match="^For 'GradAccumulation', a batch must have at least one row"):
        find_micro_size(network, optimizer, Tensor(np.ones((0, 2), np.float32)), "1GiB")


def test_what_cannot_be_sent_is_refused_with_another_way():
    network, optimizer, batch = misbehaving("nothing")
    network.lines = (line for line in ())
    with raises(
        TypeError,
        "For 'find_micro_size', network, optimizer and batch must be such that another process can get copies of "
        "them, but got TypeError: cannot pickle 'generator' object. Write a function that returns (network, "
        "optimizer, batch) and run: python -m ms_gradaccum micro-size script.py:function --memory-limit LIMIT",
    ):
        find_micro_size(network, optimizer, batch, "1GiB")


def test_a_child_measures_nothing_in_turn(monkeypatch):
    monkeypatch.setenv(child.IN_CHILD, "1")
    with pytest.raises(RuntimeError, match=re.escape("Call it under: if __name__ == '__main__'")):
        find_micro_size(*misbehaving("nothing"), "1GiB")


def sent(thing):
    file = io.BytesIO()
    transport.save(thing, file)
    file.seek(0)
    return transport.load(file)


_add_all = ops.MultitypeFuncGraph("add_all")


@_add_all.register("Tensor", "Tensor")
def _add(a, b):
    return a + 2 * b


def local_network():
    """A network of everything that is not easily pickled."""
    factor = 3.0

    class Local(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(4, 4, weight_init="ones")
            self.norm = nn.BatchNorm1d(4)
            self.map, self.fixed_map = ops.HyperMap(), ops.HyperMap(_add_all)
            self.square = ops.Square().add_prim_attr("added", 7)
            self.scale = lambda x: x * factor

        def construct(self, x):
            pair = self.map(_add_all, (x, x), (x, self.dense(x)))
            pair = self.fixed_map(pair, (x, self.norm(x)))
            return self.square(self.scale(pair[0] - pair[1])).mean()

    return Local()


def test_a_copy_trains_as_the_original_does(mode):
    network = local_network()
    optimizer = nn.Adam(network.trainable_params(), nn.CosineDecayLR(0.0, 0.1, 10))
    network_copy, optimizer_copy = sent((network, optimizer))
    assert network_copy.square.added == 7 and network_copy.square.attrs["added"] == 7
    assert [a is b for a, b in zip(optimizer_copy.parameters, network_copy.trainable_params())] == [True] * 4
    batch = Tensor(np.arange(16, dtype=np.float32).reshape(4, 4) / 8)
    for cell, its_optimizer in ((network, optimizer), (network_copy, optimizer_copy)):
        step = TrainOneStepCell(GradAccumulation(cell, 2), its_optimizer)
        assert step(batch).updated.asnumpy() and step(batch).updated.asnumpy()
    pairs = list(zip(network.get_parameters(), network_copy.get_parameters()))
    assert len(pairs) == 6 and [a.name for a, _ in pairs] == [b.name for _, b in pairs]
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours.asnumpy(), theirs.asnumpy())
    # A network that has been trained, and compiled, can be sent as well.
    again = sent(network)
    np.testing.assert_array_equal(again.dense.weight.asnumpy(), network.dense.weight.asnumpy())


GRADS = [ops.GradOperation(True, True), ops.grad, ops.Map(), nn.ForwardValueAndGrad(nn.Dense(1, 1), get_all=True)]


@pytest.mark.parametrize("thing", GRADS, ids=lambda thing: type(thing).__name__)
def test_what_takes_gradients_can_be_sent(thing):
    copy = sent(thing)
    assert type(copy) is type(thing)
    if isinstance(thing, ops.GradOperation):
        assert (copy.get_all, copy.get_by_list, copy.sens_param) == (True, True, False)


def test_few_micro_batches_stand_for_all_and_have_all_shapes():
    network, optimizer, _ = misbehaving("nothing")
    batch = Tensor(np.arange(22, dtype=np.float32).reshape(11, 2))
    training = check_training(GradAccumulation(network, 1), optimizer, batch, {})
    assert training.rows() == 11
    for micro_size, rows in ((1, [11]), (3, [4, 4, 3]), (4, [3, 3, 3, 2]), (9, [2, 2, 1, 1]), (11, [1] * 4)):
        assert [part.rows for part in training.in_parts(micro_size).split(batch).micro_batches] == rows
    last = training.in_parts(5).split(batch).micro_batches[-1]
    np.testing.assert_array_equal(last.tensors[0].asnumpy(), batch.asnumpy()[9:])


def test_the_settings_of_a_grad_accumulation_are_kept_also_in_half_precision(eager):
    class Weighted(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(2, 1)

        def construct(self, x, y):
            return ops.square(self.dense(x.transpose(1, 0)) - y).sum(), y.sum()

    network = Weighted()
    outer = GradAccumulation(network, 7, weighted=True, batch_axis=(1, 0))
    batch = {"x": Tensor(np.ones((2, 6), np.float32)), "y": Tensor(np.ones((6, 1), np.float32))}
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    # The loss scale begins so high that some windows are skipped before there are two updates.
    half = MixedPrecision("fp16", "O2", init_scale=2.0**24)
    training = check_training(outer, optimizer, batch, {"mixed_precision": half, "clip": ClipByGlobalNorm(1.0)})
    parts = training.in_parts(6)
    assert (parts.micro_size, parts.weighted, parts.batch_axis, parts.terms) == (6, True, (1, 0), 1)
    child.train(training, 6)
    assert optimizer.global_step.asnumpy().item() == 2


def test_training_stops_if_no_update_is_ever_made(eager):
    network, optimizer, _ = misbehaving("nothing")
    training = check_training(network, optimizer, Tensor(np.full((2, 2), np.nan, np.float32)), {})
    child.train(training, 1)
    assert optimizer.global_step.asnumpy().item() == 0


@pytest.mark.parametrize(
    "error, expected",
    [
        (MemoryError("x"), True),
        (RuntimeError("Memory not enough:\nMemory isn't enough and alloc failed, kernel name: MatMul"), True),
        (RuntimeError("Allocate memory failed"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("the shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_missing_memory_is_told_from_other_errors(error, expected):
    assert child.is_out_of_memory(error) is expected


def test_memory_that_this_device_lacks_is_told_from_other_errors():
    with pytest.raises(MemoryError) as numpys:
        np.ones(2**45)
    with pytest.raises(RuntimeError) as mindspores:
        ops.ones((2**40,), ms.float32).sum().asnumpy()
    assert child.is_out_of_memory(numpys.value) and child.is_out_of_memory(mindspores.value)


def test_a_child_reports_on_one_line_each():
    out = io.StringIO()
    child._tell(out, rows=3, error=["A", "two\nlines"])
    assert json.loads(out.getvalue()) == {"rows": 3, "error": ["A", "two\nlines"]} and out.getvalue().count("\n") == 1


def test_the_toy_for_the_measurements_trains(eager):
    network, optimizer, _ = wide(ms.PYNATIVE_MODE)
    batch = Tensor(np.ones((2, 4, 256), np.float32))
    before = network.dense.weight.asnumpy().copy()
    child.train(Training(GradAccumulation(network, 1), optimizer, (batch,), {}), 2)
    assert np.any(network.dense.weight.asnumpy() != before)
