"""Ranks that were told different things, read the same rows, or fail alone: an error or a warning, and no hang."""

import itertools
import math
import os
import signal
from functools import partialmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import mindspore as ms
import numpy as np
import pytest
from linear_toy import momentum, mse, sgd
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim as experimental
from mindspore.train import OnRequestExit
from ranks import RANK, assert_same, everyone, folder, on_ranks, own_data, own_share, told
from refusal import refuses
from scenarios import APART, KINDS, batch, build_network, build_step, close, joined, share, stock_weights, weights_of

from ms_gradaccum import (
    EMA,
    HSDP,
    Accumulator,
    GradAccumulation,
    Model,
    Reduced,
    StateCheckpoint,
    TrainOneStepCell,
    load_state,
    save_state,
)
from ms_gradaccum.parallel import world


def step_with(optimizer, network, loss=None, batch_axis=0, **settings):
    loss_cell = GradAccumulation(nn.WithLossCell(network, loss or nn.MSELoss()), 2, batch_axis=batch_axis)
    return TrainOneStepCell(loss_cell, optimizer, **settings)


def train_model(network, epochs=1, callbacks=(), **settings):
    model = Model(network, nn.MSELoss(), sgd(network), **settings)
    model.train(epochs, own_data(), callbacks=[*callbacks])
    return model.train_network.events


def in_another_mode(network):
    ms.set_context(mode=(ms.GRAPH_MODE, ms.PYNATIVE_MODE)[RANK])
    step_with(sgd(network), network)


def cast_on_one_rank(network):
    if RANK:
        network[2].to_float(ms.float16)
    step_with(sgd(network), network)


def half_frozen(network):
    optimizer = sgd(network)
    network.trainable_params()[0].requires_grad = RANK == 0
    step_with(optimizer, network)


# Everything that makes ranks train different weights, or wait for each other, if they are told it unlike: what is
# built, the name of the setting, and its value on each rank.
DISAGREEMENTS = {
    "decay": (
        lambda net: step_with(nn.Momentum(net.trainable_params(), 0.1, 0.9, weight_decay=0.1 * RANK), net),
        "'optimizer.weight_decay', but got 0.0 on rank 0 and 0.1",
    ),
    "class": (
        lambda net: step_with((nn.Momentum, nn.Adam)[RANK](net.trainable_params(), 0.1, 0.9), net),
        "'optimizer', but got Momentum on rank 0 and Adam",
    ),
    "mode": (in_another_mode, "'mode', but got GRAPH_MODE on rank 0 and PYNATIVE_MODE"),
    "loss": (
        lambda net: step_with(sgd(net), net, (nn.MSELoss(), nn.L1Loss())[RANK]),
        "'network.network._loss_fn', but got MSELoss on rank 0 and L1Loss",
    ),
    "axis": (lambda net: step_with(sgd(net), net, batch_axis=RANK), "'batch_axis', but got 0 on rank 0 and 1"),
    "compile": (
        lambda net: step_with(sgd(net), net, compile=(None, True)[RANK]),
        "'compile', but got False on rank 0 and True",
    ),
    "cell": (
        lambda net: (TrainOneStepCell, Accumulator)[RANK](mse(net), sgd(net)),
        "'the training cell', but got TrainOneStepCell on rank 0 and Accumulator",
    ),
    "layers": (
        lambda net: step_with(sgd(net), nn.SequentialCell(net, nn.Dense(3, 3 + RANK))),
        "'parameter 1.weight', but got (3, 3) of Float32 on rank 0 and (4, 3) of Float32",
    ),
    "frozen": (half_frozen, "'parameter 0.weight', but got (8, 6) of Float32 on rank 0 and (8, 6) of Float32, frozen"),
    "states": (
        lambda net: train_model(net, callbacks=[StateCheckpoint(folder(), save_checkpoint_steps=1)] * RANK),
        "'callbacks', but got [] on rank 0 and ['StateCheckpoint(save_checkpoint_steps=1, ",
    ),
    "cast": (cast_on_one_rank, "'network.network._backbone.2.to_float', but got None on rank 0 and fp16"),
    "last_window": (
        lambda net: train_model(net, last_window=("apply", "drop")[RANK]),
        "'last_window', but got apply on rank 0 and drop",
    ),
    "epoch": (lambda net: train_model(net, 1 + RANK), "'epoch', but got 1 on rank 0 and 2"),
}


