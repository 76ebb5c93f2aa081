"""Warnings of the inputs that the ranks of a training have begun with."""

from collections.abc import Sequence
from typing import NamedTuple

from ms_gradaccum._checks import warn


class FirstInput(NamedTuple):
    """The first input of a rank."""

    kind: str  # A batch or gradients; empty if there is none.
    digest: str


NO_INPUT = FirstInput("", "")


def warn_of_inputs(owner: str, firsts: Sequence[FirstInput]) -> None:
    """Warn if ranks have begun with the same batch or gradients."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(firsts):
        if each.kind:
            groups.setdefault((each.kind, each.digest), []).append(rank)
    # Name the largest group of such ranks.
    same = max(groups.values(), key=len, default=[])
    if len(same) < 2:
        return
    what = firsts[same[0]].kind
    hint = ""
    if what != "batch":
        hint = " Remove your DistributedGradReducer: the step reduces the gradients."
    warn(
        f"For '{owner}', the ranks must read different data, but ranks {same} have begun with the "
        f"same {what}, whose rows then count {len(same)} times.{hint} Give the dataset "
        f"num_shards={len(firsts)} and shard_id=get_rank(), or let each rank read its own rows in "
        f"another way."
    )
