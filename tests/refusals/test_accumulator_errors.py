"""Accumulator: wrong arguments, calls in an order that has no meaning, batches that fail."""

import loop_toy
import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, line, sgd, weight_of
from loop_toy import FOUR, toy_loop, updates_of
from mindspore import Tensor, amp, nn
from refusal import raises, typed
from step_probe import LABELS, changed, number, tensors, with_a_bad_label

from ms_gradaccum import Accumulator

STEPS_REMEDY = "It counts the batches of one update; 1 means an update per batch."

SEVERAL = "Several networks take a list with the optimizer (or optimizers) of each."


def loss_cell():
    return nn.WithLossCell(line(), nn.MSELoss())


def of_two(*optimizers, **settings):
    """Accumulator of two networks, with optimizers of the first or second."""
    cells = [loss_cell(), loss_cell()]
    return Accumulator(cells, [sgd(cells[index]) for index in optimizers], **settings)


def with_the_same_optimizer_twice():
    network = line()
    optimizer = sgd(network)
    return Accumulator([nn.WithLossCell(network, nn.MSELoss()), nn.WithLossCell(network, nn.L1Loss())], [optimizer] * 2)


def with_a_parameter_in_two_optimizers():
    cell = loss_cell()
    return Accumulator(cell, [sgd(cell), sgd(cell)])


def with_an_optimizer_that_is_taken():
    _, accumulator = toy_loop()
    return Accumulator(accumulator._networks[0].network, accumulator._networks[0].optimizers)


ACCUMULATORS = {
    "network": (
        lambda: Accumulator(3, sgd(line())),
        TypeError,
        f"'network' must be an nn.Cell, but got {typed(3)}. Give a GradAccumulation or a loss cell.",
    ),
    "no network": (
        lambda: Accumulator([], sgd(line())),
        ValueError,
        f"'network' must be at least one, but got an empty list. {SEVERAL}",
    ),
    "no optimizer": (
        lambda: Accumulator(loss_cell(), []),
        ValueError,
        f"'optimizer' must be at least one, but got an empty list. {SEVERAL}",
    ),
    "optimizer": (
        lambda: Accumulator(loss_cell(), 0.1),
        TypeError,
        "'optimizer' must be an optimizer of mindspore.nn, mindspore.mint or mindspore.experimental, but got float. "
        "Build it from network.trainable_params().",
    ),
    "stranger": (
        lambda: of_two(1, 1),
        ValueError,
        "'optimizer' must be one over parameters of the network, but got 1 parameters that it does not have, first "
        "'weight'. Build it from network.trainable_params().",
    ),
    "too few": (
        lambda: of_two(0),
        ValueError,
        f"'optimizer' must be one per network, but got 1 for 2 networks. {SEVERAL}",
    ),
    "twice": (
        with_the_same_optimizer_twice,
        ValueError,
        "'optimizer' must be different optimizers, but got one of them twice. Put losses that train the same weights "
        "into one cell.",
    ),
    "shared": (
        with_a_parameter_in_two_optimizers,
        ValueError,
        "'optimizer' must be optimizers of different parameters, but got 'weight' in two of them. Give each parameter "
        "to one optimizer.",
    ),
    "taken": (
        with_an_optimizer_that_is_taken,
        ValueError,
        "'optimizer' must be one that nothing else trains with, but got the optimizer of another Accumulator. Two "
        "training cells would divide its windows between them: use the first one, or delete it.",
    ),
    "clip": (
        lambda: Accumulator(loss_cell(), sgd(line()), clip=1.0),
        TypeError,
        "'clip' must be a ClipByGlobalNorm, a ClipByGroupNorm, a ClipByValue or None, but got 1.0. For example "
        "clip=ClipByGlobalNorm(1.0).",
    ),
    "one scale for two": (
        lambda: of_two(0, 1, mixed_precision=amp.DynamicLossScaleManager()),
        ValueError,
        "'mixed_precision' must be a rule for the scale of each network, but got one DynamicLossScaleManager for 2. "
        "Give a name or a MixedPrecision without one.",
    ),
    "prepare": (
        lambda: toy_loop()[1].prepare(5),
        TypeError,
        f"'objects' must be a dataset, a learning rate scheduler or a Cell, but got {typed(5)}. Give what the loop "
        "iterates over.",
    ),
}


@pytest.mark.parametrize("call, error, rest", ACCUMULATORS.values(), ids=ACCUMULATORS)
def test_wrong_networks_and_optimizers(call, error, rest):
    with raises(error, f"For 'Accumulator', the argument {rest}"):
        call()


