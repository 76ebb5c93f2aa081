"""What a window costs on each of several processes, and whether `TrainingPlan` foresees what it sends and holds."""

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import mindspore as ms
from distributed import KINDS, OURS, build, launch, report, what_is_kept
from growth_paper import held, make_plan
from growth_windows import Stopwatch
from mindspore.communication import get_group_size, get_rank, init
from windows import make_batch

NAMES = (OURS, "ours, HSDP level1", "ours, HSDP level2")
MICRO_SIZE = 4


def measure(settings: dict[str, int], repeat: int) -> dict[str, Any]:
    """Measure as one of the ranks: all kinds take turns, after two windows to warm up."""
    args = argparse.Namespace(**settings)
    batch = make_batch(args)
    programs = {name: build(name, MICRO_SIZE, args) for name in NAMES}
    watches = {name: Stopwatch(program.step) for name, program in programs.items()}
    for _ in range(2 + repeat):
        for program in programs.values():
            program.run(batch)
    # Counting runs a window too.
    windows = {name: list(watch.windows[2:]) for name, watch in watches.items()}
    facts = {}
    for name, program in programs.items():
        weights = program.network.trainable_params()
        plan = make_plan(KINDS[name], weights, get_group_size(), MICRO_SIZE, "CPU")
        kept = what_is_kept(program, batch)
        foreseen = (plan.collectives_per_window, plan.bytes_per_window, plan.buffer_bytes, held(plan).weights)
        facts[name] = {
            "windows": windows[name],
            "messages": kept.messages,
            "sent": kept.sent,
            "state": 4 * kept.state,
            "sums": 4 * kept.sums,
            "weights": 4 * kept.weights,
            "as_planned": foreseen == (kept.messages, kept.sent, 4 * kept.sums, 4 * kept.weights),
        }
    return facts


def rows_of(processes: int, settings: dict[str, int], repeat: int) -> list[dict[str, Any]]:
    """Run `measure` on several processes and return a row per kind of parallelism."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [json.dumps([settings, repeat])]
        ranks = launch(Path(__file__).resolve(), processes, Path(folder), arguments=arguments)
    rows = []
    for name in NAMES:
        facts = [rank[name] for rank in ranks]
        # The best window, each as long as on its slowest rank.
        windows = [tuple(map(max, zip(*parts))) for parts in zip(*(fact.pop("windows") for fact in facts))]
        most = {key: max(fact[key] for fact in facts) for key in facts[0]}
        most["as_planned"] = all(fact["as_planned"] for fact in facts)
        micro_step, end = map(min, zip(*windows))
        rows.append({"ranks": processes, "kind": name, **most, "micro_step_s": micro_step, "end_s": end})
    return rows


def main() -> None:
    gc.freeze()  # Each compilation collects garbage, which takes longest in the modules that never become any.
    init()
    ms.set_context(mode=ms.GRAPH_MODE)
    report(get_rank(), measure(*json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
