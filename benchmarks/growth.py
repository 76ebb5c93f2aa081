"""How the cost of a window grows with micro_size, parameters, tensors and ranks. Draws the pictures of docs/benchmarks.

python benchmarks/growth.py                  # all themes: measure, print, keep the numbers, draw
python benchmarks/growth.py memory ranks     # these alone
python benchmarks/growth.py --draw           # draw once more what was measured before
python benchmarks/growth.py --paper          # 1,000 devices and 10^11 parameters, by TrainingPlan's formulas
"""

import argparse
import datetime
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")

from growth_paper import paper_table
from growth_plots import Rows, draw
from growth_ranks import rows_of
from growth_windows import BARE_MICRO_BATCH, in_child, part_seconds, peak_memory, window_seconds
from step import BARE, FULL, OURS, run_child
from windows import versions

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
MICRO_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
REPEAT = 5


def micro_size_rows() -> Iterator[dict[str, Any]]:
    """Memory and time of a window against micro_size, the batch fixed."""
    settings = {"layers": 4, "width": 512, "batch": 4096}
    args = argparse.Namespace(**settings)
    seconds = in_child(window_seconds, settings, MICRO_SIZES, REPEAT)
    full_seconds = min(seconds[FULL])
    for name, micro_size in [(FULL, 1), *((OURS, micro_size) for micro_size in MICRO_SIZES)]:
        best, bare = (min(seconds[f"{kind} {micro_size}"]) for kind in (OURS, BARE))
        yield {
            "name": name,
            "micro_size": micro_size,
            "megabytes": run_child(name, micro_size, args, args.batch).megabytes,
            "seconds": full_seconds if name == FULL else best,
            "bare_seconds": full_seconds if name == FULL else bare,
        }


def parameter_rows() -> Iterator[dict[str, Any]]:
    """The parts of a window against the number of parameters, in 10 tensors, with micro batches of 2 rows."""
    for width in (44, 141, 447, 1414, 4472):
        settings = {"layers": 5, "width": width, "batch": 4}
        row = in_child(part_seconds, settings, REPEAT)
        for key, name in (("peak_mb", OURS), ("full_peak_mb", FULL)):
            row[key] = in_child(peak_memory, name, 2, settings, True)["peak"]
        yield row


def tensor_rows() -> Iterator[dict[str, Any]]:
    """The parts of a window against the number of tensors, which have 10^6 parameters together."""
    for layers, width in ((5, 447), (16, 249), (50, 141), (158, 79), (500, 44)):
        yield in_child(part_seconds, {"layers": layers, "width": width, "batch": 4}, REPEAT)


def rank_rows() -> Iterator[dict[str, Any]]:
    """What each rank sends, keeps and waits for, against the number of ranks."""
    for processes in (1, 2, 4, 8):
        yield from rows_of(processes, {"layers": 6, "width": 512, "batch": 64}, REPEAT)


def memory_rows() -> Iterator[dict[str, Any]]:
    """The peak of the memory beside what it should be: parameters, state, sums, and one micro batch by MindSpore."""
    settings = {"layers": 16, "width": 1024, "batch": 1024}
    for micro_size in (2, 8, 32, 64):
        bare, ours = (in_child(peak_memory, name, micro_size, settings, True) for name in (BARE_MICRO_BATCH, OURS))
        fresh = in_child(peak_memory, OURS, micro_size, settings, False)
        weights = ours["weights"]
        # Momentum keeps one number per weight, and so do the sums.
        parts = {"weights": weights, "state": weights, "buffer": weights, "bare": bare["peak"] - weights}
        expected = sum(parts.values())
        yield {
            "micro_size": micro_size,
            **parts,
            "sum": expected,
            "peak": ours["peak"],
            "ratio": ours["peak"] / expected,
            "fresh_peak": fresh["peak"],
            "counted_by_mindspore": ours["counted"],
        }


THEMES = {
    "micro_size": micro_size_rows,
    "parameters": parameter_rows,
    "tensors": tensor_rows,
    "ranks": rank_rows,
    "memory": memory_rows,
}


def measure(theme: str) -> Rows:
    """Measure a theme and print its rows as they come."""
    print(f"\n{theme}: {THEMES[theme].__doc__}", flush=True)
    rows = []
    for row in THEMES[theme]():
        rows.append(row)
        if len(rows) == 1:
            print("  ".join(f"{key:>{_width(key)}}" for key in row))
        print("  ".join(_cell(key, value) for key, value in row.items()), flush=True)
    return rows


def _width(key: str) -> int:
    return 22 if key in ("kind", "name") else max(10, len(key))


def _cell(key: str, value: Any) -> str:
    return f"{value:{_width(key)}.4g}" if isinstance(value, float) else f"{value!s:>{_width(key)}}"


def keep(theme: str, rows: Rows) -> None:
    """Write what was measured, and on what, beside the picture."""
    facts = {
        "command": f"OMP_NUM_THREADS={os.getenv('OMP_NUM_THREADS', '')} python benchmarks/growth.py {theme}",
        "versions": versions(),
        "hardware": _processor(),
        "date": datetime.date.today().isoformat(),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in facts.items()]
    listed = ",\n".join(f"  {json.dumps(_rounded(row))}" for row in rows)
    text = "\n".join(["{", *lines, ' "rows": [', listed, " ]", "}", ""])
    (FOLDER / f"{theme}.json").write_text(text)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("themes", nargs="*", help=f"default: all of {', '.join(THEMES)}")
    parser.add_argument("--draw", action="store_true", help="measure nothing, draw what was measured before")
    parser.add_argument("--paper", action="store_true", help="print what a large job would send and hold")
    args = parser.parse_args()
    unknown = set(args.themes) - THEMES.keys()
    if unknown:
        parser.error(f"themes must be among {', '.join(THEMES)}, but got {', '.join(sorted(unknown))}")
    return args


def main() -> None:
    args = parse_args()
    if args.paper:
        print(paper_table())
        return
    for theme in args.themes or THEMES:
        if not args.draw:
            keep(theme, measure(theme))
        draw(theme, json.loads((FOLDER / f"{theme}.json").read_text())["rows"], FOLDER / f"{theme}.png")


if __name__ == "__main__":
    main()
