"""Every optimizer that MindSpore has: a window of micro batches is one update on the whole batch."""

import functools

import mindspore as ms
import mindspore.experimental.optim as experimental
import pytest
from mindspore import mint, nn
from optimizer_parity import BOTH, WholeBatch, accumulate, assert_like_whole_batch, assert_not_vacuous, one_layer
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


@pytest.mark.parametrize("name,mode", some(LOADED, *[each for each in LOADED if each[0] in FIRST]), indirect=["mode"])
def test_a_checkpoint_loaded_into_a_step_that_has_trained_is_trained_on(name, mode):
    assert_like_whole_batch(whole_batch(name), *accumulated(name)["loaded", mode])


def test_no_optimizer_of_mindspore_is_left_out():
    tried = {optimizer for optimizer, _ in OPTIMIZERS.values()} | {mint.optim.AdamW}
    for module in (nn.optim, mint.optim, experimental):
        left_out = [name for name in module.__all__ if name not in NOT_HERE and getattr(module, name) not in tried]
        assert not left_out
