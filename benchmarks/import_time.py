"""The time of importing the package beside MindSpore's own import, in one process each time.

``ms_gradaccum`` alone loads nothing of itself; what ``TrainOneStepCell``, ``Model`` and ``Accumulator`` need is loaded
when they are imported. Both are measured after MindSpore in the same process. ``python benchmarks/import_time.py``
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys, time
begin = time.perf_counter()
import mindspore
middle = time.perf_counter()
import ms_gradaccum
bare = time.perf_counter()
from ms_gradaccum import Accumulator, GradAccumulation, Model, TrainOneStepCell
end = time.perf_counter()
modules = [name for name in sys.modules if name.startswith("ms_gradaccum")]
print(json.dumps([middle - begin, bare - middle, end - middle, len(modules)]))
"""


def run() -> list[float]:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7, help="processes; the medians are printed")
    # The first one may compile Python's files.
    runs = [run() for _ in range(parser.parse_args().repeat + 1)][1:]
    mindspore, bare, names, modules = map(statistics.median, zip(*runs, strict=True))
    rows = {"`ms_gradaccum`": bare, f"with `Model`, `TrainOneStepCell`, `Accumulator`: {modules:.0f} modules": names}
    print("| import | s | beside MindSpore's |\n| --- | --: | --: |")
    print(f"| `mindspore` | {mindspore:.2f} | |")
    for name, seconds in rows.items():
        print(f"| {name} | {seconds:.4f} | {seconds / mindspore:.3f} |")
