"""Checkpoints of a training step in mid-window, with MindSpore's own functions."""

import mindspore as ms
import mindspore.experimental.optim as experimental
import numpy as np
import pytest
from linear_toy import X, mse, toy_step, weight_of
from loop_toy import FOUR
from mindspore import nn, ops
from open_window import reducer_of
from quick_mindspore import api, compiling
from step_probe import Squared, changed, number, sgd_step, tensors, values_of

from ms_gradaccum import GradAccumulation, TrainOneStepCell

# Two windows of three batches and two batches more.
BATCHES = [tensors(X[i % 6 : i % 6 + 3], 2 * X[i % 6 : i % 6 + 3]) for i in range(8)]


def new_step(make_optimizer=None):
    network = nn.Dense(1, 1, "ones")
    loss_cell = GradAccumulation(mse(network), 2)
    make_optimizer = make_optimizer or (lambda p: nn.Momentum(p, [0.01, 0.005, 0.002, 0.001], 0.9))
    optimizer = make_optimizer(network.trainable_params())
    return TrainOneStepCell(loss_cell, optimizer, accumulation_steps=3, check_loss=False)


def train(step, batches):
    return [number(step(*batch).loss) for batch in batches]


def test_a_step_loaded_in_mid_window_goes_on_as_if_it_had_not_stopped(tmp_path):
    step = new_step()
    train(step, BATCHES[:5])
    path = str(tmp_path / "step.ckpt")
    ms.save_checkpoint(step, path)
    checkpoint = ms.load_checkpoint(path)
    sums = {f"accu_grads.weight{end}" for end in ("", ".window_loss", ".window_weight", ".window_skipped")}
    state = {"moments.weight", "moments.bias", "global_step", "learning_rate", "momentum"}
    batches = {"accu_grads.weight.window_batches"}
    assert set(checkpoint) == {"weight", "bias", "accu_grads.bias"} | sums | batches | state
    losses, values = train(step, BATCHES[5:]), values_of(step)
    fresh, used = new_step(), new_step()
    # This one has run already, elsewhere: its graphs must see what is loaded.
    train(used, BATCHES[2:6])
    for step in (fresh, used):
        checkpoint = ms.load_checkpoint(path)
        assert ms.load_param_into_net(step, checkpoint) == ([], [])
        assert step.open_batches() == 2
        loaded = values_of(step)
        assert train(step, BATCHES[5:]) == losses
        assert not changed(values, values_of(step))
        assert "weight" in changed(loaded, values_of(step))  # otherwise the test proves nothing


@pytest.mark.parametrize("as_graph", [False, True], ids=["step", "graph"])
def test_more_open_batches_than_the_step_collects_are_updated_with(as_graph, tmp_path):
    _, step = toy_step(accumulation_steps=4)
    for batch in FOUR[:3]:
        step(*batch)
    ms.save_checkpoint(step, str(tmp_path / "middle.ckpt"))
    for steps in (2, 3):
        network, step = toy_step(accumulation_steps=steps)
        ms.load_param_into_net(step, ms.load_checkpoint(str(tmp_path / "middle.ckpt")))
        output = ms.jit(step)(*FOUR[3]) if as_graph else step(*FOUR[3])
        assert np.isfinite(number(output[0])) and weight_of(network) == pytest.approx(2.04)
        assert step.open_batches() == 0


def test_a_step_of_one_batch_flushes_and_drops_a_longer_window_that_it_has_loaded(tmp_path):
    path = str(tmp_path / "middle.ckpt")
    _, step = toy_step(accumulation_steps=3)
    for batch in FOUR[:2]:
        step(*batch)
    ms.save_checkpoint(step, path)
    step.drop()
    for ends in ("flush", "drop"):
        _, step = toy_step(accumulation_steps=1)
        ms.load_param_into_net(step, ms.load_checkpoint(path))
        assert step.open_batches() == 2
        if ends == "flush":
            assert number(step.flush().weight) == 4
        else:
            assert step.drop() == 2
        assert step.open_batches() == 0
        assert number(step(*FOUR[2]).weight) == 2


