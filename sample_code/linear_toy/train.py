"""Fit y = 2 x with one weight, in four batches of two rows and in one batch of eight: the same weight twice.

The linear example of Hugging Face Accelerate's guide "Performing gradient accumulation", in MindSpore. Worked out by
hand: mean squared error, weight 0, learning rate 0.02 give one update of 0.02 * mean(2 * x * 2 * x) = 2.04.

    python train.py
"""

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset

from ms_gradaccum import Accumulator

ms.set_context(mode=ms.GRAPH_MODE)

x = np.arange(1, 9, dtype=np.float32).reshape(8, 1)
y = 2 * x


def create_training():
    """A weight that starts at 0, its loss cell and its optimizer."""
    net = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
    return net, nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.02)


def weight_of(net):
    return net.weight.asnumpy().item()


# With accumulation: an update for every four batches of two rows.
net, loss_cell, optimizer = create_training()
accumulator = Accumulator(loss_cell, optimizer, accumulation_steps=4)
loader = accumulator.prepare(NumpySlicesDataset((x, y), shuffle=False).batch(2))
print(f"initial weight: {weight_of(net):.5f}")
for i, (inputs, labels) in enumerate(loader):
    with accumulator.accumulate():
        accumulator.backward(inputs, labels)
        accumulator.step()
        accumulator.zero_grad()
    print(f"batch {i}, x = {inputs.asnumpy().ravel()}: weight {weight_of(net):.5f}")
accumulated = weight_of(net)

# Without: MindSpore's own training step, on all eight rows at once.
net, loss_cell, optimizer = create_training()
train_step = nn.TrainOneStepCell(loss_cell, optimizer).set_train()
train_step(ms.Tensor(x), ms.Tensor(y))
whole = weight_of(net)

print(f"with accumulation, the final weight is {accumulated:.5f}")
print(f"without accumulation, the final weight is {whole:.5f}")
assert f"{accumulated:.5f}" == f"{whole:.5f}" == "2.04000"
