"""Watch the parameters of ResNet18 in a window of four batches: only the last iteration updates them.

The example of Colossal-AI's guide to gradient accumulation, in MindSpore.

    python train.py                                on Fashion-MNIST, a subset of which comes with the samples
    DATA=~/cifar-10-batches-bin python train.py    on CIFAR-10, in its binary version

BatchNorm in a window: the weights stand still until the last iteration, BatchNorm does not. It normalises each batch by
that batch's own mean and variance, as it does without accumulation, and its moving averages move once per batch, not
once per update. For it, four batches of 128 are not one batch of 512. Networks without it (with GroupNorm or LayerNorm)
have the gradient of the one batch.
"""

import os

# Where the processor has AVX-512, MindSpore's convolutions take 10 times as long with it as without. Only on CPU.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import mindspore as ms
import numpy as np
from images import create_dataset
from mindspore import nn
from resnet import ResNet18

from ms_gradaccum import Accumulator

BATCH_SIZE = int(os.getenv("BATCH_SIZE", "128"))
GRADIENT_ACCUMULATION = 4

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_device(os.getenv("DEVICE_TARGET", "CPU"))
ms.set_seed(1)
np.set_printoptions(precision=4, suppress=True, linewidth=120)

net = ResNet18(num_classes=10)
optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1, momentum=0.9, weight_decay=5e-4)
loss_cell = nn.WithLossCell(net, nn.CrossEntropyLoss())
# As MindSpore has it, a network begins in evaluation mode, in which BatchNorm uses its moving averages.
loss_cell.set_train()
accumulator = Accumulator(loss_cell, optimizer, accumulation_steps=GRADIENT_ACCUMULATION)
loader = accumulator.prepare(create_dataset(BATCH_SIZE, os.getenv("DATA")))

parameter, moving_mean = net.conv1.weight, net.bn1.moving_mean
initial = parameter.asnumpy().copy()
for iteration, (image, label) in zip(range(GRADIENT_ACCUMULATION), loader):
    # What BatchNorm should do to its moving average, from this batch alone.
    batch_mean = net.conv1(image).asnumpy().mean(axis=(0, 2, 3))
    expected_mean = 0.9 * moving_mean.asnumpy() + 0.1 * batch_mean

    with accumulator.accumulate():
        accumulator.backward(image, label)
        accumulator.step()
        accumulator.zero_grad()

    print(f"iteration {iteration}, first 10 elements of param: {parameter.asnumpy().ravel()[:10]}")
    print(f"iteration {iteration}, BatchNorm's moving mean: {moving_mean.asnumpy()[:4]}", flush=True)
    # Against the initial value: an update in the first iteration would show.
    assert np.array_equal(parameter.asnumpy(), initial) == (iteration < GRADIENT_ACCUMULATION - 1)
    np.testing.assert_allclose(moving_mean.asnumpy(), expected_mean, rtol=1e-4, atol=1e-5)

print("The parameter is only updated in the last iteration")
