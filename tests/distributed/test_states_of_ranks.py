"""States of several processes: nothing is lost where one of them fails, and their number may change."""

import errno
import os
import signal
from unittest import mock

import mindspore as ms
import numpy as np
import pytest
from linear_toy import momentum, mse
from mindspore import Tensor, nn, train
from mindspore.parallel.auto_parallel import AutoParallel
from open_window import buffer_of
from ranks import RANK, SIZE, assert_same, everyone, folder, on_ranks, own_data, states, train_batches
from refusal import refuses
from scenarios import KINDS, build_network, build_step, fingerprint, weights_of, whole_batches

from ms_gradaccum import EMA, Model, StateCheckpoint, TrainOneStepCell, load_state, save_state
from ms_gradaccum.checkpoint import files
from ms_gradaccum.checkpoint.contents import Contents
from ms_gradaccum.parallel import factory

# Batches before the state is saved, in the middle of a window of two, and after it.
FIRST, LAST = range(3), range(3, 6)
WINDOWS = ((0, 1), (2, 3), (4, 5))


def new_step(name="data parallel"):
    return build_step(accumulation_steps=2, parallel=KINDS[name])


def bits(step):
    return fingerprint(
        [*step.network.get_parameters(), *step.optimizer.get_parameters(), *buffer_of(step).all_totals()]
    )


def check_weights(network):
    np.testing.assert_allclose(weights_of(network), whole_batches("Adam", WINDOWS), 1e-5, 1e-6)


def go_on_bit_for_bit(name):
    """Save in mid-window, go on, and do the same from the state."""
    network, step = new_step(name)
    train_batches(step, FIRST)
    save_state(step, states() / f"{name} {SIZE}")
    train_batches(step, LAST)
    _, its_step = new_step(name)
    load_state(its_step, states() / f"{name} {SIZE}")
    train_batches(its_step, LAST)
    assert bits(step) == bits(its_step)
    check_weights(network)


test_as_many_ranks_go_on_bit_for_bit = on_ranks(2, cases=KINDS.keys())(go_on_bit_for_bit)
test_four_go_on_bit_for_bit = on_ranks(4, cases=["data parallel"])(go_on_bit_for_bit)


@on_ranks(4, cases=[*zip(KINDS, KINDS), ("data parallel", "level2"), ("level2", "data parallel")])
def test_twice_as_many_ranks_go_on(source, name):
    network, step = new_step(name)
    load_state(step, states() / f"{source} 2")
    train_batches(step, LAST)
    check_weights(network)


@pytest.mark.parametrize("state", [f"{name} 2" for name in KINDS] + ["data parallel 4"])
def test_one_process_goes_on(state, two, four, request, eager):
    network, step = build_step(accumulation_steps=2)
    load_state(step, request.getfixturevalue("states") / state)
    assert step.open_batches() == 1
    assert abs(buffer_of(step).weight.asnumpy() - 12) < 1e-6  # The rows of all ranks.
    train_batches(step, LAST)
    check_weights(network)


@on_ranks(2)
def test_what_a_rank_has_for_itself_stays_its_own():
    """The normalisation's statistics are of each rank's own rows."""

    def build():
        network = nn.SequentialCell(nn.Dense(6, 8), nn.BatchNorm1d(8), nn.Dense(8, 3))
        ms.set_seed(1)
        loss_cell = mse(network)
        return network, TrainOneStepCell(loss_cell, momentum(network, 0.1)).set_train()

    network, step = build()
    train_batches(step, FIRST)
    save_state(step, states() / "statistics")
    fresh, its_step = build()
    load_state(its_step, states() / "statistics")
    mean = network[1].moving_mean.asnumpy().tolist()
    first, second = everyone(mean)
    assert mean == fresh[1].moving_mean.asnumpy().tolist() and first != second


@on_ranks(2, cases=[("data parallel", 1, 0), ("level1", 0, 3)])
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_loses_nothing(name, bad_rank, files_before):
    """One rank cannot write, after some files; the next attempt is whole."""
    _, step = new_step(name)
    place = states() / f"full {name} {bad_rank}"
    save_state(step, place)
    train_batches(step, FIRST)
    write, written = files._write, []

    def fail(path, data):
        written.append(path)
        if RANK == bad_rank and len(written) > files_before:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    before = bits(step)
    with mock.patch.multiple(files, _write=fail, CHUNK=1):
        with refuses(OSError, "No space left on device", "Earlier states are intact."):
            save_state(step, place)
    left = sorted(path.name for path in place.iterdir() if path.name != files.LOCK)
    saved = save_state(step, place)
    # Rank 0 clears up, while the other one may look.
    assert [each for each in left if RANK == 0 or not each.startswith(".")] == ["state-000001"]
    assert before == bits(step) and saved.path.name == "state-000002"


