"""A process of `test_parallel_precision.py`."""

import mindspore as ms
from launch import meet, report
from precision_scenarios import compiled_trainings, eager_trainings
from quick_mindspore import eagerly

ms.set_context(mode=ms.PYNATIVE_MODE)
rank, size = meet()
with eagerly():
    results = {name: train() for name, train in eager_trainings(rank, size).items()}
results |= compiled_trainings(rank, size)
report(rank, results)
