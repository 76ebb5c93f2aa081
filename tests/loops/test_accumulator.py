"""Accumulator: what each call of a hand-written loop does, with Accelerate's words and MindSpore's functional idiom."""

import pickle

import mindspore as ms
import numpy as np
import pytest
from linear_toy import ALL, descend, mse, sgd, weight_of
from loop_toy import FOUR, batch, optimizer_of, own_loop, renew, toy_loop, train, updates_of
from mindspore import Tensor, nn, ops
from refusal import refuses
from step_probe import compilations, number

from ms_gradaccum import AccumulationConfig, Accumulator, StepOutput, load_state, save_state


def test_four_batches_of_a_window_are_the_whole_batch(mode):
    network, accumulator = toy_loop(4)
    list(train(accumulator, FOUR))
    assert weight_of(network) == pytest.approx(2.04)
    assert descend(ALL) == pytest.approx(2.04, rel=1e-12)
    assert descend((1, 2), (3, 4), (5, 6), (7, 8)) == pytest.approx(1.75052, rel=1e-5)


def test_the_loss_is_the_mean_of_its_batch_and_the_report_that_of_the_window():
    network, accumulator = toy_loop(2)
    losses, outputs, norms = [], [], []
    for each in (batch(1), batch(2, 3)):
        with accumulator.accumulate():
            losses.append(number(accumulator.backward(*each)))
            norms.append(accumulator.clip_grad_norm(1e6))
            outputs.append(accumulator.step())
    # Squared errors at weight 0: 4, 16 and 36.
    assert losses == [4, 26] and (outputs[0], norms[0]) == (None, None)
    output = outputs[1]
    assert isinstance(output, StepOutput) and output.is_updated
    assert number(output.loss) == pytest.approx(56 / 3) and number(output.weight) == 3
    assert number(norms[1]) == number(output.grad_norm) == pytest.approx(56 / 3)
    weight = weight_of(network)
    again = accumulator.step()  # It does nothing.
    assert accumulator.updated and not again.is_updated and number(again.weight) == 0
    assert weight_of(network) == weight and updates_of(accumulator, FOUR[:2]) == [False, True]


def gradient_function(network, optimizer):
    return ops.value_and_grad(mse(network), None, optimizer.parameters)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_called_where_the_optimizer_was_called(reduction, mode):
    network, accumulator = toy_loop(3)
    gradients_of = gradient_function(network, optimizer_of(accumulator))
    outputs = []
    for each in (batch(1), batch(2, 3, 4), batch(5, 6, 7, 8)):
        loss, grads = gradients_of(*each)
        if reduction == "sum":
            loss, grads = loss * len(each[0]), tuple(grad * len(each[0]) for grad in grads)
        outputs.append(accumulator(grads, weight=len(each[0]), loss=loss, reduction=reduction))
    assert [output.is_updated for output in outputs] == [False, False, True]
    assert [number(output.weight) for output in outputs] == [1, 4, 8]
    # Squared errors 4 x^2: of x = 1, of x = 1 to 4, of all.
    assert [number(output.loss) for output in outputs] == pytest.approx([4, 30, 102])
    assert weight_of(network) == pytest.approx(2.04)
    # Means that count alike, as loops without weights have them, end elsewhere.
    assert np.mean([descend(rows) for rows in ((1,), (2, 3, 4), (5, 6, 7, 8))]) < 1.5


def test_gradients_without_a_loss_give_a_report_without_one(mode):
    """From Python and in a compiled function, inside a window and at its end; such a report is no number."""
    _, accumulator = own_loop(2)
    grads = (Tensor([[1.0]]),)
    outputs = [accumulator(grads, 2) for _ in range(2)]
    assert [output.loss for output in outputs] == [output[0] for output in outputs] == [None, None]
    assert number(outputs[1].grad_norm) == 1 and outputs[1].is_updated and str(outputs[1]) == "None"
    assert "loss=None" in repr(outputs[1]) and pickle.loads(pickle.dumps(outputs[1])).loss is None
    with refuses(TypeError, "'loss'", "Call accumulator(grads"):
        float(outputs[1])

    @ms.jit
    def without_loss(grad):
        return accumulator((grad,), 2.0)

    @ms.jit
    def with_loss(grad):
        return accumulator((grad,), 2.0, 3.0)

    items = [without_loss(*grads) for _ in range(2)]
    assert [item[0] for item in items] == [None, None] and [bool(item[3]) for item in items] == [False, True]
    assert float([with_loss(*grads) for _ in range(2)][1][0]) == 3.0
    assert accumulator(grads, 2, 5.0).loss is not None
    assert accumulator(grads, 2).loss is None and float(accumulator(grads, 2, 5.0)) == 5.0
    accumulator.drop()