ROWS = "It is the number of rows or tokens of the batch."
GRADS = "Take them with value_and_grad(forward, None, optimizer.parameters)."
GRAD = Tensor([[1.0]])
CALLS = {
    "text": (dict(grads="g"), TypeError, f"'grads' must be a tuple of tensors, but got str. {GRADS}"),
    "arrays": (
        dict(grads=(np.ones((1, 1)),)),
        TypeError,
        f"'grads' must be a tuple of tensors, but got tuple. {GRADS}",
    ),
    "too many": (
        dict(grads=(GRAD, GRAD)),
        ValueError,
        "'grads' must be gradients of the optimizer's 1 parameters, of shapes [(1, 1)], but got shapes "
        f"[(1, 1), (1, 1)]. {GRADS}",
    ),
    "shape": (
        dict(grads=Tensor([1.0])),
        ValueError,
        "'grads' must be gradients of the optimizer's 1 parameters, of shapes [(1, 1)], but got shapes [(1,)]. "
        f"{GRADS}",
    ),
    "negative": (
        dict(grads=GRAD, weight=-1),
        ValueError,
        f"'weight' must be a number of at least 0, but got -1. {ROWS}",
    ),
    "nan": (
        dict(grads=GRAD, weight=np.nan),
        ValueError,
        f"'weight' must be a number of at least 0, but got nan. {ROWS}",
    ),
    "bool": (dict(grads=GRAD, weight=True), TypeError, f"'weight' must be a number, but got {typed(True)}. {ROWS}"),
    "word": (dict(grads=GRAD, weight="2"), TypeError, f"'weight' must be a number, but got {typed('2')}. {ROWS}"),
    "reduction": (
        dict(grads=GRAD, reduction="max"),
        ValueError,
        "'reduction' must be one of 'mean', 'sum', but got 'max'. It says what the loss has done with its rows.",
    ),
}


@pytest.mark.parametrize("settings, error, rest", CALLS.values(), ids=CALLS)
def test_wrong_gradients_leave_the_window_alone(settings, error, rest):
    network, accumulator = toy_loop(2)
    accumulator((GRAD,), weight=3)
    with raises(error, f"For 'Accumulator', the argument {rest}"):
        accumulator(**settings)
    output = accumulator((GRAD,), weight=1)
    assert number(output.updated) and number(output.weight) == 4
    assert weight_of(network) == pytest.approx(-0.02)


@pytest.mark.parametrize("inside", [True, False], ids=["inside a window", "at its end"])
def test_a_wrong_limit_is_refused_in_every_batch(inside):
    _, accumulator = toy_loop(2 if inside else 1)
    with accumulator.accumulate():
        accumulator.backward(*FOUR[0])
        sentence = "For 'ClipByGlobalNorm', the argument 'max_norm' must be a positive number, but got 0. "
        with raises(ValueError, sentence + "Typical norms are 0.5 to 5."):
            accumulator.clip_grad_norm(0)
        sentence = f"For 'ClipByValue', the argument 'limit' must be a positive number, but got {typed('1')}. "
        with raises(TypeError, sentence + "Typical limits are 0.1 to 10."):
            accumulator.clip_grad_value("1")


def test_accumulate_inside_accumulate():
    network, accumulator = toy_loop(4)
    sentence = "For 'Accumulator', accumulate() must not be entered twice, but got it inside itself. "
    for each in FOUR:
        with accumulator.accumulate():
            accumulator.backward(*each)
            with raises(RuntimeError, sentence + "Write one 'with' per batch."), accumulator.accumulate():
                pass
            accumulator.step()
    assert weight_of(network) == pytest.approx(2.04, rel=1e-6)


def test_a_second_backward_pass_in_a_batch_does_not_shift_the_boundary():
    network, accumulator = toy_loop(4)
    sentence = (
        "For 'Accumulator', a network must have one backward pass in accumulate(), but got a second one. Put both "
        "losses into one cell, or write one 'with' per micro batch."
    )
    for each in FOUR:
        with accumulator.accumulate():
            accumulator.backward(*each)
            for second in (lambda each=each: accumulator.backward(*each), lambda: accumulator((GRAD,))):
                with raises(RuntimeError, sentence):
                    second()
            accumulator.step()
    assert weight_of(network) == pytest.approx(2.04, rel=1e-6)


