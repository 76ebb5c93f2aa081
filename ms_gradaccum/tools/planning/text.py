"""A plan as a few lines of text."""

from collections.abc import Iterator, Sequence
from typing import Any

from ms_gradaccum._checks import counted
from ms_gradaccum.parallel.layout import Message


def describe(plan: Any) -> str:
    """Return the lines of a TrainingPlan, aligned."""
    rows, per_epoch, window = plan.dataset_size, plan.batches_per_epoch, plan.accumulation_steps
    data = f"{rows} rows" if isinstance(rows, int) else f"{sum(rows)} rows, {min(rows)} to {max(rows)} per rank,"
    wanted = plan.global_batch not in (None, plan.rows_per_update)
    rounded = f" ({plan.global_batch} were wanted, rounded up)" if wanted else ""
    of_rank = f"{counted(plan.micro_batches_per_update, 'micro batch')} on each rank"
    sizes = sorted({min(plan.update_rows, default=0), max(plan.update_rows, default=0)})
    updates = f"{plan.updates}: {plan.updates_per_epoch} per epoch, of {' to '.join(map(str, sizes))} rows"
    lines = {
        "data": f"{data} for {counted(plan.ranks, 'rank')} in batches of {plan.batch_size}",
        "epochs": f"{plan.batches / per_epoch:.4g} of {counted(per_epoch, 'batch')} on each rank: "
        + counted(plan.batches, "batch"),
        "window": f"{counted(window, 'batch')}, {of_rank}: {plan.rows_per_update} rows{rounded}",
        "updates": updates if plan.updates else "none: no window is ever whole",
        "left over": "; ".join(_left_over(plan)) or "nothing",
    }
    if plan.learning_rate is not None and plan.updates:
        shown = sorted({0, plan.updates // 2, plan.updates - 1})
        rates = zip(plan.rates_at(shown), shown)
        lines["learning rate"] = ", ".join(f"{rate:.4g} at update {update}" for rate, update in rates)
    if plan.traffic is not None:
        lines["gradient sums"] = f"{_size(plan.buffer_bytes)} on each rank"
        lines["messages"] = _messages(plan) if plan.window_messages else "none"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def _left_over(plan: Any) -> Iterator[str]:
    if plan.repeated_rows:
        yield f"{counted(plan.repeated_rows, 'row')} of an epoch twice, so that all ranks have the same number"
    if plan.dropped_rows:
        yield f"{counted(plan.dropped_rows, 'row')} of an epoch dropped with its last batch"
    if plan.last_batch_rows < plan.batch_size * plan.ranks:
        yield f"the last batch of an epoch has {counted(plan.last_batch_rows, 'row')}"
    if plan.last_window_batches:
        fate = {"apply": "one more update", "drop": "dropped", "carry": "to the next epoch"}[plan.last_window]
        yield f"an epoch has {counted(plan.last_window_batches, 'batch')} more than whole windows: {fate}"
    if plan.unused_batches:
        yield f"{counted(plan.unused_batches, 'batch')} in no update"


def _messages(plan: Any) -> str:
    traffic, total = plan.traffic, plan.window_messages
    per = {"micro batch": traffic.per_micro_batch, "batch": traffic.per_batch, "update": traffic.per_update}
    parts = [f"{len(each)} ({_bytes(each)}) per {name}" for name, each in per.items() if each]
    return f"{counted(len(total), 'collective')} and {_bytes(total)} per window: {', '.join(parts)}"


def _bytes(messages: Sequence[Message]) -> str:
    return _size(sum(message.nbytes for message in messages))


def _size(nbytes: float) -> str:
    """Return a number of bytes in the largest fitting unit."""
    unit = next(i for i in range(4) if nbytes < 1000 ** (i + 1) or i == 3)
    return f"{nbytes / 1000**unit:.4g} {('bytes', 'KB', 'MB', 'GB')[unit]}"
