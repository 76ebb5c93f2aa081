"""Running cells as graphs from both modes: how many are compiled, and what happens where none can be."""

import gc
import inspect
from unittest import mock

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, line, sgd
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.api import _pynative_executor
from open_window import buffer_of, compiled_micro_steps, window_of
from refusal import refuses
from step_probe import KeepGradients, Learned, compilations, keeping_step, number, tensors

from ms_gradaccum import GradAccumulation, TrainOneStepCell
from ms_gradaccum.backend import compiled as compiled_module
from ms_gradaccum.backend.compiled import MAX_FIXED_SHAPES, Compiled

BATCH = tensors(X, 2 * X)
GRADIENT = -102  # of the line at weight 0 for the eight rows of BATCH


@pytest.fixture(autouse=True)
def graph_mode(restored_mode):
    ms.set_context(mode=ms.GRAPH_MODE)


def line_step(micro_size=2, **settings):
    return keeping_step(nn.WithLossCell(line(), nn.MSELoss()), micro_size, check_loss=False, **settings)


def test_both_modes_run_compiled_graphs_if_told_so_and_stay_as_they_were(mode):
    step = line_step(compile=True)
    with compilations() as compiled:
        step(*BATCH)
        assert sorted(compiled) == ["MicroStep", "Update", "WindowReduction.report"]
        step(*BATCH)
        step.set_train()(*BATCH)
    # MindSpore's own step starts out of training mode, too. Each mode has a graph, and both are kept.
    assert sorted(compiled) == ["MicroStep", "Update", "WindowReduction.report"]
    with compilations() as compiled:
        step.set_train(False)(*BATCH)
        step.set_train()(*BATCH)
    assert sorted(compiled) == ["MicroStep", "Update", "WindowReduction.report"]
    assert step.optimizer.gradients() == [GRADIENT] and ms.get_context("mode") == mode


class OneWeight(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1.0]), "weight")


class Increment(nn.Cell):
    def construct(self, x):
        return x + 1


def test_a_cell_that_is_freed_meanwhile_costs_no_second_compilation(monkeypatch):
    x, older, collect = Tensor(np.zeros(31, np.float32)), [Increment()], gc.collect
    older[0](x)
    # MindSpore finds a graph by its inputs, and forgets these with the first cell that had such inputs.
    monkeypatch.setattr(gc, "collect", lambda *args: (older.clear(), collect(*args)))
    newer = Compiled(Increment, "TrainOneStepCell", "the network")
    with compilations() as compiled:
        assert newer(x).sum() == 31 and compiled == ["Increment"] and not older


class Counting(KeepGradients):
    runs = 0

    def construct(self, gradients):
        self.runs += 1
        return super().construct(gradients)


def test_pynative_mode_compiles_what_holds_no_code_of_the_users(caplog):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    loss_cell = nn.WithLossCell(line(), nn.MSELoss())
    optimizer = Counting(loss_cell.trainable_params())
    step = TrainOneStepCell(GradAccumulation(loss_cell, 2), optimizer)
    with compilations() as compiled:
        for _ in range(3):
            step(*BATCH)
    graphs = ["AddMicroBatch", "Update.end", "Update.mean_gradients", "WindowReduction.report"]
    assert sorted(compiled) == graphs
    assert optimizer.runs == 3 and optimizer.gradients() == [GRADIENT]
    # One line of the log says how to find out whether compiling all of it gives the same.
    assert [record.name for record in caplog.records] == ["ms_gradaccum"] and "compile=True" in caplog.text


def test_what_the_compiler_has_freed_is_given_back(monkeypatch):
    given_back = []
    monkeypatch.setattr(compiled_module, "_malloc_trim", given_back.append)
    step = line_step(2)
    with compilations() as compiled:
        step(*BATCH)
        assert len(given_back) == len(compiled) > 0
        step(*BATCH)
    assert len(given_back) == len(compiled)


