"""Several processes against one: weights, agreement, messages, memory, checkpoints."""

import copy
import functools
import itertools
from contextlib import nullcontext
from unittest import mock

import mindspore as ms
import numpy as np
from described_messages import bytes_of_sums, described, sent_by
from linear_toy import momentum, mse
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size
from mindspore.graph.api import _cell_graph_executor
from mindspore.train import CheckpointConfig, ModelCheckpoint, RunContext
from mindspore.train.callback import _InternalCallbackParam
from open_window import buffer_of, reducer_of
from quick_mindspore import compiling, eagerly
from ranks import RANK, SIZE, assert_same, folder, on_ranks, own_data, own_share, told, train_batches
from refusal import refuses
from scenarios import (
    BY_HAND,
    CLIPS,
    ONE_SHAPE,
    OPTIMIZERS,
    STEPS,
    batch,
    build_network,
    build_step,
    close,
    fingerprint,
    joined,
    scaled_by,
    share,
    stock_clipped,
    stock_weights,
    uneven_data,
    weights_of,
    whole_batches,
)
from step_probe import operators

from ms_gradaccum import (
    HSDP,
    ClipByGroupNorm,
    ClipByValue,
    DataParallel,
    GradAccumulation,
    MixedPrecision,
    Model,
    NormSpike,
    TrainingPlan,
    TrainOneStepCell,
)
from ms_gradaccum.parallel import world

KINDS = {
    "data parallel": DataParallel(),
    "data parallel, each batch": DataParallel(sync_each_batch=True),
    "all shards": HSDP(threshold=0),
    "two shards": HSDP(2, 0),
    "all shards, level2": HSDP(-1, 0, "level2"),
    "two shards, level2": HSDP(2, 0, "level2"),
}
# Those that differ most.
THREE = ["data parallel", "all shards", "all shards, level2"]
# One update per batch, and two batches per update.
EACH, PAIRS = tuple((number,) for number in range(STEPS)), ((0, 1), (2, 3))


@functools.cache
def one_process(clip):
    return stock_clipped("Adam", map(batch, range(STEPS)), BY_HAND[clip])


def check_like_one_process(network, output, clip):
    """The weights, equal on all ranks to the bit, the loss and the norms."""
    assert_same(fingerprint(network))
    expected, reports = one_process(clip)
    loss, norm, clipped = reports[-1]
    assert clipped < norm  # Something is clipped.
    for found, wanted in ((output.loss, loss), (output.grad_norm, norm), (output.clipped_grad_norm, clipped)):
        np.testing.assert_allclose(found.asnumpy(), wanted, rtol=1e-5)
    close(weights_of(network), expected)


def state_size(optimizer):
    return sum(parameter.size for parameter in optimizer.get_parameters())


def train(optimizer, clip, **settings):
    network, step = build_step(optimizer, clip=CLIPS[clip](), **settings)
    return network, step.optimizer, train_batches(step, range(STEPS))


@on_ranks(2, cases=[*itertools.product(KINDS, ["Adam"]), *itertools.product(["two shards"], OPTIMIZERS)])
def test_uneven_rows_on_several_processes_train_like_one_process_on_all_rows(kind, optimizer):
    network, _, _ = train(optimizer, "none", parallel=KINDS[kind])
    assert_same(fingerprint(network))
    expected = whole_batches(optimizer, EACH)
    assert not np.allclose(expected, weights_of(build_network()))  # Otherwise the test proves nothing.
    close(weights_of(network), expected)


@on_ranks(2, cases=["data parallel", "all shards", "two shards, level2"])
def test_each_entry_is_clipped_by_itself(name):
    network, _, output = train("Adam", "value", parallel=KINDS[name])
    check_like_one_process(network, output, "value")


# These are compiled, and the collectives in their graphs are counted.
COMPILED = {2: ["data parallel", "all shards"], 4: ["two shards, level2"]}
COLLECTIVES = ("AllReduce", "ReduceScatter", "AllGather")


