"""A network with hooks that reduce, in one process: there is nothing to send, but its scale is undone."""

from types import SimpleNamespace

import pytest
from linear_toy import descend, line, mse, sgd, weight_of
from loop_toy import FOUR

from ms_gradaccum import Accumulator

pytestmark = pytest.mark.usefixtures("eager")


def test_the_scale_of_a_network_in_one_process_is_undone():
    network = line()
    network.weight.register_hook(lambda grad: grad * 0.125)
    network.hsdp_scheduler = SimpleNamespace(
        config=SimpleNamespace(grad_scale=0.125),
        requires_acc_grad=False,
        set_requires_grad_sync=lambda is_synced: None,
        zero_grads=lambda: None,
        hsdp_state=SimpleNamespace(shard=lambda: None),
    )
    accumulator = Accumulator(mse(network), sgd(network, 0.02), 2)
    for each in FOUR[:2]:
        with accumulator.accumulate():
            accumulator.backward(*each)
            output = accumulator.step()
    assert weight_of(network) == pytest.approx(descend((1, 2, 3, 4)), rel=1e-6)
    assert output.weight == 4
