"""A network of Llama's shape whose operators are sharded: RMSNorm, rotary positions, SwiGLU, tied vocabulary.

It is built of primitives, since only these take a strategy. ``dp`` splits rows, ``mp`` columns, heads and vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, lazy_inline, nn, ops


@dataclass(frozen=True)
class Llama:
    """Sizes and strategy of a network."""

    dp: int = 1
    mp: int = 1
    layers: int = 2
    width: int = 16
    heads: int = 4
    inner: int = 32
    vocabulary: int = 32
    length: int = 8
    # The rows of the norms and residuals are split over mp too.
    sequence_parallel: bool = False
    recompute: bool = False


class Linear(nn.Cell):
    """A product with a weight of its own or another's, of columns (``out``) or of rows split over mp."""

    def __init__(self, shape: Llama, weight: Parameter, strategy: Any, out: Any = None) -> None:
        super().__init__()
        self.weight = weight
        self.matmul = ops.MatMul(transpose_b=True)
        self.matmul.shard(strategy) if out is None else self.matmul.shard(strategy, out)

    def construct(self, x):
        return self.matmul(x, self.weight)


class RMSNorm(nn.Cell):
    """x / sqrt(mean(x²) + eps) * weight."""

    def __init__(self, shape: Llama, rows: int) -> None:
        super().__init__()
        self.weight = Parameter(np.ones(shape.width, np.float32))
        self.square = ops.Square().shard(((rows, 1),))
        self.mean = ops.ReduceMean(keep_dims=True).shard(((rows, 1),))
        self.add = ops.Add().shard(((rows, 1), ()))
        self.rsqrt = ops.Rsqrt().shard(((rows, 1),))
        self.scale = ops.Mul().shard(((rows, 1), (rows, 1)))
        self.weigh = ops.Mul().shard(((rows, 1), (1,)))

    def construct(self, x):
        x = self.scale(x, self.rsqrt(self.add(self.mean(self.square(x), 1), 1e-6)))
        return self.weigh(x, self.weight)