def test_a_full_window_waits_for_its_step():
    network, accumulator = toy_loop(2)
    sentence = (
        "For 'Accumulator', a full window must be followed by step(), but got the next batch. Call step(), or "
        "zero_grad() to throw the window away; a batch in no_sync() ends none."
    )
    accumulator.backward(*FOUR[0]), accumulator.backward(*FOUR[1])
    for _ in range(2):
        with raises(RuntimeError, sentence):
            accumulator.backward(*FOUR[2])
    accumulator.step()
    assert weight_of(network) == pytest.approx(0.6) and updates_of(accumulator, FOUR[:2]) == [False, True]


def test_clipping_before_backward_would_clip_by_the_norm_of_another_gradient():
    network, accumulator = toy_loop(2)
    sentence = (
        "For 'Accumulator', backward() must come before the clipping of its window, but got it afterwards. The norm is "
        "that of the whole window, this batch included."
    )
    accumulator.backward(*FOUR[0])
    with accumulator.accumulate():
        accumulator.clip_grad_norm(1.0)
        with raises(RuntimeError, sentence):
            accumulator.backward(*FOUR[1])
        accumulator.zero_grad()


def test_a_window_is_clipped_in_one_way():
    _, accumulator = toy_loop(1)
    accumulator.backward(*FOUR[0])
    accumulator.clip_grad_norm(2.0)
    accumulator.clip_grad_norm(1.0)
    sentence = "For 'Accumulator', an update must be clipped by its norm or by value, but got both. "
    with raises(RuntimeError, sentence + "Call one of clip_grad_norm() and clip_grad_value()."):
        accumulator.clip_grad_value(1.0)
    assert number(accumulator.step().clipped_grad_norm) == 1


@pytest.mark.parametrize("place", ["before backward", "wrong batch", "after backward"])
def test_an_exception_inside_a_batch_does_not_shift_the_boundary(place):
    network, accumulator = toy_loop(4)
    updates_of(accumulator, FOUR[:3])
    (buffer,) = [each.buffer for each in accumulator._networks[0].reducers]
    before = [number(p) for p in (buffer.sums[0], buffer.loss, buffer.weight, buffer.batches)]
    with pytest.raises((OSError, ValueError)), accumulator.accumulate():
        assert accumulator.sync_gradients
        if place == "wrong batch":
            accumulator.backward(FOUR[3][0], Tensor(X[:1]))
        if place == "after backward":
            accumulator.backward(*FOUR[3])
        raise OSError
    if place != "after backward":
        assert [number(p) for p in (buffer.sums[0], buffer.loss, buffer.weight, buffer.batches)] == before
        assert not accumulator.sync_gradients and updates_of(accumulator, FOUR[3:]) == [True]
    else:
        accumulator.step()
    assert weight_of(network) == pytest.approx(2.04, rel=1e-6)
    assert updates_of(accumulator, FOUR) == [False, False, False, True]


DROPPED = "^For 'Accumulator', the batch failed in mid-window: the 1 batches before it are dropped with it.$"


def test_a_batch_that_fails_op_by_op_leaves_its_window_as_it_was():
    found = []
    for bad in (False, True):
        network = nn.Dense(1, 3, "ones", "zeros")
        optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
        accumulator = Accumulator(nn.WithLossCell(network, nn.CrossEntropyLoss()), optimizer, 3)
        assert updates_of(accumulator, [tensors(X, LABELS)]) == [False]
        if bad:
            with pytest.raises(RuntimeError, match="^For 'GatherD'"):
                updates_of(accumulator, [with_a_bad_label(5)])
        assert updates_of(accumulator, [tensors(X, LABELS)] * 2) == [False, True]
        found.append(network.weight.asnumpy())
    np.testing.assert_array_equal(*found)
    assert not np.array_equal(found[0], np.ones_like(found[0]))


def test_a_batch_that_fails_while_it_runs_takes_its_window_with_it():
    network = nn.Dense(1, 3, "ones")
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    accumulator = Accumulator(nn.WithLossCell(network, nn.CrossEntropyLoss()), optimizer, 3, compile=True)
    start = {p.name: p.asnumpy().copy() for p in optimizer.get_parameters()}
    assert updates_of(accumulator, [tensors(X, LABELS)]) == [False]
    with pytest.raises(RuntimeError, match="^For 'GatherD'"), pytest.warns(UserWarning, match=DROPPED) as warned:
        updates_of(accumulator, [with_a_bad_label(5)])
    assert warned[0].filename == loop_toy.__file__
    assert accumulator.flush() is None
    assert not changed(start, {p.name: p.asnumpy() for p in optimizer.get_parameters()})
    assert updates_of(accumulator, [tensors(X, LABELS)] * 3) == [False, False, True]
    assert ms.get_context("mode") == ms.PYNATIVE_MODE
