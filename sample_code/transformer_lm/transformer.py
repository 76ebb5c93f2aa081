"""A small causal transformer: pre-norm blocks, learned positions, no dropout. Other samples use its blocks."""

import mindspore as ms
import numpy as np
from mindspore import nn, ops


class Attention(nn.Cell):
    """Self-attention. If causal, what is padded at the end of a row is seen by padding alone."""

    def __init__(self, width, heads, length, causal=True):
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.qkv = nn.Dense(width, 3 * width, has_bias=False)
        self.out = nn.Dense(width, width)
        self.mask = ms.Tensor(np.triu(np.full((length, length), -1e9 if causal else 0, np.float32), k=1))
        self.scale = self.head_width**-0.5

    def construct(self, x):
        rows, length, width = x.shape
        qkv = self.qkv(x).reshape(rows, length, 3, self.heads, self.head_width).transpose(2, 0, 3, 1, 4)
        query, key, value = qkv[0], qkv[1], qkv[2]
        scores = ops.matmul(query * self.scale, key.swapaxes(-1, -2)) + self.mask
        mixed = ops.matmul(ops.softmax(scores, -1), value)
        return self.out(mixed.swapaxes(1, 2).reshape(rows, length, width))


class Block(nn.Cell):
    def __init__(self, width, heads, length, causal=True):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.attention = Attention(width, heads, length, causal)
        self.mlp = nn.SequentialCell(nn.Dense(width, 4 * width), nn.GELU(), nn.Dense(4 * width, width))

    def construct(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Cell):
    """Inputs: tokens (rows, length), integers. Outputs: logits (rows, length, vocabulary) of the next token."""

    def __init__(self, vocabulary, length, width=64, heads=4, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, embedding_table=0.02)
        self.positions = ms.Parameter(ms.Tensor(0.02 * np.random.randn(length, width), ms.float32))
        self.blocks = nn.SequentialCell([Block(width, heads, length) for _ in range(layers)])
        self.norm = nn.LayerNorm((width,))
        self.head = nn.Dense(width, vocabulary)

    def construct(self, tokens):
        x = self.tokens(tokens) + self.positions
        return self.head(self.norm(self.blocks(x)))
