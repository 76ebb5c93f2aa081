"""Train with HyperParallel's hsdp on two CPU processes: its own accumulation, and ours, against one process.

python clients/hyper_parallel_ranks.py FOLDER      # a copy of github.com/mindspore-ai/hyper-parallel

Prints how far the weights are from those of MindSpore's optimizer on all rows of each window, relative to how far these
have moved. Exit status 1 if ours are further than rounding. The CPU lacks three operators that HyperParallel calls op
by op: all-reduces stand in for its all-gather and its reduce-scatter, and assignments for its additions in place.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

ROWS, WIDTH, WINDOWS, MICRO_BATCHES, RANKS = 12, 8, 3, 4, 2
# Rows of a micro batch on each rank.
SHARES = [slice(0, 7), slice(7, 12)]
ROUNDING = 1e-4
WAYS = ("its loop, means of means", "ours: backward()", "ours: accumulator(grads)")


def batch(number: int) -> tuple[Any, Any]:
    random = np.random.default_rng(number)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    # Sentences of one token to six.
    tokens = random.integers(1, 7, (ROWS, 1)).astype(np.float32)
    return x, np.concatenate([np.sin(x[:, :2] * 3), tokens], 1)


def build() -> nn.Cell:
    network = nn.SequentialCell(mint.nn.Linear(WIDTH, 16), nn.Tanh(), mint.nn.Linear(16, 2))
    for number, weight in enumerate(network.trainable_params()):
        weight.set_data(Tensor(np.random.default_rng(number).normal(size=weight.shape).astype(np.float32) * 0.3))
    return network


class TokenLoss(nn.Cell):
    """The sum of the losses of all tokens, and their number."""

    returns_weight = True

    def __init__(self, network: nn.Cell) -> None:
        super().__init__()
        self.network = network

    def construct(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (y[:, 2] * ((self.network(x) - y[:, :2]) ** 2).sum(1)).sum(), y[:, 2].sum()


def adam(network: nn.Cell) -> nn.Cell:
    return nn.Adam(network.trainable_params(), 0.01)


def whole() -> Any:
    """The weights that one process gets from all rows of each window."""
    network = build()
    optimizer, loss = adam(network), TokenLoss(network)
    for window in range(WINDOWS):
        batches = [batch(window * MICRO_BATCHES + number) for number in range(MICRO_BATCHES)]
        x, y = [Tensor(np.concatenate(arrays)) for arrays in zip(*batches)]
        grads = ms.value_and_grad(loss, None, network.trainable_params(), has_aux=True)(x, y)[1]
        tokens = float(y[:, 2].sum().asnumpy())
        optimizer(tuple(grad / tokens for grad in grads))
    return values_of(network.trainable_params())


def values_of(parameters: Any) -> Any:
    return np.concatenate([parameter.asnumpy().ravel() for parameter in parameters])


def fill_in_what_the_cpu_lacks(platform: Any) -> None:
    """Replace operators that have no kernel on CPU in PYNATIVE mode."""

    class Handle:
        def wait(self) -> None: ...

    def summed(tensor: Tensor, group: Any) -> Tensor:
        return ops.AllReduce(group=group.group_name)(tensor + 0)

    def own(group: Any) -> int:
        return ms.communication.get_rank(group.group_name)

    def all_gather(data: Tensor, group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
        rows = [data + 0 if i == own(group) else ops.zeros_like(data + 0) for i in range(group.rank_size)]
        return summed(ops.concat(rows), group), Handle() if async_op else None

    def reduce_scatter(data: Tensor, group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
        rows = data.shape[0] // group.rank_size
        return summed(data, group)[own(group) * rows : (own(group) + 1) * rows] + 0, Handle() if async_op else None

    platform.all_gather_into_tensor, platform.reduce_scatter_tensor = map(staticmethod, (all_gather, reduce_scatter))
    Parameter.add_ = lambda self, other: self.assign_value(self.value() + other)
    Parameter.zero_ = lambda self: self.assign_value(ops.zeros_like(self.value()))


def train(way: str, level: str, accumulates: bool, hsdp: Any, rank: int) -> Any:
    """Return the weights after some windows."""
    from ms_gradaccum import Accumulator

    network = build()
    # Its gradients are sums over the ranks, and with its own accumulation over the micro batches.
    scale = 1.0 / (RANKS * MICRO_BATCHES) if way == WAYS[0] else 1.0
    hsdp(network, -1, 0, level, enable_grad_accumulation=accumulates, grad_scale=scale)
    optimizer, loss = adam(network), TokenLoss(network)
    accumulator = None if way == WAYS[0] else Accumulator(loss, optimizer, MICRO_BATCHES)

    def mean(x: Tensor, y: Tensor) -> Tensor:
        total, tokens = loss(x, y)
        return total / tokens

    own = ms.value_and_grad(mean, None, network.trainable_params())
    sums = ms.value_and_grad(loss, None, network.trainable_params(), has_aux=True)
    total: list[Tensor] = []
    for number in range(WINDOWS * MICRO_BATCHES):
        x, y = [Tensor(array[SHARES[rank]]) for array in batch(number)]
        if accumulator is None:
            number %= MICRO_BATCHES
            if accumulates:
                if number == 0:
                    network.zero_grads()
                network.set_requires_grad_sync(number == MICRO_BATCHES - 1)
            _, grads = own(x, y)
            if not accumulates:
                total = list(grads) if number == 0 else [each + grad for each, grad in zip(total, grads)]
                grads = total
            if number == MICRO_BATCHES - 1:
                optimizer(tuple(grads))
            continue
        with accumulator.accumulate():
            if way == WAYS[1]:
                accumulator.backward(x, y)
                accumulator.step()
            else:
                (value, tokens), grads = sums(x, y)
                accumulator(grads, tokens, value, reduction="sum")
    for part in network.hsdp_scheduler.hsdp_state.hsdp_params:
        if part.sharded:
            part.to_unsharded()
    return values_of(network.trainable_params())


def work(source: str, path: str) -> None:
    """Train on one process."""
    sys.path.insert(0, source)
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    ms.communication.init()
    from hyper_parallel import get_platform, hsdp

    fill_in_what_the_cpu_lacks(type(get_platform()))
    rank, expected = ms.communication.get_rank(), whole()
    moved = np.linalg.norm(expected - values_of(build().trainable_params()))
    rows = []
    for level in ("level1", "level2", "level3"):
        for accumulates in (False, True):
            for way in WAYS:
                weights = train(way, level, accumulates, hsdp, rank)
                rows.append([level, accumulates, way, float(np.linalg.norm(weights - expected) / moved)])
    if rank == 0:
        Path(path).write_text(json.dumps(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder with HyperParallel's source")
    source = parser.parse_args().source.resolve()
    if not (source / "hyper_parallel").is_dir():
        parser.error(f"{source} has no folder hyper_parallel")
    with tempfile.TemporaryDirectory() as folder:
        path, msrun = Path(folder, "rows.json"), Path(sys.executable).parent / "msrun"
        command = [str(msrun), f"--worker_num={RANKS}", f"--local_worker_num={RANKS}", "--join=True"]
        command += [f"--master_port={free_port()}", f"--log_dir={folder}", __file__, str(source), str(path)]
        environment = {"OMP_NUM_THREADS": "1", "MS_JIT": "0", **os.environ}
        status = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL).returncode
        if status or not path.exists():
            print(Path(folder, "worker_0.log").read_text(errors="replace")[-4000:])
            return 1
        rows = json.loads(path.read_text())
    print(f"{'':8}{'enable_grad_accumulation':26}{'':28}from all rows, of the way")
    for level, accumulates, way, difference in rows:
        print(f"{level:8}{accumulates!s:26}{way:28}{difference:.1e}")
    return int(any(difference > ROUNDING for _, _, way, difference in rows if way != WAYS[0]))


def free_port() -> int:
    from ms_gradaccum.tools.processes import free_port

    return free_port()


if __name__ == "__main__":
    if os.getenv("MS_ROLE"):
        work(*sys.argv[1:])
    else:
        sys.exit(main())
