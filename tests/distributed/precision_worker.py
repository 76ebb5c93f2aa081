"""A process of `test_parallel_precision.py`."""

import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import mindspore as ms
from mindspore.communication import get_group_size, get_rank, init

sys.path.insert(0, str(Path(__file__).parent))
from launch import report  # noqa: E402
from precision_scenarios import compiled_trainings, eager_trainings  # noqa: E402

ms.set_context(mode=ms.PYNATIVE_MODE)
init()
rank, size = get_rank(), get_group_size()


@contextmanager
def eagerly():
    """Run op by op, for which nothing is compiled."""
    os.environ["MS_JIT"] = "0"
    yield
    del os.environ["MS_JIT"]


results = {}
with eagerly():
    for name, train in eager_trainings(rank, size).items():
        begin = time.monotonic()
        results[name] = train()
        print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
begin = time.monotonic()
results |= compiled_trainings(rank, size)
print(f"compiled: {time.monotonic() - begin:.1f} s", flush=True)
report(rank, results)
