"""EMA of several processes: each has the averages of the whole weights, and another number of them goes on."""

import mindspore as ms
import numpy as np
from ranks import RANK, SIZE, assert_same, folder, on_ranks, states
from scenarios import build_network, build_step, fingerprint, train_batches, weights_of, whole_batches

from ms_gradaccum import EMA, HSDP, load_state, save_state

PART, SIZES = "test_ema_of_ranks", (2,)
# The state is saved in the middle of the second window.
FIRST, LAST = range(3), range(3, 6)
WINDOWS = ((0, 1), (2, 3), (4, 5))


def check_averages(ema, network):
    """The averages over MindSpore's own updates with the rows of all processes."""
    average = np.array(weights_of(build_network()))
    for number in range(1, len(WINDOWS) + 1):
        average = average * 0.5 + np.array(whole_batches("Adam", WINDOWS[:number])) * 0.5
    assert np.abs(average - whole_batches("Adam", WINDOWS)).max() > 1e-3
    with ema.swapped():
        np.testing.assert_allclose(weights_of(network), average, 1e-5, 1e-6)


@on_ranks(2)
def test_shards_are_averaged_as_whole_weights():
    network, step = build_step(accumulation_steps=2, parallel=HSDP(threshold=0))
    ema = EMA(0.5, warmup_updates=0)
    step.add_callback(ema)
    train_batches(step, FIRST, RANK, SIZE)
    save_state(step, states())
    train_batches(step, LAST, RANK, SIZE)
    trained = fingerprint(network)
    check_averages(ema, network)
    assert trained == fingerprint(network) and ema.updates == 3
    assert_same(fingerprint(ema.parameters))
    path = str(folder() / f"rank_{RANK}.ckpt")
    ms.save_checkpoint(step, path)
    saved = ms.load_checkpoint(path)
    assert saved["ema.0.weight"].shape == saved["0.weight"].shape == (8, 6) and saved["ema.updates"].shape == ()


def test_one_process_goes_on_in_mid_window(two, request, eager):
    network, step = build_step(accumulation_steps=2)
    ema = EMA(0.5, warmup_updates=0)
    step.add_callback(ema)
    load_state(step, request.getfixturevalue("states"))
    assert step.open_batches() == 1 and ema.updates == 1
    train_batches(step, LAST)
    assert ema.updates == 3
    check_averages(ema, network)