@on_ranks(2, cases=DISAGREEMENTS, compiled=True)
def test_ranks_that_would_train_unlike_or_wait_for_each_other_are_told_what_differs(build, differs):
    with refuses(ValueError, f"the ranks must agree about {differs}", " Start all ranks with the same settings."):
        build(build_network())


@on_ranks(2)
def test_a_cell_may_know_its_rank_and_takes_over_the_count_of_updates():
    network = build_network()
    optimizer = nn.Adam(network.trainable_params(), 0.1)
    optimizer.rank_id = network.shard = RANK
    optimizer.global_step.set_data(Tensor([3 * (1 - RANK)], ms.int32))
    step_with(optimizer, network)
    assert optimizer.global_step.asnumpy() == [3]


@on_ranks(2)
def test_parameters_of_all_dtypes_and_large_counts_arrive_bit_for_bit():
    random = np.random.default_rng(RANK)
    bits = [random.integers(0, 256, size, np.uint8) for size in (12, 6, 5, 24, 16, 2)]
    dtypes = [np.float32, np.float16, np.uint8, np.int64, np.float64, np.float16]
    values = [part.view(dtype) for part, dtype in zip(bits, dtypes)] + [np.arange(5) % 2 == RANK]
    # NaN of different bits.
    values[0][0] = np.array([0x7F812345 + RANK], np.uint32).view(np.float32)[0]
    values[0][1:] = np.array([0xFFC00001 + RANK, 0x80000000], np.uint32).view(np.float32)
    values.append(np.array(1.5 + RANK, np.float32))
    parameters = [Parameter(Tensor(value), f"p{i}", requires_grad=False) for i, value in enumerate(values)]
    differed = world.differing_ranks(parameters)
    world.broadcast_parameters(parameters)
    differ = world.differing_ranks(parameters)
    first, second = everyone([value.tobytes().hex() for value in values])
    counts = world.gather_counts("counts", 2**24 + 1 + RANK)
    assert differed and not differ and all(mine != theirs for mine, theirs in zip(first, second))
    assert [each.asnumpy().tobytes().hex() for each in parameters] == first
    assert [each.shape for each in parameters] == [value.shape for value in values]
    assert counts == [2**24 + 1, 2**24 + 2]


class Drawn(nn.Cell):
    """A layer with a buffer and a tensor that each rank draws, as random features are."""

    def __init__(self, buffer, constant):
        super().__init__()
        self.layer = nn.Dense(3, 3, "ones", "zeros")
        self.register_buffer("buffer", Tensor(np.full(3, 1.0 + buffer, np.float32)), persistent=False)
        self.constant, self.number = Tensor(np.full(3, 1.0 + constant, np.float32)), Tensor(RANK)

    def construct(self, x):
        return self.layer(x * self.buffer + self.constant)


STARTED = "the ranks started with different parameters or buffers"
OTHER = "the ranks have different values in a tensor of the network (one of network._backbone.constant)"


@on_ranks(2, compiled=True, cases=[("nothing", None), ("buffer", STARTED), ("constant", OTHER)])
def test_buffers_are_those_of_rank_0_and_other_tensors_that_differ_are_named(what, sentence):
    network = Drawn(RANK if what == "buffer" else 0, RANK if what == "constant" else 0)
    with told("ranks") as said:
        step_with(sgd(network), network)
    assert network.buffer.asnumpy().tolist() == [1.0] * 3
    assert network.constant.asnumpy().tolist() == [1.0 + (RANK if what == "constant" else 0)] * 3
    assert len(said) == (sentence is not None)
    assert all(text.startswith(f"For 'TrainOneStepCell', {sentence}") for text in said)


class Experts(nn.Cell):
    """The parameters of two experts, of which each rank has one, and of a gate that both have."""

    def __init__(self, name, is_marked):
        super().__init__()
        self.gate = Parameter(ops.ones((3, 2)), "gate")
        self.expert = Parameter(Tensor(np.full((3, 3), 1.0 + RANK, np.float32)), name, layerwise_parallel=is_marked)
        self.add_up = ops.AllReduce()

    def construct(self, x):
        return self.add_up(ops.matmul(x, self.expert)) * ops.matmul(x, self.gate).sum()


