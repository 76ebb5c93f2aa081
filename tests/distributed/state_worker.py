"""A process of `test_states_of_ranks.py`: save states, lose some, and go on from them."""

import errno
import os
import signal
from pathlib import Path

import mindspore as ms
from launch import meet, report
from mindspore import Tensor, nn, train
from mindspore.dataset import NumpySlicesDataset
from mindspore.parallel.auto_parallel import AutoParallel
from open_window import buffer_of
from scenarios import (
    KINDS,
    build_network,
    build_step,
    fingerprint,
    train_batches,
    uneven_data,
    weights_of,
)
from state_scenarios import FIRST, LAST, MOVES

from ms_gradaccum import DataParallel, Model, StateCheckpoint, TrainOneStepCell, load_state, save_state
from ms_gradaccum.checkpoint import files
from ms_gradaccum.checkpoint.contents import Contents
from ms_gradaccum.parallel import factory

rank, size = meet(eager=True)
STATES = Path(os.environ["STATES"])
results = {}


def new_step(kind):
    return build_step(accumulation_steps=2, parallel=kind)


def bits(step):
    """A hash of all that this rank holds."""
    return fingerprint(
        [*step.network.get_parameters(), *step.optimizer.get_parameters(), *buffer_of(step).all_totals()]
    )


def error_of(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def save_in_mid_window(name):
    """Save on these ranks, go on, and do the same from the state."""
    network, step = new_step(KINDS[name])
    train_batches(step, FIRST, rank, size)
    save_state(step, STATES / f"{name} {size}")
    train_batches(step, LAST, rank, size)
    fresh, its_step = new_step(KINDS[name])
    load_state(its_step, STATES / f"{name} {size}")
    train_batches(its_step, LAST, rank, size)
    results[name] = {"bits": [bits(step), bits(its_step)], "weights": weights_of(network)}


def move(source, name):
    """Go on from a state that two ranks have saved."""
    network, step = new_step(KINDS[name])
    load_state(step, STATES / f"{source} 2")
    train_batches(step, LAST, rank, size)
    results[f"{source} to {name}"] = weights_of(network)


def own_statistics():
    """The normalisation's statistics are of each rank's own rows."""

    def build():
        network = nn.SequentialCell(nn.Dense(6, 8), nn.BatchNorm1d(8), nn.Dense(8, 3))
        ms.set_seed(1)
        loss_cell = nn.WithLossCell(network, nn.MSELoss())
        return network, TrainOneStepCell(loss_cell, nn.Momentum(network.trainable_params(), 0.1, 0.9)).set_train()

    network, step = build()
    train_batches(step, FIRST, rank, size)
    save_state(step, STATES / "statistics")
    fresh, its_step = build()
    load_state(its_step, STATES / "statistics")
    mean = network[1].moving_mean.asnumpy().tolist()
    results["statistics"] = [mean, fresh[1].moving_mean.asnumpy().tolist()]


def full_disk(name, bad_rank, files_before):
    """One rank cannot write, after some files: none of them has saved, and the next attempt is whole."""
    _, step = new_step(KINDS[name])
    folder = STATES / f"full {name} {bad_rank}"
    save_state(step, folder)
    train_batches(step, FIRST, rank, size)
    write, chunk, written = files._write, files.CHUNK, []

    def fail(path, data):
        written.append(path)
        if rank == bad_rank and len(written) > files_before:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    files._write, files.CHUNK = fail, 1
    before = bits(step)
    error = error_of(lambda: save_state(step, folder))
    files._write, files.CHUNK = write, chunk
    left = sorted(path.name for path in folder.iterdir() if path.name != files.LOCK)
    saved = save_state(step, folder)
    results[f"full {bad_rank}"] = [error, left, before == bits(step), saved.path.name]


def differing_ranks():
    """A rank's weights are not those of the others."""
    network, step = new_step(DataParallel())
    train_batches(step, FIRST, rank, size)
    if rank == 1:
        network.trainable_params()[0].set_data(Tensor(network.trainable_params()[0].asnumpy() + 1e-7))
    results["differing_ranks"] = error_of(lambda: save_state(step, STATES / "differing_ranks"))
    results["differing_ranks left"] = [path.name for path in (STATES / "differing_ranks").glob("state-*")]


def damaged():
    """One byte of one rank's sums is another one."""
    _, step = new_step(DataParallel())
    train_batches(step, FIRST, rank, size)
    saved = [save_state(step, STATES / "damaged") for _ in range(2)][-1]
    if rank == 0:
        path = saved.path / "rank_1" / "parameters-00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    train_batches(step, LAST, rank, size)  # both wait for that, and have other numbers than the state
    before = bits(step), Contents(step).state_dict()
    error = error_of(lambda: load_state(step, STATES / "damaged"))
    results["damaged"] = [error, before == (bits(step), Contents(step).state_dict())]


def partitioned():
    """Return the part of everything that the compiler has given to each rank."""
    factory.is_semi_auto, is_semi_auto = lambda network: True, factory.is_semi_auto
    try:
        network = build_network()
        cell = AutoParallel(nn.WithLossCell(network, nn.MSELoss()))
        step = TrainOneStepCell(cell, nn.Momentum(network.trainable_params(), 0.1, 0.9))
    finally:
        factory.is_semi_auto = is_semi_auto
    mine = network.trainable_params()[0]
    mine.set_data(Tensor(mine.asnumpy() + rank))
    saved = save_state(step, STATES / "partitioned")
    path = saved.path / f"rank_{rank}" / "parameters-00000.safetensors"
    by_mindspore = ms.load_checkpoint(str(path), format="safetensors")
    values = mine.asnumpy().tolist()
    mine.set_data(Tensor(mine.asnumpy() * 0))
    load_state(step, STATES / "partitioned")
    results["partitioned"] = {
        "files": sorted(str(path.relative_to(saved.path)) for path in saved.path.rglob("*.safetensors")),
        "values": [values, mine.asnumpy().tolist(), by_mindspore[mine.name].asnumpy().tolist()],
        "left over": list(ms.load_param_into_net(build_network(), by_mindspore)[0]),
    }


class Signal(train.Callback):
    def on_train_step_end(self, run_context):
        if rank == 1 and run_context.original_args().cur_step_num == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def train_model(folder, epochs, *callbacks):
    """Rank 0 has three batches in each pass, the other two; a callback changes the rate in each step."""
    network = build_network()
    optimizer = nn.Adam(network.trainable_params(), 0.01)
    model = Model(network, nn.MSELoss(), optimizer)
    data = NumpySlicesDataset(tuple(uneven_data(rank)), shuffle=False).batch(2)
    rate = train.LearningRateScheduler(lambda _, step: 0.001 * (1 + step % 7))
    checkpoint = StateCheckpoint(STATES / folder, save_checkpoint_steps=2, keep_checkpoint_max=9)
    model.train(epochs, data, callbacks=[checkpoint, rate, *callbacks], resume=True)
    return fingerprint(network)


def signalled():
    straight = train_model("straight", 3)
    code = None
    try:
        train_model("signalled", 3, Signal())
    except SystemExit as end:
        code = end.code
    states = sorted(path.name for path in (STATES / "signalled").glob("state-*"))
    results["signalled"] = [code, states, straight, train_model("signalled", 3)]


for name in KINDS if size == 2 else ["data parallel"]:
    save_in_mid_window(name)
if size == 2:
    own_statistics()
    full_disk("data parallel", 1, 0)
    full_disk("level1", 0, 3)
    differing_ranks()
    damaged()
    partitioned()
    signalled()
else:
    for source, name in MOVES:
        move(source, name)
report(rank, results)