@on_ranks(2, 4, cases=[*KINDS, "nothing above the threshold"], compiled=True)
def test_clipping_sees_the_whole_gradient_with_the_collectives_that_the_reducer_describes(name):
    kind = KINDS.get(name, HSDP())
    if name not in COMPILED[SIZE]:
        with eagerly():
            network, optimizer, output = train("Adam", "norm", parallel=kind)
    else:
        cells, compile_cell = [], _cell_graph_executor.compile

        def note(cell, *inputs, **settings):
            cells.append(cell)
            return compile_cell(cell, *inputs, **settings)

        network, step = build_step(clip=CLIPS["norm"](), parallel=kind, check_loss=name == COMPILED[SIZE][-1])
        optimizer = step.optimizer
        with mock.patch.object(_cell_graph_executor, "compile", note):
            output = train_batches(step, range(STEPS), ONE_SHAPE)
        traffic = described(reducer_of(step))
        expected = sorted(message.operator for message in traffic.per_micro_batch + traffic.per_update)
        assert collectives_in(cells) == expected != []
    check_like_one_process(network, output, "norm")
    if isinstance(kind, HSDP) and kind.threshold == 0:
        # The weights and two moments are divided by the shard size, but for those of three rows.
        whole = [weight.size for weight in build_network().trainable_params()]
        divided = sum(whole[:-2]) - sum(whole[:-2]) // (kind.shard_size if kind.shard_size > 0 else SIZE)
        stock = nn.Adam(build_network().trainable_params())
        assert state_size(optimizer) == state_size(stock) - 3 * divided


def collectives_in(cells):
    """The collective operators of a micro batch and of an update: of each kind of graph once, whatever its shapes.

    Some ranks have no micro batch left and take part by `add_nothing`; a `_Collective` asks how many they are.
    """
    graphs = {}
    for cell in cells:
        adds_nothing = getattr(getattr(cell, "method", None), "__name__", "") == "add_nothing"
        if not adds_nothing and type(cell).__name__ != "_Collective":
            found = sorted(each for each in operators(cell, cell.current_phase) if each in COLLECTIVES)
            graphs[type(cell).__name__, tuple(found)] = found
    return sorted(sum(graphs.values(), []))


@on_ranks(2, compiled=True)
def test_the_context_of_data_parallel_changes_no_update_and_a_sum_is_named():
    # With parameter_broadcast=True each graph that MindSpore compiles would get the sums and shards of rank 0.
    with told("gradients_mean=True uses 2 times that") as said:
        for mean in (True, False):
            ms.set_auto_parallel_context(parallel_mode="data_parallel", parameter_broadcast=True, gradients_mean=mean)
            try:
                # The graphs of one of them are enough.
                with eagerly() if mean else nullcontext():
                    network, _, output = train("Adam", "norm", parallel=HSDP(2, 0))
            finally:
                ms.reset_auto_parallel_context()
            check_like_one_process(network, output, "norm")
    assert len(said) == 1


@on_ranks(2, cases=[(name, limit) for name in THREE for limit in (NormSpike(std=3.0, windows=4), 50.0)])
def test_all_processes_leave_out_the_same_window(name, limit):
    """One batch again and again, once 30 times as large."""
    network, step = build_step("Momentum", skip_above=limit, parallel=KINDS[name])
    updated = [step(*(part * factor for part in own_share(0))).is_updated for factor in (1, 1, 1, 30, 1)]
    assert_same(fingerprint(network))
    assert updated == [True, True, True, False, True]
    close(weights_of(network), stock_weights("Momentum", [batch(0)] * 4))


class Halved(nn.Cell):
    def construct(self, grads, norm):
        return tuple(grad * 0.5 for grad in grads)


@on_ranks(2)
def test_a_clip_of_ones_own_gets_the_gradient_of_all_processes_or_is_refused():
    network, step = build_step("Momentum", clip=Halved())
    train_batches(step, range(STEPS))
    expected, _ = stock_clipped("Momentum", map(batch, range(STEPS)), scaled_by(lambda norm: 0.5))
    assert not np.allclose(expected, whole_batches("Momentum", EACH), rtol=1e-3)
    close(weights_of(network), expected)
    network = build_network()
    optimizer = momentum(network)
    with refuses(ValueError, "a clip of your own needs whole gradients, but got Halved with HSDP("):
        TrainOneStepCell(mse(network), optimizer, clip=Halved(), parallel=HSDP(2, 0))
    assert optimizer.parameters[0].shape == (8, 6)


def messages_of(kind, micro_size, num_norm_reductions=1, **settings):
    """Return the messages of a window of one batch, which must be those that its layout stands for.

    The norm after a clip by value takes one more reduction, and the norms of groups another one.
    """
    _, step = build_step("SGD", micro_size, parallel=kind, **settings)
    inputs = [Tensor(np.ones((16, columns), np.float32)) for columns in (6, 3)]
    for _ in range(2):  # In the first two the ranks also compare what they train.
        step(*inputs)
    sent = []
    reducer, gather = reducer_of(step), world._send

    def note(operator, values):
        sent.append((type(operator).__name__, get_group_size(operator.group), values.size * values.itemsize))

    sent_by(reducer, note)

    def counted_gather(values):
        sent.append(("AllGather", SIZE, values.nbytes))
        return gather(values)

    with mock.patch.object(world, "_send", counted_gather):
        step(*inputs)
    assert sent == list(described(reducer, num_norm_reductions).of_window(1, micro_size))
    kept = {total.name: total.nbytes for total in (*buffer_of(step).sums, *reducer.sums)}
    assert sum(kept.values()) == bytes_of_sums(reducer)
    return sent


