"""A process of `test_many_workers.py`: two updates with whole and with sharded optimizer state."""

import os
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.communication import get_group_size, get_rank, init

sys.path.insert(0, str(Path(__file__).parent))
from launch import report  # noqa: E402
from scenarios import batch, build_step, fingerprint, weights_of  # noqa: E402

from ms_gradaccum import HSDP, DataParallel  # noqa: E402

# Op by op: compiling takes longer than all the rest, once per process.
ms.set_context(mode=ms.PYNATIVE_MODE)
os.environ["MS_JIT"] = "0"
init()
rank, size = get_rank(), get_group_size()
results = {}
for kind in (DataParallel(), HSDP(threshold=0)):
    network, step = build_step(micro_size=2, parallel=kind)
    for number in range(2):
        step(*[Tensor(np.array_split(array, size)[rank]) for array in batch(number)])
    results[type(kind).__name__] = {"weights": weights_of(network), "fingerprint": fingerprint(network)}
report(rank, results)
