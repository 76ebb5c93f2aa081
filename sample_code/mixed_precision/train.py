"""Train a small Vision Transformer on Fashion-MNIST in float32 or in half precision, 128 images per update.

    python train.py --precision fp32
    python train.py --precision fp16    matrix products in float16, with a loss scale
    bash run.sh                         both, compared and drawn in one plot

What --precision takes is what mixed_precision of ms_gradaccum's Model takes by name, and fp32.
"""

import argparse
import math
import os
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset

from ms_gradaccum import ClipByGlobalNorm, MetricsLogger, MixedPrecision, Model, ProgressBar, TrainingPlan

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))
from find_data import IMAGES, LABELS, find_data, read_idx
from vit import VisionTransformer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--precision", default="fp16", help="fp32, fp16, fp16_apex, fp16_naive, bf16, ...")
parser.add_argument("--growth-interval", type=int, help="of fp16: updates until the loss scale doubles (2000)")
parser.add_argument("--batch-size", type=int, default=32, help="images of a batch")
parser.add_argument("--accumulation-steps", type=int, default=4, help="batches of an update")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--warmup", type=int, default=50, help="updates until the learning rate is at its peak")
parser.add_argument("--peak", type=float, default=2e-3, help="largest learning rate")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--rows", type=int, help="use the first images alone, to train and to test")
parser.add_argument("--metrics", type=Path, default="metrics.jsonl", help="file for a report of each update")
settings = parser.parse_args()
if settings.growth_interval and settings.precision != "fp16":
    parser.error("--growth-interval goes with --precision fp16")

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_device(os.getenv("DEVICE_TARGET", "CPU"))
ms.set_seed(settings.seed)


def read_images(folder, usage):
    """Images of mean 0 and deviation 1, and their labels."""
    images = read_idx(folder / IMAGES[usage])[: settings.rows].astype(np.float32)
    return (images / 255 - 0.286) / 0.353, read_idx(folder / LABELS[usage])[: settings.rows].astype(np.int32)


def mixed_precision():
    """The precision as Model takes it."""
    if settings.growth_interval:
        return MixedPrecision("fp16", growth_interval=settings.growth_interval)
    return None if settings.precision == "fp32" else settings.precision


def learning_rates(updates):
    """One rate per update: a line up to the peak, then half a cosine down to 0."""
    warmup = min(settings.warmup, updates)
    up = [(i + 1) / warmup for i in range(warmup)]
    down = [(1 + math.cos(math.pi * i / (updates - warmup))) / 2 for i in range(updates - warmup)]
    return [settings.peak * factor for factor in up + down]


train_path, test_path, which = find_data(os.getenv("DATA_PATH"))
train_images, test_images = read_images(train_path, "train"), read_images(test_path, "test")
print(f"Training in {settings.precision} on {which}.", flush=True)

# It counts updates, not batches: the rate moves once per window.
plan = TrainingPlan(
    dataset_size=len(train_images[0]),
    batch_size=settings.batch_size,
    accumulation_steps=settings.accumulation_steps,
    epochs=settings.epochs,
)
net = VisionTransformer(layers=settings.layers)
model = Model(
    net,
    nn.CrossEntropyLoss(),
    nn.Adam(net.trainable_params(), learning_rates(plan.updates)),
    metrics={"accuracy"},
    accumulation_steps=settings.accumulation_steps,
    clip=ClipByGlobalNorm(1.0),
    mixed_precision=mixed_precision(),
)
settings.metrics.parent.mkdir(parents=True, exist_ok=True)
logger = MetricsLogger(settings.metrics)
train_set = NumpySlicesDataset(train_images, shuffle=True).batch(settings.batch_size)
test_set = NumpySlicesDataset(test_images, shuffle=False).batch(500)
# At the end of each epoch the test images, in the precision of the training.
model.fit(settings.epochs, train_set, test_set, callbacks=[ProgressBar(), logger])