REPLICAS = "the argument 'network' must be a network with the same parameters on all processes, but got "
EXPERTS = {
    "named": (
        f"expert{RANK}",
        False,
        "the ranks must agree about 'optimizer.parameters[1]', but got expert0 on rank 0 and expert1 on rank 1. ",
    ),
    "alike": ("expert", False, f"{REPLICAS}different values, and All"),
    "marked": ("expert", True, f"{REPLICAS}'expert' with layerwise_parallel. "),
}


@on_ranks(2, cases=EXPERTS, compiled=True)
def test_experts_that_only_one_rank_has_are_refused_on_all_ranks_and_keep_their_values(name, is_marked, sentence):
    network = Experts(name, is_marked)
    before = network.expert.asnumpy().copy()
    with refuses(ValueError, f"For 'TrainOneStepCell', {sentence}"):
        step_with(sgd(network), network)
    assert (network.expert.asnumpy() == before).all()


class Failure(Exception):
    """An error of one rank."""


class Fails:
    """Raises on rank 1 where an event of one batch has a name."""

    def __init__(self, batch, name, micro_batch=None):
        self.where = batch, name, micro_batch

    def _fail(self, name, event):
        if RANK and (event.batch, name, event.micro_batch) == self.where:
            raise Failure

    on_micro_batch_begin = partialmethod(_fail, "begin")
    on_micro_batch_end = partialmethod(_fail, "end")
    on_update_begin = partialmethod(_fail, "update")


# The batch that fails, and where: windows have two batches of three micro batches.
FAILURES = {
    "first micro batch": (1, "begin", 0),
    "mid-batch": (1, "begin", 2),
    "last micro batch": (2, "end", 2),
    "update": (2, "update", None),
}
BECOMES = {"before": "left out", "first micro batch": "left out", "given wrong": "left out last", "after": "whole"}
# A batch without its labels; and of a loop, before the backward pass and after it.
BESIDE = {"given wrong": 2, "before": 1, "after": 2}


# By what becomes of the window: it has no rows of the failed batch, is dropped, or has all.
WINDOWS = {
    "left out": [joined(share(batch(0), 0, 2), batch(1)), joined(batch(2), batch(3))],
    "left out last": [joined(batch(0), share(batch(1), 0, 2)), joined(batch(2), batch(3))],
    "dropped": [joined(batch(2), batch(3))],
    "whole": [joined(batch(0), batch(1)), joined(batch(2), batch(3))],
}


@on_ranks(
    2,
    cases=[
        *(("step", kind, "mid-batch") for kind in KINDS),
        *itertools.product(["step"], APART, [*FAILURES, "given wrong"]),
        *itertools.product(["loop"], APART, ["before", "mid-batch", "after"]),
    ],
)
def test_a_window_in_which_a_batch_has_failed_on_one_rank_is_dropped_on_all(face, kind, failure):
    """Or it goes on without that batch, if nothing of it was added, and with it, if all was."""
    network = build_network()
    optimizer = momentum(network, 0.1)
    loss_cell = GradAccumulation(mse(network), 3)
    settings = {"accumulation_steps": 2, "parallel": KINDS[kind], "check_loss": kind == "data parallel"}
    step = (TrainOneStepCell if face == "step" else Accumulator)(loss_cell, optimizer, **settings)
    step.add_callback(Fails(*FAILURES.get(failure, (0, ""))))
    errors, ended = 0, []
    with told("ranks") as said:
        for number in range(4):
            fails = failure if RANK and number + 1 == BESIDE.get(failure) else ""
            try:
                if face == "step":
                    inputs = own_share(number)[: 1 if fails else 2]
                    ended.append(step(*inputs).ends_window)
                    continue
                with step.accumulate():
                    if fails == "before":
                        raise Failure
                    step.backward(*own_share(number))
                    if fails == "after":
                        raise Failure
                    step.step()
            except (Failure, TypeError):
                errors += 1
    becomes = BECOMES.get(failure, "dropped")
    assert errors == RANK
    assert (step.events.updates, step.events.skipped_updates) == ((1, 1) if becomes == "dropped" else (2, 0))
    expected = {name: stock_weights("Momentum", windows) for name, windows in WINDOWS.items()}
    close(weights_of(network), expected.pop(becomes))
    assert all(np.abs(np.subtract(weights_of(network), other)).max() > 1e-3 for other in expected.values())
    if becomes != "dropped":
        assert said == []
        return
    sentence = "a batch failed on one of the ranks, so all ranks discard this window. See the log of that rank."
    assert any(sentence in text for text in said)
    # The rank that has raised the error has no report of that batch.
    assert face == "loop" or ended in ([False, True, False, True], [True, False, True], [False, False, True])


