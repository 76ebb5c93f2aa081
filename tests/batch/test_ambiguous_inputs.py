"""Inputs that are no batch: the error and `verify` name them where the shapes cannot tell."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import whole
from mindspore import COOTensor, CSRTensor, Parameter, Tensor, nn, ops
from step_probe import KeepGradients, keeping_step, number, tensors

from ms_gradaccum import GradAccumulation, TrainOneStepCell, verify
from ms_gradaccum.batch.split import ambiguous_inputs

RANDOM = np.random.default_rng(3)
X, Y = RANDOM.normal(size=(4, 3)).astype(np.float32), RANDOM.normal(size=(4, 1)).astype(np.float32)
MASK = np.triu(np.ones((4, 4), np.float32)) + 0.5


class Mixed(nn.Cell):
    """Multiplies the features with a mask whose length is, by chance, that of the batch."""

    def __init__(self):
        super().__init__()
        self.table = Parameter(Tensor(np.ones((3, 4), np.float32)), "table")

    def construct(self, x, mask, y):
        return ops.square(ops.matmul(ops.matmul(x, self.table), mask) - y).mean()


class Scaled(Mixed):
    """Uses the mask in a way that a part of it does not break."""

    def construct(self, x, mask, y):
        return ops.square(ops.matmul(x, self.table) * ops.sqrt(mask.sum()) - y).mean()


HINT = (
    "For 'GradAccumulation', the split may be at fault, where no shape shows what the batch is: 'mask' of shape "
    "(4, 4). What is no batch needs None in batch_axis."
)


def test_an_error_of_a_network_names_the_inputs_that_may_be_no_batch(mode):
    step = keeping_step(Mixed(), 2)
    with pytest.raises(Exception) as raised:
        step(*tensors(X, MASK, Y))
    first, second = str(raised.value).splitlines()[:2]
    assert "must be equal" in first and second == HINT
    # The way out gives the gradient of the whole batch.
    network = Mixed()
    step = keeping_step(network, 2, batch_axis=(0, None, 0))
    step(*tensors(X, MASK, Y))
    expected = ops.grad(network, None, network.trainable_params())(*tensors(X, MASK, Y))
    np.testing.assert_allclose(step.optimizer.gradients()[0], expected[0].asnumpy(), rtol=1e-4)


class Permuted(Mixed):
    """Takes the order of the rows as an input."""

    def construct(self, x, order, y):
        return ops.square(ops.matmul(ops.gather(x, order, 0), self.table) - y).mean()


def test_an_error_of_indices_names_those_that_may_be_split_by_mistake(eager):
    step = keeping_step(Permuted(), 2)
    with pytest.raises(Exception) as raised:
        step(*tensors(X, np.int32([2, 3, 0, 1]), Y))
    first, second = str(raised.value).splitlines()[:2]
    assert "indices" in first and second == HINT.replace("'mask' of shape (4, 4)", "'order' of shape (4,)")


def test_an_error_that_no_split_can_have_made_stays_as_it_is(eager):
    for micro_size, mask in ((1, MASK[:3]), (2, RANDOM.normal(size=(4, 3)).astype(np.float32))):
        step = keeping_step(Mixed(), micro_size, batch_axis=(0, None if micro_size == 1 else 0, 0))
        with pytest.raises(Exception) as raised:
            step(*tensors(X, mask, Y))
        assert "the split may be at fault" not in str(raised.value)


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


def test_verify_names_the_input_that_is_no_batch(eager):
    report = verify(Scaled(), tensors(X, MASK, Y), 2)
    assert not report.equal
    assert report.causes == (
        "An input that is no batch and is split like one: with 'mask' of shape (4, 4) whole in each micro batch, the "
        "gradients are equal. Give it None in batch_axis.",
    )
    assert verify(Scaled(), tensors(X, MASK, Y), 2, batch_axis=(0, None, 0)).equal


def test_verify_does_not_lay_another_cause_to_the_shape(eager):
    class Sum(Mixed):
        def construct(self, x, mask, y):
            return ops.square(ops.matmul(x, self.table) * mask - y).sum()

    (cause,) = verify(Sum(), tensors(X, MASK, Y), 2).causes
    assert cause.startswith("A sum where a mean is expected")


SPARSE = {
    "CSRTensor": CSRTensor(Tensor([0, 1, 1, 1, 1], ms.int32), Tensor([2], ms.int32), Tensor([1.0]), (4, 4)),
    "COOTensor": COOTensor(Tensor([[0, 2]], ms.int32), Tensor([1.0]), (4, 4)),
}


@pytest.mark.parametrize("kind", SPARSE)
def test_a_sparse_tensor_is_refused_by_its_place(kind, eager):
    text = (
        f"For 'GradAccumulation', the inputs must be dense tensors, but got a {kind} in input[1]. Give it dense, as of "
        "to_dense(), with None in batch_axis if it is not split, or its parts one by one."
    )
    network = Mixed()
    step = TrainOneStepCell(GradAccumulation(network, 2), KeepGradients(network.trainable_params()))
    with pytest.raises(TypeError, match=whole(text)):
        step(Tensor(X), SPARSE[kind], Tensor(Y))


def test_a_sparse_tensor_that_was_made_dense_trains(eager):
    step = keeping_step(Mixed(), 2, batch_axis=(0, None, 0))
    assert number(step(Tensor(X), SPARSE["COOTensor"].to_dense(), Tensor(Y)).weight) == 4
