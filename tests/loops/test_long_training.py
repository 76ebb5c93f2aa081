"""A long training keeps nothing of its past. At length, with a plot: benchmarks/long_run.py."""

import os
from pathlib import Path

import mindspore as ms
import numpy as np
from linear_toy import sgd
from mindspore import Tensor, nn

from ms_gradaccum import GradAccumulation, TrainOneStepCell


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_changing_batch_sizes_keep_neither_memory_nor_graphs(monkeypatch):
    cells, compile_cell = set(), nn.Cell.compile

    def compile_and_note(cell, *args, **kwargs):
        cells.add(cell)
        compile_cell(cell, *args, **kwargs)

    monkeypatch.setattr(nn.Cell, "compile", compile_and_note)
    ms.set_context(mode=ms.GRAPH_MODE)
    network = nn.Dense(16384, 1)
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 4)
    step = TrainOneStepCell(loss_cell, sgd(network, 1e-6), accumulation_steps=2)
    random = np.random.default_rng(0)

    def train(windows):
        for _ in range(2 * windows):
            rows = int(random.integers(1, 33))
            x = Tensor(random.normal(size=(rows, 16384)).astype(np.float32))
            step(x, x[:, :1])
        return sum(len(cell.compile_cache) for cell in cells)

    graphs = train(40)
    memory = resident()
    assert train(100) == graphs
    assert 3 <= graphs <= 10
    # The batches were 200 MB: if one in ten were kept, it would show.
    assert resident() - memory < 16 * 2**20
