"""A GAN as MindSpore's tutorials write it, for whole batches, and with two Accumulators for micro batches."""

import mindspore as ms
import numpy as np
import pytest
from harness import ROWS, UPDATES, deviation
from mindspore import Tensor, nn, ops

from ms_gradaccum import Accumulator

PARTS = 4
SIZE = ROWS // PARTS


def dense(inputs, outputs, seed):
    numbers = np.random.default_rng(seed)
    weight = Tensor(numbers.uniform(-0.8, 0.8, (outputs, inputs)).astype(np.float32))
    bias = Tensor(numbers.uniform(-0.8, 0.8, outputs).astype(np.float32))
    return nn.Dense(inputs, outputs, weight_init=weight, bias_init=bias)


def numbers_of(*cells):
    return [parameter.asnumpy().copy() for cell in cells for parameter in cell.get_parameters()]


def parts_of(batch):
    """The micro batches of a NumPy batch, as tensors."""
    return [[Tensor(each[i : i + SIZE]) for each in batch] for i in range(0, ROWS, SIZE)]


def whole(batch):
    return [Tensor(each) for each in batch]


def assert_trained_alike(train, batches, rtol=2e-5):
    """Check train(accumulated) with both values, that it moves, and, in PYNATIVE mode, that lost rows would be seen."""
    start, expected, found = train(None, []), train(False, batches), train(True, batches)
    for before, whole_batch, window in zip(start, expected, found):
        assert deviation(window, whole_batch) <= rtol
        assert deviation(before, whole_batch) > 50 * rtol
    if ms.get_context("mode") == ms.PYNATIVE_MODE:
        wrong = train(False, [[each[:SIZE] for each in batch] for batch in batches])
        assert max(deviation(a, b) for a, b in zip(wrong, expected)) > 20 * rtol


def in_batches(accumulated, batches):
    """Yield what the loop sees: whole batches, or four parts of each."""
    for batch in batches:
        yield from parts_of(batch) if accumulated else [whole(batch)]


@pytest.mark.parametrize("jit", [False, True], ids=["python", "jit"])
def test_gan_with_two_accumulators(jit, mode):
    def train(accumulated, batches):
        generator, critic = named(dense(2, 3, 1), "generator"), named(dense(3, 1, 2), "critic")
        first = nn.Adam(generator.trainable_params(), 0.05, eps=0.1)
        second = nn.Adam(critic.trainable_params(), 0.05, eps=0.1)
        for optimizer, name in ((first, "of_generator"), (second, "of_critic")):
            optimizer.update_parameters_name(f"{name}.")
        if accumulated:
            first, second = Accumulator(generator, first, PARTS), Accumulator(critic, second, PARTS)

        def generate(noise):
            fake = generator(noise)
            score = critic(fake)
            return ops.softplus(-score).mean(), fake

        def judge(real, fake):
            return (ops.softplus(-critic(real)) + ops.softplus(critic(fake))).mean() / 2

        grad_generate = ms.value_and_grad(generate, None, generator.trainable_params(), has_aux=True)
        grad_judge = ms.value_and_grad(judge, None, critic.trainable_params())

        def step(real, noise):
            (loss, fake), grads = grad_generate(noise)
            loss_2, grads_2 = grad_judge(real, ops.stop_gradient(fake))
            if accumulated:
                first(grads, 2.0, loss)
                second(grads_2, 2.0, loss_2)
            else:
                first(grads)
                second(grads_2)
            return loss, loss_2

        step = ms.jit(step) if jit else step
        for real, noise in in_batches(accumulated, batches):
            step(real, noise)
        return numbers_of(generator, critic)

    numbers = np.random.default_rng(14)
    shapes = [(ROWS, 3), (ROWS, 2)]
    assert_trained_alike(
        train, [[numbers.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(UPDATES)]
    )


def named(cell, name):
    cell.update_parameters_name(f"{name}.")
    return cell