def test_the_number_of_compilations_does_not_depend_on_micro_size():
    counts = {}
    for micro_size in (1, 2, 8, 3):
        step = line_step(micro_size, accumulation_steps=2)
        with compilations() as compiled:
            step(*BATCH)
        counts[micro_size] = len(compiled)
    # One for the report on the open window. Eight rows in three micro batches are two of three rows and one of two.
    assert counts == {1: 2, 2: 2, 8: 2, 3: 3}


def test_what_runs_op_by_op_is_not_told_of_changing_shapes():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    increment = Compiled(Increment, "TrainOneStepCell", "the network")
    with mock.patch.object(_pynative_executor, "set_dynamic_input") as told:
        for rows in range(1, MAX_FIXED_SHAPES + 3):
            assert increment(Tensor(np.ones(rows, np.float32))).sum() == 2 * rows
    assert increment.general_cell is not None and not told.called


def scores(weight, x):
    """A sum that mixes both axes of its input, which may both change."""
    return (ops.softmax(x * weight, -1) * x).sum()


def columns(weight, x):
    """The same, from a tuple of columns, whose number a graph must know."""
    return scores(weight, ops.stack(ops.unstack(x, -1), -1))


def three_columns(weight, x):
    return scores(weight, x) + 0 * ops.MatMul()(x, ops.ones((3, 1))).sum()


def compiled_cell(function):
    return Compiled(lambda: Learned([1.0], function), "Test", "the cell")


class NoProduct(OneWeight):
    def construct(self, x, y):
        scaled = x * self.weight
        return ops.MatMul()(scaled, ops.ones((7, 7))).mean()


def test_an_error_of_the_compiler_begins_with_the_users_line():
    line = inspect.getsourcelines(NoProduct.construct)[1] + 2
    with pytest.raises(ValueError, match=f"^For 'TrainOneStepCell', .*: at {__file__}:{line}: For 'MatMul'"):
        keeping_step(NoProduct(), 2)(*BATCH)


def scores_by_hand(x):
    powers = np.exp(x.astype(np.float64))
    return (powers / powers.sum(-1, keepdims=True) * x).sum()


def call_with_shapes(cell, shapes):
    random = np.random.default_rng(0)
    with compilations() as compiled:
        for shape in shapes:
            x = random.normal(size=shape).astype(np.float32)
            assert number(cell(Tensor(x))) == pytest.approx(scores_by_hand(x), rel=1e-5)
    return len(compiled)


class Unnamed(nn.Cell):
    def __init__(self):
        super().__init__()
        self.net = nn.Dense(1, 1)

    def construct(this, x, y):  # noqa: N805
        return ops.square(this.net(x) - y).mean()


def test_a_construct_without_self_is_named_with_its_line():
    ms.set_context(mode=ms.GRAPH_MODE)
    cell = nn.SequentialCell(Unnamed())[0]
    step = TrainOneStepCell(cell, sgd(cell, 0.1))
    line = Unnamed.construct.__code__.co_firstlineno
    with refuses(TypeError, f"a construct of Unnamed at {__file__}:{line} with 'this' first", "'self'"):
        step(*BATCH)


def test_lengths_that_begin_to_change_later_take_one_more_graph():
    cell = compiled_cell(scores)
    assert call_with_shapes(cell, [(rows, 5) for rows in range(1, 12)]) == MAX_FIXED_SHAPES + 1
    assert call_with_shapes(cell, [(rows, 3 + rows % 7) for rows in range(1, 30)]) == 1
    # The shapes that came first still have their own, faster graphs.
    assert call_with_shapes(cell, [(1, 5), (40, 40)]) == 0


def test_a_network_that_needs_fixed_lengths_gets_one_graph_per_shape():
    cell = compiled_cell(columns)
    shapes = [(2, columns) for columns in range(1, 9)]
    assert call_with_shapes(cell, shapes) == len(shapes)
    assert call_with_shapes(cell, shapes) == 0


