"""Messages of many tensors are put together and cut, in one process: those of one size together, each in its place."""

from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from built_for import built_for
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum.parallel import collectives
from ms_gradaccum.parallel.collectives import AllReduce, AssignParts, Group, of_bucket
from ms_gradaccum.parallel.kinds import DataParallel, World
from ms_gradaccum.parallel.layout import layout_of


def messages_of(tensors):
    """Return the messages of tensors that are whole on each rank."""
    return layout_of(DataParallel(), tensors, World(0, 1), (), [ms.float32] * len(tensors)).replicated


class PutTogetherAndCut(nn.Cell):
    """Assign what is cut out of one message per bucket to parameters of the same sizes."""

    def __init__(self, buckets, targets):
        super().__init__()
        self.assign = nn.CellList([AssignParts(targets, bucket) for bucket in buckets])

    def construct(self, messages):
        done = ()
        for number, message in enumerate(messages):
            done += self.assign[number](message)
        return done


@pytest.mark.parametrize(
    "shapes",
    [[(2, 3), (6,), (4,), (3, 2), (4, 1), (5,)], [(4,)] * 5, [(1,), (2,), (3,)], [()]],
    ids=["mixed", "one size", "all sizes differ", "a scalar"],
)
def test_each_tensor_comes_back_to_its_place(shapes, mode):
    sent = [Parameter(np.full(shape, i, np.float32), f"p{i}") for i, shape in enumerate(shapes)]
    targets = [Parameter(np.full(shape, -1.0, np.float32)) for shape in shapes]
    replicated = messages_of(sent)
    rows = [[item.asnumpy().reshape(1, -1) for item in of_bucket(sent, bucket)] for bucket in replicated]
    PutTogetherAndCut(replicated, targets)(tuple(Tensor(np.concatenate(each, axis=1)) for each in rows))
    for item, target in zip(sent, targets):
        np.testing.assert_array_equal(target.asnumpy(), item.asnumpy())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(10, 200))
def test_cuts_are_neighbours_of_one_size_and_leave_nothing_out(sizes, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ms_gradaccum.parallel.layout.BUCKET_SIZE", limit)
        replicated = messages_of([Parameter(np.zeros(size, np.float32)) for size in sizes])
    assert sorted(i for bucket in replicated for i in bucket.indices) == list(range(len(sizes)))
    for bucket, _, cuts in replicated:
        begins = np.cumsum([0, *(sizes[i] for i in bucket)])
        end = begins[-1]
        assert end <= limit or len(bucket) == 1
        # NumPy cuts the message where the tensors begin, as the runs do.
        expected = np.split(np.arange(end), begins[1:-1])
        begins, lengths, counts = cuts
        runs = [np.arange(begin, begin + length) for begin, length in zip(begins, lengths)]
        parts = [part for run, count in zip(runs, counts) for part in np.split(run, count)]
        assert [list(part) for part in parts] == [list(part) for part in expected]
        assert len({length // count for length, count in zip(lengths, counts)}) == len(counts)


class Parts(nn.Cell):
    """Stands in for a ReduceScatter of three equal ranks, as the sums of all parts, or for the AllGather of these."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def construct(self, values):
        return values.reshape(3, -1).reshape(-1) * self.factor


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3,), (7,), (1, 5), (2, 3)], ids=str)
def test_on_a_gpu_no_graph_has_an_all_reduce(shape, mode, monkeypatch):
    """MindSpore 2.10 would put several of them on another stream, where they do not wait for what they send."""
    kinds = {
        "AllReduce": lambda group: None,
        "ReduceScatter": lambda group: Parts(3.0),
        "AllGather": lambda group: Parts(1.0),
    }
    monkeypatch.setattr(collectives, "ops", SimpleNamespace(**{**vars(ops), **kinds}))
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    with built_for("GPU"):
        total = AllReduce(Group(3, World(0, 3)))(Tensor(values))
    assert total.shape == shape
    np.testing.assert_allclose(total.asnumpy(), 3 * values, rtol=1e-6)
