"""A lack of memory before a window has anything to lose: its batch is split into twice as many micro batches."""

import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from linear_toy import sgd
from mindspore import Tensor, nn
from refusal import no_warning, told, warns
from step_probe import fails_at, sgd_step

from ms_gradaccum import Accumulator, GradAccumulation, TrainOneStepCell
from ms_gradaccum.backend import compiled
from ms_gradaccum.tools.micro_size_finder import Training

ROWS = 12
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
START = np.float32([[0.3, -0.2, 0.5]])
RATE = 0.1
# The sentences of MindSpore 2.10 on CPU, in GRAPH and in PYNATIVE mode.
WORDS = [
    "Memory not enough:\nMemory isn't enough and alloc failed, kernel name: BiasAdd-op1, alloc size: 409600000B.",
    "Allocate output memory failed, alloc node:Default/BiasAdd-op1 alloc size:102400000B",
]
LACKS = "the memory is not enough"
SAID = (
    "For 'GradAccumulation', the memory is not enough for {} of a batch of 12 rows, so from now on each batch has {}. "
    "Give micro_size={} to start with."
)


class Square(nn.Cell):
    """The mean over rows of a square. With ``most``, memory is enough for so many rows."""

    def __init__(self, most=None, words=WORDS[1]):
        super().__init__()
        self.line = nn.Dense(3, 1, Tensor(START), has_bias=False)
        self.most = most
        self.words = words

    def construct(self, x):
        if self.most is not None and x.shape[0] > self.most:
            raise RuntimeError(self.words)
        return self.line(x).square().mean()


def weights_after(*batches):
    weights = START.astype(np.float64)
    for rows in batches:
        x = rows.astype(np.float64)
        weights = weights - RATE * 2 * (x @ weights.T).T @ x / len(x)
    return weights


