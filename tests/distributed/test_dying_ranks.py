"""A rank that ends with an error is named in the logs of the others, and one that saves alone is told so."""

import os
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
import quick_mindspore
from linear_toy import mse, sgd
from mindspore import Tensor, communication, nn

from ms_gradaccum import TrainOneStepCell, save_state
from ms_gradaccum.tools.processes import Job


def train_and_die(folder):
    """Save a state on rank 0 alone, and end rank 1 with an error. Yield where the log is, and what was told."""
    quick_mindspore.install()
    communication.init()
    rank = communication.get_rank()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = nn.Dense(1, 1)
    step = TrainOneStepCell(mse(network), sgd(network, 0.1))
    x = Tensor(np.full((2, 1), rank, np.float32))
    step(x, x)
    said, has_died = "", folder / "has_died"
    try:
        if rank == 0:
            save_state(step, folder / "states")
        else:
            step(x, x)
    except RuntimeError as error:
        said = str(error)
    if rank == 1:
        try:
            # As MindSpore frames its errors.
            raise RuntimeError(f"\n{'-' * 40}\n- Kernel error:\n{'-' * 40}\nthe label 'cat' is not known\n")
        except RuntimeError:
            # As Python does where nothing catches it.
            sys.excepthook(*sys.exc_info())
        has_died.touch()
    # What it writes after the other rank has ended, such as MindSpore's lost connection, covers nothing in its log.
    while not has_died.exists():
        time.sleep(0.1)
    print("later " * 500, file=sys.stderr, flush=True)
    yield Path(os.readlink("/proc/self/fd/2")).read_text(errors="replace"), os.readlink("/proc/self/fd/2"), said


def test_the_logs_of_the_other_ranks_name_the_one_that_has_ended(tmp_path):
    with Job(2, train_and_die, tmp_path) as job:
        (other, _, said), (own, log, _) = job.wait(600)
    sentence = f"rank 1 has ended with RuntimeError: the label 'cat' is not known See the end of {log};"
    assert 0 <= other.find(sentence) < other.find("later " * 500) and other.count(sentence) == 1
    assert "Traceback" in own and sentence not in own
    # One that alone saves is told so.
    assert "this rank saves a state and another one adds up gradients" in said
