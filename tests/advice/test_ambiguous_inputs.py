"""Inputs that are no batch: the error names them where the shapes cannot tell, and the measurement finds their loss."""

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


class PerRow(nn.Cell):
    """Compares each row with its item of a list."""

    def __init__(self):
        super().__init__()
        self.net = nn.Dense(3, 1)

    def construct(self, x, targets):
        predicted, loss = self.net(x), 0.0
        for i in range(predicted.shape[0]):
            target = targets[i]
            target = target["boxes"] if isinstance(target, dict) else target
            loss += ops.square(predicted[i] - target).mean()
        return loss / predicted.shape[0]


class Stacked(PerRow):
    def construct(self, x, targets):
        return ops.square(self.net(x)[:, 0] - ops.stack(targets)).mean()


class Recurrent(nn.Cell):
    def __init__(self, kind, **settings):
        super().__init__()
        self.net = kind(3, 2, **settings)

    def construct(self, x):
        return ops.square(self.net(x)[0]).mean()


class Masked(PerRow):
    """Attention of each row, with a mask that is as long as the batch."""

    def construct(self, x, mask):
        scores = ops.softmax(ops.matmul(x, x.swapaxes(1, 2)) + mask, -1)
        return ops.square(self.net(ops.matmul(scores, x))).mean()


EIGHT = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
TIMES = np.random.default_rng(0).normal(size=(8, 8, 3)).astype(np.float32)
BOXES = [Tensor(each) for each in np.random.default_rng(2).normal(size=(8, 8, 4)).astype(np.float32)]
SCALARS = [Tensor(float(i)) for i in range(8)]
OF_ROWS = {
    "numbers": (PerRow, (EIGHT, [float(i) for i in range(8)]), 4, "is not the mean"),
    "numbers of NumPy": (PerRow, (EIGHT, list(EIGHT[:, 0])), 4, "is not the mean"),
    "boxes": (PerRow, (EIGHT, BOXES), 4, "is not the mean"),
    "boxes in dicts": (PerRow, (EIGHT, [{"boxes": each} for each in BOXES]), 8, "is not the mean"),
    "scalars for single rows": (Stacked, (EIGHT, SCALARS), 8, "takes 1 row, but not 2"),
    "a mask that is cut into single rows": (Masked, (TIMES, np.eye(8, dtype=np.float32)), 8, "takes 1 row, but not 2"),
    "times in place of rows": (lambda: Recurrent(nn.GRU), (TIMES,), 4, "is not the mean"),
}


@pytest.mark.parametrize("case", OF_ROWS)
def test_what_is_not_cut_with_its_rows_is_measured(case, mode):
    make, inputs, micro_size, key = OF_ROWS[case]
    cell = make()
    step = TrainOneStepCell(GradAccumulation(cell, micro_size), sgd(cell)).set_train()
    with told("'GradAccumulation'") as texts:
        for _ in range(2):
            step(*inputs)
    (text,) = texts
    assert key in text


def test_scalars_for_the_whole_batch_fit_no_part_of_it(mode):
    with refuses(Exception, "takes only the 8 rows of the batch"):
        sgd_step(Stacked(), 4)(Tensor(EIGHT), SCALARS)


def test_rows_on_the_axis_that_is_cut_are_right(mode):
    for cell, axis in ((Recurrent(nn.GRU), 1), (Recurrent(nn.GRU, batch_first=True), 0)):
        step = TrainOneStepCell(GradAccumulation(cell, 4, batch_axis=axis), sgd(cell)).set_train()
        with no_warning():
            step(Tensor(TIMES))


def test_targets_of_different_lengths_are_refused_with_the_way_out(eager):
    boxes = [np.ones((length, 4), np.float32) for length in range(1, 9)]
    with refuses(ValueError, "batch_axis one axis"):
        sgd_step(PerRow(), 4)(Tensor(EIGHT), boxes)


class AnyRows(PerRow):
    def construct(self, x):
        return self.net(x).mean()


@pytest.mark.parametrize("rows, words", [(1, "1 row"), (8, "8 rows")])
def test_more_micro_batches_than_rows_are_named_once(rows, words, eager):
    step = sgd_step(AnyRows(), 16).set_train()
    with told("'GradAccumulation'") as texts:
        for _ in range(2):
            step(Tensor(EIGHT[:rows]))
    (text,) = texts
    assert f"micro_size=16 exceeds the {words} of the batch" in text


def test_as_many_micro_batches_as_rows_and_a_short_last_batch_are_not_named(eager):
    step = sgd_step(AnyRows(), 8).set_train()
    with no_warning():
        for rows in (8, 3, 1):
            step(Tensor(EIGHT[:rows]))