@pytest.fixture(scope="module")
def compiled_step():
    """A compiled function of the user with the accumulator inside, four batches per window."""
    network, accumulator = own_loop(4)
    gradients_of = gradient_function(network, optimizer_of(accumulator))

    @ms.jit
    def train_step(x, y):
        loss, grads = gradients_of(x, y)
        return accumulator(grads, weight=x.shape[0], loss=loss)

    return network, accumulator, train_step


def start(network, accumulator):
    renew(accumulator)
    # Not set_data: a function compiled by ms.jit goes on with the storage that it knows, with a stock optimizer too.
    ops.assign(network.weight, ops.zeros_like(network.weight))


def test_inside_a_compiled_function(compiled_step, mode):
    network, accumulator, train_step = compiled_step
    start(network, accumulator)
    initial = network.weight.asnumpy().tobytes()
    outputs, kept = [], []
    for each in FOUR:
        outputs.append(StepOutput(*train_step(*each)))
        kept.append(network.weight.asnumpy().tobytes() == initial)
    assert kept == [True, True, True, False] and weight_of(network) == pytest.approx(2.04)
    assert [output.is_updated for output in outputs] == [False, False, False, True]
    assert number(outputs[3].loss) == pytest.approx(102) and number(outputs[3].weight) == 8


def test_a_compiled_function_leaves_its_last_window_to_flush_and_drop(compiled_step):
    network, accumulator, train_step = compiled_step
    start(network, accumulator)
    for each in (*FOUR, FOUR[0], FOUR[1]):
        train_step(*each)
    output = accumulator.flush()
    assert number(output.weight) == 4
    assert weight_of(network) == pytest.approx(descend(ALL, (1, 2, 3, 4)))
    train_step(*FOUR[0]), train_step(*FOUR[1])
    assert accumulator.drop() == 2 and accumulator.drop() == 0 and accumulator.flush() is None
    # A window of four again.
    assert [number(train_step(*each)[3]) for each in FOUR] == [False, False, False, True]


def test_a_compiled_function_cannot_follow_a_schedule():
    _, accumulator = own_loop(config=AccumulationConfig(schedule={0: 2}))

    @ms.jit
    def train_step(grad):
        return accumulator((grad,))

    with refuses(ValueError, "without a schedule"):
        train_step(Tensor([[1.0]]))


@pytest.mark.parametrize("extra", [None, [[1.0]], [[1.0, 2.0]]], ids=["another", "same", "other"])
def test_a_compiled_function_takes_the_gradient_of_a_parameter_and_none_of_others(extra):
    """Gradients of one parameter more would otherwise train, each in the place of the one before it."""
    network, accumulator = toy_loop(1)

    @ms.jit
    def train_step(*grads):
        return accumulator(grads[0] if len(grads) == 1 else grads)

    grads = [Tensor([[1.0], [2.0]])] if extra is None else [Tensor([[1.0]]), Tensor(extra)]
    with refuses(ValueError, "'grads'"):
        train_step(*grads)
    assert weight_of(network) == 0
    assert number(train_step(Tensor([[-102.0]]))[3])
    assert weight_of(network) == pytest.approx(2.04)


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE])
def test_a_compiled_function_takes_a_gradient_whose_length_is_open_when_it_compiles(mode):
    ms.set_context(mode=mode)
    network = nn.Dense(2, 3, bias_init="zeros")
    accumulator = Accumulator(mse(network), sgd(network), check_loss=False)

    @ms.jit
    def train_step(values):
        return accumulator((ops.ones((3, 2), ms.float32), ops.unique(values)[0]))

    assert number(train_step(Tensor([5.0, 6.0, 7.0, 7.0]))[3])
    assert network.bias.asnumpy() == pytest.approx([-0.1, -0.12, -0.14])


