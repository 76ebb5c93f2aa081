"""Updates of many parameters, which the compiler takes for deep ones if they are looped over."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn

from ms_gradaccum import ClipByGlobalNorm, ClipByGroupNorm, TrainOneStepCell
from ms_gradaccum.compiled import execution_mode
from ms_gradaccum.runs import runs_of

MANY = 400
LIMIT = 3.0


class Wide(nn.Cell):
    """A loss cell of many small parameters, which is never run."""

    def __init__(self):
        super().__init__()
        self.parts = ParameterTuple(Parameter(Tensor([float(i)]), name=f"part{i}") for i in range(MANY))

    def construct(self, x):
        return x


@pytest.mark.parametrize("clip", [ClipByGlobalNorm(LIMIT), ClipByGroupNorm({"*": LIMIT})], ids=lambda c: str(c)[:13])
def test_an_update_of_400_parameters_is_compiled(clip):
    network = Wide()
    step = TrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.5), clip=clip)
    sums = np.random.default_rng(0).standard_normal(MANY).astype(np.float32)
    for total, value in zip(step.buffer.sums, sums):
        total.set_data(Tensor([value]))
    step.buffer.weight.set_data(Tensor(4.0))
    with execution_mode(ms.GRAPH_MODE):  # where what cannot be compiled is an error
        output = step.window.close()
    norm = np.linalg.norm(sums.astype(np.float64)) / 4
    assert norm > LIMIT
    assert float(output.grad_norm) == pytest.approx(norm, rel=1e-6)
    assert float(output.clipped_grad_norm) == pytest.approx(LIMIT, rel=1e-5)
    expected = np.arange(MANY) - 0.5 * sums / 4 * (LIMIT / norm)
    np.testing.assert_allclose([float(part.asnumpy()[0]) for part in network.parts], expected, rtol=1e-5)
    assert not any(total.asnumpy().any() for total in step.buffer.sums)


def test_runs_hold_all_tensors_and_no_more_than_the_largest_has_or_a_share():
    million = 2**20
    assert runs_of([1] * 1000) == ((0, 1000),)
    assert runs_of([million] * 3) == ((0, 1), (1, 2), (2, 3))
    assert runs_of([3 * million, million, million, million, 2 * million]) == ((0, 1), (1, 4), (4, 5))
    runs = runs_of([million] * 320)
    assert runs[0] == (0, 10) and len(runs) == 32 and runs[-1][1] == 320
    assert runs_of([]) == ()
