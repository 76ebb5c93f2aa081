"""A network that looks rows up in a table has a gradient for these rows alone."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, nn, ops
from optimizer_parity import RowLoss, WholeBatch, accumulate, assert_like_whole_batch, assert_not_vacuous, batches
from refusal import told

from ms_gradaccum import Accumulator, TrainOneStepCell


class Lookup(nn.Cell):
    """Rows of a table; the tests' data are float32, so its indices are too."""

    def __init__(self, sparse):
        super().__init__()
        lookup = nn.EmbeddingLookup(6, 2, "ones", target="CPU", sparse=True)
        # The gradient of the other one is as large as the table.
        self.rows = lookup if sparse else nn.Embedding(6, 2, embedding_table="ones")

    def construct(self, x):
        return self.rows(ops.cast(x, ms.int32))


def adam_groups(network):
    """No decay of the table, but one of a parameter of a cell around it."""
    network.backbone.scale = Parameter(np.ones((2, 2), np.float32), "scale")
    groups = [{"params": [network.backbone.rows.embedding_table], "weight_decay": 0.0}]
    return nn.Adam([*groups, {"params": [network.backbone.scale]}], 0.05, weight_decay=0.1)


def adam(network):
    return nn.Adam(network.trainable_params(), 0.05, eps=1.0)


def test_the_gradient_of_a_sparse_lookup_trains_like_that_of_a_dense_one():
    # Not compared with the stock step on the same lookup, which fails in PYNATIVE mode and in GRAPH mode takes a row
    # that occurs twice for two rows.
    ids = np.array([0, 1, 1, 2, 3, 3, 3, 1, 4, 0, 2, 3])
    data = [(np.roll(ids, i), y, factor) for i, (_, y, factor) in enumerate(batches())]
    whole = WholeBatch(lambda: RowLoss(Lookup(sparse=False)), adam, data)
    assert_not_vacuous(whole, micro_size=4)
    for outputs, values in accumulate(lambda: RowLoss(Lookup(sparse=True)), adam, 4, [ms.GRAPH_MODE], data).values():
        assert_like_whole_batch(whole, outputs, values)


def decaying(network):
    return nn.Adam(network.trainable_params(), 0.05, weight_decay=0.1)


@pytest.mark.parametrize("build", (TrainOneStepCell, Accumulator))
@pytest.mark.parametrize(
    "sparse, optimizer, count", [(True, decaying, 1), (True, adam_groups, 0), (True, adam, 0), (False, decaying, 0)]
)
def test_a_weight_decay_of_rows_that_no_batch_reads_is_told(build, sparse, optimizer, count):
    """MindSpore adds it to the rows of the sparse gradient alone."""
    network = RowLoss(Lookup(sparse))
    with told("weight decay") as said:
        build(network, optimizer(network))
    assert len(said) == count
