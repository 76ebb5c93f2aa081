"""Splitting one batch into micro batches."""

import mindspore as ms
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor, nn
from step_probe import Of
from tiers import share_of

from ms_gradaccum import GradAccumulation
from ms_gradaccum.batch.split import split_shapes


def table(rows, columns=2):
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


def split(*inputs, micro_size=2):
    return GradAccumulation(Of(nn.Identity(), None), micro_size).split(*inputs)


@settings(max_examples=share_of(30), deadline=None)
@given(rows=st.integers(1, 60), micro_size=st.integers(1, 70))
def test_every_row_is_in_one_micro_batch_and_sizes_differ_by_at_most_one(rows, micro_size):
    batch = table(rows)
    micro_batches = split(Tensor(batch), micro_size=micro_size).micro_batches
    sizes = [micro_batch.rows for micro_batch in micro_batches]
    assert len(sizes) == min(micro_size, rows) and sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    pieces = [tensors[0].asnumpy() for _, tensors in micro_batches]
    assert [len(piece) for piece in pieces] == sizes
    np.testing.assert_array_equal(np.concatenate(pieces), batch)
    # A graph cuts at the same rows.
    ends = np.cumsum(sizes).tolist()
    assert split_shapes(((rows, 2),), 0, micro_size) == ((0,), tuple(zip([0, *ends[:-1]], ends)))


def test_bfloat16_is_split_too():
    parts = split(Tensor(table(3), ms.bfloat16)).micro_batches
    assert [tensors[0].dtype for _, tensors in parts] == [ms.bfloat16] * 2
    values = [tensors[0].astype(ms.float32).asnumpy() for _, tensors in parts]
    np.testing.assert_array_equal(np.concatenate(values), table(3))


def test_rows_are_not_copied_on_cpu_and_a_batch_that_is_not_split_is_passed_on_itself():
    batch = Tensor(table(6))
    for _, (part,) in split(batch, micro_size=3).micro_batches:
        assert np.shares_memory(part.asnumpy(), batch.asnumpy())
    ((rows, (part,)),) = split(batch, micro_size=1).micro_batches
    assert part is batch and rows == 6


def structure_of(*inputs):
    return split(table(2), *inputs).structure


def test_inputs_share_a_structure_if_a_graph_can_take_both():
    # Lengths may differ: the graph is compiled for them, or for lengths that change.
    assert structure_of(table(2)) == structure_of(table(2, 7))
    assert hash(structure_of(table(2))) == hash(structure_of(table(2, 7)))
    # Python values are part of the graph, and so are dtypes and numbers of axes.
    for same in (1, 1.5, "a", None, True, (1, 2), {"a": 1}, float("nan"), {1, 2}):
        assert structure_of(same) == structure_of(same)
    different = [table(2), table(2).astype(np.int32), table(2)[0], 1, 2, 1.0, True, None, "a", (1,), [1], {"a": 1}]
    structures = [structure_of(item) for item in different]
    assert len(set(structures)) == len(structures)
