"""A process of `test_micro_tokens_of_ranks.py`: other numbers of micro batches than on the other rank.

They have so many tokens at most, or one rank runs out of memory.
"""

from launch import meet, report
from micro_token_scenarios import LIMIT, LONG, RATE, START, rows_of
from mindspore import Tensor, nn
from scenarios import KINDS

from ms_gradaccum import GradAccumulation, TokenMeanLoss, TrainOneStepCell

rank, _ = meet(eager=True)


def labels_of(x, labels):
    return labels != -100


def build(kind):
    network = nn.Dense(3, 4, Tensor(START), has_bias=False)
    accumulation = GradAccumulation(TokenMeanLoss(network), micro_tokens=LIMIT, lengths=labels_of)
    optimizer = nn.SGD(network.trainable_params(), RATE)
    return network, TrainOneStepCell(accumulation, optimizer, parallel=kind, check_loss=False)


def train(kind):
    network, step = build(kind)
    batch = [Tensor(each) for each in rows_of(rank)]
    parts = len(step.network.split(*batch).micro_batches)
    output = step(*batch)
    return network.weight.asnumpy().tolist(), float(output.loss), float(output.weight), parts


def refused(kind):
    """A row that is too long on one rank: its error, and the window that all ranks discard."""
    network, step = build(kind)
    said = ""
    output = None
    try:
        output = step(*[Tensor(each) for each in rows_of(rank, LONG)])
    except ValueError as error:
        said = str(error)
    is_updated = output is not None and output.is_updated
    after = step(*[Tensor(each) for each in rows_of(rank)])
    return said, is_updated, network.weight.asnumpy().tolist(), float(after.weight)


class Limited(nn.Cell):
    """A network that lacks memory for more than two rows on rank 1."""

    def __init__(self):
        super().__init__()
        self.head = nn.Dense(3, 4, Tensor(START), has_bias=False)

    def construct(self, x):
        if rank == 1 and x.shape[0] > 2:
            raise RuntimeError("Allocate output memory failed, alloc node:BiasAdd")
        return self.head(x)


def without_memory(kind):
    network = Limited()
    optimizer = nn.SGD(network.trainable_params(), RATE)
    accumulation = GradAccumulation(TokenMeanLoss(network), "auto")
    step = TrainOneStepCell(accumulation, optimizer, parallel=kind, check_loss=False)
    said = ""
    try:
        step(*[Tensor(each) for each in rows_of(rank)])
    except RuntimeError as error:
        said = str(error)
    return network.head.weight.asnumpy().tolist(), said, accumulation.micro_size


results = {name: train(kind) for name, kind in KINDS.items()}
results |= {f"refused, {name}": refused(KINDS[name]) for name in ("data parallel", "level2")}
results |= {f"memory, {name}": without_memory(KINDS[name]) for name in ("data parallel", "level1", "level2")}
report(rank, results)
