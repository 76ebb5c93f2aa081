"""Splitting one batch into micro batches."""

from typing import NamedTuple

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor
from tiers import share_of

from ms_gradaccum.batch.split import check_batch_axis, split_batch, split_shapes


def table(rows, columns=2):
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


def parts(inputs, micro_size, batch_axis=0):
    """The arrays of each micro batch, as the network gets them."""
    split = split_batch(inputs, micro_size, batch_axis)
    return [[tensor.asnumpy() for tensor in tensors] for _, tensors in split.micro_batches]


@settings(max_examples=share_of(30), deadline=None)
@given(rows=st.integers(1, 60), micro_size=st.integers(1, 70))
def test_every_row_is_in_one_micro_batch_and_sizes_differ_by_at_most_one(rows, micro_size):
    batch = table(rows)
    micro_batches = split_batch((Tensor(batch),), micro_size, 0).micro_batches
    sizes = [micro_batch.rows for micro_batch in micro_batches]
    assert len(sizes) == min(micro_size, rows) and sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    pieces = [tensors[0].asnumpy() for _, tensors in micro_batches]
    assert [len(piece) for piece in pieces] == sizes
    np.testing.assert_array_equal(np.concatenate(pieces), batch)
    # A graph cuts at the same rows.
    ends = np.cumsum(sizes).tolist()
    assert split_shapes(((rows, 2),), 0, micro_size) == ((0,), tuple(zip([0, *ends[:-1]], ends)))


@pytest.mark.parametrize("dtype", [ms.float16, ms.float32, ms.float64, ms.int8, ms.int32, ms.int64, ms.bool_])
def test_values_and_dtype_stay_as_they_are(dtype):
    batch = Tensor(table(5), dtype)
    for begin, (_, (part,)) in zip((0, 3), split_batch((batch,), 2, 0).micro_batches):
        assert part.dtype == dtype
        np.testing.assert_array_equal(part.asnumpy(), batch.asnumpy()[begin : begin + part.shape[0]])


def test_bfloat16_is_split_too():
    parts = split_batch((Tensor(table(3), ms.bfloat16),), 2, 0).micro_batches
    assert [tensors[0].dtype for _, tensors in parts] == [ms.bfloat16] * 2
    values = [tensors[0].astype(ms.float32).asnumpy() for _, tensors in parts]
    np.testing.assert_array_equal(np.concatenate(values), table(3))


def test_rows_are_not_copied_on_cpu():
    batch = Tensor(table(6))
    for (part,) in parts((batch,), 3):
        assert np.shares_memory(part, batch.asnumpy())


def test_a_batch_that_is_not_split_is_passed_on_itself():
    batch = Tensor(table(6))
    ((rows, (part,)),) = split_batch((batch,), 1, 0).micro_batches
    assert part is batch and rows == 6


@pytest.mark.parametrize("axis", [1, -1])
def test_rows_may_be_on_another_axis(axis):
    batch = np.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(parts((batch,), 2, axis), [[batch[:, :2]], [batch[:, 2:]]])


def test_negative_axes_count_from_the_end_of_each_input():
    short, long = np.arange(4), np.arange(24).reshape(2, 3, 4)
    for index, (first, second) in enumerate(parts((short, long), 2, -1)):
        rows = slice(2 * index, 2 * index + 2)
        np.testing.assert_array_equal(first, short[rows])
        np.testing.assert_array_equal(second, long[..., rows])


def test_an_input_without_a_batch_axis_goes_whole_into_each_micro_batch():
    batch, table_of_all = table(4), table(3)
    for rows, (x, whole) in zip((slice(0, 2), slice(2, 4)), parts((batch, table_of_all), 2, (0, None))):
        np.testing.assert_array_equal(x, batch[rows])
        np.testing.assert_array_equal(whole, table_of_all)


class Pair(NamedTuple):
    left: object
    right: object


def nested(rows):
    """Nested inputs whose leaves all have rows on axis 0, except the first dict's "wide", on axis 1."""
    return ({"x": table(rows), "wide": table(rows).T}, [table(rows, 1), (table(rows, 3),)], Pair(table(rows), 0.5))


AXES = [
    ({"x": 0, "wide": 1}, 0, 0),
    [{"x": 0, "wide": -1}, [0, (0,)], (0, None)],
    ({"wide": 1, "x": 0}, (0, 0), Pair(0, 0)),
]


@pytest.mark.parametrize("axes", AXES)
def test_nested_inputs_are_split_and_put_together_again(axes):
    structure, micro_batches, *_ = split_batch(nested(5), 2, check_batch_axis(axes))
    for rows, (count, tensors) in zip((slice(0, 3), slice(3, 5)), micro_batches):
        named, listed, pair = structure.as_cell().construct(tensors)
        assert count == rows.stop - rows.start and list(named) == ["x", "wide"]
        np.testing.assert_array_equal(named["x"].asnumpy(), table(5)[rows])
        np.testing.assert_array_equal(named["wide"].asnumpy(), table(5).T[:, rows])
        assert isinstance(listed, list) and isinstance(listed[1], tuple)
        np.testing.assert_array_equal(listed[0].asnumpy(), table(5, 1)[rows])
        np.testing.assert_array_equal(listed[1][0].asnumpy(), table(5, 3)[rows])
        assert isinstance(pair, Pair) and pair.right == 0.5
        np.testing.assert_array_equal(pair.left.asnumpy(), table(5)[rows])


def structure_of(*inputs):
    return split_batch((table(2), *inputs), 2, 0).structure


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


def test_numbers_without_axes_are_not_split():
    for x, scalar in parts((table(4), np.array(3, np.float32)), 2):
        assert x.shape == (2, 2) and scalar.shape == () and scalar == 3
