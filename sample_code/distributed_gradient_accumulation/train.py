"""Train a small network on Fashion-MNIST or MNIST with gradient accumulation.

MindSpore's tutorial on gradient accumulation, with GradAccumulation and Model imported from ms_gradaccum.

    python train.py                               in one process
    EPOCHS=3 DATA_PATH=~/mnist python train.py    other data, another number of passes (default 10)
    bash run.sh                                   under msrun
"""

import os
import sys
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn, train
from mindspore.communication import get_group_size, get_rank, init
from mindspore.nn.utils import no_init_parameters
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum import GradAccumulation, Model, ProgressBar

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))
from find_data import find_data

epochs = int(os.getenv("EPOCHS", "10"))

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_device(os.getenv("DEVICE_TARGET", "CPU"))
ms.set_seed(1)

# msrun tells each process its role. Started by hand there is nothing to join.
rank, rank_size = 0, 1
if os.getenv("MS_ROLE"):
    init()
    rank, rank_size = get_rank(), get_group_size()

train_path, test_path, which = find_data(os.getenv("DATA_PATH"))
print(f"Training on {which}.", flush=True)


def create_dataset(batch_size, usage="train"):
    # Each rank trains on its own share of the images; all of them are tested on all images.
    shard = {"num_shards": rank_size, "shard_id": rank} if usage == "train" else {"shuffle": False}
    dataset = ds.MnistDataset(str(train_path if usage == "train" else test_path), usage, **shard)
    image_transforms = [
        ds.vision.Rescale(1.0 / 255.0, 0),
        ds.vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        ds.vision.HWC2CHW(),
    ]
    label_transform = ds.transforms.TypeCast(ms.int32)
    dataset = dataset.map(image_transforms, "image")
    dataset = dataset.map(label_transform, "label")
    dataset = dataset.batch(batch_size)
    return dataset


data_set = create_dataset(32)


class Network(nn.Cell):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.SequentialCell(
            nn.Dense(28 * 28, 512, weight_init="normal", bias_init="zeros"),
            nn.ReLU(),
            nn.Dense(512, 512, weight_init="normal", bias_init="zeros"),
            nn.ReLU(),
            nn.Dense(512, 10, weight_init="normal", bias_init="zeros"),
        )

    def construct(self, x):
        x = self.flatten(x)
        logits = self.dense_relu_sequential(x)
        return logits


with no_init_parameters():
    net = Network()
    optimizer = nn.SGD(net.trainable_params(), 1e-2)

loss_fn = nn.CrossEntropyLoss()
loss_cb = train.LossMonitor(100)
# Each batch of 32 images is cut into 4 micro batches of 8. The optimizer runs once for the batches of all workers.
loss_net = GradAccumulation(nn.WithLossCell(net, loss_fn), 4)
# With several workers each keeps and updates its part of the optimizer's state.
loss_net = AutoParallel(loss_net)
loss_net.hsdp()
model = Model(loss_net, optimizer=optimizer)
model.train(epochs, data_set, callbacks=[loss_cb, ProgressBar()])

# On GPU and Ascend AutoParallel leaves each worker with its part of the weights alone.
if rank_size == 1 or ms.get_context("device_target") == "CPU":
    classifier = ms.Model(net, loss_fn=loss_fn, metrics={"accuracy"})
    accuracy = classifier.eval(create_dataset(1000, "test"), dataset_sink_mode=False)["accuracy"]
    print(f"Accuracy on the test images: {accuracy:.2%}", flush=True)
