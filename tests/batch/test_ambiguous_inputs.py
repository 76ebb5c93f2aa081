"""Inputs that are no batch: the error names them where the shapes cannot tell, and `verify` finds their loss."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import sgd
from mindspore import COOTensor, CSRTensor, Parameter, Tensor, nn, ops
from refusal import no_warning, refuses, told
from step_probe import keeping_step, sgd_step, tensors

from ms_gradaccum import GradAccumulation, TrainOneStepCell
from ms_gradaccum.advice.ambiguous_inputs import ambiguous_inputs

RANDOM = np.random.default_rng(3)
X, Y = RANDOM.normal(size=(4, 3)).astype(np.float32), RANDOM.normal(size=(4, 1)).astype(np.float32)


class Mixed(nn.Cell):
    """Multiplies the features with a mask whose length is, by chance, that of the batch."""

    def __init__(self):
        super().__init__()
        self.table = Parameter(Tensor(np.ones((3, 4), np.float32)), "table")

    def construct(self, x, mask, y):
        return ops.square(ops.matmul(ops.matmul(x, self.table), mask) - y).mean()


class Permuted(Mixed):
    def construct(self, x, order, y):
        return ops.square(ops.matmul(ops.gather(x, order, 0), self.table) - y).mean()


def test_an_error_of_indices_names_those_that_may_be_split_by_mistake(eager):
    step = keeping_step(Permuted(), 2)
    with pytest.raises(Exception) as raised:
        step(*tensors(X, np.int32([2, 3, 0, 1]), Y))
    first, second = str(raised.value).splitlines()[:2]
    assert "indices" in first and second == (
        "For 'GradAccumulation', an input may be split by mistake, because its shape does not show whether it is a "
        "batch: 'order' of shape (4,). Give None in batch_axis for an input that is not a batch."
    )


def test_an_error_that_no_split_can_have_made_stays_as_it_is(eager):
    for micro_size, mask in ((1, np.ones((3, 4), np.float32)), (2, np.ones((4, 3), np.float32))):
        step = keeping_step(Mixed(), micro_size, batch_axis=(0, None if micro_size == 1 else 0, 0))
        with pytest.raises(Exception) as raised:
            step(*tensors(X, mask, Y))
        assert "split by mistake" not in str(raised.value)


@pytest.mark.parametrize(
    ("shapes", "axis", "expected"),
    [
        ([(4, 3), (4, 4), (4, 1)], 0, [1]),
        ([(4, 3), (4, 2, 4)], 0, [1]),
        ([(4, 3), (4, 4)], (0, None), []),
        ([(3, 4), (4, 4)], (1, 0), [1]),
        ([(4, 3), (4,)], 0, [1]),
        ([(1, 1), (1,)], 0, []),
        ([(4, 3), ()], 0, []),
    ],
)
def test_what_is_ambiguous(shapes, axis, expected):
    inputs = tuple(Tensor(np.ones(shape, np.float32)) for shape in shapes)
    assert ambiguous_inputs(inputs, axis) == expected


def test_labels_are_no_vector_of_something_else():
    labels = np.zeros(4, np.int32)
    assert ambiguous_inputs((Tensor(X), Tensor(labels), labels, labels.astype(np.float32)), 0) == [3]


SPARSE = {
    "CSRTensor": CSRTensor(Tensor([0, 1, 1, 1, 1], ms.int32), Tensor([2], ms.int32), Tensor([1.0]), (4, 4)),
    "COOTensor": COOTensor(Tensor([[0, 2]], ms.int32), Tensor([1.0]), (4, 4)),
}


@pytest.mark.parametrize("kind", SPARSE)
def test_a_sparse_tensor_is_refused_by_its_place(kind, eager):
    with refuses(TypeError, f"a {kind} in input[1]"):
        keeping_step(Mixed(), 2)(Tensor(X), SPARSE[kind], Tensor(Y))


class AnyInputs(nn.Cell):
    def __init__(self, recurrent=None):
        super().__init__()
        self.net, self.recurrent = nn.Dense(3, 1), recurrent

    def construct(self, x, targets=None):
        x = x["x"] if isinstance(x, dict) else x
        return (self.net(x) if self.recurrent is None else self.recurrent(x)[0]).mean()


def warnings_of(*inputs, micro_size=4, cell=None, **settings):
    cell, said = cell or AnyInputs(), []
    loss_cell = GradAccumulation(cell, micro_size, **settings)
    for _ in range(2):
        step = TrainOneStepCell(loss_cell, sgd(cell), check_loss=False).set_train()
        with told("'GradAccumulation'") as texts:
            for _ in range(2):
                step(*inputs)
        said.append(texts)
        del step
    assert said[0] == said[1]
    return said[0]


IF_OF_ROWS = (
    "For 'GradAccumulation', the input {} seems to have an item per row, but got {}. Make it a tensor, or give "
    "batch_axis an entry per input, None for this one."
)
WHOLE = "a list of 8, which goes whole into each micro batch"
CUT = "a list of 8, each of which is cut along its axis 0"
EIGHT = np.ones((8, 3), np.float32)
OF_ROWS = {
    "numbers": ((EIGHT, [1.0] * 8), "'targets'", WHOLE),
    "in a dict": (({"x": EIGHT, "y": [1.0] * 8},), "input[0]['y']", WHOLE),
    "of NumPy": ((EIGHT, list(EIGHT[:, 0])), "'targets'", WHOLE),
    "dicts": ((EIGHT, [{"class": 1}] * 8), "'targets'", WHOLE),
    "tensors without axes": ((EIGHT, [Tensor(1.0)] * 8), "'targets'", WHOLE),
    "the same in a tuple": ((EIGHT, (Tensor(1.0),) * 8), "'targets'", WHOLE.replace("list", "tuple")),
    "boxes": ((EIGHT, [np.ones((8, 4), np.float32)] * 8), "'targets'", CUT),
    "boxes in dicts": (
        (EIGHT, [{"boxes": np.ones((8, 4), np.float32), "classes": np.ones(8, np.int32)}] * 8),
        "'targets'",
        CUT,
    ),
}


@pytest.mark.parametrize("case", OF_ROWS)
def test_lists_with_an_item_per_row_are_named(case, eager):
    inputs, place, got = OF_ROWS[case]
    assert warnings_of(*inputs) == [IF_OF_ROWS.format(place, got)]


@pytest.mark.parametrize(
    "targets, axis",
    [
        ([1.0] * 5, 0),
        ((1.0,) * 8, 0),
        ([1.0] * 8, (0, None)),
        ([Tensor(1.0)] * 8, (0, None)),
        ([EIGHT] * 2, 0),
        ((EIGHT,) * 8, 0),
        ([EIGHT] * 8, (0, 0)),
        ([], 0),
    ],
)
def test_other_lists_are_not(targets, axis, eager):
    assert warnings_of(EIGHT, targets, batch_axis=axis) == []


def test_targets_of_different_lengths_are_refused_with_the_way_out(eager):
    boxes = [np.ones((length, 4), np.float32) for length in range(1, 9)]
    with refuses(ValueError, "batch_axis one axis"):
        warnings_of(EIGHT, boxes)


@pytest.mark.parametrize("rows, words", [(1, "1 row"), (8, "8 rows")])
def test_more_micro_batches_than_rows_are_named_once(rows, words, eager):
    (said,) = warnings_of(EIGHT[:rows], micro_size=16)
    assert f"micro_size=16 exceeds the {words} of the batch" in said


def test_as_many_micro_batches_as_rows_and_a_short_last_batch_are_not_named(eager):
    assert warnings_of(EIGHT, micro_size=8) == []
    step = sgd_step(AnyInputs(), 8).set_train()
    with no_warning():
        for rows in (8, 3, 1):
            step(Tensor(EIGHT[:rows]))


TIMES = np.random.default_rng(0).normal(size=(8, 8, 3)).astype(np.float32)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_times_that_are_as_many_as_rows_are_named(kind, eager):
    (said,) = warnings_of(TIMES, cell=AnyInputs(kind(3, 2)))
    assert f"on axis 1 for {kind.__name__} with batch_first=False, but got 'x' of shape (8, 8, 3)" in said
    assert warnings_of(TIMES, cell=AnyInputs(kind(3, 2)), batch_axis=1) == []
    assert warnings_of(TIMES, cell=AnyInputs(kind(3, 2, batch_first=True))) == []
    assert warnings_of(TIMES[:6], cell=AnyInputs(kind(3, 2))) == []
