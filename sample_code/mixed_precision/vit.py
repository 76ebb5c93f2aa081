"""A small Vision Transformer: patches of the image in place of words, seen by each other in both directions."""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "transformer_lm"))
from transformer import Block


class VisionTransformer(nn.Cell):
    """Inputs: images (rows, size, size), float32. Outputs: logits (rows, classes)."""

    def __init__(self, size=28, patch=7, classes=10, width=64, heads=4, layers=2):
        super().__init__()
        self.patch, self.side = patch, size // patch
        patches = self.side**2
        self.embedding = nn.Dense(patch * patch, width)
        self.positions = ms.Parameter(ms.Tensor(0.02 * np.random.randn(patches, width), ms.float32))
        self.blocks = nn.SequentialCell([Block(width, heads, patches, causal=False) for _ in range(layers)])
        self.norm = nn.LayerNorm((width,))
        self.head = nn.Dense(width, classes)

    def construct(self, images):
        rows, side, patch = images.shape[0], self.side, self.patch
        patches = images.reshape(rows, side, patch, side, patch).transpose(0, 1, 3, 2, 4)
        x = self.embedding(patches.reshape(rows, side * side, patch * patch)) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))
