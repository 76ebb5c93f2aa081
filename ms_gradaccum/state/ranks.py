"""How the ranks of a job agree about what each has done for itself, so that none waits for one that has failed."""

from collections.abc import Callable
from typing import Any

from ms_gradaccum.parallel.world import World, current_world, gather_values


class Ranks:
    """The processes that save or load together."""

    def __init__(self, owner: str) -> None:
        self.world: World = current_world(owner)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides and writes what all have in common."""
        return self.world.rank == 0

    def exchange(self, make: Callable[[], Any], wrap: Callable[[str], Exception]) -> list[Any]:
        """Return what ``make`` gives on each rank, as JSON. If it fails on one, raise on all. Collective.

        ``wrap`` makes the exception that the others raise of the text of that rank's.
        """
        error: Exception | None = None
        value: Any = None
        try:
            value = make()
        except Exception as caught:
            error = caught
        if self.world.size == 1:
            everyone = [(value, None)]
        else:
            everyone = gather_values((value, None if error is None else str(error)))
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(everyone):
            if text is not None:
                raise wrap(f"{text} (rank {rank})")
        return [each for each, _ in everyone]
