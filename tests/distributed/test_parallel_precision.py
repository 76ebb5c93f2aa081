"""Loss scale, bad micro batches, 16-bit messages and limits per group: two processes against one."""

import functools

import mindspore as ms
import numpy as np
from open_window import reducer_of, window_of
from ranks import RANK, assert_same, on_ranks, own_share, train_batches
from refusal import refuses
from scenarios import (
    BY_HAND,
    CLIPS,
    ROWS,
    STEPS,
    batch,
    build_step,
    close,
    norm_of,
    stock_clipped,
    weights_of,
    whole_batches,
)

from ms_gradaccum import HSDP, ClipByGroupNorm, DataParallel, MixedPrecision

PARTS, BOUNDS = 3, [7, 9, 11, 12]  # The micro batches of rank 1 of 2, in rows of the whole batch.
KINDS = {"data parallel": DataParallel(), "two shards": HSDP(2, 0), "two shards, level2": HSDP(2, 0, "level2")}
GROUPS = ClipByGroupNorm({"*bias": 0.05, "0.*": 0.3})


def scaled(**settings):
    """A loss scale for a network that stays in float32."""
    return MixedPrecision(level="O0", init_scale=64.0, growth_interval=2, **settings)


def bad_share(number, bad):
    """This rank's rows of a batch; of the second batch, with a NaN in micro batch ``bad`` of rank 1."""
    x, y = own_share(number)
    if number == 1 and RANK == 1:
        x[BOUNDS[bad] - BOUNDS[0], 0] = np.nan
    return x, y


# Where the bad micro batch is, and what is done about it.
BAD = [("data parallel", "skip_window", bad) for bad in range(PARTS)]
BAD += [("two shards", "skip_window", 0), ("data parallel", "drop", 1), ("two shards", "drop", 0)]
BAD += [("two shards, level2", "drop", 2)]


@on_ranks(2, cases=BAD)
def test_a_bad_micro_batch_on_one_rank_skips_the_update_or_is_left_out_on_all(name, choice, bad):
    """Three windows, the second one with a NaN on rank 1."""
    settings = {"mixed_precision": scaled(), "bad_micro_batch": choice, "parallel": KINDS[name]}
    network, step = build_step("schedule", clip=CLIPS["norm"](), **settings)
    seen = []
    for number in range(3):
        output = step(*bad_share(number, bad))
        seen.append([float(item.asnumpy()) for item in output._asdict().values()])
    assert_same(str(seen))
    assert_same(weights_of(network))
    _, overflow, scale, updated, norm, _, rate, weight = np.array(seen).T
    assert scale.tolist() == [64, 64, 32] and window_of(step).loss_scale.value().asnumpy() == 32
    updates = step.optimizer.global_step.asnumpy()
    if choice == "skip_window":
        assert overflow.tolist() == [0, 1, 0] and updated.tolist() == [1, 0, 1] and updates == [2]
        # The rate waits for the update that is not made.
        assert rate[1] == rate[2]
        np.testing.assert_allclose(rate[1], rate[0] / 2, rtol=1e-6)
        assert weight[[0, 2]].tolist() == [12, 12]
        expected, _ = stock_clipped("schedule", [batch(0), batch(2)], BY_HAND["norm"])
        close(weights_of(network), expected)
        return
    rows = np.r_[0 : BOUNDS[bad], BOUNDS[bad + 1] : ROWS]
    assert overflow.tolist() == [0, 0, 0] and updated.tolist() == [1, 1, 1] and updates == [3]
    assert weight.tolist() == [12, len(rows), 12]
    batches = batch(0), [array[rows] for array in batch(1)], batch(2)
    expected, reports = stock_clipped("schedule", batches, BY_HAND["norm"])
    np.testing.assert_allclose(norm, [report[1] for report in reports], rtol=1e-5)
    close(weights_of(network), expected)


def trained(steps=STEPS, **settings):
    network, step = build_step("Momentum", **settings)
    return network, step, train_batches(step, range(steps))


def clipped_by_groups(grads, norm):
    """All biases together, then the first layer's weight; the others as they are."""
    biases = norm_of(grad for name, grad in grads.items() if name.endswith("bias"))
    factors = dict.fromkeys(grads, 1.0) | {"0.weight": min(1.0, 0.3 / norm_of([grads["0.weight"]]))}
    factors |= {name: min(1.0, 0.05 / biases) for name in grads if name.endswith("bias")}
    return {name: grad * factors[name] for name, grad in grads.items()}


@functools.cache
def in_groups():
    return stock_clipped("Momentum", [batch(number) for number in range(STEPS)], clipped_by_groups)


@on_ranks(2)
def test_groups_are_clipped_by_their_norms_over_all_shards():
    found, _, output = trained(clip=GROUPS, parallel=KINDS["two shards"])
    expected, reports = in_groups()
    _, norm, clipped = reports[-1]
    assert clipped < norm
    np.testing.assert_allclose(output.grad_norm.asnumpy(), norm, rtol=1e-5)
    np.testing.assert_allclose(output.clipped_grad_norm.asnumpy(), clipped, rtol=1e-5)
    close(weights_of(found), expected)


@on_ranks(2, cases=KINDS)
def test_messages_of_a_group_of_parameters_have_16_bits_and_the_others_float32(kind):
    precision = scaled(reduce_dtype={"*weight": "fp16"})
    found, step, _ = trained(steps=1, mixed_precision=precision, parallel=kind)
    layout = reducer_of(step).layout
    assert {ms.float16, ms.float32} == {bucket.dtype for bucket in (*layout.replicated, *layout.sharded)}
    expected = whole_batches("Momentum", ((0,),))
    apart = np.abs(np.subtract(weights_of(found), expected))
    is_bias = [weight.name.endswith("bias") for weight in found.trainable_params() for _ in range(weight.size)]
    assert 1e-5 < apart[np.logical_not(is_bias)].max() < 1e-3 and apart[is_bias].max() < 2e-6


@on_ranks(2, compiled=True)
def test_half_precision_on_several_processes_trains_like_one():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    precision = MixedPrecision("fp16", "O2", init_scale=64.0, reduce_dtype="fp16")
    settings = {"mixed_precision": precision, "bad_micro_batch": "drop", "clip": GROUPS}
    found, _, _ = trained(parallel=KINDS["two shards"], **settings)
    assert_same(weights_of(found))
    assert 1e-5 < np.abs(np.subtract(weights_of(found), in_groups()[0])).max() < 1e-2


@on_ranks(2)
def test_messages_that_a_device_cannot_add_up_are_refused():
    with refuses(ValueError, "'mixed_precision'", "reduce_dtype"):
        build_step(mixed_precision=scaled(reduce_dtype=ms.bfloat16), parallel=DataParallel())
