"""Sequence models: RNN with lengths, BiLSTM-CRF, a Transformer, tied weights, LoRA."""

import mindspore as ms
import numpy as np
from harness import ROWS, UPDATES, Program, checks_of, momentum
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

WORDS, LENGTH, TAGS = 11, 5, 3
LENGTHS = np.array([5, 4, 3, 1, 2, 5, 3, 4], np.int32)


def sentences(labels=2):
    """Batches of words, lengths and one label per row."""

    def build():
        numbers = np.random.default_rng(6)
        return [
            (
                numbers.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32),
                LENGTHS,
                numbers.integers(0, labels, ROWS).astype(np.int32),
            )
            for _ in range(UPDATES)
        ]

    return build


def tagged():
    numbers = np.random.default_rng(6)
    shape = (ROWS, LENGTH)
    return [
        (
            numbers.integers(0, WORDS, shape).astype(np.int32),
            numbers.integers(0, TAGS, shape).astype(np.int32),
            LENGTHS,
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


class CRF(nn.Cell):
    """The sequence-labelling tutorial: a linear chain over an LSTM's emissions, by the forward algorithm."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 4)
        self.rnn = nn.LSTM(4, 2, bidirectional=True, batch_first=True)
        self.emit = nn.Dense(4, TAGS)
        self.start = Parameter(initializer("zeros", (TAGS,)), name="start")
        self.transitions = Parameter(initializer("zeros", (TAGS, TAGS)), name="transitions")

    def construct(self, words, tags, lengths):
        emissions = self.emit(self.rnn(self.embedding(words), seq_length=lengths)[0])
        one_hot = ops.one_hot(tags, TAGS, Tensor(1.0, ms.float32), Tensor(0.0, ms.float32))
        scores = self.start + emissions[:, 0]
        gold = (scores * one_hot[:, 0]).sum(-1)
        for i in range(1, LENGTH):
            inside = ops.cast(lengths > i, ms.float32)
            step = (ops.matmul(one_hot[:, i - 1], self.transitions) + emissions[:, i]) * one_hot[:, i]
            gold = gold + step.sum(-1) * inside
            new = ops.logsumexp(scores.expand_dims(2) + self.transitions, 1) + emissions[:, i]
            keep = inside.expand_dims(1)
            scores = keep * new + (1 - keep) * scores
        return (ops.logsumexp(scores, 1) - gold).mean()


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


PROGRAMS = {
    "RNN with lengths": Program(Sentiment, momentum, sentences()),
    "BiLSTM-CRF": Program(CRF, momentum, tagged),
    "tied weights": Program(LanguageModel, adamw, sentences()),
    "LoRA": Program(lambda: LanguageModel(adapted), adamw, sentences()),
    "recompute": Program(lambda: LanguageModel(recomputed), adamw, sentences()),
    # In GRAPH mode MindSpore refuses it on a CPU.
    "lazy_inline": Program(lambda: LanguageModel(Lazy), adamw, sentences(), modes=("PYNATIVE",)),
}


test_equal_or_named, test_lost_rows_would_be_seen = checks_of(PROGRAMS)
