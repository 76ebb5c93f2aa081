"""Networks and losses that look at all rows of a batch together, and MindSpore's own step on the whole batch."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops


class Tower(nn.SequentialCell):
    def __init__(self):
        super().__init__(nn.Dense(6, 8), nn.Tanh(), nn.Dense(8, 4))


class Towers(nn.Cell):
    def __init__(self):
        super().__init__()
        self.image, self.text = Tower(), nn.Dense(5, 4)

    def construct(self, x, y):
        return self.image(x), self.text(y)


def unit(rows):
    return rows / ops.sqrt(ops.square(rows).sum(1, keepdims=True))


class Clip(nn.Cell):
    def __init__(self):
        super().__init__()
        self.temperature = Parameter(Tensor(1.5, ms.float32), name="temperature")

    def construct(self, image, text):
        similarities = ops.matmul(unit(image), unit(text).T) * ops.exp(self.temperature)
        both = ops.log_softmax(similarities, 1) + ops.log_softmax(similarities, 0)
        return -(both * ops.eye(len(image), len(image), ms.float32)).sum() / (2 * len(image))


class SupervisedContrastive(nn.Cell):
    """Positives are the other rows of the same label."""

    def construct(self, rows, labels):
        rows = unit(rows)
        itself = ops.eye(len(rows), len(rows), ms.float32)
        similarities = ops.matmul(rows, rows.T) / 0.2 - 1e9 * itself
        alike = (labels.reshape(-1, 1) == labels.reshape(1, -1)).astype(ms.float32) - itself
        positives = alike.sum(1)
        each = (ops.log_softmax(similarities, 1) * alike).sum(1) / ops.maximum(positives, Tensor(1.0, ms.float32))
        return -each.sum() / (positives > 0).astype(ms.float32).sum()


class Correlation(nn.Cell):
    """1 minus the correlation of the first output with the labels."""

    def construct(self, rows, labels):
        shown, wanted = rows[:, 0], labels.astype(ms.float32)
        shown, wanted = shown - shown.mean(), wanted - wanted.mean()
        return 1 - (shown * wanted).sum() / ops.sqrt(ops.square(shown).sum() * ops.square(wanted).sum())


# The loss, its network, and how many of its inputs are labels.
LOSSES = {
    "clip": (Clip, Towers, 0),
    "supervised contrastive": (SupervisedContrastive, Tower, 1),
    "correlation": (Correlation, Tower, 1),
}


def batch(name, number, rows):
    """A batch of a loss; the same for the same number."""
    random = np.random.default_rng(number)
    x = random.normal(size=(rows, 6)).astype(np.float32)
    if name == "clip":
        return x, (x[:, :5] + random.normal(size=(rows, 5))).astype(np.float32)
    # Sorted, so that micro batches differ.
    return x, np.sort(random.integers(0, 5, rows)).astype(np.int32)


def bounds_of(number, ranks):
    """Return the bounds of the rows of each rank in a batch: not the same number for each, and none for the last rank
    in the last batch."""
    ends = {2: [0, 11, 18 + number % 2], 4: [0, 7, 11, 16, 18 + number % 2]}[ranks]
    if number == 2:
        ends[-2] = ends[-1]
    return list(zip(ends, ends[1:]))


def parts_of(name, loss=None):
    """A network and its loss, or another one, always with the same parameters."""
    own, network, labels = LOSSES[name]
    loss = loss or own
    random = np.random.default_rng(1)
    backbone = network()
    for parameter in backbone.trainable_params():
        parameter.set_data(Tensor(random.normal(size=parameter.shape, scale=0.5).astype(np.float32)))
    return backbone, loss(), labels


class OrdinaryLoss(nn.Cell):
    """The same composition as GradCacheLoss has, written by hand: what nobody caches."""

    def __init__(self, network, loss, labels):
        super().__init__(auto_prefix=False)
        self.network, self.loss, self.labels = network, loss, labels

    def construct(self, *inputs):
        end = len(inputs) - self.labels
        outputs = self.network(*inputs[:end])
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return self.loss(*outputs, *inputs[end:])


def values_of(parameters):
    return [parameter.asnumpy().copy() for parameter in parameters]


def train(step, batches):
    return [step(*map(Tensor, each))[0].asnumpy().item() for each in batches]


class WholeBatches(nn.TrainOneStepCell):
    def __call__(self, *inputs):
        return [super().__call__(*inputs)]


def flat(values):
    return np.concatenate([value.astype(np.float64).reshape(-1) for value in values])


def distance(a, b, size=None):
    """How far two sets of weights are apart, by the length of the second one or of another."""
    return np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b if size is None else size))


def movement(start, end):
    return [a.astype(np.float64) - b for a, b in zip(end, start)]