class Attention(nn.Cell):
    """Heads split over mp."""

    def __init__(self, shape: Llama, rng: Any, rows: int) -> None:
        super().__init__()
        dp, mp, width = shape.dp, shape.mp, shape.width
        self.sizes = (-1, shape.length, shape.heads, width // shape.heads)
        self.width = width
        self.query = Linear(shape, _weight(rng, width, width), ((dp, 1), (mp, 1)))
        self.key = Linear(shape, _weight(rng, width, width), ((dp, 1), (mp, 1)))
        self.value = Linear(shape, _weight(rng, width, width), ((dp, 1), (mp, 1)))
        self.out = Linear(shape, _weight(rng, width, width), ((dp, mp), (1, mp)), _rows_out(shape, rows))
        split = (dp, mp, 1, 1)
        self.reshape = ops.Reshape()
        self.to_heads = ops.Transpose().shard(((dp, 1, mp, 1),))
        self.from_heads = ops.Transpose().shard((split,))
        self.scores = ops.BatchMatMul(transpose_b=True).shard((split, split))
        self.mix = ops.BatchMatMul().shard((split, split))
        self.scale = ops.Mul().shard((split, ()))
        self.mask = ops.Add().shard((split, (1, 1)))
        self.softmax = ops.Softmax().shard((split,))
        self.halves = ops.Split(3, 2).shard((split,))
        self.negative = ops.Neg().shard((split,))
        self.join = ops.Concat(3).shard((split, split))
        self.turn = ops.Mul().shard((split, (1, 1)))
        self.add = ops.Add().shard((split, split))
        self.cosine, self.sine = _rotation(shape)
        self.hidden = Tensor(np.triu(np.full((shape.length, shape.length), -1e4, np.float32), 1))

    def construct(self, x):
        query, key, value = self.rotated(self.query(x)), self.rotated(self.key(x)), self.heads(self.value(x))
        scores = self.scale(self.scores(query, key), 1.0 / self.sizes[-1] ** 0.5)
        weights = self.softmax(self.mask(scores, self.hidden))
        mixed = self.from_heads(self.mix(weights, value), (0, 2, 1, 3))
        return self.out(self.reshape(mixed, (-1, self.width)))

    def heads(self, x):
        return self.to_heads(self.reshape(x, self.sizes), (0, 2, 1, 3))

    def rotated(self, x):
        x = self.heads(x)
        first, second = self.halves(x)
        turned = self.join((self.negative(second), first))
        return self.add(self.turn(x, self.cosine), self.turn(turned, self.sine))


class SwiGLU(nn.Cell):
    """silu(gate(x)) * up(x), then down."""

    def __init__(self, shape: Llama, rng: Any, rows: int) -> None:
        super().__init__()
        dp, mp = shape.dp, shape.mp
        self.gate = Linear(shape, _weight(rng, shape.inner, shape.width), ((dp, 1), (mp, 1)))
        self.up = Linear(shape, _weight(rng, shape.inner, shape.width), ((dp, 1), (mp, 1)))
        self.down = Linear(shape, _weight(rng, shape.width, shape.inner), ((dp, mp), (1, mp)), _rows_out(shape, rows))
        self.sigmoid = ops.Sigmoid().shard(((dp, mp),))
        self.mul = ops.Mul().shard(((dp, mp), (dp, mp)))

    def construct(self, x):
        gate = self.gate(x)
        return self.down(self.mul(self.mul(gate, self.sigmoid(gate)), self.up(x)))


class Block(nn.Cell):
    """Attention and SwiGLU with their norms."""

    def __init__(self, shape: Llama, rng: Any) -> None:
        super().__init__()
        rows = _rows(shape)
        self.first_norm, self.second_norm = RMSNorm(shape, rows), RMSNorm(shape, rows)
        self.attention = Attention(shape, rng, rows)
        self.feed_forward = SwiGLU(shape, rng, rows)
        self.add = ops.Add().shard(((rows, 1), (rows, 1)))

    def construct(self, x):
        x = self.add(x, self.attention(self.first_norm(x)))
        return self.add(x, self.feed_forward(self.second_norm(x)))


class LlamaLoss(nn.Cell):
    """Sum of the cross-entropy over the tokens that have a label, and their number. No label: -100."""

    def __init__(self, shape: Llama) -> None:
        super().__init__()
        rng = np.random.RandomState(0)
        dp, mp = shape.dp, shape.mp
        self.width, self.vocabulary = shape.width, shape.vocabulary
        # All heads of a device look at the same rows, so only the vocabulary is split over mp.
        self.table = _weight(rng, shape.vocabulary, shape.width)
        self.gather = ops.Gather().shard(((mp, 1), (dp, 1)))
        self.blocks = nn.CellList([Block(shape, rng) for _ in range(shape.layers)])
        self.norm = RMSNorm(shape, _rows(shape))
        self.head = Linear(shape, self.table, ((dp, 1), (mp, 1)))
        self.reshape, self.cast = ops.Reshape(), ops.Cast()
        self.most = ops.ReduceMax(keep_dims=True).shard(((dp, mp),))
        self.less = ops.Sub().shard(((dp, mp), (dp, 1)))
        self.exp = ops.Exp().shard(((dp, mp),))
        self.total = ops.ReduceSum().shard(((dp, mp),))
        self.log = ops.Log().shard(((dp,),))
        self.one_hot = ops.OneHot().shard(((dp, mp), (), ()))
        self.pick = ops.Mul().shard(((dp, mp), (dp, mp)))
        self.loss = ops.Sub().shard(((dp,), (dp,)))
        self.valid = ops.GreaterEqual().shard(((dp,), ()))
        self.at_least = ops.Maximum().shard(((dp,), ()))
        self.keep = ops.Mul().shard(((dp,), (dp,)))
        self.sum = ops.ReduceSum().shard(((dp,),))
        self.on, self.off = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)
        if shape.recompute:
            for block in self.blocks:
                block.recompute()

    def construct(self, tokens, labels):
        x = self.reshape(self.gather(self.table, tokens, 0), (-1, self.width))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        logits = self.less(logits, ops.stop_gradient(self.most(logits, 1)))
        labels = self.reshape(labels, (-1,))
        right = self.one_hot(self.at_least(labels, 0), self.vocabulary, self.on, self.off)
        losses = self.loss(self.log(self.total(self.exp(logits), 1)), self.total(self.pick(logits, right), 1))
        valid = self.cast(self.valid(labels, 0), ms.float32)
        return self.sum(self.keep(losses, valid)), self.sum(valid)


class LazyLlamaLoss(LlamaLoss):
    """The same, compiled once for all micro batches."""

    @lazy_inline
    def __init__(self, shape: Llama) -> None:
        super().__init__(shape)


def tokens_of(shape: Llama, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random tokens and labels, a third of which are missing."""
    rng = np.random.RandomState(seed)
    tokens = rng.randint(0, shape.vocabulary, (rows, shape.length)).astype(np.int32)
    labels = rng.randint(0, shape.vocabulary, (rows, shape.length)).astype(np.int32)
    labels[rng.rand(rows, shape.length) < 0.3] = -100
    return tokens, labels


def _weight(rng: Any, *shape: int) -> Parameter:
    return Parameter((rng.randn(*shape) * 0.1).astype(np.float32))


def _rows(shape: Llama) -> int:
    return shape.dp * shape.mp if shape.sequence_parallel else shape.dp


def _rows_out(shape: Llama, rows: int) -> Any:
    """Return the strategy of a product's output: where rows are split over mp, it is scattered, not added up."""
    return ((rows, 1),) if shape.sequence_parallel else None


def _rotation(shape: Llama) -> tuple[Tensor, Tensor]:
    half = shape.width // shape.heads // 2
    angles = np.outer(np.arange(shape.length), 10000.0 ** (-np.arange(half) / half))
    angles = np.concatenate([angles, angles], 1).astype(np.float32)
    return Tensor(np.cos(angles)), Tensor(np.sin(angles))
