"""What a job of any size holds and sends on each device, by the formulas of `TrainingPlan`. Nothing is run."""

import math
from typing import Any, NamedTuple

from ms_gradaccum import HSDP, DataParallel, TrainingPlan
from ms_gradaccum.parallel.factory import reducer_layout
from ms_gradaccum.parallel.layout import Message, Ranks
from ms_gradaccum.tools.planning.settings import Weight

DEVICES, MICRO_SIZE = 1000, 8
LAYERS, WIDTH, WORDS = 83, 10_000, 50_000
KINDS = (
    DataParallel(),
    DataParallel(sync_each_batch=True),
    HSDP(shard_size=8),
    HSDP(shard_size=40),
    HSDP(),
    HSDP(shard_size=8, optimizer_level="level2"),
    HSDP(shard_size=40, optimizer_level="level2"),
    HSDP(optimizer_level="level2"),
)


class Held(NamedTuple):
    """Bytes that each device keeps between windows."""

    weights: int
    adam: int
    sums: int


def transformer() -> list[Weight]:
    """Return the shapes of a transformer's float32 weights."""
    width = WIDTH
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    vectors = [(3 * width,), (width,), (4 * width,), (width,), *[(width,)] * 4]
    shapes = [(WORDS, width), *LAYERS * (matrices + vectors), (width,), (width,)]
    return [Weight(shape, 4) for shape in shapes]


def make_plan(kind: Any, weights: Any, devices: int, micro_size: int, device_target: str) -> TrainingPlan:
    """Return the plan of one window of one batch."""
    return TrainingPlan(
        dataset_size=devices * micro_size,
        batch_size=micro_size,
        steps=1,
        ranks=devices,
        micro_size=micro_size,
        parallel=kind,
        parameters=weights,
        device_target=device_target,
    )


def held(plan: TrainingPlan) -> Held:
    """Return what each device keeps; the optimizer is Adam, with two numbers per weight."""
    weights, world = plan.parameters, Ranks(plan.ranks, plan.ranks, plan.device_target or "")
    whole = 4 * sum(math.prod(weight.shape) for weight in weights)
    if not isinstance(plan.parallel, HSDP):
        return Held(whole, 2 * whole, plan.buffer_bytes or 0)
    layout = reducer_layout(plan.parallel, weights, world).shards
    # The sharded optimizer updates slices of its own, from which the whole weights are gathered.
    slices = 4 * sum(math.prod(layout.shapes[i]) for i in layout.sharded)
    parts = 4 * sum(math.prod(shape) for shape in layout.shapes)
    return Held(whole + slices, 2 * parts, plan.buffer_bytes or 0)


def over_the_wire(message: Message) -> float:
    """Return the bytes that each device sends in a ring."""
    others = message.ranks - 1
    if message.operator == "AllGather":
        return others * message.nbytes
    return (2 if message.operator == "AllReduce" else 1) * others / message.ranks * message.nbytes


def _name(kind: Any) -> str:
    if isinstance(kind, DataParallel):
        return "`DataParallel(sync_each_batch=True)`" if kind.sync_each_batch else "`DataParallel()`"
    size = DEVICES if kind.shard_size == -1 else kind.shard_size
    return f"`HSDP`, `{kind.optimizer_level}`, {size} devices a shard group"


def paper_table() -> str:
    """Return the table of benchmarks/README.md."""
    weights = transformer()
    lines = [
        "| `parallel` | weights | Adam | sums | messages per micro batch | per update | in a window | sent in a ring |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in KINDS:
        plan = make_plan(kind, weights, DEVICES, MICRO_SIZE, "Ascend")
        traffic, messages = plan.traffic, plan.window_messages
        if traffic is None or messages is None:
            continue
        kept = " | ".join(f"{each / 1e9:.1f} GB" for each in held(plan))
        parts = (traffic.per_micro_batch, traffic.per_update)
        sent = " | ".join(f"{len(part)}: {sum(each.nbytes for each in part) / 1e9:.1f} GB" for part in parts)
        ring = sum(over_the_wire(each) for each in messages)
        lines.append(
            f"| {_name(kind)} | {kept} | {sent} | {len(messages)}: {(plan.bytes_per_window or 0) / 1e9:.1f} GB "
            f"| {ring / 1e9:.1f} GB |"
        )
    total = sum(math.prod(weight.shape) for weight in weights)
    heading = (
        f"{total:,} float32 weights in {len(weights)} tensors on {DEVICES:,} devices, {MICRO_SIZE} micro batches in a "
        f"window"
    )
    return "\n".join([heading, "", *lines])
