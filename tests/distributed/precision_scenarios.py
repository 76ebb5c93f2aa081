"""Trainings with a loss scale: a bad micro batch on one rank, half precision, 16-bit messages, limits per group."""

from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Tensor
from open_window import reducer_of, window_of
from scenarios import CLIPS, ROWS, STEPS, batch, build_step, fingerprint, share, train_batches, weights_of

from ms_gradaccum import HSDP, ClipByGroupNorm, DataParallel, MixedPrecision

PARTS, BOUNDS = 3, [7, 9, 11, 12]  # the micro batches of rank 1 of 2, in rows of the whole batch
KINDS = {"data parallel": DataParallel(), "two shards": HSDP(2, 0), "two shards, level2": HSDP(2, 0, "level2")}
GROUPS = ClipByGroupNorm({"*bias": 0.05, "0.*": 0.3})


def scaled(**settings):
    """A loss scale for a network that stays in float32."""
    return MixedPrecision(level="O0", init_scale=64.0, growth_interval=2, **settings)


def bad_share(number, bad, rank, size):
    """This rank's rows of a batch; of the second batch, with a NaN in micro batch ``bad`` of rank 1."""
    x, y = share(batch(number), rank, size)
    if number == 1 and rank == 1:
        x = x.copy()
        x[BOUNDS[bad] - BOUNDS[0], 0] = np.nan
    return Tensor(x), Tensor(y)


def good_rows(bad):
    """The rows of the second batch without that micro batch."""
    rows = np.r_[0 : BOUNDS[bad], BOUNDS[bad + 1] : ROWS]
    return [Tensor(array[rows]) for array in batch(1)]


def overflow_on_one_rank(kind, choice, bad, rank, size):
    """Three windows, the second one with a NaN on rank 1."""
    settings = {"mixed_precision": scaled(), "bad_micro_batch": choice, "parallel": kind}
    network, step = build_step("schedule", clip=CLIPS["norm"](), **settings)
    seen = []
    for number in range(3):
        output = step(*bad_share(number, bad, rank, size))
        seen.append([float(item.asnumpy()) for item in output._asdict().values()])
    return {
        "seen": seen,
        "weights": weights_of(network),
        "updates": int(step.optimizer.global_step.asnumpy()[0]),
        "scale": float(window_of(step).loss_scale.value().asnumpy()),
    }


def trained(rank, size, **settings):
    """Some windows, and what the last one reported."""
    network, step = build_step("Momentum", **settings)
    output = train_batches(step, range(STEPS), rank, size)
    norms = [float(output.grad_norm.asnumpy()), float(output.clipped_grad_norm.asnumpy())]
    return {"weights": weights_of(network), "fingerprint": fingerprint(network), "norms": norms}


def refusal(rank, size, kind):
    """Return the error about messages that the CPU cannot add up."""
    try:
        build_step(mixed_precision=scaled(reduce_dtype=ms.bfloat16), parallel=kind)
    except ValueError as error:
        return str(error)
    return "nothing"


# Where the bad micro batch is, and what is done about it.
BAD = [("data parallel", "skip_window", bad) for bad in range(PARTS)]
BAD += [("two shards", "skip_window", 0), ("data parallel", "drop", 1), ("two shards", "drop", 0)]
BAD += [("two shards, level2", "drop", 2)]


def trained_by_group(rank, size, **settings):
    """One window; the weights and the biases by themselves."""
    network, step = build_step("Momentum", **settings)
    train_batches(step, [0], rank, size)
    ends = ("weight", "bias")
    parts = [[item.asnumpy().ravel() for item in network.trainable_params() if item.name.endswith(end)] for end in ends]
    found = {end: np.concatenate(part).tolist() for end, part in zip(ends, parts)}
    if size == 1:
        return found
    layout = reducer_of(step).layout
    return found | {"dtypes": [str(bucket.dtype) for bucket in (*layout.replicated, *layout.sharded)]}


def eager_trainings(rank, size):
    """The scenarios that need no compiler, by name."""
    found = {}
    for name, choice, bad in BAD:
        found[f"bad {name} {choice} {bad}"] = partial(overflow_on_one_rank, KINDS[name], choice, bad, rank, size)
    for name in KINDS:
        precision = scaled(reduce_dtype=ms.float16)
        found[f"sent {name}"] = partial(trained, rank, size, mixed_precision=precision, parallel=KINDS[name])
        groups = {"mixed_precision": scaled(reduce_dtype={"*weight": "fp16"}), "parallel": KINDS[name]}
        found[f"sent in groups {name}"] = partial(trained_by_group, rank, size, **groups)
    found["groups two shards"] = partial(trained, rank, size, clip=GROUPS, parallel=KINDS["two shards"])
    found["refused"] = partial(refusal, rank, size, DataParallel())
    return found


def compiled_trainings(rank, size):
    """Half precision with all that goes with it, by name."""
    precision = MixedPrecision("fp16", "O2", init_scale=64.0, reduce_dtype="fp16")
    settings = {"mixed_precision": precision, "bad_micro_batch": "drop", "clip": GROUPS}
    return {"half two shards": trained(rank, size, parallel=KINDS["two shards"], **settings)}
