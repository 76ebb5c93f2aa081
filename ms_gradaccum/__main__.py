"""Command line: ``python -m ms_gradaccum``."""

import argparse
import importlib
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from tqdm import tqdm

from ms_gradaccum import __version__

# Each command has its own module, imported after the arguments are checked: importing MindSpore takes seconds.
_PROGRAM = "python -m ms_gradaccum"
_FOUND = "ms_gradaccum_test.json"
_ERRORS = (ImportError, OSError, RuntimeError, TypeError, ValueError)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command and its arguments."""
    more = f"{_PROGRAM} COMMAND --help has the arguments of a command, and an example."
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Gradient accumulation for MindSpore.", epilog=more
    )
    parser.add_argument("--version", action="version", version=f"ms_gradaccum {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, summary: str, example: str) -> Callable[..., argparse.Action]:
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"example:\n  {_PROGRAM} {name} {example}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        return command.add_argument

    option = add(
        "test",
        "train small networks here and compare with the whole batch",
        "--device CPU --workers 2",
    )
    device = "the kind of device; default: the one that MindSpore takes here"
    option("--device", choices=("CPU", "GPU", "Ascend"), help=device)
    workers = "processes of a job, 1 for no job; default: %(default)s"
    option("--workers", type=int, default=2, metavar="N", help=workers)
    option(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="limit of one case; default: %(default)g",
    )
    option(
        "--output",
        default=_FOUND,
        metavar="FILE",
        help="where to write JSON; default: %(default)s, here",
    )

    summary = "print the smallest micro_size that fits into a memory limit"
    option = add("micro-size", summary, "train.py:build --memory-limit 4GiB")
    build = "a function that returns (network, optimizer, batch); or module:build"
    option("build", metavar="train.py:build", help=build)
    option(
        "--memory-limit",
        required=True,
        metavar="SIZE",
        help="limit of a training, such as 4GiB; required",
    )
    option(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="limit of one process; default: %(default)g",
    )

    option = add(
        "plot", "draw the files of MetricsLogger into a PNG", "run.jsonl other.jsonl -o runs.png"
    )
    option("runs", nargs="+", metavar="run.jsonl", help="files that MetricsLogger has written")
    option(
        "-o",
        "--output",
        metavar="PNG",
        help="the picture; default: the first file's name with .png",
    )

    add("env", "print versions, device, modes, and what this machine can and cannot do", "")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 2 with one sentence after an error, 130 after Ctrl-C."""
    args = parse(arguments)
    commands = {
        "test": (_test, "self_test.self_test"),
        "micro-size": (_micro_size, "micro_size_finder"),
        "plot": (_plot, "reporting.run_plot"),
        "env": (_env, "environment"),
    }
    command, module = commands[args.command]
    try:
        return command(args, _import_uninterrupted(f"ms_gradaccum.tools.{module}"))
    except KeyboardInterrupt:
        _print_error(args.command, "it was interrupted, and its processes have ended.")
        return 130
    except _ERRORS as error:
        _print_error(args.command, error)
        return 2


def _print_error(command: str, error: object) -> None:
    print(f"{_PROGRAM} {command}: {error}", file=sys.stderr)


def _import_uninterrupted(module: str) -> ModuleType:
    """Delay Ctrl-C while MindSpore is imported: during the import, Python would crash."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return importlib.import_module(module)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _env(args: argparse.Namespace, environment: ModuleType) -> int:
    for name, value in environment.describe().items():
        print(f"{name:28}{value}")
    return 0


def _micro_size(args: argparse.Namespace, finder: ModuleType) -> int:
    """Print the measurements as they come, and only the answer on the standard output."""

    def report(probe: object) -> None:
        print(probe, file=sys.stderr)

    try:
        print(
            finder.find_micro_size(
                args.build, args.memory_limit, timeout=args.timeout, report=report
            )
        )
    except MemoryError as error:
        _print_error("micro-size", error)
        return 1
    return 0


def _test(args: argparse.Namespace, self_test: ModuleType) -> int:
    """Print the table as it grows, and the current cell in a line below it. Return 1 if a cell has failed."""
    output = Path(args.output).absolute()
    is_new = not output.exists()
    try:
        # Check that the file can be written before the long test.
        output.open("a").close()
        with tqdm(bar_format="{desc} {elapsed}", leave=False, disable=None) as line:
            settings = {"timeout": args.timeout, "show": _show, "tell": line.set_description_str}
            found = self_test.self_test(args.device, args.workers, **settings)
        print(self_test.summary(found))
        output.write_text(json.dumps(found, indent=2) + "\n")
        print(f"Written to {output}")
    finally:
        if is_new and output.is_file() and not output.stat().st_size:
            output.unlink()
    return 1 if found["failed"] else 0


def _show(text: str) -> None:
    """Print a line above the changing one, without delay."""
    tqdm.write(text)
    sys.stdout.flush()


def _plot(args: argparse.Namespace, run_plot: ModuleType) -> int:
    output = args.output or Path(args.runs[0]).with_suffix(".png")
    run_plot.draw(args.runs, output)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
