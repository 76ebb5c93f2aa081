"""A rank that saves a state alone, and one that ends with an error.

Each reports where its log is, the failing one after its error has been told, and what it was told of the saving.
"""

import os
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from launch import meet, report
from mindspore import Tensor, nn

from ms_gradaccum import TrainOneStepCell, save_state

rank, _ = meet()
ms.set_context(mode=ms.PYNATIVE_MODE)
network = nn.Dense(1, 1)
step = TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params(), 0.1))
x = Tensor(np.full((2, 1), rank, np.float32))
step(x, x)
said = ""
try:
    if rank == 0:
        save_state(step, os.environ["REPORT_FOLDER"])
    else:
        step(x, x)
except RuntimeError as error:
    said = str(error)
log = os.readlink("/proc/self/fd/2")
if rank == 1:
    told = sys.excepthook

    def hook(*error):
        told(*error)
        report(1, [log, said])

    sys.excepthook = hook
    # As MindSpore frames its errors.
    raise RuntimeError(f"\n{'-' * 40}\n- Kernel error:\n{'-' * 40}\nthe label 'cat' is not known\n")
# What it writes after the other rank has ended, such as MindSpore's lost connection, covers nothing in its log.
while not Path(os.environ["REPORT_FOLDER"], "report_1.json").exists():
    time.sleep(0.1)
print("later " * 500, file=sys.stderr, flush=True)
report(0, [log, said])
# It waits for the other rank until msrun ends it.
time.sleep(600)
