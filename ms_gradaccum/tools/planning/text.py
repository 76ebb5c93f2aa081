"""A plan as a few lines of text."""

from collections.abc import Iterator
from typing import Any

from ms_gradaccum.parallel.layout import Message
from ms_gradaccum.tools.planning.rates import rates_at


def describe(plan: Any) -> str:
    """Return the lines of a TrainingPlan, aligned."""
    lines = list(_lines(plan))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _lines(plan: Any) -> Iterator[tuple[str, str]]:
    yield "data", _data(plan)
    yield "epochs", _epochs(plan)
    yield "window", _window(plan)
    yield "updates", _updates(plan)
    yield "left over", "; ".join(_left_over(plan)) or "nothing"
    if plan.learning_rate is not None and plan.updates:
        yield "learning rate", _rates(plan)
    if plan.traffic is not None:
        yield "gradient sums", f"{_size(plan.buffer_bytes)} on each rank"
        yield "messages", _messages(plan)


def _data(plan: Any) -> str:
    rows = plan.dataset_size
    text = f"{rows} rows" if isinstance(rows, int) else f"{sum(rows)} rows, {min(rows)} to {max(rows)} per rank,"
    return f"{text} for {_count(plan.ranks, 'rank')} in batches of {plan.batch_size}"


def _epochs(plan: Any) -> str:
    epochs = plan.batches / plan.batches_per_epoch
    per_epoch = _count(plan.batches_per_epoch, "batch", "es")
    return f"{epochs:.4g} of {per_epoch} on each rank: {_count(plan.batches, 'batch', 'es')}"


def _window(plan: Any) -> str:
    micro_batches = _count(plan.micro_batches_per_update, "micro batch", "es")
    text = (
        f"{_count(plan.accumulation_steps, 'batch', 'es')}, {micro_batches} on each rank: {plan.rows_per_update} rows"
    )
    if plan.global_batch not in (None, plan.rows_per_update):
        text += f" ({plan.global_batch} were wanted, rounded up)"
    return text


def _updates(plan: Any) -> str:
    if not plan.updates:
        return "none: no window is ever whole"
    rows = sorted({min(plan.update_rows), max(plan.update_rows)})
    text = f"{plan.updates}: {plan.updates_per_epoch} per epoch, of {' to '.join(map(str, rows))} rows"
    if plan.tokens_per_row is not None:
        text += f", {' to '.join(f'{count * plan.tokens_per_row:.15g}' for count in rows)} tokens"
    return text


def _left_over(plan: Any) -> Iterator[str]:
    if plan.repeated_rows:
        yield f"{_count(plan.repeated_rows, 'row')} of an epoch twice, so that all ranks have the same number"
    if plan.dropped_rows:
        yield f"{_count(plan.dropped_rows, 'row')} of an epoch dropped with its last batch"
    if plan.last_batch_rows < plan.batch_size * plan.ranks:
        yield f"the last batch of an epoch has {_count(plan.last_batch_rows, 'row')}"
    if plan.last_window_batches:
        fate = {"apply": "one more update", "drop": "dropped", "carry": "to the next epoch"}[plan.last_window]
        left = _count(plan.last_window_batches, "batch", "es")
        yield f"an epoch has {left} more than whole windows: {fate}"
    if plan.unused_batches:
        yield f"{_count(plan.unused_batches, 'batch', 'es')} in no update"


def _rates(plan: Any) -> str:
    updates = sorted({0, plan.updates // 2, plan.updates - 1})
    rates = rates_at("TrainingPlan", plan.learning_rate, updates)
    return ", ".join(f"{rate:.4g} at update {update}" for update, rate in zip(updates, rates))


def _messages(plan: Any) -> str:
    if not plan.collectives_per_window:
        return "none"
    parts = [
        f"{_total(messages)} per {name}"
        for name, messages in (
            ("micro batch", plan.traffic.per_micro_batch),
            ("batch", plan.traffic.per_batch),
            ("update", plan.traffic.per_update),
        )
        if messages
    ]
    return f"{_count(plan.collectives_per_window, 'collective')} and {_size(plan.bytes_per_window)} per window: " + (
        ", ".join(parts)
    )


def _total(messages: tuple[Message, ...]) -> str:
    return f"{len(messages)} ({_size(sum(message.nbytes for message in messages))})"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _size(nbytes: float) -> str:
    """Return a number of bytes in the largest fitting unit."""
    for unit in ("bytes", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"
