"""The sentences of the troubleshooting page are those of ms_gradaccum: each is provoked by its cause there."""

import re
import warnings
from collections import UserDict
from pathlib import Path

import mindspore as ms
import mindspore.experimental.optim as experimental
import numpy as np
import pytest
from linear_toy import X, batches, line, sgd
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import LossMonitor, RunContext
from refusal import loss_cell

from ms_gradaccum import (
    HSDP,
    Accumulator,
    DataParallel,
    GradAccumulation,
    Model,
    TokenMeanLoss,
    TrainOneStepCell,
    load_state,
    save_state,
)
from ms_gradaccum._checks import is_lost
from ms_gradaccum.advice import advisor, first_batches, rank_inputs
from ms_gradaccum.checkpoint import files
from ms_gradaccum.gradients import mixed_precision
from ms_gradaccum.loops import data_position, epoch
from ms_gradaccum.parallel import factory, shards, world

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
# The first cells of those tables that quote what the program says.
QUOTES = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.M)
LINES = Tensor(X), Tensor(2 * X)

PROVOKED = {}


def says(key):
    """Register what provokes the sentence of the page that has these words."""

    def register(provoke):
        PROVOKED[key] = provoke
        return provoke

    return register


def step_of(network, **settings):
    optimizer = settings.pop("optimizer", None)
    return TrainOneStepCell(network, sgd(network) if optimizer is None else optimizer, **settings)


def accumulator_of(steps=1):
    cell = loss_cell()
    return Accumulator(cell, sgd(cell), accumulation_steps=steps)


class Returning(nn.Cell):
    """A network that returns what a function makes of its mean loss."""

    def __init__(self, make):
        super().__init__()
        self.cell, self.make = loss_cell(), make

    def construct(self, x, y):
        return self.make(self.cell(x, y))


@says("optimizer of the network's")
def another_networks_optimizer(*_):
    TrainOneStepCell(loss_cell(), sgd(line()))


class Complex(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1j], ms.complex64), "weight")


@says("optimizer of mindspore.nn")
def an_optimizer_class(*_):
    TrainOneStepCell(loss_cell(), nn.SGD)


@says("optimizer of real")
def a_complex_parameter(*_):
    step_of(Complex())


@says("argument 'optimizer' cannot")
def another_optimizer_for_a_built_step(*_):
    cell = loss_cell()
    step = step_of(cell)
    step.optimizer = step.optimizer
    step.optimizer = sgd(cell)


@says("was also called directly")
def an_optimizer_that_is_called_beside_its_step(*_):
    cell = loss_cell()
    step = step_of(cell)
    step.optimizer(tuple(parameter.value() for parameter in step.optimizer.parameters))


@says("step now belongs")
def a_step_that_another_one_has_followed(*_):
    cell = loss_cell()
    step = step_of(cell)
    follower = step_of(cell, optimizer=step.optimizer)
    step(*LINES)
    del follower


@says("'optimizer' must keep")
def a_group_that_is_added_to_a_built_step(*_):
    network = nn.SequentialCell(line(), nn.Dense(1, 1))
    optimizer = experimental.SGD(network[0].trainable_params(), 0.1)
    step = step_of(nn.WithLossCell(network, nn.MSELoss()), optimizer=optimizer)
    step(*LINES)
    optimizer.add_param_group({"params": network[1].trainable_params()})
    step(*LINES)


@says("must be a loss cell")
def a_step_in_a_step(*_):
    cell = loss_cell()
    step_of(nn.TrainOneStepCell(cell, sgd(cell)), optimizer=sgd(cell))


@says("never be called")
def an_own_construct(*_):
    class Own(TrainOneStepCell):
        def construct(self, *inputs):
            return self.network(*inputs)

    cell = loss_cell()
    Own(cell, sgd(cell))


@says("None or 1.0")
def a_number_of_batches_as_the_third_argument(*_):
    cell = loss_cell()
    TrainOneStepCell(cell, sgd(cell), 4)


@says("'network' must not contain")
def one_in_the_other(*_):
    GradAccumulation(GradAccumulation(loss_cell(), 2), 2)


@says("unexpected argument")
def an_argument_for_boost(*_):
    cell = loss_cell()
    Model(cell, optimizer=sgd(cell), boost_config_dict={"boost": {"mode": "manual"}})


