"""A process of `test_report.py`: train with a logger that measures everything, and without one."""

import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import mindspore as ms
from launch import meet, report
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset
from open_window import buffer_of
from scenarios import build_network, fingerprint, uneven_data

from ms_gradaccum import HSDP, DataParallel, MetricsLogger, Model, ProgressBar

rank, size = meet()
folder = Path(os.environ["REPORT_FOLDER"])
KINDS = {
    "data parallel": DataParallel(),
    "each batch": DataParallel(sync_each_batch=True),
    "level1, compiled": HSDP(threshold=0),
}


class Updates(ms.train.Callback):
    """Notes the number of each update that this rank is told of."""

    def __init__(self):
        super().__init__()
        self.numbers = []

    def on_update_end(self, event):
        self.numbers.append(event.updates)


def train(kind, *callbacks):
    """Rank 0 has three batches of two rows, the other two, and two make an update. A measured loss is compiled, too."""
    network = build_network()
    optimizer = nn.Adam(network.trainable_params(), 0.01)
    settings = {"parallel": kind, "check_loss": "MS_JIT" in os.environ}
    model = Model(network, nn.MSELoss(), optimizer, accumulation_steps=2, **settings)
    data = NumpySlicesDataset(tuple(uneven_data(rank)), shuffle=False).batch(2)
    model.train(1, data, callbacks=list(callbacks))
    # This rank's part, past the stand-ins that checkpoints see.
    kept = [*optimizer.moment1, *optimizer.moment2, *buffer_of(model.train_network).get_parameters()]
    return network, fingerprint(network), fingerprint(kept)


results = {}
# Op by op, for which nothing is compiled; the one that moves most as graphs.
ms.set_context(mode=ms.PYNATIVE_MODE)
os.environ["MS_JIT"] = "0"
for name, kind in KINDS.items():
    path = folder / f"{name}.jsonl"
    if name.endswith("compiled"):
        del os.environ["MS_JIT"]
    updates, printed = Updates(), StringIO()
    logger = MetricsLogger(path, weight_norm=True)
    with redirect_stdout(printed):
        network, *observed = train(kind, logger, updates, ProgressBar(live=False))
    weights = [weight.asnumpy().astype("float64") for weight in network.trainable_params()]
    results[name] = {
        "observed": observed,
        "plain": train(kind)[1:],
        "updates": updates.numbers,
        "printed": printed.getvalue(),
        "norm": sum((weight**2).sum() for weight in weights) ** 0.5,
    }
report(rank, results)
