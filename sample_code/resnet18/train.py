"""Watch the parameters of ResNet18 in a window of four batches: only the last iteration updates them.

The example of Colossal-AI's guide to gradient accumulation, in MindSpore.

    python train.py                      on the Fashion-MNIST subset beside the samples
    DATA=~/cifar-10-batches-bin python train.py    on CIFAR-10, in its binary version

BatchNorm in a window: the weights stand still until the last iteration, BatchNorm does not. It normalises each batch
by that batch's own mean and variance, as without accumulation, and its moving averages move once per batch, not once
per update. So four batches of 128 are not one batch of 512 for it. Networks without it (GroupNorm, LayerNorm) have
the gradient of the whole window.
"""

import os
import sys
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from resnet import ResNet18

from ms_gradaccum import Accumulator

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))
from find_data import find_data

BATCH_SIZE = int(os.getenv("BATCH_SIZE", "128"))
GRADIENT_ACCUMULATION = 4

ms.set_device(os.getenv("DEVICE_TARGET", "CPU"))
ms.set_seed(1)


def create_dataset():
    if os.getenv("DATA"):
        dataset = ds.Cifar10Dataset(str(Path(os.environ["DATA"]).expanduser()), "train")
    else:
        dataset = ds.MnistDataset(str(find_data()[0]), "train")
        # 28 x 28 and grey, made 32 x 32 and three equal colours.
        dataset = dataset.map([ds.vision.Pad(2), lambda image: np.repeat(image, 3, axis=2)], "image")
    image_transforms = [
        ds.vision.RandomCrop(32, padding=4),
        ds.vision.RandomHorizontalFlip(),
        ds.vision.Rescale(1.0 / 255.0, 0),
        ds.vision.Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)),
        ds.vision.HWC2CHW(),
    ]
    dataset = dataset.map(image_transforms, "image")
    dataset = dataset.map(ds.transforms.TypeCast(ms.int32), "label")
    return dataset.batch(BATCH_SIZE, drop_remainder=True)


net = ResNet18(num_classes=10)
optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1, momentum=0.9, weight_decay=5e-4)
loss_cell = nn.WithLossCell(net, nn.CrossEntropyLoss())
accumulator = Accumulator(loss_cell, optimizer, accumulation_steps=GRADIENT_ACCUMULATION)
loader = accumulator.prepare(create_dataset())

parameter, moving_mean = net.conv1.weight, net.bn1.moving_mean
initial = parameter.asnumpy().copy()
for iteration, (image, label) in zip(range(GRADIENT_ACCUMULATION), loader):
    # What BatchNorm does to its moving average, from this batch alone.
    batch_mean = net.conv1(image).asnumpy().mean(axis=(0, 2, 3))
    expected_mean = 0.9 * moving_mean.asnumpy() + 0.1 * batch_mean

    with accumulator.accumulate():
        accumulator.backward(image, label)
        accumulator.step()
        accumulator.zero_grad()

    print(f"iteration {iteration}, first 10 elements of param: {parameter.asnumpy().ravel()[:10].round(4)}")
    print(f"             first moving mean of BatchNorm: {moving_mean.asnumpy()[0]:.4f}", flush=True)
    # Compared with the initial value: an update in the first iteration would show here.
    assert np.array_equal(parameter.asnumpy(), initial) == (iteration < GRADIENT_ACCUMULATION - 1)
    np.testing.assert_allclose(moving_mean.asnumpy(), expected_mean, rtol=1e-4, atol=1e-5)

print("The parameter is only updated in the last iteration")