def test_a_wrong_batch_does_not_change_how_others_are_compiled():
    cell = compiled_cell(three_columns)
    for rows in range(1, MAX_FIXED_SHAPES + 1):
        call_with_shapes(cell, [(rows, 3)])
        with pytest.raises(ValueError, match="For 'MatMul' the input dimensions must be equal"):
            cell(Tensor(np.ones((rows, 4), np.float32)))
    assert call_with_shapes(cell, [(rows, 3) for rows in range(1, 20)]) == 1


class Unsupported(OneWeight):
    def construct(self, x, y):
        try:
            return ops.square(x * self.weight - y).mean()
        finally:
            pass


CANNOT = "^For 'TrainOneStepCell', MindSpore cannot compile the network:"


@pytest.mark.parametrize("compile", [None, True])
def test_a_network_that_cannot_be_compiled_is_an_error_that_names_its_line(mode, compile):
    step = keeping_step(Unsupported(), 2, compile=compile)
    if mode == ms.PYNATIVE_MODE and not compile:
        step(*BATCH)
        assert step.optimizer.gradients() == [GRADIENT / 2]  # at weight 1
        return
    place = f"{__file__}:{inspect.getsourcelines(Unsupported.construct)[1]}"
    with pytest.raises(RuntimeError, match=f"{CANNOT} in Unsupported at {place}: Unsupported statement 'Try'."):
        step(*BATCH)
    assert number(buffer_of(step).weight) == 0 and ms.get_context("mode") == mode


HOOKS = ["register_forward_pre_hook", "register_forward_hook", "register_backward_pre_hook", "register_backward_hook"]


def test_hooks_of_cells_are_called_once_per_micro_batch_or_refused_where_a_graph_would_not_call_them():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    calls = []
    step, compiled = line_step(accumulation_steps=100), line_step(compile=True)
    for each in (step, compiled):
        each(*BATCH)
    # They may come at any time.
    for i, register in enumerate(HOOKS):
        networks = [each.network.network.backbone_network for each in (step, compiled)]
        handles = [getattr(network, register)(lambda *_: calls.append(1)) for network in networks]
        step(*BATCH)
        with refuses(ValueError, "'compile'", "Remove the hook"):
            compiled(*BATCH)
        for handle in handles:
            handle.remove()
        assert len(calls) == 2 * (i + 1), register
        assert number(buffer_of(step).sums[0]) == 8 * (i + 2) * GRADIENT
        compiled(*BATCH)


@pytest.mark.parametrize("wrong, kind", [(False, ValueError), (1, TypeError), ("yes", TypeError)])
def test_compile_is_true_or_none(wrong, kind):
    with refuses(kind, "'compile'", "True or None"):
        line_step(compile=wrong)


def test_ms_jit_0_runs_eagerly_for_debugging(monkeypatch, mode):
    monkeypatch.setenv("MS_JIT", "0")
    step = line_step()
    with compilations() as compiled:
        step(*BATCH)
    assert not compiled and step.optimizer.gradients() == [GRADIENT] and ms.get_context("mode") == mode


def too_few_rows(weight, x):
    if (x * weight).shape[0] < 100:
        raise ValueError("too few rows")
    return x.mean()


@pytest.mark.parametrize("op_by_op", [True, False])
def test_errors_in_pynative_mode_leave_nothing_behind(op_by_op, monkeypatch):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    if op_by_op:
        monkeypatch.setenv("MS_JIT", "0")
    step = keeping_step(Learned([1.0], too_few_rows), 1, compile=True)
    for _ in range(3):
        with pytest.raises(ValueError, match="too few rows"):
            step(Tensor(X))
    # After two errors inside a gradient MindSpore itself refuses this.
    assert Tensor([1.0, 2.0])[1] == 2


class Scaled(OneWeight):
    def construct(self, x, factor):
        return (x * self.weight).mean() * factor


