"""Hand-written loops that one process and several do alike."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.experimental import optim
from mindspore.experimental.optim.lr_scheduler import StepLR
from scenarios import batch, build_network, share, uneven_data, weights_of

from ms_gradaccum import Accumulator, TokenMeanLoss

START = np.array([[-0.00748682], [0.53644359]], np.float32)
PADDING = -100


def sentences(numbers):
    """Sentence i has the words 1 to i + 1; a word's label is whether it is odd."""
    length = max(*numbers, 0) + 1  # -1 is a sentence without words
    words = np.full((len(numbers), length, 1), PADDING, np.float32)
    labels = np.full((len(numbers), length), PADDING, np.int32)
    for row, number in enumerate(numbers):
        words[row, : number + 1, 0] = np.arange(1, number + 2)
        labels[row, : number + 1] = np.arange(1, number + 2) % 2
    return words, labels


def language_model():
    return nn.Dense(1, 2, weight_init=Tensor(START), has_bias=False)


def train_sentences(parts, block_tokens=None, **settings):
    """One window of micro batches; return the weights and what the step reported.

    With `block_tokens` the model is the head of a network without a body.
    """
    backbone = language_model()
    loss_cell = TokenMeanLoss(backbone)
    if block_tokens is not None:
        loss_cell = TokenMeanLoss(nn.Identity(), head=backbone, block_tokens=block_tokens)
    optimizer = nn.SGD(backbone.trainable_params(), 0.08)
    accumulator = Accumulator(loss_cell, optimizer, len(parts), **settings)
    for part in parts:
        with accumulator.accumulate():
            accumulator.backward(*[Tensor(array) for array in sentences(part)])
            output = accumulator.step()
    return backbone.weight.asnumpy().ravel().tolist(), output


def train_with_scheduler(batches, epochs, steps, **settings):
    """Train with a learning rate that is halved after every second update; return weights, updates and the rate."""
    network = build_network()
    optimizer = optim.SGD(network.trainable_params(), 0.1, momentum=0.9)
    scheduler = StepLR(optimizer, 2, 0.5)
    accumulator = Accumulator(nn.WithLossCell(network, nn.MSELoss()), optimizer, steps, **settings)
    loader, scheduler = accumulator.prepare(batches, scheduler)
    for _ in range(epochs):
        for each in loader:
            with accumulator.accumulate():
                accumulator.backward(*each)
                accumulator.clip_grad_norm(0.5)
                accumulator.step()
                scheduler.step()
                accumulator.zero_grad()
    return weights_of(network), accumulator.driver.updates, float(optimizer.lrs[0].asnumpy())


def batches_of(arrays, rows=2):
    return [tuple(Tensor(array[i : i + rows]) for array in arrays) for i in range(0, len(arrays[0]), rows)]


def joined_batches(ranks):
    """The data of several ranks with uneven rows, batch by batch, as batches of one process."""
    per_rank = [uneven_data(rank) for rank in range(ranks)]
    joined = []
    for begin in range(0, 6, 2):
        rows = [[array[begin : begin + 2] for array in arrays] for arrays in per_rank]
        joined.append(tuple(Tensor(np.concatenate(arrays)) for arrays in zip(*rows)))
    return joined


def train_functionally(batches, **settings):
    """One window of gradients that the caller has taken."""
    network, loss_fn = build_network(), nn.MSELoss()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    accumulator = Accumulator(network, optimizer, len(batches), **settings)

    def forward(x, y):
        return loss_fn(network(x), y)

    grad_fn = ms.value_and_grad(forward, None, network.trainable_params())
    for x, y in batches:
        loss, grads = grad_fn(x, y)
        output = accumulator(grads, weight=len(x), loss=loss)
    return weights_of(network), output


def build_loop(**settings):
    """A network and an Accumulator whose optimizer has a state."""
    network = build_network()
    cell, optimizer = nn.WithLossCell(network, nn.MSELoss()), nn.Momentum(network.trainable_params(), 0.1, 0.9)
    return network, Accumulator(cell, optimizer, 2, check_loss=False, **settings)


def train_loop(accumulator, numbers, rank=0, size=1):
    for number in numbers:
        with accumulator.accumulate():
            accumulator.backward(*[Tensor(array) for array in share(batch(number), rank, size)])
            accumulator.step()


def train_adversaries(rank=0, size=1):
    """Return the weights of two networks that share their windows, one of them stepped before the other's turn."""
    first, second = build_network(), build_network()
    optimizers = [nn.SGD(network.trainable_params(), 0.1) for network in (first, second)]
    cells = [nn.WithLossCell(network, nn.MSELoss()) for network in (first, second)]
    accumulator = Accumulator(cells, optimizers, 2)
    for number in (0, 1):
        x, y = [Tensor(array) for array in share(batch(number), rank, size)]
        with accumulator.accumulate():
            accumulator.backward(x, y, network=cells[0])
            accumulator.step(network=cells[0])
            accumulator.backward(x, first(x), network=cells[1])
            accumulator.step(network=cells[1])
    return [weights_of(first), weights_of(second)]
