"""Every optimizer that MindSpore has: a window of micro batches is one update on the whole batch."""

import functools

import mindspore as ms
import mindspore.experimental.optim as experimental
import numpy as np
import pytest
from mindspore import mint, nn
from optimizer_parity import (
    BOTH,
    WholeBatch,
    accumulate,
    assert_like_whole_batch,
    assert_not_vacuous,
    assert_same,
    batches,
    one_layer,
)
from optimizers_tried import OPTIMIZERS
from tiers import some

# What mindspore.nn exports beside optimizers that a CPU, or any single device, can build.
NOT_HERE = {
    "Optimizer",  # the base class
    "Lamb",  # these three: see test_optimizers_without_kernel.py
    "LARS",
    "thor",
    "AdaSumByDeltaWeightWrapCell",  # refuses to be built on fewer than 16 devices
    "AdaSumByGradWrapCell",
    "OptTFTWrapper",  # refuses to be built without an Ascend
    "FusedAdamW",  # cannot be built on a CPU
}

# A graph of any of them could go on with the weights that it knows; op by op, one of each package stands for all.
LOADED = [(name, ms.GRAPH_MODE) for name in OPTIMIZERS]
LOADED += [(name, ms.PYNATIVE_MODE) for name in ("Momentum", "user-defined", "experimental AdamW", "mint Adam")]

# Two whose formulas are written down below, one of a user, and one whose settings are parameters.
FIRST = ("Momentum", "Adam", "user-defined", "experimental AdamW")
FIRST_LOADED = [(name, mode) for name, mode in LOADED if name in FIRST]


def maker(name):
    optimizer, settings = OPTIMIZERS[name]
    return lambda network: optimizer(network.trainable_params(), **settings)


@functools.cache
def whole_batch(name):
    whole = WholeBatch(one_layer, maker(name))
    assert_not_vacuous(whole, micro_size=4)
    return whole


@functools.cache
def accumulated(name):
    # All of a step is compiled with one of them.
    loaded = [mode for each, mode in LOADED if each == name]
    return accumulate(one_layer, maker(name), 4, BOTH, compiled=name == "Momentum", loaded=loaded)


@pytest.mark.parametrize("name", some(OPTIMIZERS, *FIRST))
def test_micro_batches_leave_weights_and_state_of_the_whole_batch(name, mode):
    assert_like_whole_batch(whole_batch(name), *accumulated(name)[mode])


@pytest.mark.parametrize("name,mode", some(LOADED, *FIRST_LOADED), indirect=["mode"])
def test_a_checkpoint_loaded_into_a_step_that_has_trained_is_trained_on(name, mode):
    assert_like_whole_batch(whole_batch(name), *accumulated(name)["loaded", mode])


@pytest.mark.parametrize("name", ["SGD, Nesterov", "experimental AdamW"])
def test_uneven_micro_batches_count_by_their_rows(name, mode):
    assert_not_vacuous(whole_batch(name), micro_size=5)
    results = accumulate(one_layer, maker(name), 5, [mode], compiled=True)
    assert_like_whole_batch(whole_batch(name), *results[mode])


def float64_training(update):
    """Train the one layer in float64, with gradients from the formula, and return weight and bias."""
    layer = one_layer().backbone
    weights = [layer.weight.asnumpy().astype(np.float64), layer.bias.asnumpy().astype(np.float64)]
    states = [{}, {}]
    for i, (x, y, _) in enumerate(batches()):
        x, y = x.astype(np.float64), y.astype(np.float64)
        residual = 2 * (x @ weights[0].T + weights[1] - y) / y.size
        for weight, gradient, state in zip(weights, (residual.T @ x, residual.sum(0)), states):
            update(weight, gradient, state, i + 1)
    return weights


def sgd_dampened(weight, gradient, state, step):
    gradient = gradient + 0.1 * weight
    state["v"] = gradient if step == 1 else 0.9 * state["v"] + 0.7 * gradient
    weight -= 0.01 * state["v"]


def sgd_nesterov(weight, gradient, state, step):
    gradient = gradient + 0.1 * weight
    state["v"] = gradient if step == 1 else 0.9 * state["v"] + gradient
    weight -= 0.01 * (gradient + 0.9 * state["v"])


def momentum(weight, gradient, state, step):
    state["v"] = 0.9 * state.get("v", 0) + gradient + 0.1 * weight
    weight -= 0.01 * state["v"]


def adam(weight, gradient, state, step):
    gradient = gradient + 0.1 * weight
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * gradient
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * gradient**2
    rate = 0.05 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    weight -= rate * state["m"] / (np.sqrt(state["v"]) + 1.0)


@pytest.mark.parametrize(
    "name,update",
    [
        pytest.param("SGD, dampened", sgd_dampened, marks=pytest.mark.second_tier),
        pytest.param("SGD, Nesterov", sgd_nesterov, marks=pytest.mark.second_tier),
        ("Momentum", momentum),
        ("Adam", adam),
    ],
)
def test_weights_equal_the_formula_in_float64(name, update, mode):
    weight, bias = float64_training(update)
    _, values = accumulated(name)[mode]
    assert_same({"w": values["backbone.weight"], "b": values["backbone.bias"]}, {"w": weight, "b": bias}, 1e-6)


def test_no_optimizer_of_mindspore_is_left_out():
    tried = {optimizer for optimizer, _ in OPTIMIZERS.values()} | {mint.optim.AdamW}
    for module in (nn.optim, mint.optim, experimental):
        left_out = [name for name in module.__all__ if name not in NOT_HERE and getattr(module, name) not in tried]
        assert not left_out