@on_ranks(2, cases=[("same", 1), ("joined", 1), ("sunk", 1), ("other", 0), ("none", 0)])
def test_ranks_that_read_the_same_data_are_told_once(how, times):
    _, step = build_step(check_loss=True, accumulation_steps=3 if how == "joined" else 1)
    inputs = [Tensor(array) for array in batch(RANK if how == "other" else 0)]
    with told("ranks") as said:
        if how == "none":
            step(*inputs) if RANK else step.join()
        else:
            if how == "sunk":
                # As a Model does before a graph takes the batches by itself.
                step.body.measure_loss(tuple(inputs))
            for _ in range(2):
                step(*inputs)
            if how == "joined":
                step.join()
    assert len(said) == times
    assert all("must read different data" in text and "num_shards=2" in text for text in said)


class MaskedMean(nn.Cell):
    """A mean over the rows that a mask leaves, which is one over all rows where it leaves all."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x, y, mask):
        return (ops.square(self.network(x) - y).mean(-1) * mask).sum() / mask.sum()


@on_ranks(2)
def test_a_rank_that_finds_something_wrong_with_its_loss_trains_on_with_the_others():
    """It sends nothing for its measurement, and measures no more."""
    weights = []
    for check_loss in (True, False):
        network = build_network()
        step = TrainOneStepCell(GradAccumulation(MaskedMean(network), 2), sgd(network), check_loss=check_loss)
        with told("is not the mean of their losses") as found:
            for number in range(4):
                x, y = own_share(number)
                mask = np.ones(len(x), np.float32)
                mask[0] = RANK
                step(x, y, Tensor(mask))
        assert len(found) == (check_loss and RANK == 0)
        weights.append(weights_of(network))
    assert_same(weights)
    assert weights[0] == weights[1]


def apart(what, owner="TrainOneStepCell"):
    return (
        f"For '{owner}', the ranks must have the same {what} in an update, but ranks [1] differ from rank 0. "
        "Give all optimizers the same numbers; load a checkpoint, add an EMA, step a scheduler and change parameters "
        "on all ranks or on none."
    )


def load_last_layer(network, optimizer):
    network[-1].bias.set_data(Tensor(np.array([1.0, 2.0, 3.0], np.float32)))


def assign_rate(network, optimizer):
    ops.assign(optimizer.lrs[0], Tensor(0.05, ms.float32))


OPTIMIZERS = {
    "one": lambda parameters: experimental.SGD(parameters, 0.1),
    "momentum": lambda parameters: experimental.SGD(parameters, 0.1, momentum=0.9 - 0.1 * RANK),
    "schedule": lambda parameters: nn.SGD(parameters, nn.ExponentialDecayLR(0.1, 0.5 + 0.1 * RANK, 1)),
}
# The window before which rank 1 alone changes something, and how many errors there are: in the next of windows 1, 2, 4,
# and where the loop flushes.
CHANGES = {
    "loaded": (0, load_last_layer, "parameters", None),
    "loaded, level1": (0, load_last_layer, "parameters", None, HSDP(threshold=0)),
    "loaded, loop": (0, load_last_layer, "parameters", None, "auto", Accumulator),
    "loaded late": (2, load_last_layer, "parameters", 2),
    "loaded last": (4, load_last_layer, "parameters", 1),
    "rate": (2, assign_rate, "learning rate", 2),
    # Numbers that no rank has compared before: they show in the parameters.
    "momentum": (None, None, "parameters", 2, "auto", TrainOneStepCell, "momentum"),
    "schedule": (None, None, "parameters", 2, "auto", TrainOneStepCell, "schedule"),
    "alike": (None, None, "parameters", 0, HSDP(threshold=0)),
}


@on_ranks(2, cases=CHANGES)
def test_ranks_that_train_apart_end_in_one_sentence(
    window, change, what, times, parallel="auto", build=TrainOneStepCell, optimizer="one"
):
    network, errors = build_network(), []
    optimizer = OPTIMIZERS[optimizer](network.trainable_params())
    step = build(GradAccumulation(mse(network), 2), optimizer, parallel=parallel)

    def train(inputs):
        if build is TrainOneStepCell:
            step(*inputs)
            return
        step.backward(*inputs)
        step.clip_grad_norm(1.0)
        step.step()

    with told("ranks") as said:
        for number in range(6):
            if RANK and number == window:
                change(network, optimizer)
            try:
                train(own_share(number)) if number < 5 else step.flush()
            except RuntimeError as error:
                errors.append(str(error))
    sentence = apart(what, build.__name__)
    if times is None:
        assert errors[0] == sentence
    else:
        assert (errors, said) == ([sentence] * times, [])


@on_ranks(2)
def test_of_two_networks_in_a_loop_one_that_has_parted_is_an_error_on_all():
    """Rank 1 has other weights, and its data end early."""
    losses = [mse(build_network()) for _ in range(2)]
    accumulator = Accumulator(losses, [nn.SGD(loss.trainable_params(), 0.1) for loss in losses], 2)
    if RANK:
        load_last_layer(losses[0].backbone_network, None)
    with refuses(RuntimeError, apart("parameters", "Accumulator")):
        for inputs in accumulator.prepare([own_share(number) for number in range(2 - RANK)]):
            with accumulator.accumulate():
                for loss in losses:
                    accumulator.backward(*inputs, network=loss)
                accumulator.step()


@on_ranks(2)
def test_averages_that_one_rank_alone_has_are_told_before_the_first_update():
    network, step = build_step()
    before = weights_of(network)
    if RANK:
        step.add_callback(EMA(0.5))
    with refuses(RuntimeError, apart("averages (EMA)")):
        step(*own_share(0))
    assert before == weights_of(network)


GRADIENTS = {
    "mean": (0, True),
    "sum": (0, False),
    "own": (1, None),
    "declared": (1, False, 1.0, Reduced()),
    "of zeros": (1, None, 0.0),
    "of nan": (1, None, math.nan),
}


@on_ranks(2, cases=GRADIENTS)
def test_gradients_that_were_reduced_before_are_told_once(is_own, mean, scale=1.0, parallel="auto"):
    """Two windows of gradients of the caller, who may have reduced them."""
    network = build_network()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    accumulator = Accumulator(mse(network), optimizer, parallel=parallel)
    forward = mse(network)
    with told("ranks") as said:
        for _ in range(2):
            inputs = [Tensor(array[: 3 + RANK]) for array in batch(RANK)]
            grads = tuple(grad * scale for grad in ops.grad(forward, None, optimizer.parameters)(*inputs))
            if mean is not None:
                grads = nn.DistributedGradReducer(optimizer.parameters, mean)(grads)
            accumulator(grads, 3 + RANK, reduction="mean" if parallel == "auto" else "sum")
    assert len(said) == (not is_own)
    assert all("have begun with the same gradients" in text and "DistributedGradReducer" in text for text in said)


class ReducingSGD(nn.SGD):
    """An optimizer for a step that reduces nothing."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.1)
        self.all_reduce = ops.AllReduce()

    def construct(self, grads):
        return super().construct(tuple(self.all_reduce(grad) / 2 for grad in grads))


