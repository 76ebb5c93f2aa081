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
print(json.dumps([middle - begin, bare - middle, end - bare, len(modules)]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7, help="processes; the medians are printed")
    repeat = parser.parse_args().repeat
    runs = []
    for _ in range(repeat + 1):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    # The first one may compile Python's files.
    mindspore, bare, names, modules = (statistics.median(column) for column in zip(*runs[1:], strict=True))
    print("| import | s | beside MindSpore's |")
    print("| --- | --: | --: |")
    print(f"| `mindspore` | {mindspore:.2f} | |")
    print(f"| `ms_gradaccum` | {bare:.4f} | {bare / mindspore:.3f} |")
    print(
        f"| with `Model`, `TrainOneStepCell`, `Accumulator`: {modules:.0f} modules | {bare + names:.2f} | "
        f"{(bare + names) / mindspore:.3f} |"
    )


if __name__ == "__main__":
    main()