ADAM = {"lr": 0.1, "eps": 1.0}


class OwnAdam(experimental.Adam):
    def construct(self, gradients):
        self.calls = getattr(self, "calls", 0) + 1
        return super().construct(gradients)


class Around(nn.Optimizer):
    def __init__(self, parameters):
        super().__init__(0.1, parameters)
        self.inner = [experimental.Adam(parameters, **ADAM)]

    def construct(self, gradients):
        return self.inner[0](gradients)


OPTIMIZERS = {
    "MindSpore's": lambda p: experimental.Adam(p, **ADAM),
    "a user's": lambda p: OwnAdam(p, **ADAM),
    "around one": Around,
}


@pytest.mark.parametrize("part", ["weights", "states", "both, then another mode of training"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_compiles_a_part_of_itself_goes_on_with_what_was_loaded(name, part):
    """In PYNATIVE mode, where MindSpore's own step goes on with the old memory and does not train."""
    ms.set_context(mode=ms.PYNATIVE_MODE)

    def trained(load):
        ms.set_seed(0)
        step = new_step(OPTIMIZERS[name])
        with compiling("the optimizer"):
            train(step, BATCHES[:3])
        adam = step.optimizer.inner[0] if name == "around one" else step.optimizer
        states, weights = [*adam.exp_avg, *adam.exp_avg_sq, adam.state_step], list(adam.parameters)
        for each in {"weights": weights, "states": states}.get(part, weights + states):
            load(each, ms.Tensor(each.asnumpy() + 1, each.dtype))
        if "mode" in part:
            step.set_train(False).set_train()
        with compiling("the optimizer"):
            train(step, BATCHES[:6])
        return {each.name: each.asnumpy() for each in weights + states}

    # What `load_param_into_net` does, and the same in place.
    found, expected = trained(ms.Parameter.set_data), trained(ops.assign)
    assert not changed(expected, found)


class Jitted(nn.Cell):
    """A loss cell of which MindSpore compiles a part in PYNATIVE mode."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(1, 1, "ones", has_bias=False)
        self.head = nn.CellList([Squared(self.dense)])

    def construct(self, x, y):
        return self.head[0](x, y)


@pytest.mark.parametrize("builds_anew", [False, True])
def test_a_network_with_a_compiled_part_goes_on_with_what_was_loaded(builds_anew, monkeypatch):
    """In PYNATIVE mode, where MindSpore's own step goes on with the old memory."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    monkeypatch.delenv("MS_JIT", raising=False)

    def trained(network, load):
        def build():
            return sgd_step(network, 2, 0.02, check_loss=False)

        network.set_train()
        step = build()
        train(step, BATCHES[:2])
        load(network.dense.weight, ms.Tensor([[5.0]]))
        network.set_train(False).set_train()
        step = build() if builds_anew else step
        return train(step, BATCHES[:3]), network.dense.weight.asnumpy()

    found, expected = trained(Jitted(), ms.Parameter.set_data), trained(Jitted(), ops.assign)
    assert found == expected
    assert expected[0][0] > 20  # That of the loaded weight.
    compiled = api.ms_compile_cache.copy()
    trained(Jitted(), ops.assign)
    assert len(api.ms_compile_cache - compiled) <= 2 * (1 + builds_anew)  # Once per step.


def test_a_cell_around_a_step_renames_what_is_gathered_for_a_checkpoint():
    step, outer = new_step(), nn.Cell()
    weight = step.network.trainable_params()[0]
    weight.gather = lambda shard: shard
    reducer_of(step).stand_ins = {id(weight): weight}
    before, outer.step = weight.name, step
    assert weight.name not in ("", before)
    assert [*step.parameter_layout_dict] == [*step.parallel_parameter_merge_net_dict] == [weight.name]