def all_reduced(grad):
    return ALL_REDUCE(grad) / 2


ALL_REDUCE = ops.AllReduce()
# Two steps are built.
REDUCED = {
    "optimizer": (ReducingSGD, None, ["the optimizer calls AllReduce"] * 2),
    "hook": (nn.SGD, all_reduced, ["the hook of a parameter calls AllReduce"]),
    "nothing": (nn.SGD, lambda grad: grad * 2, []),
}


@on_ranks(2, cases=REDUCED)
def test_optimizers_and_hooks_that_add_up_over_the_ranks_are_named(kind, hook, parts):
    """In a loop whose optimizer is prepared, and has been in another loop before."""
    network = build_network()
    optimizer = kind(network.trainable_params())
    if hook is not None:
        network[0].weight.register_hook(hook)
    with told("ranks") as said:
        for _ in range(2):
            accumulator = Accumulator(mse(network), optimizer)
            accumulator.prepare(optimizer)
        accumulator.backward(*own_share(0))
        optimizer.step()
    assert len(said) == len(parts) and all(part in text for part, text in zip(parts, said))


class Stops(ms.Callback):
    def on_train_epoch_end(self, run_context):
        if RANK:
            run_context.request_stop()


@on_ranks(2)
def test_all_ranks_stop_after_the_pass_after_which_one_stops():
    network = build_network()
    with told("only ranks [1] have called request_stop()") as said:
        events = train_model(network, epochs=3, callbacks=[Stops()])
    assert_same(weights_of(network))
    # Rank 0 has three batches, of which the last is a window of its own.
    assert len(said) == 1 and events.updates == 3