def test_python_values_are_constants_of_a_graph_and_many_of_them_are_reported():
    step = keeping_step(Scaled(), 2, accumulation_steps=100)
    with compilations() as compiled:
        for factor in (1.0, 2.0, 1.0, float("nan"), float("nan")):
            step.drop()
            step(Tensor(X), factor)
            assert number(buffer_of(step).sums[0]) == pytest.approx(36 * factor, nan_ok=True)
    assert compiled.count("MicroStep") == 3
    with pytest.warns() as warned:
        for factor in range(6):
            step(Tensor(X), factor)
    assert ["but got 8 different ones" in str(w.message) for w in warned] == [True] and warned[0].filename == __file__


@pytest.mark.parametrize("when", ["on the network", "before the first call", "after the first call"])
def test_the_jit_config_reaches_every_compiled_cell(when):
    config = ms.JitConfig(jit_level="O1")
    loss_cell = nn.WithLossCell(line(), nn.MSELoss())
    if when == "on the network":
        loss_cell.set_jit_config(config)
    step = keeping_step(loss_cell, 2)
    if when == "before the first call":
        step.set_jit_config(config)
    step(*BATCH)
    if when == "after the first call":
        step.set_jit_config(config)
    cells = [compiled.cell for compiled in compiled_micro_steps(step).values()]
    if when != "on the network":
        cells += [
            step.body.micro_step,
            step.body.end.reduction.compiled_report.cell,
            step.body.end.reduction.compiled_report_without_rate.cell,
            *(compiled.cell for compiled in step.body.end.updates.values()),
            window_of(step).micro_steps.empty_step.cell,
        ]
    assert [cell.jit_config_dict["jit_level"] for cell in cells] == ["O1"] * len(cells)
    assert step.optimizer.gradients() == [GRADIENT]


class LazyBlock(nn.Cell):
    @ms.lazy_inline
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 3)

    def construct(self, x):
        return ops.tanh(self.dense(x))


class FrontBlock(LazyBlock):
    @ms.lazy_inline(policy="front")
    def __init__(self):
        super().__init__()


class Blocks(nn.Cell):
    def __init__(self, kind):
        super().__init__()
        self.blocks, self.unused = nn.SequentialCell([kind() for _ in range(3)]), kind()
        for i, weight in enumerate(self.blocks.trainable_params()):
            weight.set_data(Tensor(np.random.default_rng(i).normal(size=weight.shape).astype(np.float32)))

    def construct(self, x):
        return ops.square(self.blocks(x)).mean()


@pytest.mark.parametrize("kind", [LazyBlock, FrontBlock])
def test_cells_built_with_lazy_inline_compile_on_cpu_and_train_as_op_by_op(kind):
    gradients = []
    for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE):
        ms.set_context(mode=mode)
        network = Blocks(kind)
        step = keeping_step(network, 2)
        step(Tensor(np.arange(15, dtype=np.float32).reshape(5, 3) / 10))
        gradients.append(step.optimizer.gradients())
        # What marks the cells for the compiler is as it was.
        assert all(("no_inline" in vars(block)) == (kind is FrontBlock) for block in network.blocks)
    for compiled, eager in zip(*gradients):
        np.testing.assert_allclose(compiled, eager, rtol=1e-5, atol=1e-7)
    assert np.abs(gradients[1][0] - gradients[1][2]).max() > 1e-3  # the blocks' weights are not one


@pytest.mark.parametrize("device,is_inlined", [("CPU", True), ("GPU", True), ("Ascend", False)])
def test_only_ascend_calls_cells_built_with_lazy_inline(device, is_inlined, monkeypatch):
    monkeypatch.setattr("ms_gradaccum.backend.device.this_device", lambda: device)
    block = LazyBlock()
    with compiled_module.inlined([block]):
        assert getattr(block, "no_inline", True) != is_inlined
