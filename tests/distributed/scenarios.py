"""What one process and several train alike, and what MindSpore's own optimizers make of it in one process."""

import functools
import hashlib

import mindspore as ms
import numpy as np
import optimizers_tried
from linear_toy import mse
from mindspore import Tensor, nn
from quick_mindspore import eagerly

from ms_gradaccum import HSDP, ClipByGlobalNorm, ClipByValue, DataParallel, GradAccumulation, TrainOneStepCell

# Two windows show what the first leaves for the next; further ones show no more.
ROWS, STEPS = 12, 2

# Of the optimizers that one process tries, those whose updates are element by element, and some with settings of here.
SHARDED = ("LazyAdam", "AdaMax", "Adagrad", "Adadelta", "FTRL", "ProximalAdagrad", "ASGD", "Rprop")
SHARDED += ("AdamOffload", "experimental SGD", "experimental Adam", "experimental AdamW", "experimental RMSprop")
SHARDED += ("experimental Adagrad", "experimental NAdam")
OPTIMIZERS = {
    name: (lambda weights, kind=kind, settings=settings: kind(weights, **settings))
    for name, (kind, settings) in optimizers_tried.OPTIMIZERS.items()
    if name in SHARDED
}
OPTIMIZERS |= {
    "SGD": lambda weights: nn.SGD(weights, 0.1, momentum=0.9, weight_decay=0.01),
    "Momentum": lambda weights: nn.Momentum(weights, 0.1, 0.9),
    "Adam": lambda weights: nn.Adam(weights, 0.01),
    "AdamWeightDecay": lambda weights: nn.AdamWeightDecay(weights, [0.03, 0.02, 0.01, 0.005], weight_decay=0.1),
    "RMSProp": lambda weights: nn.RMSProp(weights, 0.01),
    "groups": lambda weights: nn.Adam([{"params": weights[:2], "lr": 0.05}, {"params": weights[2:]}], 0.01),
    "schedule": lambda weights: nn.Momentum(weights, nn.ExponentialDecayLR(0.1, 0.5, 1), 0.9),
}
KINDS = {
    "data parallel": DataParallel(),
    "each batch": DataParallel(sync_each_batch=True),
    "level1": HSDP(threshold=0),
    "level2": HSDP(threshold=0, optimizer_level="level2"),
}
# Those that differ most: whole gradients once per window, and shards of each micro batch's.
APART = ("data parallel", "level2")
CLIPS = {"none": lambda: None, "norm": lambda: ClipByGlobalNorm(0.5), "value": lambda: ClipByValue(0.05)}


def build_network():
    """A network whose first axes 2 and 4 processes divide, and one, the last, that they do not.

    Two biases have one size: they are cut out of a message together.
    """
    network = nn.SequentialCell(nn.Dense(6, 8), nn.Tanh(), nn.Dense(8, 8), nn.Tanh(), nn.Dense(8, 3))
    for i, weight in enumerate(network.trainable_params()):
        weight.set_data(Tensor(np.random.default_rng(i).normal(size=weight.shape).astype(np.float32)))
    return network


def batch(step):
    """The rows of all processes together."""
    generator = np.random.default_rng(100 + step)
    x = generator.normal(size=(ROWS, 6)).astype(np.float32)
    return x, generator.normal(size=(ROWS, 3)).astype(np.float32)


# Where the rows of the processes begin and end, in jobs of 2 and 4: not the same number for each.
BOUNDS = {2: [0, 7, 12], 4: [0, 5, 8, 11, 12]}
# The same, but three micro batches of one process have one shape, of which fewer graphs are compiled.
ONE_SHAPE = {2: [0, 9, 12], 4: [0, 6, 9, 10, 12]}


def share(arrays, rank, size, bounds=BOUNDS):
    return [array[bounds[size][rank] : bounds[size][rank + 1]] for array in arrays] if size > 1 else list(arrays)


def build_step(optimizer="Adam", micro_size=3, **settings):
    """A network and the step that trains it. It measures the loss, which takes most of the time, only if told to."""
    network = build_network()
    settings.setdefault("check_loss", False)
    loss_cell = GradAccumulation(mse(network), micro_size)
    return network, TrainOneStepCell(loss_cell, OPTIMIZERS[optimizer](network.trainable_params()), **settings)


def stock_weights(optimizer, batches):
    """The weights of MindSpore's own step in one process, after an update for each of these batches."""
    network = build_network()
    cell = mse(network)
    step = nn.TrainOneStepCell(cell, OPTIMIZERS[optimizer](network.trainable_params())).set_train()
    with eagerly():
        for arrays in batches:
            step(*map(Tensor, arrays))
    return weights_of(network)


def train_clipped(loss_cell, optimizer, batches, clip):
    """Train by an optimizer of MindSpore with gradients that ``clip`` scales in NumPy; return reports.

    ``clip`` takes the gradients by name and their norm. A report is the loss, and the norm before and after.
    """
    names = [weight.name for weight in optimizer.parameters]
    grad_fn = ms.value_and_grad(loss_cell, None, optimizer.parameters)
    reports = []
    with eagerly():
        for arrays in batches:
            loss, grads = grad_fn(*map(Tensor, arrays))
            grads = {name: grad.asnumpy() for name, grad in zip(names, grads)}
            norm = norm_of(grads.values())
            grads = clip(grads, norm)
            reports.append([float(loss.asnumpy()), norm, norm_of(grads.values())])
            optimizer(tuple(Tensor(grad.astype(np.float32)) for grad in grads.values()))
    return reports


def stock_clipped(optimizer, batches, clip):
    """The same with the network of here: the weights and the reports."""
    network = build_network()
    optimizer = OPTIMIZERS[optimizer](network.trainable_params())
    reports = train_clipped(mse(network), optimizer, batches, clip)
    return weights_of(network), reports


def norm_of(grads):
    return float(np.sqrt(sum(np.square(grad.astype(np.float64)).sum() for grad in grads)))


def scaled_by(factor_of):
    return lambda grads, norm: {name: grad * factor_of(norm) for name, grad in grads.items()}


# The clips of CLIPS in NumPy.
BY_HAND = {
    "norm": scaled_by(lambda norm: min(1.0, 0.5 / norm)),
    "value": lambda grads, norm: {name: np.clip(grad, -0.05, 0.05) for name, grad in grads.items()},
}


def joined(*batches):
    return [np.concatenate(arrays) for arrays in zip(*batches)]


@functools.cache
def whole_batches(optimizer, windows):
    """The same on the rows of all processes and of all batches of each window at once."""
    return stock_weights(optimizer, [joined(*map(batch, numbers)) for numbers in windows])


def uneven_data(rank):
    """Data in batches of two rows: three batches for rank 0, two for the others."""
    generator = np.random.default_rng(rank)
    return [generator.normal(size=(6 if rank == 0 else 4, columns)).astype(np.float32) for columns in (6, 3)]


def close(found, expected, rtol=2e-5, atol=2e-6):
    np.testing.assert_allclose(found, expected, rtol, atol)


def weights_of(network):
    return np.concatenate([weight.asnumpy().ravel() for weight in network.trainable_params()]).tolist()


def fingerprint(network):
    """A hash that differs as soon as one bit of a weight (or of the parameters in a list) does."""
    parameters = network.trainable_params() if isinstance(network, nn.Cell) else network
    return hashlib.sha256(b"".join(parameter.asnumpy().tobytes() for parameter in parameters)).hexdigest()