class AsksForExit(ms.Callback):
    """Asks this rank to exit, in the fourth step on rank 0 and in the fifth one on rank 1, and counts the steps."""

    def __init__(self, path):
        super().__init__()
        self.path, self.steps = Path(path), 0

    def on_train_step_begin(self, run_context):
        self.steps = run_context.original_args().cur_step_num
        if self.steps == 4 + RANK:
            self.path.write_text('{"GracefulExit": 1}')


@on_ranks(2)
def test_ranks_that_are_asked_to_exit_do_so_in_the_step_in_which_all_are():
    """Three passes of three steps, in the last of which only rank 0 has a batch."""
    handler = signal.getsignal(signal.SIGTERM)
    with mock.patch.dict(os.environ, MS_ENABLE_GRACEFUL_EXIT="1"), TemporaryDirectory() as place:
        network, path = build_network(), f"{place}/exit.json"
        asks = AsksForExit(path)
        events = train_model(network, epochs=3, callbacks=[asks, OnRequestExit(False, False, config_file=path)])
    signal.signal(signal.SIGTERM, handler)
    assert_same(weights_of(network))
    assert (asks.steps, events.updates) == (5, 5)


@on_ranks(2, cases=[("data parallel", " for the parameter '0.weight': this window makes no update"), ("level2", "")])
def test_a_skipped_window_names_the_parameter_once_on_all_ranks(kind, place):
    """The rows of rank 1 have a NaN, in a parameter of which each rank keeps a shard."""
    _, step = build_step("Momentum", parallel=KINDS[kind])
    with told("norm") as said:
        for number in range(3):
            x, y = share(batch(number), RANK, 2)
            x[0, 0] = np.nan if RANK else x[0, 0]
            step(Tensor(x), Tensor(y))
    (sentence,) = said
    what = f"the gradient of a window must have a finite norm, but got an Inf or a NaN{place}"
    assert sentence.startswith(f"For 'TrainOneStepCell', {what}")


@on_ranks(2, cases=APART)
def test_ranks_that_are_one_message_apart_get_one_sentence_and_can_go_on(kind):
    """Each call against the next one; then the ranks do the same again."""
    with TemporaryDirectory() as place:
        _, step = build_step("Momentum", accumulation_steps=2, parallel=KINDS[kind])
        calls = {
            "saves a state": lambda: save_state(step, place),
            "loads a state": lambda: load_state(step, place),
            "flushes its window": step.flush,
            "builds a training step": build_step,
        }
        if kind == "level2":
            calls["begins a batch"] = lambda: step(*own_share(0))
        for pair in itertools.pairwise([*calls, "saves a state"]):
            sentence = f"the ranks made different calls: rank 0 {pair[0]} and rank 1 {pair[1]}. "
            with pytest.raises(RuntimeError) as error:
                calls[pair[RANK]]()
            assert sentence in str(error.value)
        output = [step(*own_share(number)) for number in range(2)][-1]
        assert output.is_updated
