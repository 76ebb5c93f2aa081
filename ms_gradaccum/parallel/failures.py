"""A rank that ends with an error tells the other ranks of its machine, which else wait for it without a word."""

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import TracebackType

from ms_gradaccum.parallel.world import World

# The name that msrun gives to the log of a worker.
_LOG = re.compile(r"worker_\d+\.log")


@cache
def tell_peers_of_failure(owner: str, world: World) -> None:
    """Let an error that ends this process be named in the logs of the other ranks, where msrun has written them."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        before(kind, error, traceback)
        if issubclass(kind, Exception):
            text = next(iter(str(error).strip().splitlines()), "")
            for own, log in _logs_of_peers():
                try:
                    with log.open("a") as file:
                        file.write(
                            f"\nFor '{owner}', all ranks must train to the end, but rank {world.rank} has ended with "
                            f"{kind.__name__}: {text} Look at the end of {own}; what follows here is of the lost "
                            f"connection.\n"
                        )
                except OSError:
                    continue

    sys.excepthook = hook


def _logs_of_peers() -> Iterator[tuple[Path, Path]]:
    """Yield the log of this process and that of each other rank in its folder."""
    try:
        own = Path(os.readlink("/proc/self/fd/2"))
    except OSError:
        return
    if _LOG.fullmatch(own.name):
        yield from ((own, log) for log in sorted(own.parent.glob("worker_*.log")) if log != own)
