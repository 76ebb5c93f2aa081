"""verify: what is equal, what a report says, what is left as it was, and what is refused."""

import random
from unittest import mock

import mindspore as ms
import numpy as np
import pytest
from linear_toy import mse
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.generator import default_generator
from refusal import no_warning, refuses
from step_probe import Weights, changed, tensors, values_of
from verify_probe import LOSS, Line, X, Y, assert_causes, differing, total

from ms_gradaccum import GradAccumulation, TrainOneStepCell, verify
from ms_gradaccum.tools.whole_batch import Run, parameter_differences


def test_a_clean_network_is_equal_and_its_loss_is_that_of_numpy(mode):
    report = verify(Line(), tensors(X, Y), 3)
    assert report.equal and report.causes == () and report.micro_batches == (3, 3, 2) and report.rtol == 1e-4
    assert {(entry.name, entry.kind) for entry in report.parameters} == {("weight", "gradient"), ("bias", "gradient")}
    assert differing(report) == set()
    loss = np.mean((X.astype(np.float64) @ [1, -1] + 0.5 - Y) ** 2)
    assert (report.window_loss, report.whole_loss) == (pytest.approx(loss, rel=1e-5), pytest.approx(loss, rel=1e-5))


def test_a_grad_accumulation_by_name_weighted_and_on_another_axis(mode):
    class Columns(Line):
        def construct(self, y, x, scale):
            return total(self.output(x.T * scale), y), y.shape[0]

    cell = GradAccumulation(Columns(), 3, weighted=True, batch_axis=(0, 1, None))
    inputs = {"scale": Tensor(np.float32([1, 2])), "x": Tensor(X.T.copy()), "y": Tensor(Y)}
    report = verify(cell, inputs, None)
    assert report.equal and report.micro_batches == (3, 3, 2)
    with mock.patch.dict("os.environ", MS_JIT="0"):
        again = verify(cell.network, inputs, 3, weighted=True, batch_axis=(0, 1, None))
    assert again.equal and again.micro_batches == (3, 3, 2)


def test_a_batch_may_be_one_tensor_or_array_or_a_list(eager):
    for one in (Tensor(X), X, [X]):
        (entry,) = verify(Weights(2), one, 4).parameters
        # The gradient of the mean is the mean of the rows.
        assert not entry.differs and entry.name == "weight"


def test_16_bits_are_rounded_more(eager):
    report = verify(Line(dtype=ms.float16), tensors(X, Y), 3)
    assert (report.equal, report.rtol) == (True, 2e-2)
    assert report.parameters[0].relative_difference > 1e-4  # otherwise the test proves nothing
    report = verify(Line(total).to_float(ms.float16), tensors(X, Y), 4)
    assert_causes(report, LOSS)
    assert report.rtol == 2e-2


def test_a_gradient_that_is_rounding_alone_does_not_differ():
    def run(*grads):
        return Run([1.0], [np.float32([grad]) for grad in grads])

    assert max(parameter_differences(run(1.0, 1e-9), run(1.0, 3e-9))) < 1e-6
    assert max(parameter_differences(run(1e-9), run(3e-9))) > 0.5  # Nothing larger that it could be the rounding of.


def test_rtol_decides_what_differs(eager):
    assert not verify(Line(total), tensors(X, Y), 4, rtol=0.7).equal
    assert verify(Line(total), tensors(X, Y), 4, rtol=0.8).equal


def test_a_sparse_lookup_has_the_gradient_of_its_rows():
    class Lookup(nn.Cell):
        def __init__(self):
            super().__init__()
            self.table = nn.EmbeddingLookup(4, 2, "ones", target="CPU", sparse=True)

        def construct(self, ids, y):
            return ops.square(self.table(ids).sum(-1) - y).mean()

    ms.set_context(mode=ms.GRAPH_MODE)
    assert verify(Lookup(), (Tensor([0, 1, 1, 2, 3, 3, 3, 1], ms.int32), Tensor(Y)), 3).equal


def test_the_worst_parameter_is_the_first(eager):
    report = verify(Line(total), tensors(X, Y), 4)
    text = str(report)
    assert "2 of 2 differ" in text and "Probable cause:" in text and text.index("weight") < text.index("Loss: ")
    assert [entry.differs for entry in report.parameters] == [True, True]
    assert report.parameters[0].relative_difference >= report.parameters[1].relative_difference == pytest.approx(0.75)


class Layers(nn.Cell):
    """Everything that a run changes: moving averages, a counter, random numbers, modes."""

    def __init__(self, fails):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.fixed = nn.BatchNorm1d(2, use_batch_statistics=True)
        self.drop = nn.Dropout(p=0.5)
        self.line = Line()
        self.seen = Parameter(Tensor(0, ms.int32), "seen", requires_grad=False)
        self.fails = fails

    def construct(self, x, y):
        ops.assign_add(self.seen, Tensor(1, ms.int32))
        np.random.rand(), random.random(), default_generator._step(Tensor(12, ms.int64))
        if self.fails:
            raise ValueError("too few rows")
        return self.line(self.drop(self.fixed(self.norm(x))), y)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_parameters_modes_and_random_state_are_as_they_were(begun, fails, eager):
    network = Layers(fails)
    network.norm.moving_mean.set_data(Tensor([0.25, -3.0]))
    if begun:
        network.set_train().norm.set_train(False)

    def state():
        modes = [(cell.training, cell.phase) for _, cell in network.cells_and_names()]
        statistics = network.fixed.use_batch_statistics, network.norm.use_batch_statistics
        generators = np.random.get_state()[1:3], random.getstate(), ms.get_rng_state().asnumpy()
        return repr((modes, statistics, generators))

    before, start = state(), values_of(network)
    if fails:
        with pytest.raises(ValueError, match="too few rows"):
            verify(network, tensors(X, Y), 2)
    else:
        assert not verify(network, tensors(X, Y), 2).equal
    assert state() == before and changed(start, values_of(network)) == set()


def test_a_grad_accumulation_of_mindspore_is_one_of_this_package():
    found = verify(ms.parallel.nn.GradAccumulation(Line(), 2), tensors(X, Y), None)
    assert found.equal and found.micro_batches == verify(Line(), tensors(X, Y), 2).micro_batches


@pytest.mark.parametrize(
    ("settings", "got"), [({"micro_size": 2}, "2"), ({"weighted": True}, "True"), ({"batch_axis": 1}, "1")]
)
def test_the_settings_of_a_grad_accumulation_are_its_own(settings, got):
    (name,) = settings
    with refuses(ValueError, f"'{name}'", f"but got {got}.", "them out here"):
        verify(GradAccumulation(Line(), 4), tensors(X, Y), **{"micro_size": 4, **settings})


def test_a_training_step_and_a_reference_of_other_parameters_are_refused():
    network = Line()
    step = TrainOneStepCell(network, nn.SGD(network.trainable_params()))
    with refuses(ValueError, "'network'", "Give its network"):
        verify(step, tensors(X, Y), 2)
    with refuses(ValueError, "'network'", "but got none."):
        verify(nn.WithLossCell(nn.ReLU(), nn.MSELoss()), tensors(X, Y), 2)
    with refuses(ValueError, "'reference'", "first 'weight'"):
        verify(Line(), tensors(X, Y), 2, reference=Line())


def test_a_hook_that_is_linear_is_compared_and_not_named():
    """A training step warns of any hook. The comparison says whether it matters."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = nn.Dense(1, 1)
    network.weight.register_hook(lambda grad: grad * 0.5)
    with no_warning():
        assert verify(mse(network), (ops.ones((4, 1)), ops.ones((4, 1))), 2).equal
