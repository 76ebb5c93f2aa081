"""Updates of many parameters, which the compiler takes for deep ones if they are looped over."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import sgd
from mindspore import Parameter, ParameterTuple, Tensor, nn
from open_window import buffer_of, window_of

from ms_gradaccum import Accumulator, ClipByGlobalNorm, ClipByGroupNorm, TrainOneStepCell
from ms_gradaccum.backend.tensors import chunks_of

MANY = 100
LIMIT = 1.0


class Wide(nn.Cell):
    """A loss cell of many small parameters, which is never run."""

    def __init__(self):
        super().__init__()
        self.parts = ParameterTuple(Parameter(Tensor([float(i)]), name=f"part{i}") for i in range(MANY))

    def construct(self, x):
        return x


@pytest.fixture(autouse=True)
def shallow():
    """Let the compiler give up early, so that a hundred parameters are many."""
    before = ms.get_context("max_call_depth")
    ms.set_recursion_limit(100)  # Of 1000, MindSpore's default.
    yield
    ms.set_recursion_limit(before)


@pytest.mark.parametrize("clip", [ClipByGlobalNorm(LIMIT), ClipByGroupNorm({"*": LIMIT})], ids=lambda c: str(c)[:13])
def test_an_update_of_many_parameters_is_compiled(clip):
    network = Wide()
    step = TrainOneStepCell(network, sgd(network, 0.5), clip=clip)
    sums = np.random.default_rng(0).standard_normal(MANY).astype(np.float32)
    for total, value in zip(buffer_of(step).sums, sums):
        total.set_data(Tensor([value]))
    buffer_of(step).weight.set_data(Tensor(4.0))
    ms.set_context(mode=ms.GRAPH_MODE)  # where what cannot be compiled is an error
    output = window_of(step).close()
    norm = np.linalg.norm(sums.astype(np.float64)) / 4
    assert norm > LIMIT
    assert float(output.grad_norm) == pytest.approx(norm)
    assert float(output.clipped_grad_norm) == pytest.approx(LIMIT, rel=1e-5)
    expected = np.arange(MANY) - 0.5 * sums / 4 * (LIMIT / norm)
    np.testing.assert_allclose([float(part.asnumpy()[0]) for part in network.parts], expected, rtol=1e-5)
    assert not any(total.asnumpy().any() for total in buffer_of(step).sums)


def test_many_gradients_are_added_unless_one_of_them_is_nan():
    network = Wide()
    accumulator = Accumulator(network, sgd(network, 0.5), 3, bad_micro_batch="drop")
    numbers = np.random.default_rng(0).standard_normal((3, MANY)).astype(np.float32)
    numbers[1, -1] = np.nan
    ms.set_context(mode=ms.GRAPH_MODE)
    for weight, gradient in zip((1.0, 2.0, 4.0), numbers):
        output = accumulator(tuple(Tensor([number]) for number in gradient), weight)
    assert output.is_updated and float(output.weight) == 5.0
    expected = np.arange(MANY) - 0.5 * (numbers[0] + 4 * numbers[2]) / 5
    np.testing.assert_allclose([float(part.asnumpy()[0]) for part in network.parts], expected, rtol=1e-5)


def test_runs_hold_all_tensors_and_balance_their_size_with_their_number():
    million = 2**20
    assert chunks_of([1] * 1000) == ((0, 1000),)
    assert chunks_of([million] * 3) == ((0, 1), (1, 2), (2, 3))
    assert chunks_of([3 * million, million, million, million, 2 * million]) == ((0, 1), (1, 4), (4, 5))
    for tensors, first, count in ((16, 2, 8), (128, 8, 16), (320, 12, 27), (3200, 100, 32)):
        runs = chunks_of([million] * tensors)
        assert runs[0] == (0, first) and len(runs) == count and runs[-1][1] == tensors
    assert chunks_of([]) == ()
