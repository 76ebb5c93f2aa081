"""Loops that users write: functional ones with `@ms.jit`, GANs, REINFORCE, several networks and optimizers.

Each is written once as MindSpore's tutorials write it, for whole batches, and once with an Accumulator for four micro
batches of the same rows.
"""

import mindspore as ms
import numpy as np
import pytest
from harness import ROWS, UPDATES, deviation, regression
from mindspore import Tensor, nn, ops

from ms_gradaccum import Accumulator, GradAccumulation

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
def test_functional_loop(jit, mode):
    def train(accumulated, batches):
        network, loss_fn = dense(4, 1, 0), nn.MSELoss()
        optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
        accumulator = Accumulator(network, optimizer, PARTS) if accumulated else None

        def forward(x, y):
            logits = network(x)
            return loss_fn(logits, y), logits

        grad_fn = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)

        def step(x, y):
            (loss, _), grads = grad_fn(x, y)
            if accumulated:
                accumulator(grads, 2.0, loss)
            else:
                optimizer(grads)
            return loss

        step = ms.jit(step) if jit else step
        for x, y in in_batches(accumulated, batches):
            step(x, y)
        return numbers_of(network)

    assert_trained_alike(train, regression())


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


class BodyAndHead(nn.Cell):
    def __init__(self):
        super().__init__()
        self.body, self.head = dense(4, 3, 3), dense(3, 1, 4)

    def construct(self, x, y):
        return ops.square(self.head(ops.tanh(self.body(x))) - y).mean()


def test_two_optimizers_of_one_network(mode):
    def train(accumulated, batches):
        network = BodyAndHead()
        body = nn.SGD(network.body.trainable_params(), 0.05)
        head = nn.Adam(network.head.trainable_params(), 0.05, eps=0.1)
        if accumulated:
            accumulator = Accumulator(network, [body, head], PARTS)
            for x, y in in_batches(True, batches):
                with accumulator.accumulate():
                    accumulator.backward(x, y)
                    accumulator.step()
                    accumulator.zero_grad()
            return numbers_of(network)
        grad_fn = ms.value_and_grad(network, None, list(body.parameters) + list(head.parameters))
        for x, y in in_batches(False, batches):
            _, grads = grad_fn(x, y)
            body(grads[:2])
            head(grads[2:])
        return numbers_of(network)

    assert_trained_alike(train, regression())


class PolicyLoss(nn.Cell):
    """REINFORCE: minus the log probability of the actions, times the returns, as a sum and a number of steps."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def construct(self, states, actions, returns):
        chosen = ops.log_softmax(self.policy(states), -1).gather_elements(1, actions.expand_dims(1)).squeeze(1)
        return -(chosen * returns).sum(), Tensor(1.0, ms.float32) * states.shape[0]


def episodes():
    """Per update four episodes of different lengths."""
    numbers = np.random.default_rng(16)
    return [
        [
            (
                numbers.normal(size=(length, 4)).astype(np.float32),
                numbers.integers(0, 3, length).astype(np.int32),
                np.cumsum(numbers.uniform(size=length))[::-1].astype(np.float32).copy(),
            )
            for length in (2, 5, 3, 6)
        ]
        for _ in range(UPDATES)
    ]


def test_reinforce_with_episodes_of_different_lengths(mode):
    policy = dense(4, 3, 5)
    accumulator = Accumulator(
        GradAccumulation(PolicyLoss(policy), 1, weighted=True), nn.SGD(policy.trainable_params(), 0.2), 4
    )
    for update in episodes():
        for episode in update:
            with accumulator.accumulate():
                accumulator.backward(*whole(episode))
                accumulator.step()
                accumulator.zero_grad()
    found = numbers_of(policy)
    all_steps = reinforced([[np.concatenate(parts) for parts in zip(*update)] for update in episodes()])
    assert max(deviation(a, b) for a, b in zip(found, all_steps)) <= 2e-5
    one_episode = reinforced([update[0] for update in episodes()])
    assert max(deviation(a, b) for a, b in zip(found, one_episode)) > 1e-3


def reinforced(batches):
    """Return the result of a loop that takes the mean over all time steps of a batch."""
    policy = dense(4, 3, 5)
    loss_cell, optimizer = PolicyLoss(policy), nn.SGD(policy.trainable_params(), 0.2)

    def mean_loss(*batch):
        total, steps = loss_cell(*batch)
        return total / steps

    grad_fn = ms.value_and_grad(mean_loss, None, optimizer.parameters)
    for batch in batches:
        optimizer(grad_fn(*whole(batch))[1])
    return numbers_of(policy)


def test_a_loop_that_changes_its_network_between_updates(mode):
    """A target network of a DQN: copied every second update, in the loop."""

    def train(accumulated, batches):
        online, target = named(dense(4, 2, 6), "online"), named(dense(4, 2, 7), "target")
        cell = Distill(online, target)
        optimizer = nn.SGD(online.trainable_params(), 0.1)
        accumulator = Accumulator(cell, optimizer, PARTS) if accumulated else None
        grad_fn = ms.value_and_grad(cell, None, optimizer.parameters)
        for i, (x, y) in enumerate(in_batches(accumulated, batches)):
            if accumulated:
                with accumulator.accumulate():
                    accumulator.backward(x, y)
                    accumulator.step()
                    accumulator.zero_grad()
            else:
                optimizer(grad_fn(x, y)[1])
            if (i + 1) % (2 * PARTS if accumulated else 2) == 0:
                for mine, other in zip(target.get_parameters(), online.get_parameters()):
                    ops.assign(mine, other)
        return numbers_of(online, target)

    assert_trained_alike(train, regression())


class Distill(nn.Cell):
    def __init__(self, online, target):
        super().__init__(auto_prefix=False)
        self.online, self.target = online, target

    def construct(self, x, y):
        wanted = y + 0.9 * ops.stop_gradient(self.target(x))
        return ops.square(self.online(x) - wanted).mean()
