"""Networks with lengths, tied and frozen weights, recomputation, gradients inside, and a backward pass of their own."""

import mindspore as ms
import numpy as np
from harness import ROWS, UPDATES, Program, checks_of, momentum, regression
from mindspore import Tensor, nn, ops

WORDS, LENGTH, CLASSES = 11, 5, 3
LENGTHS = np.array([5, 4, 3, 1, 2, 5, 3, 4], np.int32)


def sentences():
    """Batches of words, lengths and one label per row."""
    numbers = np.random.default_rng(6)
    return [
        (
            numbers.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32),
            LENGTHS,
            numbers.integers(0, 2, ROWS).astype(np.int32),
        )
        for _ in range(UPDATES)
    ]


class Sentiment(nn.Cell):
    """The RNN tutorial: embedding, bidirectional LSTM with lengths, a head on the last hidden states."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 4)
        self.rnn = nn.LSTM(4, 3, bidirectional=True, batch_first=True)
        self.head = nn.Dense(6, 1)

    def construct(self, words, lengths, label):
        _, (hidden, _) = self.rnn(self.embedding(words), seq_length=lengths)
        last = ops.concat((hidden[-2], hidden[-1]), 1)
        score = self.head(last).squeeze(1)
        # The binary cross-entropy, see test_losses.py.
        return (ops.softplus(score) - score * label).mean()


class Block(nn.Cell):
    """Attention and a feed-forward layer."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.qkv = nn.Dense(width, 3 * width)
        self.out = nn.Dense(width, width)
        self.mlp = nn.SequentialCell(nn.Dense(width, 2 * width), nn.GELU(), nn.Dense(2 * width, width))

    def construct(self, x):
        query, key, value = ops.chunk(self.qkv(self.norm1(x)), 3, -1)
        weights = ops.softmax(ops.matmul(query, key.swapaxes(1, 2)) / 2.0, -1)
        x = x + self.out(ops.matmul(weights, value))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Cell):
    """A language model whose head is its embedding."""

    def __init__(self, block=Block):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 4)
        self.block = block(4)

    def construct(self, words, lengths, label):
        hidden = self.block(self.embedding(words))
        logits = ops.matmul(hidden[:, :-1], self.embedding.embedding_table.T)
        return ops.cross_entropy(logits.reshape(-1, WORDS), words[:, 1:].reshape(-1))


class LoRA(nn.Cell):
    """A frozen layer with a trained difference of low rank."""

    def __init__(self, layer, rank=2, alpha=4.0):
        super().__init__()
        self.layer = layer
        for parameter in layer.get_parameters():
            parameter.requires_grad = False
        self.a = nn.Dense(layer.in_channels, rank, has_bias=False)
        self.b = nn.Dense(rank, layer.out_channels, weight_init="zeros", has_bias=False)
        self.scale = alpha / rank

    def construct(self, x):
        return self.layer(x) + self.scale * self.b(self.a(x))


def adapted(width):
    ms.set_seed(5)
    block = Block(width)
    for parameter in block.get_parameters():
        parameter.requires_grad = False
    block.qkv, block.out = LoRA(block.qkv), LoRA(block.out)
    return block


def recomputed(width):
    block = Block(width)
    block.recompute()
    return block


class Lazy(Block):
    @ms.lazy_inline
    def __init__(self, width):
        super().__init__(width)


def adamw(cell):
    return nn.AdamWeightDecay(cell.trainable_params(), 0.02, eps=0.1, weight_decay=0.1)


class FCN(nn.Cell):
    """Convolution, upsampling by a transposed convolution, one class per pixel."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(2, 4, 2, 2, has_bias=True)
        self.up = nn.Conv2dTranspose(4, CLASSES, 2, 2, has_bias=True)

    def construct(self, x):
        return self.up(ops.relu(self.down(x)))


def images():
    """Batches of images with a label per pixel."""
    numbers = np.random.default_rng(8)
    return [
        (
            numbers.normal(size=(ROWS, 2, 4, 4)).astype(np.float32),
            numbers.integers(0, CLASSES, (ROWS, 4, 4)).astype(np.int32),
        )
        for _ in range(UPDATES)
    ]


class Critic(nn.Cell):
    """WGAN-GP's critic: its loss has the gradient of the critic at points between real and generated rows."""

    def __init__(self):
        super().__init__()
        self.critic = nn.SequentialCell(nn.Dense(3, 4), nn.Tanh(), nn.Dense(4, 1))
        self.gradient = ops.GradOperation()

    def score(self, x):
        return self.critic(x).sum()

    def construct(self, real, fake, share):
        between = share * real + (1 - share) * fake
        slope = self.gradient(self.score)(between)
        norms = ops.sqrt(ops.square(slope).sum(1) + 1e-12)
        penalty = ops.square(norms - 1).mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10.0 * penalty


