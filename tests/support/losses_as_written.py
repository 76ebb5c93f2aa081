"""Losses as people write them: functions (network, *inputs) that can be trained in parts, and those that cannot."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

ROWS, PARTS = 16, 4
_numbers = np.random.default_rng(3)
X = _numbers.normal(size=(ROWS, 6)).astype(np.float32)
Y = _numbers.normal(size=(ROWS, 3)).astype(np.float32)
LABELS = _numbers.integers(0, 3, ROWS).astype(np.int32)
MASK = np.array([1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 1, 0], np.float32)
TOKENS = _numbers.integers(0, 3, (ROWS, 5)).astype(np.int32)
LENGTHS = np.array([5, 1, 2, 4, 3, 3, 5, 1, 1, 2, 5, 5, 2, 4, 1, 3])
PADDED = np.where(np.arange(5) < LENGTHS[:, None], TOKENS, -100).astype(np.int32)
VALID = (np.arange(5) < LENGTHS[:, None]).astype(np.float32)
BOXES = np.where(_numbers.random((ROWS, 4)) < 0.4, 1, 0).astype(np.float32)
WEIGHTS = _numbers.random(ROWS).astype(np.float32) + 0.1


def net(out=3):
    numbers = np.random.default_rng(7)
    return nn.SequentialCell(
        nn.Dense(6, 8, bias_init="zeros", weight_init=Tensor(numbers.normal(size=(8, 6)).astype(np.float32) / 2)),
        nn.Tanh(),
        nn.Dense(8, out, bias_init="zeros", weight_init=Tensor(numbers.normal(size=(out, 8)).astype(np.float32) / 2)),
    )


class Loss(nn.Cell):
    """A loss cell of a function (network, *inputs)."""

    def __init__(self, function, out=3):
        super().__init__()
        self.net, self.function = net(out), function

    def construct(self, *inputs):
        return self.function(self.net, *inputs)


def unit(x):
    return x / ops.sqrt((x * x).sum(-1, keepdims=True) + 1e-9)


def kl(mean, log_var):
    return -0.5 * (1 + log_var - mean.square() - log_var.exp())


# By name: the function, its inputs, and the outputs of its network.
WRONG = {}
RIGHT = {}


def wrong(*data, out=3):
    """Note a loss whose micro batches do not have the gradient of the batch."""
    return lambda function: WRONG.setdefault(function.__name__, (function, data, out))[0]


def right(*data, out=3):
    """Note a loss that can be trained in micro batches."""
    return lambda function: RIGHT.setdefault(function.__name__, (function, data, out))[0]


def build(case):
    """Return a loss cell, always with the same numbers, and its inputs."""
    function, data, out = case
    return Loss(function, out), tuple(map(Tensor, data))


@wrong(X, MASK)
def masked_mean_eps(net, x, mask):
    return (net(x).square().mean(-1) * mask).sum() / (mask.sum() + 1e-5)


@wrong(X, PADDED, out=15)
def tokens_ignored(net, x, y):
    return ops.cross_entropy(net(x).reshape(-1, 3), y.reshape(-1), ignore_index=-100)


@wrong(X, LABELS)
def label_smoothing_with_weights(net, x, y):
    return ops.cross_entropy(net(x), y, Tensor([0.1, 1.0, 3.0], ms.float32), label_smoothing=0.1)


@wrong(X, BOXES, out=4)
def focal_by_positives(net, x, positive):
    p = ops.sigmoid(net(x))
    each = -positive * (1 - p).square() * ops.log(p) - (1 - positive) * p.square() * ops.log(1 - p)
    return each.sum() / positive.sum()


@wrong(X, LABELS)
def hard_examples(net, x, y):
    each = ops.cross_entropy(net(x), y, reduction="none")
    return (each * ops.stop_gradient(ops.softmax(2 * each, 0))).sum()


@wrong(X, LABELS)
def worst_row(net, x, y):
    return ops.cross_entropy(net(x), y, reduction="none").max()


@wrong(X, BOXES, out=4)
def dice_of_batch(net, x, y):
    p = ops.sigmoid(net(x))
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum() + 1)


@wrong(X, Y)
def in_batch_negatives(net, x, y):
    scores = ops.matmul(unit(net(x)), unit(y).T) / 0.2
    return -ops.log_softmax(scores, -1).diagonal().mean()


@wrong(X, WEIGHTS, out=1)
def neighbours_in_order(net, x, y):
    s = net(x)[:, 0]
    return ops.relu(s[1:] - s[:-1] + 0.1).mean()


@wrong(X, Y)
def root_of_mean(net, x, y):
    return ops.sqrt((net(x) - y).square().mean())


@wrong(X, Y)
def sum_of_squares(net, x, y):
    return ((net(x) - y) ** 2).sum()


@wrong(X, WEIGHTS, out=1)
def cox_survival(net, x, time):
    s = net(x)[:, 0]
    later = (time.expand_dims(0) >= time.expand_dims(1)).astype(ms.float32)
    return (ops.log((later * ops.exp(s)).sum(-1)) - s).mean()


@wrong(X, Y, out=6)
def vae_summed(net, x, y):
    mean, log_var = ops.chunk(net(x), 2, -1)
    return (mean - y).square().sum() + kl(mean, log_var).sum()


@wrong(X, LABELS)
def load_balance(net, x, y):
    p = ops.softmax(net(x), -1)
    share = ops.one_hot(p.argmax(-1), 3, Tensor(1.0), Tensor(0.0)).mean(0)
    return 3 * (share * p.mean(0)).sum()


@right(X, Y)
def mean_of_norms(net, x, y):
    return ops.norm(net(x) - y, dim=-1).mean()


@right(X, TOKENS, VALID, out=15)
def mean_of_row_means(net, x, y, valid):
    each = ops.cross_entropy(net(x).reshape(-1, 3), y.reshape(-1), reduction="none").reshape(-1, 5)
    return ((each * valid).sum(-1) / valid.sum(-1)).mean()


@right(X, LABELS)
def with_penalty(net, x, y):
    return ops.cross_entropy(net(x), y) + 0.01 * net[0].weight.square().sum()


@right(X, WEIGHTS, out=1)
def ppo(net, x, advantage):
    log_p = net(x)[:, 0]
    ratio = ops.exp(log_p - ops.stop_gradient(log_p))
    return -ops.minimum(ratio * advantage, ops.clamp(ratio, 0.8, 1.2) * advantage).mean()


@right(X, LABELS)
def smooth_labels(net, x, y):
    return ops.cross_entropy(net(x), y, label_smoothing=0.1)


@right(X, LABELS)
def distillation(net, x, y):
    teacher = ops.softmax(ops.stop_gradient(net(x + 0.1)), -1)
    return -(teacher * ops.log_softmax(net(x), -1)).sum(-1).mean() + ops.cross_entropy(net(x), y)


@right(X, Y)
def pinn(net, x, y):
    residual = (net(x + 0.01) - net(x)) / 0.01
    return residual.square().mean() + 0.1 * (net(x) - y).square().mean()
