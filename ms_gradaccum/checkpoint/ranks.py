"""Exchange of results and errors between ranks, so that no rank waits for one that has failed."""

from collections.abc import Callable
from typing import Any

from ms_gradaccum.parallel.world import World, current_world, gather_values

# The type that one rank's error has on the other ranks.
_KINDS: dict[str, type[Exception]] = {"OSError": OSError, "ValueError": ValueError, "RuntimeError": RuntimeError}


class Ranks:
    """The ranks that save or load together."""

    def __init__(self, owner: str) -> None:
        self.world: World = current_world(owner)

    @property
    def is_first(self) -> bool:
        """True on rank 0, which decides and writes everything that the ranks share."""
        return self.world.rank == 0

    def exchange(self, make: Callable[[], Any]) -> list[Any]:
        """Call ``make`` on each rank and return all results, as JSON. If one rank fails, raise on all. Collective."""
        if self.world.size == 1:
            return [make()]
        error: Exception | None = None
        words: list[Any] = [None, None, ""]
        try:
            words[0] = make()
        except Exception as caught:
            error = caught
            kind = next((name for name, kind in _KINDS.items() if isinstance(caught, kind)), "RuntimeError")
            words[1:] = [kind, str(caught)]
        everyone = gather_values(words)
        if error is not None:
            raise error
        for rank, (_, kind, text) in enumerate(everyone):
            if kind is not None:
                raise _KINDS[kind](f"{text} (rank {rank})")
        return [each[0] for each in everyone]
