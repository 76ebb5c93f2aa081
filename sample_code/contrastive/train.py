"""Train images and their names to find each other, as CLIP does, on whole batches and in micro batches.

Micro batches are cached, so that the loss sees all rows of a batch, or plain, so that it sees their own.

    python train.py                  all three, and a plot of them beside each other
    python train.py --epochs 2       a shorter run
    python train.py --seeds 3        three times from other starts, drawn as bands

The images are those of Fashion-MNIST. The name of a garment is read letter by letter. An image is retrieved right if
among the ten names its own is the nearest one.
"""

import argparse
import os
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.dataset import NumpySlicesDataset

from ms_gradaccum import ContrastiveLoss, GradAccumulation, GradCacheLoss, TrainOneStepCell

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("data", "transformer_lm")]
from find_data import IMAGES, LABELS, find_data, read_idx
from plot import draw_band

NAMES = "t-shirt, trousers, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle boot".split(", ")
LETTERS = 12

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batch-size", type=int, default=256, help="images of an update")
parser.add_argument("--micro-size", type=int, default=128, help="micro batches of an update")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--seeds", type=int, default=1, help="how often each is trained, from another start")
parser.add_argument("--rows", type=int, help="use the first images alone, to train and to test")
parser.add_argument("--plot", type=Path, default="contrastive.png")
settings = parser.parse_args()

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_device(os.getenv("DEVICE_TARGET", "CPU"))


class ImageTower(nn.SequentialCell):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__(nn.Dense(784, 128), nn.ReLU(), nn.Dense(128, 32))


class TextTower(nn.Cell):
    """Letters at their places, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, 16)
        self.layer = nn.Dense(16 * LETTERS, 32)

    def construct(self, text):
        return self.layer(self.letters(text).reshape(text.shape[0], -1))


class Towers(nn.Cell):
    """Both."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = ImageTower(), TextTower()

    def construct(self, image, text):
        return self.image(image), self.text(text)


class LossOfMicroBatch(nn.Cell):
    """The same loss as an ordinary cell, which sees no rows but those of its micro batch."""

    def __init__(self, towers, loss_fn) -> None:
        super().__init__(auto_prefix=False)
        self.towers, self.loss_fn = towers, loss_fn

    def construct(self, image, text, labels):
        image, text = self.towers(image, text)
        return self.loss_fn(image, text, labels)


def read_images(folder, usage):
    """Images as rows of mean 0 and deviation 1, and their labels."""
    images = read_idx(folder / IMAGES[usage])[: settings.rows].astype(np.float32)
    images = (images / 255 - 0.286) / 0.353
    return images.reshape(len(images), -1), read_idx(folder / LABELS[usage])[: settings.rows].astype(np.int32)


def retrieval_accuracy(towers):
    """The share of the test images whose nearest name is their own."""
    images = towers.image(Tensor(test_images)).asnumpy()
    names = towers.text(Tensor(texts)).asnumpy()
    cosines = images @ (names / np.linalg.norm(names, axis=1, keepdims=True)).T
    return float((cosines.argmax(1) == test_labels).mean())


def train(kind, seed):
    """Train, and return the accuracy after each epoch."""
    ms.set_seed(seed)
    towers, loss_fn = Towers(), ContrastiveLoss()
    if kind == "plain micro batches":
        loss_cell = LossOfMicroBatch(towers, loss_fn)
    else:
        loss_cell = GradCacheLoss(towers, loss_fn, labels=1)
    micro_size = 1 if kind == "whole batch" else settings.micro_size
    optimizer = nn.Adam(loss_cell.trainable_params(), 1e-3)
    step = TrainOneStepCell(GradAccumulation(loss_cell, micro_size), optimizer).set_train()
    accuracies = []
    for epoch in range(settings.epochs):
        # The same order for all.
        order = np.random.default_rng([seed, epoch]).permutation(len(train_labels))
        columns = train_images[order], texts[train_labels[order]], train_labels[order]
        for batch in NumpySlicesDataset(columns, shuffle=False).batch(settings.batch_size, drop_remainder=True):
            step(*batch)
        accuracies.append(retrieval_accuracy(towers))
    print(
        f"{kind}: {', '.join(f'{accuracy:.1%}' for accuracy in accuracies)} of the images find their name", flush=True
    )
    return accuracies


train_path, test_path, which = find_data(os.getenv("DATA_PATH"))
(train_images, train_labels), (test_images, test_labels) = (
    read_images(train_path, "train"),
    read_images(test_path, "test"),
)
texts = np.array([[ord(letter) for letter in name.ljust(LETTERS)] for name in NAMES], np.int32)
print(f"Training on {which}: updates of {settings.batch_size} pairs.", flush=True)
seeds = range(1, settings.seeds + 1)
runs = {}
for kind in ("whole batch", "cached micro batches", "plain micro batches"):
    runs[kind] = [train(kind, seed) for seed in seeds]

whole, cached, plain = ([accuracies[-1] for accuracies in by_seed] for by_seed in runs.values())
if any(abs(one - other) > 0.01 for one, other in zip(whole, cached)):
    raise SystemExit("Cached micro batches must train as the whole batch does.")
behind = sum(one < other for one, other in zip(plain, whole))
falls = "fall" if 2 * behind > settings.seeds else "do not fall"
print(f"Cached micro batches train like the whole batch; plain ones {falls} behind.")

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError:
    raise SystemExit("No plot: it takes matplotlib, pip install matplotlib.") from None
figure = Figure(figsize=(7, 4), dpi=100, layout="constrained")
FigureCanvasAgg(figure)
axes = figure.subplots()
for i, ((kind, by_seed), style) in enumerate(zip(runs.items(), ("-", "--", ":"))):
    percent = [[100 * accuracy for accuracy in accuracies] for accuracies in by_seed]
    draw_band(axes, percent, f"C{i}", linestyle=style, marker=".", label=kind)
axes.set(xlabel="epoch", ylabel="% of images that find their name (not from 0)")
if settings.seeds > 1:
    axes.set_title(f"median and range of {settings.seeds} seeds", fontsize="medium")
axes.grid(True, alpha=0.3)
axes.legend()
settings.plot.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(settings.plot, format="png")
print(f"Plot: {settings.plot}")
