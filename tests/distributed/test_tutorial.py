"""The program of MindSpore's tutorial, with nothing but its imports changed, on two processes, smaller."""

import mindspore as ms
import numpy as np
from linear_toy import sgd
from mindspore import Tensor, nn, train
from mindspore.dataset import NumpySlicesDataset
from mindspore.nn.utils import no_init_parameters
from mindspore.parallel.auto_parallel import AutoParallel
from quick_mindspore import eagerly
from ranks import assert_same, on_ranks
from scenarios import fingerprint, weights_of

from ms_gradaccum import GradAccumulation, Model

RANDOM = np.random.default_rng(0)
# The tutorial gives all ranks the same images.
IMAGES = RANDOM.normal(size=(16, 1, 8, 8)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 16).astype(np.int32)


def build_network():
    first, last = [nn.Dense(*sizes, weight_init="normal", bias_init="zeros") for sizes in ((8 * 8, 512), (512, 3))]
    return nn.SequentialCell(nn.Flatten(), first, nn.ReLU(), last)


@on_ranks(2, compiled=True)
def test_the_weights_move_and_end_equal_on_all_ranks():
    ms.set_seed(1)
    with no_init_parameters():
        net = build_network()
        optimizer = sgd(net, 1e-2)
    loss_fn = nn.CrossEntropyLoss()
    cell = AutoParallel(GradAccumulation(nn.WithLossCell(net, loss_fn), 4))
    cell.hsdp()
    model = Model(cell, optimizer=optimizer)
    start = [weight.asnumpy().copy() for weight in net.trainable_params()]
    data_set = NumpySlicesDataset((IMAGES, LABELS), shuffle=False).batch(8)
    model.train(10, data_set, callbacks=[train.LossMonitor(100)])
    assert_same(fingerprint(net))
    # Each rank has half the optimizer's state of the big layer.
    shapes = {item.name: item.shape for item in optimizer.get_parameters()}
    for state in ("accum", "stat"):
        assert [shapes[f"{state}.{layer}"] for layer in ("1.weight", "3.weight", "3.bias")] == [
            (256, 64),
            (3, 512),
            (3,),
        ]
    stock = build_network()
    for weight, value in zip(stock.trainable_params(), start):
        weight.set_data(Tensor(value))
    begun = weights_of(stock)
    step = nn.TrainOneStepCell(nn.WithLossCell(stock, loss_fn), sgd(stock, 1e-2)).set_train()
    with eagerly():
        for _ in range(10):
            for rows in (slice(8), slice(8, 16)):
                step(Tensor(IMAGES[rows]), Tensor(LABELS[rows]))
    np.testing.assert_allclose(weights_of(net), weights_of(stock), rtol=1e-5, atol=1e-7)
    assert np.abs(np.subtract(weights_of(stock), begun)).max() > 1e-3