def assert_trained(network, *batches):
    np.testing.assert_allclose(network.line.weight.asnumpy(), weights_after(*batches), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("words", WORDS)
def test_a_batch_is_tried_with_twice_the_micro_batches(words, eager):
    network = Square(most=3, words=words)
    step = sgd_step(network, "auto")
    with told(LACKS) as said:
        output = step(Tensor(X))
        assert_trained(network, X)
        assert (output.is_updated, float(output.weight), step.network.micro_size) == (True, ROWS, 4)
        assert (step.events.batches, step.events.micro_batches, step.events.updates) == (1, 4, 1)
        # Later batches begin with what has worked.
        step(Tensor(X))
        assert_trained(network, X, X)
    assert said == [SAID.format("1 micro batch", 2, 2), SAID.format("2 micro batches", 4, 4)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_graph_that_has_added_gradients_leaves_none_behind(when, monkeypatch):
    monkeypatch.delenv("MS_JIT", raising=False)
    ms.set_context(mode=ms.GRAPH_MODE)
    run_graph = compiled.run_graph
    tensors_of_step = 3  # Share, factor and rows.

    def limited(cell, *tensors, phase):
        is_large = len(tensors) == tensors_of_step and tensors[-1].shape[:1] > (4,)
        if is_large and when == "before":
            raise RuntimeError(WORDS[0])
        outputs = run_graph(cell, *tensors, phase=phase)
        if is_large:
            raise RuntimeError(WORDS[0])
        return outputs

    monkeypatch.setattr(compiled, "run_graph", limited)
    network = Square()
    step = sgd_step(network)
    with told(LACKS) as said:
        for batches in ([X], [X, X]):
            assert float(step(Tensor(X)).weight) == ROWS
            assert_trained(network, *batches)
    assert said == [SAID.format("2 micro batches", 4, 4)]


def test_an_open_window_keeps_its_batches_if_nothing_was_added(eager):
    network = Square(most=4)
    step = sgd_step(network, "auto", accumulation_steps=2)
    with no_warning():
        step(Tensor(X[:4]))
    with told(LACKS) as said:
        output = step(Tensor(X[4:]))
    assert_trained(network, X)
    assert float(output.weight) == ROWS and len(said) == 1


def test_a_first_batch_that_fails_in_its_middle_begins_anew(eager):
    network = Square()
    network.register_forward_hook(fails_at(3, RuntimeError(WORDS[1])))
    step = sgd_step(network, 3)
    with warns(LACKS):
        assert float(step(Tensor(X)).weight) == ROWS
    assert_trained(network, X)
    assert step.network.micro_size == 6


def test_a_window_whose_sums_would_be_lost_is_discarded_with_the_error(eager):
    network = Square()
    network.register_forward_hook(fails_at(3 + 2, RuntimeError(WORDS[1])))
    step = sgd_step(network, 3, accumulation_steps=2)
    step(Tensor(X))
    with told(LACKS) as said, pytest.raises(RuntimeError, match="Allocate output memory failed"):
        step(Tensor(X))
    assert_trained(network)
    assert said == [] and step.network.micro_size == 3 and step.open_batches() == 0


def test_single_rows_are_not_split(eager):
    step = sgd_step(Square(most=0), "auto")
    with told(LACKS) as said:
        with pytest.raises(RuntimeError, match="Allocate output memory failed"):
            step(Tensor(X))
    assert step.network.micro_size == 16 and len(said) == 4


@pytest.mark.parametrize(
    "error", [RuntimeError("the shapes do not match"), ValueError(WORDS[0]), KeyboardInterrupt(WORDS[0])]
)
def test_other_errors_are_errors(error, eager):
    network = Square()
    network.register_forward_hook(fails_at(1, error))
    step = sgd_step(network, "auto")
    with no_warning(), pytest.raises(type(error)):
        step(Tensor(X))
    assert step.network.micro_size == 1


def test_a_weight_of_the_caller_micro_tokens_and_a_number_that_is_measured_are_not_split(eager):
    network, x = Square(most=6), Tensor(X)
    accumulator = Accumulator(network, sgd(network, RATE))
    step = TrainOneStepCell(GradAccumulation(network, micro_tokens=100), sgd(network, RATE))
    training = Training((network, sgd(network, RATE), x), 1)
    for run in (lambda: accumulator.backward(x, weight=5.0), lambda: step(x), training.run):
        with told(LACKS) as said:
            with pytest.raises(RuntimeError, match="Allocate output memory failed"):
                run()
        assert said == []


# A network of a large activation, in an address space in which the whole batch does not fit.
PROGRAM = """
import resource, sys, warnings
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from ms_gradaccum import GradAccumulation, TrainOneStepCell

class Wide(nn.SequentialCell):
    def construct(self, x):
        return super().construct(x).mean()

ms.set_context(mode=getattr(ms, sys.argv[1]))
if sys.argv[1] == "PYNATIVE_MODE":
    # Otherwise operators that wait in MindSpore's queue may run on without memory, and end the process.
    ms.runtime.launch_blocking()
network = Wide(nn.Dense(1, 4, Tensor(np.ones((4, 1), np.float32))), nn.Tanh(), nn.Dense(4, 1))
accumulation = GradAccumulation(network, "auto")
step = TrainOneStepCell(accumulation, nn.SGD(network.trainable_params(), 0.1), check_loss=False)
step(Tensor(np.ones((2, 8, 1), np.float32)))
x = Tensor(np.ones((64, 400_000, 1), np.float32))
with open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + 500 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    outputs = [step(x) for _ in range(2)]
assert all(output.is_updated for output in outputs) and float(outputs[0].weight) == 64
assert any("the memory is not enough for 1 micro batch" in str(each.message) for each in caught)
print("trained in", accumulation.micro_size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited as on Linux")
@pytest.mark.parametrize("mode_name", ["GRAPH_MODE", "PYNATIVE_MODE"])
def test_mindspore_goes_on_after_a_real_lack_of_memory(mode_name, monkeypatch, tmp_path):
    monkeypatch.delenv("MS_JIT", raising=False)
    program = tmp_path / "program.py"  # The compiler reads it.
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), mode_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "trained in" in done.stdout, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 1