@says("need a name")
def a_setting_without_its_name(*_):
    GradAccumulation(loss_cell(), 2, True)


@says("bfloat16 on CPU")
def bfloat16_on_cpu(*_):
    step_of(loss_cell(), mixed_precision="bf16")


@says("return its mean")
def logits_for_a_loss(*_):
    step_of(GradAccumulation(line(), 2))(LINES[0])


@says("scalar losses")
def two_losses(*_):
    step_of(GradAccumulation(Returning(lambda loss: (loss, 2 * loss)), 2))(*LINES)


@says("return its weight")
def a_weighted_loss_without_a_weight(*_):
    step_of(GradAccumulation(Returning(lambda loss: (loss, None)), 1, weighted=True))(*LINES)


@says("rows on their")
def an_input_of_other_rows(*_):
    step_of(GradAccumulation(loss_cell(), 2))(LINES[0], LINES[1][:4])


@says("inputs do not fit")
def a_network_without_its_loss(*_):
    step_of(GradAccumulation(line(), 2))(*LINES)


@says("dataset has no batch()")
def a_dataset_of_single_rows(*_):
    network = line()
    rows = NumpySlicesDataset((X, X[:, 0]), shuffle=False)
    Model(network, nn.MSELoss(), sgd(network)).train(1, rows)


@says("backbone must take")
def a_backbone_with_its_own_loss(*_):
    step_of(TokenMeanLoss(loss_cell()))(*LINES)


@says("'head' must be an nn.Dense")
def a_head_of_another_class(*_):
    TokenMeanLoss(nn.Dense(4, 4), head=nn.Dense(4, 9, activation="relu"))


@says("(classes, width)")
def a_convolution_as_a_head(*_):
    TokenMeanLoss(nn.Dense(4, 4), head=nn.Conv1d(4, 9, 1).weight)


@says("hidden states of the width")
def a_network_with_its_head_inside(*_):
    network = nn.SequentialCell(nn.Dense(1, 4), nn.Dense(4, 9))
    step_of(TokenMeanLoss(network, head=network[1]))(LINES[0], Tensor(np.zeros(8, np.int32)))


class LacksMemory:
    """A forward hook that lacks memory for more than four rows."""

    def __call__(self, cell, inputs, output):
        if inputs[0].shape[0] > 4:
            raise RuntimeError("Allocate output memory failed")


@says("memory is not enough")
def a_batch_that_is_too_large(*_):
    cell = loss_cell()
    cell.register_forward_hook(LacksMemory())
    step_of(GradAccumulation(cell, "auto"))(*LINES)


@says("at least the length of each row")
def a_row_of_too_many_tokens(*_):
    words = Tensor(np.ones((4, 9, 1), np.float32))
    step_of(GradAccumulation(loss_cell(), micro_tokens=8))(words, words)


@says("MindSpore cannot compile")
def what_no_graph_can_do(monkeypatch, _):
    monkeypatch.delenv("MS_JIT")
    ms.set_context(mode=ms.GRAPH_MODE)
    step_of(Returning(lambda loss: loss + undefined))(*LINES)  # noqa: F821


@says("network with hooks")
def a_hook(monkeypatch, _):
    monkeypatch.delenv("MS_JIT")
    cell = loss_cell()
    cell.register_forward_hook(print)
    step_of(cell, compile=True)(*LINES)


class Lookup(nn.Cell):
    def __init__(self):
        super().__init__()
        self.rows = nn.EmbeddingLookup(6, 2, "ones", target="CPU", sparse=True)

    def construct(self, x):
        return self.rows(x).mean()


@says("gradients in PYNATIVE")
def a_sparse_lookup(*_):
    network = Lookup()
    step_of(network, optimizer=nn.LazyAdam(network.trainable_params()))(Tensor([[1], [2]], ms.int32))


@says("network is in evaluation")
def dropout_in_evaluation_mode(*_):
    step_of(nn.WithLossCell(nn.SequentialCell(line(), nn.Dropout(p=0.5)), nn.MSELoss()))(*LINES)


@says("takes the mean")
def batch_norm_in_training(*_):
    cell = nn.WithLossCell(nn.SequentialCell(line(), nn.BatchNorm1d(1)), nn.MSELoss()).set_train()
    step_of(GradAccumulation(cell, 2))(*LINES)


