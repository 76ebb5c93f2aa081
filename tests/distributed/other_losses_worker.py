"""A process of `test_other_losses_of_ranks.py`: windows of several losses, on uneven rows."""

import os

import mindspore as ms
from described_messages import sizes_sent
from launch import meet, report
from mindspore import Tensor, nn, ops
from open_window import reducer_of
from scenarios import KINDS, ONE_SHAPE, batch, build_network, share

from ms_gradaccum import GradAccumulation, MixedPrecision, TrainOneStepCell

rank, size = meet()
WAYS = {name: {"parallel": kind} for name, kind in KINDS.items()}
WAYS["16-bit messages"] = {"mixed_precision": MixedPrecision(level="O0", init_scale=1.0, reduce_dtype="fp16")}


class Losses(nn.Cell):
    """The squared error, its root's mean, and the mean of the labels' squares."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.network = build_network()

    def construct(self, x, y):
        error = self.network(x) - y
        return ops.square(error).mean(), ops.abs(error).mean(), ops.square(y).mean()


def train(losses, with_counters=False, **settings):
    """A window of two batches; in the second one rank 1 has run out of data. Return its report and messages."""
    network = Losses()
    cell = GradAccumulation(network, 3, losses=losses) if losses else GradAccumulation(_First(network), 3)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    step = TrainOneStepCell(cell, optimizer, accumulation_steps=2, **settings)
    sent = sizes_sent(reducer_of(step)) if with_counters else []
    inside = step(*[Tensor(array) for array in share(batch(0), rank, size, ONE_SHAPE)])
    # As many rows as before, so that nothing is compiled anew.
    output = step.join() if rank else step(*[Tensor(array[:9]) for array in batch(1)])
    floats = [[float(loss.asnumpy()) for loss in each.other_losses] for each in (inside, output)]
    return {"inside": floats[0], "end": floats[1], "sent": sent}


class _First(nn.Cell):
    """The first loss alone."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, y):
        return self.network(x, y)[0]


# One is compiled; op by op the others take a tenth of the time.
COMPILED = "level2"
results = {COMPILED: train("first", compile=True, check_loss=False, **WAYS[COMPILED])}
ms.set_context(mode=ms.PYNATIVE_MODE)
os.environ["MS_JIT"] = "0"
results |= {name: train("first", **settings) for name, settings in WAYS.items() if name != COMPILED}
for name, losses in (("first", "first"), ("names", ("size", "label")), ("none", None)):
    results[f"messages {name}"] = train(losses, True)["sent"]
report(rank, results)
