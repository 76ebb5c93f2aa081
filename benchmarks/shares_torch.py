"""Which operators take how much of the same micro step in PyTorch, see shares.py. Takes an environment that has it.

.venv-peers/bin/python benchmarks/shares_torch.py --networks conv
"""

import argparse
import os
import time

import torch
from peers import DEFAULT
from peers_torch import loss_of, make_network
from torch.profiler import ProfilerActivity, profile
from workload import WORKLOADS

STEPS = 200


def print_shares(name: str, micro_size: int) -> None:
    workload = WORKLOADS[name]
    network = make_network(workload)
    x, y = (torch.from_numpy(array[: len(array) // micro_size]) for array in workload.batch(micro_size))
    y = y if workload.kind == "mlp" else y.long()

    def run() -> list[float]:
        """Return how many ms each micro step took."""
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            loss_of(network, workload, x, y).backward()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    fastest = sorted(run())[: STEPS // 4]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    print(f"{name}: {workload}, micro_size {micro_size}, {STEPS} micro steps")
    print(f"fastest quarter of those without the profiler: {sum(fastest) / len(fastest):.3f} ms each")
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=40))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=WORKLOADS, default=DEFAULT[0])
    parser.add_argument("--micro-size", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count())
    for network in args.networks:
        print_shares(network, args.micro_size)