@on_ranks(2, 4, cases=KINDS)
def test_messages_and_sums_are_those_of_the_layout_and_few(kind):
    one, four = messages_of(kind, 1), messages_of(kind, 4)
    if kind == KINDS["data parallel"]:
        # All sums, the loss and the weight in one.
        assert len(one) == len(four) == 1
    elif kind == KINDS["all shards"]:
        # What stays whole, the sums, the norm, the weights.
        assert len(one) == len(four) == 4
    elif kind in (KINDS["data parallel, each batch"], KINDS["all shards, level2"]):
        # The number of micro batches, one for each of them; what stays whole, the norm, the gradients or the weights.
        assert (len(one), len(four)) == (1 + 1 + 3, 1 + 4 + 3)


@on_ranks(2)
def test_clips_take_a_reduction_a_limit_of_the_norm_none_and_16_bits_a_message():
    messages_of(HSDP(), 1)
    messages_of(KINDS["all shards"], 1, 2, clip=ClipByValue(0.1))
    messages_of(KINDS["all shards, level2"], 2, 3, clip=ClipByGroupNorm({"*weight": 0.1, "*": 1.0}))
    precision = MixedPrecision(level="O0", init_scale=1.0, reduce_dtype=ms.float16)
    for name in THREE:
        assert messages_of(KINDS[name], 2, skip_above=NormSpike()) == messages_of(KINDS[name], 2)
        # The loss, the weight and the dropped micro batches go by themselves where gradients have 16 bits.
        sent = messages_of(KINDS[name], 4, mixed_precision=precision, bad_micro_batch="drop", compile=True)
        assert ("AllReduce", 2, 12) in sent


def without_redundancy(step, saved, target):
    """Save with MindSpore's callback that leaves out what other ranks have, and return the names of what differs."""
    config = CheckpointConfig(remove_redundancy=True, integrated_save=False, format="safetensors")
    params = _InternalCallbackParam(train_network=step, cur_step_num=3, cur_epoch_num=1, batch_num=4)
    params |= dict.fromkeys(("last_save_ckpt_step", "latest_ckpt_file"))
    ModelCheckpoint("step", str(target), config).end(RunContext(params))
    (file,) = target.glob("*.safetensors")
    found = ms.load_checkpoint(str(file), format="safetensors", remove_redundancy=True)
    return [name for name in step.parameter_layout_dict if name not in found or (found[name] != saved[name]).any()]


@on_ranks(2, 4, cases=[("all shards", 3), ("all shards, level2", 2)])
def test_checkpoints_hold_whole_parameters_and_go_on_with_another_number_of_shards(kind, saved_after):
    """Saved in the middle of the second window, and at its beginning."""
    network, step = build_step(parallel=KINDS[kind], accumulation_steps=2)
    train_batches(step, range(saved_after))
    path = folder() / f"{kind}_{RANK}.ckpt"
    ms.save_checkpoint(step, str(path))
    saved = ms.load_checkpoint(str(path))
    for weight in build_network().trainable_params():
        for name in (weight.name, f"moment1.{weight.name}", f"moment2.{weight.name}", f"accu_grads.{weight.name}"):
            assert saved[name].shape == weight.shape
    assert not [name for name in saved if "shard" in name]
    # MindSpore's ModelCheckpoint with `remove_redundancy` must not take the parts of other ranks for copies of its own.
    assert without_redundancy(step, saved, path.with_suffix("")) == []
    whole = step.parameters_dict()
    ms.save_checkpoint(whole, str(path.with_name(f"dict_{path.name}")))
    ways = {
        "read": whole,
        "copied": copy.deepcopy(whole),  # EarlyStopping keeps the best parameters in such a copy.
        "cloned": {name: each.clone() for name, each in whole.items()},
        "listed": {name: Tensor(each.tolist(), each.dtype) for name, each in whole.items()},
        "set": {name: Parameter(ops.zeros(each.shape, each.dtype)).set_data(each) for name, each in whole.items()},
        "saved": ms.load_checkpoint(str(path.with_name(f"dict_{path.name}"))),
    }
    for how, parameters in ways.items():
        for name, each in parameters.items():
            assert (each.asnumpy() == saved[name].asnumpy()).all(), (how, name)
    train_batches(step, range(saved_after, 4))
    close(weights_of(network), whole_batches("Adam", PAIRS))
    for name in ("data parallel", "two shards"):
        other, step = build_step(parallel=KINDS[name], accumulation_steps=2)
        assert ms.load_param_into_net(step, ms.load_checkpoint(str(path))) == ([], [])
        train_batches(step, range(saved_after, 4))
        close(weights_of(other), weights_of(network), 2e-6, 2e-7)


