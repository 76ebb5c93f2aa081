"""An optimizer that belongs to a step and is called directly, too: two updates where one is meant."""

import gc
import warnings
from contextlib import contextmanager, nullcontext

import mindspore as ms
import mindspore.experimental.optim as experimental
import pytest
from linear_toy import X, line, mse, sgd, weight_of
from mindspore import Tensor, mint, nn
from quick_mindspore import compiling
from refusal import by_loop, warns
from step_probe import Around, tensors

from ms_gradaccum import GradAccumulation, TrainOneStepCell

BATCH = tensors(X, 2 * X)
GRADS = (Tensor([[-10.0]], ms.float32),)
OPTIMIZERS = {
    "nn.SGD": lambda parameters: nn.SGD(parameters, 0.01),
    "nn.Adam": lambda parameters: nn.Adam(parameters, 0.01),
    "experimental.Adam": lambda parameters: experimental.Adam(parameters, 0.01),
    "mint.SGD": lambda parameters: mint.optim.SGD(parameters, 0.01),
}


def step_of(network, optimizer):
    step = TrainOneStepCell(GradAccumulation(mse(network), 4), optimizer, check_loss=False)
    return step, lambda: step(*BATCH)


def loop_of(network, optimizer):
    train = by_loop(mse(network), optimizer, *BATCH, check_loss=False)
    return train, train


class ByHand(nn.Cell):
    def __init__(self, optimizer):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, grads):
        return self.optimizer((grads,))


@contextmanager
def unnamed():
    """Let a direct call that is named be an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*was also called directly")
        yield


OWNERS = {step_of: "TrainOneStepCell", loop_of: "Accumulator"}
# One optimizer with both, and the others in turn.
DIRECT = [(step_of, "nn.SGD"), (loop_of, "nn.SGD"), (loop_of, "nn.Adam")]
DIRECT += [(step_of, "experimental.Adam"), (loop_of, "mint.SGD")]


@pytest.mark.parametrize("build, name", DIRECT)
@pytest.mark.filterwarnings("ignore:.*of mindspore.mint changes nothing")
def test_a_direct_call_is_named_once(build, name, mode):
    network = line()
    optimizer = OPTIMIZERS[name](network.trainable_params())
    optimizer(GRADS)  # It belongs to nobody yet; a graph of it is compiled.
    kept, train = build(network, optimizer)
    with unnamed(), nullcontext() if name == "nn.SGD" else compiling("the optimizer"):
        train()
        train()
    with warns(f"For '{OWNERS[build]}'", "was also called directly"):
        optimizer(GRADS)
    with unnamed():
        optimizer(GRADS)
        train()


def test_a_call_in_a_graph_of_the_users_is_named(mode):
    network = line()
    optimizer = sgd(network)
    kept, train = step_of(network, optimizer)
    train()
    by_hand = ByHand(optimizer)
    with warns("delete the step"):
        (by_hand if mode == ms.GRAPH_MODE else ms.jit(by_hand))(*GRADS)


def test_nobody_else_is_named(mode, tmp_path):
    with unnamed():
        network = line()
        optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
        step, train = step_of(network, optimizer)
        train()
        ms.save_checkpoint(step, str(tmp_path / "step.ckpt"))
        ms.load_param_into_net(step, ms.load_checkpoint(str(tmp_path / "step.ckpt")))
        ms.load_param_into_net(optimizer, ms.load_checkpoint(str(tmp_path / "step.ckpt")))
        train()
        # A step takes over the optimizer.
        again, train = step_of(network, optimizer)
        train()
        # Nobody owns it once its steps are gone.
        del step, again, train
        gc.collect()
        optimizer(GRADS)


def test_a_step_in_a_larger_graph_calls_its_optimizer_itself(mode):
    network = line()
    step, _ = step_of(network, sgd(network))
    with unnamed():
        Around(step)(*BATCH)
    assert weight_of(network) == pytest.approx(2.04)


def test_a_step_that_is_gone_but_not_collected_owns_no_optimizer(mode):
    network = line()
    optimizer = sgd(network)
    step, train = step_of(network, optimizer)
    step.cycle = [step]
    del step, train
    with unnamed():
        optimizer(GRADS)


def test_hooks_of_an_optimizer_are_called(eager):
    network, seen = line(), []
    optimizer = experimental.SGD(network.trainable_params(), 0.02)
    optimizer.register_forward_pre_hook(lambda cell, inputs: seen.append(len(inputs)))
    kept, train = step_of(network, optimizer)
    train()
    assert seen == [1] and weight_of(network) == pytest.approx(2.04)


class Logged(nn.SGD):
    seen = 0

    def __call__(self, *grads):
        self.seen += 1
        return super().__call__(*grads)


@pytest.mark.parametrize("build", [step_of, loop_of])
def test_a_call_of_its_own_is_called_op_by_op(build, eager):
    network = line()
    optimizer = Logged(network.trainable_params(), 0.01)
    _, train = build(network, optimizer)
    with unnamed():
        for _ in range(3):
            train()
    assert optimizer.seen == 3