@says("sets all cells")
def a_frozen_cell_that_training_wakes(*_):
    norm = nn.BatchNorm1d(1)
    cell = nn.WithLossCell(nn.SequentialCell(line(), norm), nn.MSELoss())
    norm.set_train(False)
    Model(cell, optimizer=sgd(cell)).train(1, batches(4))


@says("exceeds the 8")
def more_micro_batches_than_rows(*_):
    step_of(GradAccumulation(loss_cell(), 16))(*LINES)


@says("1 for GRU")
def as_many_times_as_rows(*_):
    class Recurrent(nn.Cell):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(3, 2)

        def construct(self, x):
            return self.layer(x)[0].mean()

    step_of(GradAccumulation(Recurrent(), 2))(ops.ones((8, 8, 3)))


@says("loss of two")
def a_sum_over_rows(*_):
    step_of(GradAccumulation(nn.WithLossCell(line(), nn.MSELoss(reduction="sum")), 2))(*LINES)


@says("sums and weights")
def a_mean_with_a_weight(*_):
    step_of(GradAccumulation(Returning(lambda loss: (loss, Tensor(2.0))), 2, weighted=True))(*LINES)


@says("gradient of two")
def a_term_that_does_not_show_in_the_loss(*_):
    class Hidden(Returning):
        def construct(self, x, y):
            term = ops.square((self.trainable_params()[0] * x).mean())
            return self.cell(x, y) + term - ops.stop_gradient(term)

    step = step_of(GradAccumulation(Hidden(None), 2))
    for _ in range(2):
        step(*LINES)


class Counted(Returning):
    """A network whose loss grows with each call. The factor gives it more digits than a count."""

    def __init__(self):
        super().__init__(None)
        self.count = 0

    def construct(self, x, y):
        self.count += 1
        return self.cell(x, y) * (0.37 * self.count)


@says("forward pass changes")
def a_loss_that_grows_with_each_call(*_):
    step_of(GradAccumulation(Counted(), 2))(*LINES)


@says("rows have another")
def a_loss_that_grows_before_a_sink(*_):
    step_of(GradAccumulation(Counted(), 2)).body.measure_loss(LINES)


