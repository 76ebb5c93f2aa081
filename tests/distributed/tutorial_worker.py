"""A process of `test_tutorial.py`: run the program in the variable PROGRAM, and look at what it left."""

import os
import runpy

from launch import report
from mindspore.communication import get_rank
from scenarios import fingerprint

left = runpy.run_path(os.environ["PROGRAM"], run_name="__main__")
network, optimizer = left["net"], left["optimizer"]
results = {
    "fingerprint": fingerprint(network),
    "biases": {item.name: item.asnumpy().tolist() for item in network.trainable_params() if "bias" in item.name},
    "state": {item.name: list(item.shape) for item in optimizer.get_parameters()},
}
report(get_rank(), results)
