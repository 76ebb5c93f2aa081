"""EMA of several processes: each has the averages of the whole weights, and another number of them goes on."""

import numpy as np
import pytest
from scenarios import build_network, build_step, train_batches, weights_of, whole_batches
from state_scenarios import LAST

from ms_gradaccum import EMA, load_state

PART, SIZES = "ema_worker", (2,)
WINDOWS = ((0, 1), (2, 3), (4, 5))


@pytest.fixture(scope="module")
def expected():
    """The averages over MindSpore's own updates with the rows of all processes."""
    average = np.array(weights_of(build_network()))
    for number in range(1, len(WINDOWS) + 1):
        average = average * 0.5 + np.array(whole_batches("Adam", WINDOWS[:number])) * 0.5
    assert np.abs(average - whole_batches("Adam", WINDOWS)).max() > 1e-3
    return average


def test_shards_are_averaged_as_whole_weights(two, expected):
    for report in two:
        np.testing.assert_allclose(report["averages"], expected, 1e-5, 1e-6)
        assert report["bits"] == [two[0]["bits"][0], True]
        assert report["updates"] == 3
        assert report["shapes"]["ema.0.weight"] == report["shapes"]["0.weight"] == [8, 6]
        assert report["shapes"]["ema.updates"] == []


def test_one_process_goes_on_in_mid_window(two, states, expected, eager):
    network, step = build_step(accumulation_steps=2)
    ema = EMA(0.5, warmup_updates=0)
    step.add_callback(ema)
    load_state(step, states)
    assert step.open_batches() == 1 and ema.updates == 1
    train_batches(step, LAST)
    assert ema.updates == 3
    with ema.swapped():
        np.testing.assert_allclose(weights_of(network), expected, 1e-5, 1e-6)