@says("window have different")
def batches_of_other_lengths(*_):
    class Mean(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = Parameter(Tensor(1.0), "weight")

        def construct(self, x):
            return (self.weight * x).mean()

    step = step_of(Mean(), accumulation_steps=2)
    for length in (3, 5):
        step(ops.ones((4, length)))


@says("network takes 4")
def a_loss_of_four_rows(*_):
    class OfFour(Returning):
        def construct(self, x, y):
            return super().construct(x, y) + 0 * x.reshape(4, 1).mean()

    step_of(GradAccumulation(OfFour(lambda loss: loss), 2))(*LINES)


@says("reads an iterator")
def a_network_that_reads_an_iterator(*_):
    class Reading(Returning):
        def __init__(self):
            super().__init__(None)
            self.factors = iter(range(9))

        def construct(self, x, y):
            return self.cell(x, y) * next(self.factors)

    step_of(GradAccumulation(Reading(), 2))(*LINES)


@says("measured: its forward")
def a_forward_pass_that_communicates(*_):
    class Sending(Returning):
        def __init__(self):
            super().__init__(None)
            self.is_alone, self.send = True, ops.AllReduce()

        def construct(self, x, y):
            loss = self.cell(x, y)
            return loss if self.is_alone else self.send(loss)

    step = step_of(GradAccumulation(Sending(), 2))
    step.body.window.advisor.measurement.is_distributed = True
    step(*LINES)


@says("measured: the step")
def a_step_in_a_larger_graph(monkeypatch, _):
    class Outer(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.step = step_of(GradAccumulation(loss_cell(), 2))

        def construct(self, x, y):
            return self.step(x, y)[0]

    monkeypatch.delenv("MS_JIT")
    ms.set_context(mode=ms.GRAPH_MODE)
    Outer()(*LINES)


@says("tensors, tuples, lists")
def what_is_like_a_dict(*_):
    step_of(GradAccumulation(Returning(lambda loss: loss), 2))(*LINES[:1], UserDict(y=LINES[1]))


@says("input 'y' seems")
def a_number_per_row_in_a_list(*_):
    class OfList(Returning):
        def construct(self, x, y):
            return self.cell(x, x * sum(y))

    step_of(GradAccumulation(OfList(None), 2))(LINES[0], [1.0] * 8)


@says("cut into single")
def a_mask_that_is_as_long_as_the_batch(*_):
    step_of(GradAccumulation(Returning(lambda loss: loss), 8))(LINES[0], ops.ones((8, 8)))


@says("hook of the parameter")
def a_hook_of_a_parameter(*_):
    cell = loss_cell()
    cell.trainable_params()[0].register_hook(lambda gradient: gradient.clip(-1.0, 1.0))
    step_of(GradAccumulation(cell, 2))(*LINES)


@says("what the network")
def a_hook_in_a_window_of_several_batches(*_):
    cell = loss_cell()
    cell.register_backward_hook(lambda hooked, grad_input, grad_output: None)
    step_of(cell, accumulation_steps=2)(*LINES)


@says("train cell around")
def mindspores_own_step(*_):
    cell = loss_cell()
    nn.TrainOneStepCell(GradAccumulation(cell, 2), sgd(cell)).set_train()(*LINES)


@says("check that only")
def a_check_that_fails(monkeypatch, _):
    def breaks(*_):
        raise OSError("broken")

    monkeypatch.setattr(first_batches.FirstBatches, "look", breaks)
    step_of(loss_cell())(*LINES)


@says("TrainOneStepCell: PYNATIVE mode")
def a_step_op_by_op(*_):
    step_of(loss_cell())(*LINES)


@says("of a window is above")
def a_gradient_above_the_limit(*_):
    step_of(loss_cell(), skip_above=1.0)(*LINES)


@says("gradient was Inf")
def nothing_but_inf(*_):
    step, inf = step_of(loss_cell()), Tensor(np.full((1, 1), np.inf, np.float32))
    step.windows[0].ends.overflows_in_a_row = 99
    step(inf, inf)


@says("loss must be finite")
def a_loss_monitor_at_a_nan(*_):
    cell = loss_cell()
    Model(cell, optimizer=sgd(cell)).train(1, batches(4, np.full((8, 1), np.nan, np.float32)), LossMonitor())


@says("Adam of mindspore.mint")
def an_optimizer_of_mint(*_):
    cell = loss_cell()
    step_of(cell, optimizer=mint.optim.Adam(cell.trainable_params()))(*LINES)


@says("window mixes two")
def another_step_of_a_part_of_the_network(*_):
    first, second = (nn.Dense(1, 1) for _ in range(2))
    losses = [nn.WithLossCell(each, nn.MSELoss()) for each in (first, nn.SequentialCell(first, second))]
    settings = {"accumulation_steps": 2}
    steps = [step_of(loss, optimizer=sgd(each), **settings) for loss, each in zip(losses, (first, second))]
    for _ in range(2):
        for step in steps:
            step(*LINES)


@says("gradients of a batch")
def gradients_that_are_clipped_batch_by_batch(*_):
    cell = nn.Dense(3, 3, has_bias=False)
    accumulator = Accumulator(cell, sgd(cell), 3)
    for power in (1, 2, 3):
        grad = np.arange(9, dtype=np.float32).reshape(3, 3) ** power
        accumulator((Tensor(grad / np.linalg.norm(grad)),))


@says("inputs must keep")
def a_python_value_that_changes(monkeypatch, _):
    class Times(Returning):
        def construct(self, x, y, factor):
            return self.cell(x, y) * factor

    monkeypatch.delenv("MS_JIT")
    monkeypatch.setattr(advisor, "_MANY_STRUCTURES", 1)
    step_of(Times(None), compile=True)(*LINES, 2.0)


@says("step() must follow")
def steps_without_a_backward_pass(*_):
    accumulator = accumulator_of()
    for _ in range(4):
        accumulator.step()


@says("followed by step()")
def no_step(*_):
    accumulator = accumulator_of()
    for _ in range(2):
        with accumulator.accumulate():
            accumulator.backward(*LINES)


@says("complete before prepare()")
def batches_of_a_prepared_dataset(*_):
    accumulator_of().prepare(NumpySlicesDataset(X)).batch(2)


@says("pass in accumulate()")
def two_backward_passes(*_):
    accumulator = accumulator_of()
    with accumulator.accumulate():
        accumulator.backward(*LINES)
        accumulator.backward(*LINES)


@says("batches of different")
def batches_of_other_rows_without_a_weight(*_):
    accumulator = accumulator_of(4)
    for _ in batches(3):
        accumulator((ops.ones((1, 1)),))


@says("training cell TrainOneStepCell")
def a_training_cell_with_settings(*_):
    cell = loss_cell()
    Model(nn.TrainOneStepCell(cell, sgd(cell)), accumulation_steps=4)


@says("'optimizer' must be given")
def a_training_without_an_optimizer(*_):
    Model(loss_cell(), accumulation_steps=4).train(1, batches(2))


@says("list of learning")
def a_rate_for_each_batch(*_):
    cell = loss_cell()
    optimizer = nn.SGD(cell.trainable_params(), [0.01] * 4)
    Model(cell, optimizer=optimizer, accumulation_steps=4).train(1, batches(2))


@says("'grads' must be a tuple")
def the_loss_with_the_gradients(*_):
    accumulator_of()((Tensor(1.0), (ops.ones((1, 1)),)))


@says("'grads' must be gradients")
def gradients_of_other_parameters(*_):
    accumulator_of()((ops.ones((1, 1)), ops.ones((1,))))


@says("gradient of a window")
def a_nan_in_the_data(*_):
    step_of(loss_cell())(Tensor(X * np.nan), Tensor(X))


@says("connected before they")
def no_init(monkeypatch, _):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    step_of(loss_cell())


@says("ranks must agree")
def other_settings_on_another_rank(monkeypatch, _):
    monkeypatch.setattr(world, "gather_values", lambda doing, value: [value, {"micro_size": 2}])
    world.check_agreement("TrainOneStepCell", {"micro_size": 4})


@says("started with different")
def other_parameters_on_another_rank(monkeypatch, _):
    monkeypatch.setattr(factory, "differing_ranks", lambda parameters: [1])
    monkeypatch.setattr(factory, "broadcast_parameters", lambda parameters: None)
    factory._start_alike("TrainOneStepCell", DataParallel(), loss_cell(), sgd(line()))


@says("ranks have different")
def other_tensors_on_another_rank(monkeypatch, _):
    monkeypatch.setattr(factory, "differing_ranks", lambda tensors: [] if isinstance(tensors, list) else [1])
    factory._start_alike("TrainOneStepCell", DataParallel(), loss_cell(), sgd(line()))


@says("optimizer calls AllReduce")
def an_optimizer_that_adds_up(*_):
    factory.warn_of_reductions("TrainOneStepCell", "the optimizer", [ops.AllReduce()], GradAccumulation(loss_cell(), 2))


@says("loss scale skips")
def a_loss_scale_in_saturation_mode(monkeypatch, _):
    monkeypatch.setattr(mixed_precision, "clamps_overflow", lambda: True)
    step_of(loss_cell(), mixed_precision="fp16")


@says("network with the same")
def experts_of_one_rank(monkeypatch, _):
    network = line()
    network.weight.layerwise_parallel = True
    factory.check_parameters_sent("TrainOneStepCell", network.trainable_params())


@says("same weights after")
def parameters_that_became_different(monkeypatch, _):
    monkeypatch.setattr(world, "gather_values", lambda doing, value: [value, "another"])
    world.check_equal([])


@says("ranks must read")
def the_same_rows_on_two_ranks(*_):
    rank_inputs.warn_of_inputs("TrainOneStepCell", 2 * [world.FirstInput("batch", "12345678")])


@says("parameters in an update")
def parameters_that_one_rank_has_loaded(monkeypatch, _):
    monkeypatch.setattr(world, "gather_values", lambda doing, value: [value, [*value[:3], "another"]])
    world.check_states("TrainOneStepCell", world.gather_states(world.NO_INPUT, [], [], []))


@says("the ranks made different calls:")
def a_rank_that_saves_alone(monkeypatch, _):
    monkeypatch.setattr(world, "_send", lambda words: np.zeros(8, np.int32))
    world.gather_counts("saves a state", 1)


@says("failed: the ranks")
def a_message_without_an_answer(monkeypatch, _):
    error = RuntimeError("Launch kernel failed: Default/AllGather-op0")
    is_lost("TrainOneStepCell", error)
    raise error


@says("only ranks")
def a_rank_that_stops_alone(monkeypatch, _):
    monkeypatch.setattr(epoch, "gather_counts", lambda doing, count: [0, 1])
    epoch.StopTogether().on_train_epoch_end(RunContext({}))


@says("discard this window")
def a_batch_that_has_failed_on_a_rank(*_):
    window = step_of(loss_cell()).body.window
    window.reducers[0].is_distributed = True
    window.discard(for_all=True)
    window.close()


class DistributedDataParallel(nn.Cell):
    """Called as MindSpore's own, which needs several processes."""

    def __init__(self, network):
        super().__init__()
        self.network = network


@says("reduce its gradients")
def a_network_that_adds_its_gradients_up_itself(*_):
    step_of(DistributedDataParallel(loss_cell()))


@says("networks with DTensors")
def a_network_of_distributed_tensors(*_):
    network = line()
    network.weight.placements = ("Shard(0)",)
    Accumulator(nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params(), 0.1))


@says("uses the mean")
def a_context_that_adds_gradients_up(*_):
    ms.set_auto_parallel_context(parallel_mode="data_parallel")
    try:
        factory._warn_of_a_sum("TrainOneStepCell", 2)
    finally:
        ms.reset_auto_parallel_context()


@says("weight decay")
def a_weight_decay_of_a_table(*_):
    network = Lookup()
    step_of(network, optimizer=nn.Adam(network.trainable_params(), weight_decay=0.1))


@says("argument 'shard_size'")
def groups_that_are_not_alike(*_):
    factory.choose_kind("TrainOneStepCell", HSDP(shard_size=3), 4)


@says("optimizer that works")
def lamb_in_shards(*_):
    shards.check_shardable(nn.Lamb(line().trainable_params(), 0.01))


@says("StateCheckpoint for resume=True")
def nothing_to_resume_from(*_):
    cell = loss_cell()
    Model(cell, optimizer=sgd(cell)).train(1, batches(4), resume=True)


@says("folder with states")
def an_empty_folder(_, tmp_path):
    load_state(step_of(loss_cell()), tmp_path)


@says("used: the state")
def another_network(_, tmp_path):
    save_state(step_of(loss_cell()), tmp_path)
    load_state(step_of(nn.WithLossCell(nn.Dense(1, 1), nn.MSELoss())), tmp_path)


@says("bytes that were written")
def a_file_that_was_cut(_, tmp_path):
    save_state(step_of(loss_cell()), tmp_path)
    file = next(tmp_path.rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    load_state(step_of(loss_cell()), tmp_path)


@says("cannot be written")
def a_folder_that_is_a_file(_, tmp_path):
    (tmp_path / "file").write_text("")
    save_state(step_of(loss_cell()), tmp_path / "file" / "states")


@says("saves into")
def a_folder_of_another_job(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "_lock", lambda file: False)
    monkeypatch.setattr(files, "LINGERS", 0.0)
    save_state(step_of(loss_cell()), tmp_path)


@says("hsdp() must come")
def a_network_that_reduces_its_gradients_later(*_):
    cell = loss_cell()
    step = step_of(cell)
    cell.hsdp_scheduler = object()
    step(*LINES)


@says("own random seed")
def a_random_order_that_nobody_knows(*_):
    data_position.Sources(data_position._UNSET, {}).check_known(NumpySlicesDataset(X, shuffle=True), 2)


def quotes_with(key):
    return [quote for quote in QUOTES if key in quote]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("key", PROVOKED)
def test_a_quoted_sentence_is_what_is_said(key, monkeypatch, tmp_path, caplog):
    (quote,) = quotes_with(key)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            PROVOKED[key](monkeypatch, tmp_path)
            said = [str(warning.message) for warning in caught] + [record.getMessage() for record in caplog.records]
        except Exception as error:
            said = [str(error)]
    pattern = ".*".join(re.escape(part) for part in quote.split("..."))
    assert any(re.search(pattern, sentence, re.S) for sentence in said), said


def test_each_sentence_of_the_page_is_provoked():
    assert sorted(quotes_with(key)[0] for key in PROVOKED) == sorted(QUOTES)
