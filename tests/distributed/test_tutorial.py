"""The program of MindSpore's tutorial, with nothing but its imports changed, on several CPU processes."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from launch import launch
from mindspore import communication
from sample_process import SUBSET, find_data

WORKER = Path(__file__).with_name("tutorial_worker.py")
IMAGES = 128

PROGRAM = """
import os

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn, train
from mindspore.communication import init
from mindspore.nn.utils import no_init_parameters
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum import GradAccumulation, Model

ms.set_context(mode=ms.GRAPH_MODE)
init()
ms.set_seed(1)

def create_dataset(batch_size):
    dataset_path = os.getenv("DATA_PATH")
    dataset = ds.MnistDataset(dataset_path)
    image_transforms = [
        ds.vision.Rescale(1.0 / 255.0, 0),
        ds.vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        ds.vision.HWC2CHW()
    ]
    label_transform = ds.transforms.TypeCast(ms.int32)
    dataset = dataset.map(image_transforms, 'image')
    dataset = dataset.map(label_transform, 'label')
    dataset = dataset.batch(batch_size)
    return dataset

data_set = create_dataset(32)

class Network(nn.Cell):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.SequentialCell(
            nn.Dense(28*28, 512, weight_init="normal", bias_init="zeros"),
            nn.ReLU(),
            nn.Dense(512, 512, weight_init="normal", bias_init="zeros"),
            nn.ReLU(),
            nn.Dense(512, 10, weight_init="normal", bias_init="zeros")
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
net = GradAccumulation(nn.WithLossCell(net, loss_fn), 4)
net = AutoParallel(net)
net.hsdp()
model = Model(net, optimizer=optimizer)
model.train(10, data_set, callbacks=[loss_cb])
"""


@pytest.fixture(scope="module")
def variables(tmp_path_factory):
    """The program, for one pass over a few real images."""
    folder = tmp_path_factory.mktemp("tutorial")
    for names in (find_data.IMAGES, find_data.LABELS):
        find_data.write_idx(folder / names["train"], find_data.read_idx(SUBSET / "train" / names["train"])[:IMAGES])
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("model.train(10,", "model.train(1,"))
    return {"PROGRAM": str(program), "DATA_PATH": str(folder)}


@pytest.fixture(scope="module")
def two(variables, tmp_path_factory):
    return launch(WORKER, 2, tmp_path_factory.mktemp("two"), limit=120, extra=variables)


def test_the_weights_move_and_end_equal_on_all_ranks(two):
    assert all(np.any(bias) for bias in two[0]["biases"].values())  # they start at zero
    assert two[0]["fingerprint"] == two[1]["fingerprint"]


def test_each_rank_has_half_the_optimizer_state_of_the_big_layers(two):
    whole = {"0.weight": [512, 784], "2.weight": [512, 512], "4.weight": [10, 512], "4.bias": [10]}
    for report in two:
        for layer, (rows, *columns) in whole.items():
            shape = [rows // 2 if rows == 512 else rows, *columns]
            for state in ("accum", "stat"):
                assert report["state"][f"{state}.dense_relu_sequential.{layer}"] == shape


def test_one_process_trains_the_same_weights(two, variables, monkeypatch):
    monkeypatch.setenv("DATA_PATH", variables["DATA_PATH"])
    monkeypatch.setattr(communication, "init", lambda: None)
    network = runpy.run_path(variables["PROGRAM"], run_name="__main__")["net"]
    # The tutorial gives all ranks the same images.
    for name, bias in two[0]["biases"].items():
        found = network.parameters_dict()[name].asnumpy()
        np.testing.assert_allclose(found, bias, rtol=1e-5, atol=1e-8)