def pairs():
    numbers = np.random.default_rng(11)
    shapes = (ROWS, 3), (ROWS, 3), (ROWS, 1)
    return [tuple(numbers.normal(size=shape).astype(np.float32) for shape in shapes) for _ in range(UPDATES)]


class PINN(nn.Cell):
    """u'' + u = 0 with u(0) = 1, in float64: two derivatives with respect to the input, inside the loss."""

    def __init__(self):
        super().__init__()
        first, second = np.linspace(-1, 1, 5).reshape(5, 1), np.linspace(1, -1, 5).reshape(1, 5)
        self.first = nn.Dense(1, 5, weight_init=Tensor(first), dtype=ms.float64)
        self.second = nn.Dense(5, 1, weight_init=Tensor(second), dtype=ms.float64)
        self.gradient = ops.GradOperation()

    def u(self, x):
        return self.second(ops.tanh(self.first(x))).sum()

    def slope(self, x):
        return self.gradient(self.u)(x).sum()

    def construct(self, x):
        curve = self.gradient(self.slope)(x)
        value = self.second(ops.tanh(self.first(x)))
        start = self.second(ops.tanh(self.first(ops.zeros_like(x))))
        return ops.square(curve + value).mean() + ops.square(start - 1.0).mean()


def points():
    numbers = np.random.default_rng(13)
    return [(numbers.uniform(0, 3, (ROWS, 1)),) for _ in range(UPDATES)]


class Clipped(nn.Cell):
    """Passes its input on, and clips the gradient of each element: not linear in the gradient."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def construct(self, x):
        return x * 1.0

    def bprop(self, x, out, dout):
        return (ops.clip_by_value(dout, Tensor(-self.limit, ms.float32), Tensor(self.limit, ms.float32)),)


class Straight(nn.Cell):
    """Rounds forwards and passes the gradient on: a straight-through estimator."""

    def construct(self, x):
        return ops.round(x)

    def bprop(self, x, out, dout):
        return (dout,)


class Around(nn.Cell):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.second = nn.Dense(4, 3), middle(), nn.Dense(3, 1)

    def construct(self, x, y):
        return ops.square(self.second(self.middle(self.first(x))) - y).mean()


# In a window of several batches it gets the gradient of each batch.
LINEAR = "does in the backward pass .* must be linear"

PROGRAMS = {
    "RNN with lengths": Program(Sentiment, momentum, sentences),
    "tied weights": Program(LanguageModel, adamw, sentences),
    "LoRA": Program(lambda: LanguageModel(adapted), adamw, sentences),
    "recompute": Program(lambda: LanguageModel(recomputed), adamw, sentences),
    # In GRAPH mode MindSpore refuses it on a CPU.
    "lazy_inline": Program(lambda: LanguageModel(Lazy), adamw, sentences, modes=("PYNATIVE",)),
    "FCN": Program(lambda: nn.WithLossCell(FCN(), nn.CrossEntropyLoss()), momentum, images, rtol=5e-5),
    "WGAN-GP": Program(Critic, momentum, pairs, rtol=1e-4),
    "PINN in float64": Program(PINN, momentum, points),
    "straight-through bprop": Program(lambda: Around(Straight), batches=regression, warned=LINEAR),
    # Where nothing is clipped it is linear; where something is, the gradient of a mean over fewer rows is larger.
    "bprop that clips, out of reach": Program(lambda: Around(lambda: Clipped(10.0)), warned=LINEAR),
    "bprop that clips": Program(lambda: Around(lambda: Clipped(0.02)), nature="bprop"),
}


test_equal_or_named, test_lost_rows_would_be_seen = checks_of(PROGRAMS)
