"""A network that looks rows up in a table has a gradient for these rows alone."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, nn, ops
from optimizer_parity import RowLoss, WholeBatch, accumulate, assert_like_whole_batch, assert_not_vacuous, batches
from refusal import warns

from ms_gradaccum import Accumulator, TrainOneStepCell


class Gather(nn.Cell):
    """A lookup whose gradient is as large as the table."""

    def __init__(self):
        super().__init__()
        self.embedding_table = Parameter(ops.ones((6, 2)), "embedding_table")

    def construct(self, ids):
        return ops.gather(self.embedding_table, ids, 0)


class Lookup(nn.Cell):
    """Rows of a table; the tests' data are float32, so its indices are too."""

    def __init__(self, sparse):
        super().__init__()
        self.rows = nn.EmbeddingLookup(6, 2, "ones", target="CPU", sparse=True) if sparse else Gather()

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


@pytest.mark.parametrize("build", (TrainOneStepCell, Accumulator))
def test_a_weight_decay_of_rows_that_no_batch_reads_is_told(build):
    """MindSpore adds it to the rows of the sparse gradient alone."""
    network = RowLoss(Lookup(sparse=True))
    with warns("weight decay"):
        build(network, nn.Adam(network.trainable_params(), 0.05, weight_decay=0.1))


@pytest.mark.parametrize("sparse, optimizer", [(True, adam_groups), (True, adam), (False, None)])
def test_nothing_is_told_where_the_decay_is_that_of_mindspore(sparse, optimizer, recwarn):
    network = RowLoss(Lookup(sparse))
    optimizer = optimizer or (lambda network: nn.Adam(network.trainable_params(), 0.05, weight_decay=0.1))
    TrainOneStepCell(network, optimizer(network))
    assert not [each for each in recwarn if "weight decay" in str(each.message)]
