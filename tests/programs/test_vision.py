"""Vision models: residual networks, a Vision Transformer, the losses of FCN and SSD, CLIP."""

import numpy as np
from harness import ROWS, UPDATES, Program, checks_of, momentum
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

CLASSES, SIZE = 3, 4


def images(labels_shape=()):
    """Batches of images with a label each, or one per pixel."""

    def build():
        numbers = np.random.default_rng(8)
        return [
            (
                numbers.normal(size=(ROWS, 2, SIZE, SIZE)).astype(np.float32),
                numbers.integers(0, CLASSES, (ROWS, *labels_shape)).astype(np.int32),
            )
            for _ in range(UPDATES)
        ]

    return build


class Residual(nn.Cell):
    """A residual block with a normalisation of choice, pooled into a head."""

    def __init__(self, norm):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, has_bias=True)
        self.body = nn.SequentialCell(norm(), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.head = nn.Dense(4, CLASSES)

    def construct(self, x):
        x = self.stem(x)
        x = ops.relu(x + self.body(x))
        return self.head(x.mean((2, 3)))


class ViT(nn.Cell):
    """Patches, a class token, places, attention, and the head on the class token."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(2, 4, 2, 2, has_bias=True)
        self.token = Parameter(initializer("zeros", (1, 1, 4)), name="token")
        self.places = Parameter(initializer("zeros", (1, 5, 4)), name="places")
        self.norm = nn.LayerNorm((4,))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Dense(4, CLASSES)

    def construct(self, x):
        x = self.patches(x).reshape(-1, 4, 4).swapaxes(1, 2)
        token = ops.broadcast_to(self.token, (x.shape[0], 1, 4))
        x = ops.concat((token, x), 1) + self.places
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return self.head(x[:, 0])


class FCN(nn.Cell):
    """Convolution, upsampling by a transposed convolution, one class per pixel."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(2, 4, 2, 2, has_bias=True)
        self.up = nn.Conv2dTranspose(4, CLASSES, 2, 2, has_bias=True)

    def construct(self, x):
        return self.up(ops.relu(self.down(x)))


class SSD(nn.Cell):
    """Boxes and classes of four anchors; SSD divides by the number of anchors that match."""

    def __init__(self, divide):
        super().__init__()
        self.boxes = nn.Conv2d(2, 4, 2, 2, has_bias=True)
        self.classes = nn.Conv2d(2, CLASSES, 2, 2, has_bias=True)
        self.divide = divide

    def construct(self, x, labels, target):
        boxes = self.boxes(x).reshape(-1, 4, 4).swapaxes(1, 2)
        logits = self.classes(x).reshape(-1, CLASSES, 4).swapaxes(1, 2)
        matched = ops.cast(labels > 0, x.dtype)
        place = (ops.smooth_l1_loss(boxes, target, reduction="none").sum(-1) * matched).sum()
        kind = ops.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1), reduction="sum")
        found = matched.sum()
        return (place + kind) / found if self.divide else (place + kind, found)


def anchors():
    numbers = np.random.default_rng(9)
    return [(x, y, numbers.normal(size=(ROWS, 4, 4)).astype(np.float32)) for x, y in images((4,))()]


class MeanOfSSD(SSD):
    def __init__(self, cell):
        super().__init__(True)
        self.boxes, self.classes = cell.boxes, cell.classes


class CLIP(nn.Cell):
    """Each image against all texts of its batch: a loss over pairs of rows."""

    def __init__(self):
        super().__init__()
        self.image = nn.Dense(2 * SIZE * SIZE, 4)
        self.text = nn.Embedding(CLASSES, 4)
        self.scale = Parameter(Tensor(np.float32(0.5)), name="scale")

    def construct(self, x, label):
        image, text = self.image(x.reshape(x.shape[0], -1)), self.text(label)
        image = image / ops.norm(image, dim=1, keepdim=True)
        text = text / ops.norm(text, dim=1, keepdim=True)
        logits = ops.exp(self.scale) * ops.matmul(image, text.T)
        targets = ops.arange(x.shape[0])
        return (ops.cross_entropy(logits, targets) + ops.cross_entropy(logits.T, targets)) / 2


def classified(network):
    return lambda: nn.WithLossCell(network(), nn.CrossEntropyLoss())


def frozen_norm():
    return nn.BatchNorm2d(4, use_batch_statistics=False)


PROGRAMS = {
    "ResNet, BatchNorm": Program(
        classified(lambda: Residual(lambda: nn.BatchNorm2d(4))), momentum, images(), nature="BatchNorm"
    ),
    "ResNet, moving averages": Program(classified(lambda: Residual(frozen_norm)), momentum, images()),
    "ViT": Program(classified(ViT), momentum, images()),
    "FCN": Program(lambda: nn.WithLossCell(FCN(), nn.CrossEntropyLoss()), momentum, images((SIZE, SIZE)), rtol=5e-5),
    "SSD": Program(lambda: SSD(True), momentum, anchors, nature="is not the mean"),
    "SSD, weighted": Program(lambda: SSD(False), momentum, anchors, whole=MeanOfSSD, settings={"weighted": True}),
    "CLIP": Program(CLIP, momentum, images(), nature="is not the mean"),
}


test_equal_or_named, test_lost_rows_would_be_seen = checks_of(PROGRAMS)
