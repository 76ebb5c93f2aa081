"""Reports of several processes: what is measured changes nothing, and one rank writes."""

import json
from contextlib import redirect_stdout
from io import StringIO

import mindspore as ms
import numpy as np
from mindspore import nn
from open_window import buffer_of
from ranks import RANK, assert_same, folder, on_ranks, own_data
from scenarios import KINDS, build_network, fingerprint
from step_probe import Listener

from ms_gradaccum import MetricsLogger, Model, ProgressBar


def train(kind, callbacks):
    """Rank 0 has three batches of two rows, the other two, and two make an update."""
    network = build_network()
    optimizer = nn.Adam(network.trainable_params(), 0.01)
    model = Model(network, nn.MSELoss(), optimizer, accumulation_steps=2, parallel=kind)
    model.train(1, own_data(), callbacks=callbacks)
    # This rank's part, past the stand-ins that checkpoints see.
    kept = [*optimizer.moment1, *optimizer.moment2, *buffer_of(model.train_network).get_parameters()]
    return network, fingerprint(network), fingerprint(kept)


@on_ranks(2, cases=["each batch", "level1"], compiled=True)
def test_what_is_measured_changes_no_bit_and_rank_0_alone_writes(name):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    kind, path, updates, printed, calls = KINDS[name], folder() / f"{name}.jsonl", Listener(), StringIO(), []
    logger = MetricsLogger(path, lambda *args: calls.append(args), weight_norm=True)
    with redirect_stdout(printed):
        network, *observed = train(kind, [logger, updates, ProgressBar(live=False)])
    _, *plain = train(kind, [])
    assert_same(observed[0])
    assert observed == plain
    # Of three batches on rank 0 and two on rank 1 the third is a window of its own: rank 0 ends it, and both are told.
    assert updates.ends() == [(1, 0), (2, 0)]
    if RANK:
        assert printed.getvalue() == "" and calls == []
        return
    assert "2 updates" in printed.getvalue()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2]
    squares = [np.square(weight.asnumpy().astype("float64")).sum() for weight in network.trainable_params()]
    np.testing.assert_allclose(lines[-1]["weight_norm"], np.sqrt(sum(squares)), 1e-6)