@on_ranks(2)
def test_ranks_that_have_parted_save_nothing():
    network, step = new_step()
    train_batches(step, FIRST)
    if RANK == 1:
        network.trainable_params()[0].set_data(Tensor(network.trainable_params()[0].asnumpy() + 1e-7))
    with refuses(Exception, "different values of '0.weight'."):
        save_state(step, states() / "parted")
    # Rank 0 clears up, while the other one may look.
    assert RANK or list((states() / "parted").glob("state-*")) == []


@on_ranks(2)
def test_a_damaged_file_of_one_rank_is_refused_by_all():
    _, step = new_step()
    train_batches(step, FIRST)
    saved = [save_state(step, states() / "damaged") for _ in range(2)][-1]
    if RANK == 0:
        path = saved.path / "rank_1" / "parameters-00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    train_batches(step, LAST)  # Both wait for that, and have other numbers than the state.
    before = bits(step), Contents(step).state_dict()
    checksum = "rank_1/parameters-00000.safetensors has another checksum"
    with refuses(Exception, checksum, "Give the folder of the state before it", "state-000001."):
        load_state(step, states() / "damaged")
    assert before == (bits(step), Contents(step).state_dict())


class Signal(train.Callback):
    def on_train_step_end(self, run_context):
        if RANK == 1 and run_context.original_args().cur_step_num == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def train_model(name, *callbacks):
    """Rank 0 has three batches in each pass, the other two; a callback changes the rate in each step."""
    network = build_network()
    model = Model(network, nn.MSELoss(), nn.Adam(network.trainable_params(), 0.01))
    rate = train.LearningRateScheduler(lambda _, step: 0.001 * (1 + step % 7))
    checkpoint = StateCheckpoint(states() / name, save_checkpoint_steps=2, keep_checkpoint_max=9)
    model.train(3, own_data(), callbacks=[checkpoint, rate, *callbacks], resume=True)
    return fingerprint(network)


@on_ranks(2)
def test_a_signal_to_one_rank_ends_all_after_the_same_window():
    straight = train_model("straight")
    with pytest.raises(SystemExit) as end:
        train_model("signalled", Signal())
    saved = sorted(path.name for path in (states() / "signalled").glob("state-*"))
    resumed = train_model("signalled")
    assert_same(straight)
    assert end.value.code == 143 and resumed == straight
    # After steps 3, the end of a pass, and 4; after step 2 only one rank has a batch left.
    assert saved == ["state-000001", "state-000002"]


@on_ranks(2)
def test_what_the_compiler_has_partitioned_is_saved_rank_by_rank_as_mindspore_reads_it():
    network = build_network()
    with mock.patch.object(factory, "is_semi_auto", lambda network: True):
        step = TrainOneStepCell(AutoParallel(mse(network)), momentum(network, 0.1))
    mine = network.trainable_params()[0]
    values = mine.asnumpy() + RANK
    mine.set_data(Tensor(values))
    saved = save_state(step, states() / "partitioned")
    path = saved.path / f"rank_{RANK}" / "parameters-00000.safetensors"
    by_mindspore = ms.load_checkpoint(str(path), format="safetensors")
    mine.set_data(Tensor(values * 0))
    load_state(step, states() / "partitioned")
    found = sorted(str(path.relative_to(saved.path)) for path in saved.path.rglob("*.safetensors"))
    assert found == [f"rank_{each}/parameters-00000.safetensors" for each in (0, 1)]
    assert (mine.asnumpy() == values).all() and (by_mindspore[mine.name].asnumpy() == values).all()
    assert list(ms.load_param_into_net(build_network(), by_mindspore)[0]) == []


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
    network, step = new_step("level1")
    ema = EMA(0.5, warmup_updates=0)
    step.add_callback(ema)
    train_batches(step, FIRST)
    save_state(step, states() / "averages")
    train_batches(step, LAST)
    trained = fingerprint(network)
    check_averages(ema, network)
    assert trained == fingerprint(network) and ema.updates == 3
    assert_same(fingerprint(ema.parameters))
    path = str(folder() / f"rank_{RANK}.ckpt")
    ms.save_checkpoint(step, path)
    saved = ms.load_checkpoint(path)
    assert saved["ema.0.weight"].shape == saved["0.weight"].shape == (8, 6) and saved["ema.updates"].shape == ()


def test_one_process_goes_on_with_the_averages(two, request, eager):
    network, step = build_step(accumulation_steps=2)
    ema = EMA(0.5, warmup_updates=0)
    step.add_callback(ema)
    load_state(step, request.getfixturevalue("states") / "averages")
    assert step.open_batches() == 1 and ema.updates == 1
    train_batches(step, LAST)
    assert ema.updates == 3
    check_averages(ema, network)
