"""What each process of `test_micro_size_of_ranks.py` does: look for micro_size with a batch of its own."""

import os
import sys
import time
from pathlib import Path

# Op by op, for which nothing is compiled; the children inherit it.
os.environ["MS_JIT"] = "0"

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import Tensor  # noqa: E402
from mindspore.communication import get_group_size, get_rank, init  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from launch import report  # noqa: E402
from memory_networks import misbehaving, wide  # noqa: E402

from ms_gradaccum import find_micro_size  # noqa: E402
from ms_gradaccum.parallel.world import gather_counts  # noqa: E402

init()
rank, size = get_rank(), get_group_size()
results = {}
network, optimizer, _ = wide(ms.PYNATIVE_MODE)
probes = []


def slowly(probe):
    """One rank keeps the others waiting for longer than a message may take."""
    probes.append([probe.micro_size, probe.fits])
    if rank == 0 and len(probes) == 1:
        time.sleep(35)


# One row of rank 0 fits in one piece, sixteen of rank 1 do not.
rows = (1, 16)[rank]
batch = Tensor(np.ones((rows, 4096, 256), np.float32))
results["answer"] = find_micro_size(network, optimizer, batch, "840MiB", report=slowly)
results["probes"] = probes


def failing(*arguments):
    try:
        return find_micro_size(*arguments, "1GiB")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# On rank 1 the network fails in its child, and rank 0 does not go on; the second time before there is one.
results["child fails"] = failing(*misbehaving("raise" if rank == 1 else "hang"))
results["refused"] = failing(*misbehaving("nothing")[:2], "no batch" if rank == 1 else misbehaving("nothing")[2])
# The ranks can still talk.
results["after"] = gather_counts(rank)
report(rank, results)
