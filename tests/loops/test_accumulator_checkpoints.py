"""An Accumulator in MindSpore's own checkpoints: all that is trained is in the file, at any moment of a window."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, mse, sgd, weight_of
from loop_toy import FOUR, toy_loop, train, updates_of
from mindspore import Tensor, nn, ops
from refusal import refuses
from step_probe import Squared, tensors

from ms_gradaccum import AccumulationConfig, Accumulator

BATCHES = [tensors(X[i : i + 2], np.concatenate([2 * X[i : i + 2], -X[i : i + 2]], 1)) for i in range(0, 8, 2)]


@pytest.mark.parametrize("place", ["before step", "after step"])
@pytest.mark.parametrize("batches, steps", [(1, 4), (2, 4), (3, 4), (3, 1), (3, 2), (3, 3)])
def test_a_checkpoint_inside_a_batch_has_the_sums_and_the_count_of_that_batch(place, batches, steps, tmp_path, eager):
    """Also more batches than a window of the loop that loads it has."""
    path = str(tmp_path / "inside.ckpt")
    network, accumulator = toy_loop(4)
    for i, each in enumerate(FOUR[:batches], 1):
        with accumulator.accumulate():
            accumulator.backward(*each)
            if place == "after step":
                accumulator.step()
            if i == batches:
                ms.save_checkpoint(accumulator, path)
    network, accumulator = toy_loop(steps)
    ms.load_param_into_net(accumulator, ms.load_checkpoint(path))
    assert updates_of(accumulator, FOUR[batches:]) == [False] * (3 - batches) + [True]
    assert weight_of(network) == pytest.approx(2.04)


def frozen_loop(kind):
    network = nn.SequentialCell(nn.Dense(1, 3, "ones"), nn.Dense(3, 2, Tensor([[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]])))
    network[1].bias.requires_grad = False
    cell = mse(network)
    if kind != "two optimizers":
        config = AccumulationConfig(schedule=lambda updates: 2) if kind == "schedule" else AccumulationConfig(2)
        return network, Accumulator(cell, nn.Momentum(network.trainable_params(), 0.01, 0.9), config=config)
    optimizers = [nn.Momentum(part.trainable_params(), 0.01, 0.9) for part in network]
    for name in ("learning_rate", "global_step", "momentum"):
        getattr(optimizers[1], name).name = f"last.{name}"
    return network, Accumulator(cell, optimizers, 2)


@pytest.mark.parametrize("kind", ["one optimizer", "two optimizers", "schedule"])
def test_a_checkpoint_has_all_parameters_of_the_training(kind, tmp_path, eager):
    path = str(tmp_path / "loop.ckpt")
    network, accumulator = frozen_loop(kind)
    network[1].bias.set_data(Tensor([1.0, -1.0]))
    list(train(accumulator, BATCHES[:3]))
    ms.save_checkpoint(accumulator, path)
    list(train(accumulator, BATCHES[3:]))
    resumed, accumulator = frozen_loop(kind)
    assert ms.load_param_into_net(accumulator, ms.load_checkpoint(path)) == ([], [])
    assert updates_of(accumulator, BATCHES[3:]) == [True]
    for expected, found in zip(network.get_parameters(), resumed.get_parameters(), strict=True):
        np.testing.assert_array_equal(found.asnumpy(), expected.asnumpy(), expected.name)


def test_parameters_of_one_name_are_not_saved_one_over_the_other(tmp_path):
    cells = [mse(nn.Dense(1, 1)) for _ in range(2)]
    accumulator = Accumulator(cells, [sgd(cell) for cell in cells])
    with refuses(ValueError, "two 'weight'"):
        ms.save_checkpoint(accumulator, str(tmp_path / "two.ckpt"))


def test_a_cell_that_holds_a_loop_leaves_its_parameters_and_their_names_alone():
    class Holder(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Dense(1, 1), nn.Dense(1, 1)
            networks = [self.first, self.second]
            optimizers = [nn.Adam(each.trainable_params()) for each in networks]
            self.accumulator = Accumulator([mse(each) for each in networks], optimizers)

    holder = Holder()
    names = [each.name for part in (holder.first, holder.second) for each in part.get_parameters()]
    assert names == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert {*map(id, holder.first.get_parameters())} <= {*map(id, holder.accumulator.get_parameters())}


@pytest.mark.parametrize("load", [ms.Parameter.set_data, ops.assign])
def test_own_gradients_of_a_compiled_network_are_those_of_what_was_loaded(load, monkeypatch):
    """In PYNATIVE mode, where MindSpore's compiled part keeps the memory of before."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    monkeypatch.delenv("MS_JIT", raising=False)
    network = Squared(nn.Dense(1, 2, "ones", has_bias=False))
    weight = network.dense.weight
    accumulator = Accumulator(network, nn.SGD([weight], 0.1), 1)
    loss_and_grads = ms.value_and_grad(network, None, [weight])
    losses = []
    for i, (x, y) in enumerate(BATCHES):
        if i == 2:
            load(weight, Tensor([[5.0], [-5.0]]))
        with accumulator.accumulate():
            expected = np.square(x.asnumpy() @ weight.asnumpy().T - y.asnumpy()).mean()
            loss, grads = loss_and_grads(x, y)
            accumulator(grads, weight=2.0)
        losses.append((loss.asnumpy().item(), expected))
    np.testing.assert_allclose(*zip(*losses), rtol=1e-5)
