"""The networks that are tried, their data, and how MindSpore's own step trains them on the whole batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_gradaccum.batch.token_mean_loss import TokenMeanLoss

Arrays = tuple[np.ndarray[Any, Any], ...]

_INPUTS, _HIDDEN, _OUTPUTS = 12, 32, 4
_TOKENS, _LENGTH, _WIDTH, _HEADS = 24, 8, 16, 2
_IGNORED = -100


@dataclass(frozen=True)
class Workload:
    """A network, its loss and its data.

    Attributes:
        build: Returns the network.
        loss: From the network to the loss cell that a window is made of.
        mean_loss: From the network to the loss cell that MindSpore's own step takes: the mean over the whole batch.
        batch: From a number and a count of rows to the inputs.
        rate: The learning rate.
        width: The length of the longest sum in the network.
        roundings: How many roundings follow each other between an input and a gradient.
    """

    build: Callable[[], nn.Cell]
    loss: Callable[[nn.Cell], nn.Cell]
    mean_loss: Callable[[nn.Cell], nn.Cell]
    batch: Callable[[int, int], Arrays]
    rate: float
    width: int
    roundings: int

    def new(self) -> nn.Cell:
        """Return the network, which starts with the same parameters each time."""
        network = self.build()
        for number, parameter in enumerate(network.trainable_params()):
            shape = parameter.shape
            middle = 1.0 if parameter.name.endswith("gamma") else 0.0
            spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
            values = middle + spread * np.random.default_rng(number).normal(size=shape)
            parameter.set_data(Tensor(values.astype(np.float32)))
        return network


class Attention(nn.Cell):
    """Each position looks at itself and at those before it."""

    def __init__(self) -> None:
        super().__init__()
        # As attributes: MindSpore's rewriting for half precision finds no names of this file.
        self.parts = (-1, _LENGTH, _HEADS, _WIDTH // _HEADS)
        self.scale = (_WIDTH // _HEADS) ** -0.5
        self.query, self.key, self.value = (nn.Dense(_WIDTH, _WIDTH) for _ in range(3))
        self.out = nn.Dense(_WIDTH, _WIDTH)
        self.products = ops.BatchMatMul()
        self.weights = nn.Softmax(-1)
        future = np.triu(np.ones((_LENGTH, _LENGTH), np.float32), 1)
        self.mask = Tensor(future * -1e4)

    def construct(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        scores = self.products(query, ops.transpose(key, (0, 1, 3, 2))) * self.scale
        weights = self.weights(scores + ops.cast(self.mask, scores.dtype))
        seen = ops.transpose(self.products(weights, value), (0, 2, 1, 3))
        return self.out(ops.reshape(seen, x.shape))

    def heads(self, x: Tensor) -> Tensor:
        """Return the parts of the heads, which come before the positions."""
        return ops.transpose(ops.reshape(x, self.parts), (0, 2, 1, 3))


class Transformer(nn.Cell):
    """One layer that reads tokens and says which comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, _WIDTH)
        self.first_norm, self.second_norm = nn.LayerNorm((_WIDTH,)), nn.LayerNorm((_WIDTH,))
        self.attention = Attention()
        self.wide, self.narrow = nn.Dense(_WIDTH, 2 * _WIDTH), nn.Dense(2 * _WIDTH, _WIDTH)
        self.activation = nn.GELU()
        self.head = nn.Dense(_WIDTH, _TOKENS, has_bias=False)

    def construct(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.first_norm(x))
        x = x + self.narrow(self.activation(self.wide(self.second_norm(x))))
        return self.head(x)


class _MeanOverTokens(nn.Cell):
    """Cross-entropy, the mean over all labels of the batch that are not ignored."""

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = ops.cast(ops.reshape(logits, (-1, _TOKENS)), ms.float32)
        return ops.cross_entropy(logits, ops.reshape(labels, (-1,)), ignore_index=_IGNORED)


def _perceptron() -> nn.Cell:
    return nn.SequentialCell(nn.Dense(_INPUTS, _HIDDEN), nn.Tanh(), nn.Dense(_HIDDEN, _OUTPUTS))


def _rows(number: int, rows: int) -> Arrays:
    rng = np.random.default_rng(100 + number)
    return rng.normal(size=(rows, _INPUTS)).astype(np.float32), rng.normal(size=(rows, _OUTPUTS)).astype(np.float32)


def _sentences(number: int, rows: int) -> Arrays:
    """Return tokens and labels, of which each row has another number."""
    rng = np.random.default_rng(200 + number)
    tokens = rng.integers(0, _TOKENS, size=(rows, _LENGTH + 1)).astype(np.int32)
    labels = tokens[:, 1:].copy()
    labels[np.arange(_LENGTH) >= rng.integers(1, _LENGTH + 1, size=(rows, 1))] = _IGNORED
    return tokens[:, :-1].copy(), labels


def _with_squares(network: nn.Cell) -> nn.Cell:
    return nn.WithLossCell(network, nn.MSELoss())


WORKLOADS = {
    # Input, two layers, activation and loss, forth and back.
    "MLP": Workload(_perceptron, _with_squares, _with_squares, _rows, 0.1, _HIDDEN, 10),
    # Embedding, two norms, four products of attention, softmax, three layers, activation and loss, forth and back.
    "transformer": Workload(
        Transformer,
        TokenMeanLoss,
        lambda network: nn.WithLossCell(network, _MeanOverTokens()),
        _sentences,
        0.1,
        2 * _WIDTH * _LENGTH,
        28,
    ),
}


class ClippedMomentum(nn.Momentum):
    """Momentum of a gradient that is clipped to a norm."""

    def __init__(self, parameters: Sequence[Any], rate: float, max_norm: float) -> None:
        super().__init__(parameters, rate, 0.9)
        self.max_norm = max_norm

    def construct(self, gradients: tuple[Tensor, ...]) -> Any:
        return super().construct(ops.clip_by_global_norm(gradients, self.max_norm))