@on_ranks(2)
def test_weights_that_differ_are_noticed_when_asked_for():
    network, step = build_step("SGD", parallel=DataParallel(check_weights=True))
    step(*own_share(0)), step(*own_share(0))
    if RANK:
        network[0].bias.set_data(network[0].bias + 1e-6)
    # In window 3, in which the ranks compare nothing else.
    with refuses(RuntimeError, "same weights after an update, but ranks [1] differ"):
        step(*own_share(0))


class SumOfRows(nn.Cell):
    """Looks rows of a table up; the loss is the mean of their products with the second input."""

    def __init__(self):
        super().__init__()
        self.rows = nn.EmbeddingLookup(4, 2, Tensor(np.arange(8, dtype=np.float32).reshape(4, 2)), target="CPU")

    def construct(self, ids, factors):
        return (self.rows(ids).sum(1) * factors).mean()


# Row 3 is never read.
IDS, FACTORS = np.array([0, 1, 1, 2, 0, 1, 2, 2, 1, 1, 0, 2], np.int32), np.arange(12, dtype=np.float32)


def train_lookup(kind):
    cell = SumOfRows()
    step = TrainOneStepCell(GradAccumulation(cell, 2), momentum(cell, 0.1), compile=True, parallel=KINDS[kind])
    step(*map(Tensor, share([IDS, FACTORS], RANK, SIZE)))
    return cell.rows.embedding_table.asnumpy()


@on_ranks(2, cases=["data parallel", "all shards"], compiled=True)
def test_sparse_gradients_are_those_of_one_process(name):
    with compiling("the network"):
        found = train_lookup(name)
    # The mean over 12 rows, and the learning rate.
    sums = np.bincount(IDS, FACTORS, 4)
    np.testing.assert_allclose(found, np.arange(8).reshape(4, 2) - 0.1 * sums[:, None] / 12, rtol=1e-6)


@on_ranks(2)
def test_what_cannot_be_shared_is_refused_or_told():
    with refuses(ValueError, "'network'", "a sparse lookup in EmbeddingLookup"):
        train_lookup("all shards, level2")
    with told("'level3' behaves like 'level2' here") as said:
        build_step(parallel=HSDP(-1, 0, "level3"))
    assert len(said) == 1


@on_ranks(2, 4)
def test_processes_that_start_differently_take_the_weights_of_rank_0():
    """And the numbers that an optimizer has in parameters."""
    network = build_network()
    if RANK:
        network[0].weight.set_data(Tensor(np.full(network[0].weight.shape, 7.0, np.float32)))
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9 - 0.1 * RANK)
    with told("the ranks started with different parameters or buffers") as said:
        TrainOneStepCell(mse(network), optimizer)
    assert fingerprint(network) == fingerprint(build_network()) and len(said) == 1
    assert optimizer.momentum.asnumpy() == np.float32(0.9)


@on_ranks(2, cases=[(name, *end) for name in THREE[::2] for end in (("apply", 4), ("drop", 2))])
def test_a_process_that_runs_out_of_data_joins_the_others(name, last_window, updates):
    """Rank 0 has three batches of two rows, the others two."""
    network = build_network()
    optimizer = momentum(network, 0.1)
    settings = {"accumulation_steps": 2, "last_window": last_window}
    model = Model(network, nn.MSELoss(), optimizer, **settings, parallel=KINDS[name])
    model.train(2, own_data())
    assert_same(weights_of(network))
    assert optimizer.global_step.asnumpy() == [updates]
    assert TrainingPlan(dataset_size=12, batch_size=2, ranks=2, epochs=2, **settings).updates == updates
    first, second = (uneven_data(rank) for rank in (0, 1))
    windows = [joined([array[:4] for array in first], second)]
    if last_window == "apply":
        windows.append([array[4:] for array in first])
    close(weights_of(network), stock_weights("Momentum", windows * 2))
