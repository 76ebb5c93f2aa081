"""Warnings of the inputs that the ranks of a training have begun with."""

from collections.abc import Sequence

from ms_gradaccum._checks import warn
from ms_gradaccum.parallel.world import FirstInput


def warn_of_inputs(owner: str, firsts: Sequence[FirstInput]) -> None:
    """Warn of the first inputs of the ranks."""
    _warn_of_same_data(owner, firsts)
    _warn_of_other_rows(owner, [each for each in firsts if each.reductions])


def _warn_of_same_data(owner: str, firsts: Sequence[FirstInput]) -> None:
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
        f"For '{owner}', the ranks must read different data, but ranks {same} have begun with the same {what}, whose "
        f"rows then count {len(same)} times.{hint} Give the dataset num_shards={len(firsts)} and shard_id=get_rank(), "
        f"or let each rank read its own rows in another way."
    )


def _warn_of_other_rows(owner: str, firsts: Sequence[FirstInput]) -> None:
    """Warn if ranks have begun with other numbers of rows in a network that reduces over them."""
    if len({each.rows for each in firsts}) > 1:
        warn(
            f"For '{owner}', the ranks must have the same number of rows if the network communicates, but got "
            f"{', '.join(f'{each.rows:g}' for each in firsts)} with {firsts[0].reductions[0]} in its code: an update "
            f"counts each rank by its rows, which a reduction in the forward pass does not. Give all ranks as many "
            f"rows, or return this rank's loss, or its (sum, weight) with weighted=True: the step reduces them."
        )
