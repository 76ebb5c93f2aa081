"""A process of `test_many_workers.py`: two updates with whole and with sharded optimizer state."""

import numpy as np
from launch import meet, report
from mindspore import Tensor
from scenarios import batch, build_step, fingerprint, weights_of

from ms_gradaccum import HSDP, DataParallel

rank, size = meet(eager=True)
results = {}
for kind in (DataParallel(), HSDP(threshold=0)):
    network, step = build_step(micro_size=2, parallel=kind)
    for number in range(2):
        step(*[Tensor(np.array_split(array, size)[rank]) for array in batch(number)])
    results[type(kind).__name__] = {"weights": weights_of(network), "fingerprint": fingerprint(network)}
report(rank, results)
