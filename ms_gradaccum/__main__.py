"""``python -m ms_gradaccum``: pictures of trainings, and facts for a bug report."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from ms_gradaccum.environment import describe
from ms_gradaccum.run_plot import draw

_PROGRAM = "python -m ms_gradaccum"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command and its arguments."""
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="Gradient accumulation for MindSpore.")
    commands = parser.add_subparsers(dest="command", required=True)
    plot = commands.add_parser("plot", help="draw loss, learning rate and norms of MetricsLogger's files into a PNG")
    plot.add_argument("runs", nargs="+", metavar="run.jsonl", help="files that MetricsLogger has written")
    plot.add_argument("-o", "--output", help="the PNG; by default the first file's name with .png")
    commands.add_parser("env", help="print versions, device, modes, and what this machine can and cannot do")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 2 with one sentence after an error."""
    args = parse(arguments)
    if args.command == "env":
        for name, value in describe().items():
            print(f"{name:28}{value}")
        return 0
    output = args.output or Path(args.runs[0]).with_suffix(".png")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            draw(args.runs, output)
    except (ImportError, OSError, ValueError) as error:
        print(f"{_PROGRAM} plot: {error}", file=sys.stderr)
        return 2
    for warning in caught:
        print(f"{_PROGRAM} plot: {warning.message}", file=sys.stderr)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
