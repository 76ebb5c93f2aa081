"""What each process of `test_report.py` does: train with a logger that measures everything, and without one."""

import gc
import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import mindspore as ms
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import NumpySlicesDataset

sys.path.insert(0, str(Path(__file__).parent))
from launch import report  # noqa: E402
from scenarios import build_network, fingerprint, uneven_data  # noqa: E402

from ms_gradaccum import HSDP, DataParallel, MetricsLogger, Model, ProgressBar  # noqa: E402

gc.freeze()
init()
ms.set_context(mode=ms.GRAPH_MODE)
rank, size = get_rank(), get_group_size()
folder = Path(os.environ["REPORT_FOLDER"])
KINDS = {
    "data parallel": DataParallel(),
    "each batch": DataParallel(sync_each_batch=True),
    "level1": HSDP(threshold=0),
    "level2": HSDP(-1, 0, "level2"),
}


class Updates:
    """Notes the number of each update that this rank is told of."""

    def __init__(self):
        self.numbers = []

    def on_update_end(self, event):
        self.numbers.append(event.updates)


class UpdateCallback(ms.train.Callback, Updates):
    def __init__(self):
        ms.train.Callback.__init__(self)
        Updates.__init__(self)


def train(kind, *callbacks):
    """Rank 0 has three batches of two rows, the other two, and two make an update."""
    network = build_network()
    optimizer = nn.Adam(network.trainable_params(), 0.01)
    model = Model(network, nn.MSELoss(), optimizer, accumulation_steps=2, parallel=kind)
    data = NumpySlicesDataset(tuple(uneven_data(rank)), shuffle=False).batch(2)
    model.train(2, data, callbacks=list(callbacks))
    state = [item for item in optimizer.get_parameters() if item.name.startswith(("moment", "adam_m"))]
    return network, fingerprint(network), fingerprint(model.train_network.buffer), fingerprint_of(state)


def fingerprint_of(parameters):
    return [float(abs(item.asnumpy()).sum()) for item in parameters]


results = {}
for name, kind in KINDS.items():
    path = folder / f"{name}.jsonl"
    updates, printed = UpdateCallback(), StringIO()
    logger = MetricsLogger(path, weight_norm=True, communication_time=True)
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
