"""Checks of the settings of a training plan, and values derived from them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mindspore import Parameter

from ms_gradaccum._checks import (
    MAX_INT,
    argument_error,
    check_accumulation_steps,
    check_bool,
    check_choice,
    check_last_window,
    check_positive_float,
    check_positive_int,
)
from ms_gradaccum.gradients.clipping import check_clip
from ms_gradaccum.parallel.kinds import choose_kind
from ms_gradaccum.tools.planning.windows import share_rows

# The limits of a plan, which counts batch by batch.
_MOST_BATCHES, _MOST_ROWS = 10**8, 10**15
_MOST = {"ranks": 10**6, "global_batch": _MOST_ROWS}
_DEVICES = ("CPU", "GPU", "Ascend")
_COUNTS = {
    "batch_size": "It counts the rows of one batch on one rank.",
    "ranks": "It counts the processes; 1 is a single one.",
    "micro_size": "It counts the micro batches of one batch; 1 means no split.",
    "global_batch": "It counts the rows of one update on all ranks together.",
    "epochs": "It counts the passes over the data.",
    "steps": "It counts the batches to train on.",
}


class Weight(NamedTuple):
    """The facts about a parameter that a plan needs: its shape and the bytes of one element."""

    shape: tuple[int, ...]
    itemsize: int


def check_settings(owner: str, plan: Any) -> None:
    """Raise unless all settings are valid."""
    for name, remedy in _COUNTS.items():
        value = getattr(plan, name)
        if value is not None or name in ("batch_size", "ranks", "micro_size"):
            check_positive_int(owner, name, value, remedy, _MOST.get(name, MAX_INT))
    if plan.accumulation_steps is not None:
        check_accumulation_steps(owner, plan.accumulation_steps)
    if (plan.epochs is None) == (plan.steps is None):
        got = "neither" if plan.epochs is None else f"epochs={plan.epochs} and steps={plan.steps}"
        raise ValueError(f"For '{owner}', either epochs or steps must be given, but got {got}. Say how long it trains.")
    check_bool(owner, "drop_remainder", plan.drop_remainder, "It is that of Dataset.batch().")
    check_bool(owner, "round_global_batch", plan.round_global_batch, "True rounds up.")
    check_last_window(owner, plan.last_window)
    if plan.tokens_per_row is not None:
        check_positive_float(owner, "tokens_per_row", plan.tokens_per_row, "It counts the tokens of a row.")
    if plan.device_target is not None:
        check_choice(owner, "device_target", plan.device_target, _DEVICES, "None is that of the context.")
    check_clip(owner, plan.clip)
    choose_kind(owner, plan.parallel, plan.ranks)


def check_dataset_size(owner: str, plan: Any) -> int | tuple[int, ...]:
    """Return the rows of the data. Raise unless every rank has a batch."""
    remedy = "It counts the rows of the data; give one number per rank if they are dealt unevenly."
    given = plan.dataset_size
    is_uneven = isinstance(given, Sequence) and not isinstance(given, str)
    rows = tuple(
        check_positive_int(owner, "dataset_size", each, remedy, _MOST_ROWS)
        for each in (given if is_uneven else [given])
    )
    if is_uneven and len(rows) != plan.ranks:
        rule = f"one number, or one for each of the {plan.ranks} ranks"
        raise ValueError(argument_error(owner, "dataset_size", rule, f"{len(rows)} numbers", "Give ranks, too."))
    shares = share_rows(given, plan.ranks)
    _check_batches(owner, plan, shares)
    fewest = min(shares)
    if plan.drop_remainder and fewest < plan.batch_size:
        rule = f"at least one batch of {plan.batch_size} rows on each rank"
        got = f"{fewest} rows on one of them"
        raise ValueError(
            argument_error(owner, "dataset_size", rule, got, "Use drop_remainder=False or smaller batches.")
        )
    return rows if is_uneven else rows[0]


def _check_batches(owner: str, plan: Any, shares: tuple[int, ...]) -> None:
    """Raise if a training is too long to be counted batch by batch."""
    per_epoch = -(-max(shares) // plan.batch_size)
    epochs = plan.epochs or -(-plan.steps // per_epoch)
    batches, rows = max(per_epoch, plan.steps or per_epoch * epochs), sum(shares) * epochs
    remedy = "Plan fewer epochs, or larger batches."
    for most, got, what in ((_MOST_BATCHES, batches, "batches on each rank"), (_MOST_ROWS * 1000, rows, "rows")):
        if got > most:
            raise ValueError(f"For '{owner}', a training must have at most {most} {what}, but got {got}. {remedy}")


def window_batches(owner: str, plan: Any) -> int:
    """Return the number of batches of a window."""
    given: int | None = plan.accumulation_steps
    wanted: int | None = plan.global_batch
    if wanted is None:
        return given or 1
    rows: int = plan.batch_size * plan.ranks
    if wanted % rows and not plan.round_global_batch:
        nearest = [
            f"{rows * steps} (accumulation_steps={steps})" for steps in (wanted // rows, wanted // rows + 1) if steps
        ]
        remedy = f"Use {' or '.join(nearest)}; round_global_batch=True rounds up."
        raise ValueError(
            argument_error(owner, "global_batch", f"a multiple of batch_size * ranks = {rows}", wanted, remedy)
        )
    steps = -(-wanted // rows)
    if given not in (None, steps):
        rule, remedy = f"{steps} for a global_batch of {wanted}", "Give one of the two."
        raise ValueError(argument_error(owner, "accumulation_steps", rule, given, remedy))
    return steps


def check_parameters(owner: str, parameters: Any) -> tuple[Weight, ...]:
    """Return the facts about parameters, so that the plan does not keep the parameters alive."""
    known = isinstance(parameters, (list, tuple)) and all(isinstance(item, (Parameter, Weight)) for item in parameters)
    if not known:
        rule, got = "a list of parameters", type(parameters).__name__
        raise TypeError(argument_error(owner, "parameters", rule, got, "Give network.trainable_params()."))
    return tuple(Weight(tuple(item.shape), item.itemsize) for item in parameters)