def test_windows_of_all_lengths_share_the_same_four_graphs():
    _, accumulator = own_loop(3, compile=True, check_loss=False)
    with compilations() as compiled:
        for _ in train(accumulator, accumulator.prepare(FOUR)):
            pass
        assert sorted(compiled) == ["BatchMeanLoss", "MicroStep", "Update", "WindowReduction.report"]
        list(train(accumulator, FOUR * 3))
    assert len(compiled) == 4 and ms.get_context("mode") == ms.PYNATIVE_MODE


def checkpoint_of(batches, folder):
    _, accumulator = toy_loop(4)
    list(train(accumulator, batches))
    ms.save_checkpoint(accumulator, str(folder / "middle.ckpt"))
    return ms.load_checkpoint(str(folder / "middle.ckpt"))


@pytest.mark.parametrize("before", [0, 2])
def test_a_state_knows_the_window_of_a_checkpoint_that_was_loaded_before(before, tmp_path, eager):
    checkpoint = checkpoint_of(FOUR[:2], tmp_path)
    network, accumulator = toy_loop(4)
    list(train(accumulator, FOUR[:before]))
    accumulator.flush()
    ms.load_param_into_net(accumulator, checkpoint)
    save_state(accumulator, tmp_path / "states")
    for _ in range(2):  # After this look at it, and after the state is loaded.
        assert updates_of(accumulator, FOUR[2:]) == [False, True]
        assert weight_of(network) == pytest.approx(2.04)
        network, accumulator = toy_loop(4)
        load_state(accumulator, tmp_path / "states")
    accumulator.drop()


@pytest.mark.parametrize("end", ["flush", "drop"])
def test_a_window_of_a_checkpoint_can_be_ended_at_once(end, tmp_path, eager):
    checkpoint = checkpoint_of(FOUR[:2], tmp_path)
    network, accumulator = toy_loop(4)
    ms.load_param_into_net(accumulator, checkpoint)
    found = getattr(accumulator, end)()
    assert found == 2 if end == "drop" else number(found.weight) == 4
    assert weight_of(network) == pytest.approx(descend((1, 2, 3, 4)) if end == "flush" else 0)
    assert updates_of(accumulator, FOUR) == [False, False, False, True]


def test_names_and_arguments_of_accelerate_are_taken():
    network, accumulator = toy_loop(4)
    assert accumulator.gradient_accumulation_steps == accumulator.config.accumulation_steps
    for each in accumulator.prepare(FOUR):
        with accumulator.accumulate(network):
            accumulator.backward(*each)
            norm = accumulator.clip_grad_norm_(network.trainable_params(), 1.0)
            accumulator.step()
    assert number(norm) == pytest.approx(102.0, rel=1e-5) and weight_of(network) == pytest.approx(0.02, rel=1e-5)
    with refuses(ValueError, "'parameters'"):
        accumulator.clip_grad_norm_([], 1.0)
    with refuses(ValueError, "'norm_type'"):
        accumulator.clip_grad_norm_(network.trainable_params(), 1.0, norm_type=float("inf"))
    parameters = network.trainable_params()
    with pytest.raises(TypeError, match=r"but got 2 arguments. Call clip_grad_norm\(1.0\), or clip_grad_norm_\(p"):
        accumulator.clip_grad_norm(parameters, 1.0)
    with refuses(TypeError, "'limit'"):
        accumulator.clip_grad_value(parameters, 1.0)
    with refuses(TypeError, "'args'"):
        accumulator.backward(Tensor(1.0))
    with refuses(TypeError, "'networks'"):
        accumulator.accumulate(4)


@pytest.mark.parametrize("weight", [0, 0.0, np.int64(0), Tensor(0)], ids=repr)
def test_a_weight_of_zero_counts_nothing_not_even_nan(weight):
    network, accumulator = toy_loop(2)
    # What a mean over no token is.
    accumulator((Tensor([[np.nan]], ms.float32),), weight=weight, loss=np.nan)
    output = accumulator((Tensor([[-102.0]]),), weight=np.float32(8), loss=102.0)
    assert (output.is_updated, number(output.loss), number(output.weight)) == (True, 102, 8)
    assert weight_of(network) == pytest.approx(2.04)
