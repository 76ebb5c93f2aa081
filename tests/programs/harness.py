"""Whole programs, trained by MindSpore's own step on whole batches and by ms_gradaccum in micro batches.

A `Program` is written once. Each face of the package (training step, `Model`, `Accumulator`) must leave what
MindSpore's own step, or its own `Model`, leaves, or say in a warning or an error why it does not. There is no third
state: weights that differ without a word fail. The own step runs in the same mode where the mode makes a difference.

Nearly all the time of these tests is compiling. So the faces take turns: of each program one is compiled in GRAPH mode.
In PYNATIVE mode the network runs op by op and the package compiles its sums and its update alone, for one face of each
program. Of programs with a usual optimizer only the first ones of a file compile the report and the update. All else
runs with ``MS_JIT=0``, which compiles nothing.
"""

import functools
import random
import re
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import linear_toy
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.common.api import _pynative_executor
from mindspore.dataset import GeneratorDataset
from optimizer_parity import parameters_of, values_of
from quick_mindspore import compiling, eagerly
from refusal import told

from ms_gradaccum import Accumulator, GradAccumulation, Model, TrainOneStepCell, verify
from ms_gradaccum.backend.compiled import graph_mode

ROWS = 8
UPDATES = 3
PARTS = 4
MODES = {"GRAPH": ms.GRAPH_MODE, "PYNATIVE": ms.PYNATIVE_MODE}
FACES = ("step 1", "step 4", "Model", "Accumulator")


def nothing(*args, **kwargs):
    """The default of what a program may do."""


sgd = functools.partial(linear_toy.sgd, learning_rate=0.1)
momentum = functools.partial(linear_toy.momentum, learning_rate=0.05)


def regression():
    """Batches (x, y) whose rows differ much, so that no row can be left out unseen."""
    numbers = np.random.default_rng(1)
    shapes = (ROWS, 4), (ROWS, 1)
    return [tuple(numbers.normal(size=shape).astype(np.float32) for shape in shapes) for _ in range(UPDATES)]


class Net(nn.Cell):
    """Two layers and a squared error: what programs change."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(4, 5)
        self.second = nn.Dense(5, 1)

    def forward(self, x):
        return self.second(ops.tanh(self.first(x)))

    def construct(self, x, y):
        return ops.square(self.forward(x) - y).mean()


@dataclass(frozen=True, eq=False)
class Program:
    """A training program."""

    # Builds the loss cell. Its trainable parameters then get numbers that are always the same.
    network: Callable
    optimizer: Callable = sgd  # Builds the optimizer of the loss cell's parameters.
    batches: Callable = regression  # NumPy batches, one for each update.
    prepare: Callable = nothing  # What is done to (cell, optimizer) before a step is built, for example freezing.
    built: Callable = nothing  # What is done to (cell, optimizer) after the step was built.
    between: Callable = nothing  # What is done after update i: between(i, cell, optimizer).
    parts: int = PARTS  # Number of micro batches of "step 4", "Model" and "Accumulator".
    settings: dict = field(default_factory=dict)  # Arguments of GradAccumulation.
    step: dict = field(default_factory=dict)  # Arguments of our step, Model and Accumulator.
    stock_step: dict = field(default_factory=dict)  # Arguments of MindSpore's own step.
    stock_model: dict = field(default_factory=dict)  # Arguments of MindSpore's own Model.
    named: str | None = None  # Pattern of the error or warning that micro batches get in place of equal weights.
    # Pattern of the cause that `verify` names where micro batches differ by nature, as with BatchNorm.
    nature: str | None = None
    warned: str | None = None  # Pattern of a warning that is given although the weights are equal.
    own_model: bool = False  # Whether MindSpore's own Model does something else than its own step.
    faces: tuple = FACES  # Which faces can run it.
    modes: tuple = ("GRAPH", "PYNATIVE")  # In which modes MindSpore's own step trains it.
    rtol: float = 2e-5  # Largest deviation relative to the largest entry of the tensor.

    def build(self):
        """Return a new loss cell and its optimizer, always with the same numbers."""
        ms.set_seed(0)
        np.random.seed(0)
        random.seed(0)
        cell = self.network()
        numbers = np.random.default_rng(7)
        for parameter in cell.get_parameters():
            if parameter.requires_grad:
                value = numbers.uniform(-0.6, 0.6, parameter.shape)
                parameter.set_data(Tensor(value, parameter.dtype))
        optimizer = self.optimizer(cell)
        cell.set_train()
        self.prepare(cell, optimizer)
        return cell, optimizer


def tensors(tree):
    if isinstance(tree, dict):
        return {key: tensors(item) for key, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(tensors(item) for item in tree)
    return Tensor(tree) if isinstance(tree, np.ndarray) else tree


def rows_of(tree, axis, begin, end):
    """Return some rows of a nest of arrays, along the axes that GradAccumulation is told."""
    if isinstance(tree, dict):
        axes = axis if isinstance(axis, dict) else dict.fromkeys(tree, axis)
        return {key: rows_of(item, axes[key], begin, end) for key, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        axes = axis if isinstance(axis, tuple) else (axis,) * len(tree)
        return type(tree)(rows_of(item, each, begin, end) for item, each in zip(tree, axes))
    if axis is None or not isinstance(tree, np.ndarray) or not tree.ndim:
        return tree
    return tree.take(range(begin, end), axis)


def loss_of(output):
    output = output[0] if isinstance(output, (tuple, list)) else output
    return float(output.asnumpy())


class Between(ms.train.Callback):
    """Does what the program does between its updates, and keeps the losses."""

    def __init__(self, program, cell, optimizer):
        super().__init__()
        self.between = functools.partial(program.between, cell=cell, optimizer=optimizer)
        self.losses = []

    def on_train_step_end(self, run_context):
        self.losses.append(loss_of(run_context.original_args().net_outputs))
        self.between(len(self.losses) - 1)


def train_step(program, step, cell, optimizer, batches):
    losses = []
    for i, batch in enumerate(batches):
        losses.append(loss_of(step(*tensors(batch))))
        program.between(i, cell, optimizer)
    return losses


def train_model(program, model, cell, optimizer, batches):
    names = [f"column_{i}" for i in range(len(batches[0]))]
    dataset = GeneratorDataset(batches, names, shuffle=False)
    callback = Between(program, cell, optimizer)
    model.train(1, dataset, callbacks=[callback], dataset_sink_mode=False)
    return callback.losses


def settings_of(program, face):
    """Return the settings of our face. To measure a loss takes most of the time op by op: one face does it there."""
    says = (program.named, program.nature, program.warned) != (None,) * 3
    alone = face == "step 4" or "step 4" not in program.faces
    measures = says or alone or ms.get_context("mode") == ms.GRAPH_MODE
    return program.step if measures else program.step | {"check_loss": False}


def train_loop(program, cell, optimizer):
    loss_cell = GradAccumulation(cell, 1, **program.settings)
    accumulator = Accumulator(loss_cell, optimizer, program.parts, **settings_of(program, "Accumulator"))
    program.built(cell, optimizer)
    losses = []
    axis = program.settings.get("batch_axis", 0)
    size = ROWS // program.parts
    for i, batch in enumerate(program.batches()):
        for begin in range(0, ROWS, size):
            part = rows_of(batch, axis, begin, begin + size)
            with accumulator.accumulate():
                accumulator.backward(*tensors(part))
                output = accumulator.step()
                accumulator.zero_grad()
        losses.append(loss_of(output))
        program.between(i, cell, optimizer)
    return losses


def train_ours(program, face, cell, optimizer):
    if face == "Accumulator":
        return train_loop(program, cell, optimizer)
    loss_cell = GradAccumulation(cell, 1 if face == "step 1" else program.parts, **program.settings)
    if face == "Model":
        model = Model(loss_cell, optimizer=optimizer, **settings_of(program, face), **program.stock_model)
        program.built(cell, optimizer)
        return train_model(program, model, cell, optimizer, program.batches())
    step = TrainOneStepCell(loss_cell, optimizer, **settings_of(program, face))
    program.built(cell, optimizer)
    return train_step(program, step, cell, optimizer, program.batches())


def train_stock(program, face, cell, optimizer, batches):
    if face == "Model":
        model = ms.Model(cell, optimizer=optimizer, **program.stock_model)
        program.built(cell, optimizer)
        return train_model(program, model, cell, optimizer, batches)
    step = nn.TrainOneStepCell(cell, optimizer, **program.stock_step)
    program.built(cell, optimizer)
    return train_step(program, step, cell, optimizer, batches)


def outcome(program, train, face, *batches):
    cell, optimizer = program.build()
    try:
        losses = train(program, face, cell, optimizer, *batches)
    except BaseException:
        # An error inside a gradient would be in the way of whatever runs next in PYNATIVE mode.
        _pynative_executor.clear_res()
        raise
    parameters = parameters_of(optimizer) | {each.name: each for each in cell.get_parameters()}
    return SimpleNamespace(losses=losses, values=values_of(parameters))


def oracle_mode(program, mode):
    """Return the mode in which MindSpore's own step runs that is compared with.

    Op by op it costs next to nothing, so its compiled twin is only taken where Python changes something before or
    between the updates, of which a graph may keep the first value, and where there is no other.
    """
    changes = (program.prepare, program.between) != (nothing, nothing)
    return mode if changes or "PYNATIVE" not in program.modes else "PYNATIVE"


@functools.cache
def stock(program, face, mode):
    """Return what MindSpore's own step, or its own Model, leaves. Check that it trains."""
    cell, optimizer = program.build()
    start = values_of({each.name: each for each in optimizer.parameters})
    with eagerly() if mode == "PYNATIVE" else graph_mode():
        whole = outcome(program, train_stock, face, program.batches())
    moved = {name: deviation(whole.values[name], value) for name, value in start.items()}
    assert max(moved.values()) > 100 * program.rtol, f"nothing moves: {moved}"
    return whole


def deviation(found, expected):
    """Largest deviation of one array relative to the largest entry of the expected one."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        return np.inf
    error = np.max(np.abs(found - expected), initial=0.0)
    return error / max(np.max(np.abs(expected), initial=0.0), 1e-3) if np.isfinite(error) else np.inf


def check(program, mode, face):
    """Check one cell of the table: equal to MindSpore's own training, or named."""
    mode, _, way = mode.partition(", ")
    ms.set_context(mode=MODES[mode])
    if program.nature and face != "step 1":
        report = verify(program.build()[0], tuple(tensors(program.batches()[0])), program.parts)
        if not report.equal and re.search(program.nature, " ".join(report.causes)):
            return
    named = program.named if face != "step 1" else None
    with told("For '") as said, compiled_as(way):
        try:
            found = outcome(program, train_ours, face)
        except Exception as error:
            assert named and re.search(named, str(error), re.S), (
                f"an error that nobody expects: {type(error).__name__}: {error}"
            )
            return
    about = [text for text in said if re.search(named or program.warned or "$^", text)]
    if named and about:
        assert len(about) == 1, f"said more than once: {about}"
        return
    expected = stock(program, "Model" if face == "Model" and program.own_model else "step", oracle_mode(program, mode))
    assert_equal(program, found, expected)
    assert said == about, f"equal, but with a warning: {said}"


@contextmanager
def compiled_as(way):
    with pytest.MonkeyPatch.context() as patch, compiling("the network") if way == "network" else nullcontext():
        if way == "MS_JIT=0":
            patch.setenv("MS_JIT", "0")
        yield


def assert_equal(program, found, expected):
    assert found.values.keys() == expected.values.keys()
    errors = {name: deviation(found.values[name], value) for name, value in expected.values.items()}
    errors["losses"] = deviation(found.losses, expected.losses)
    too_far = {name: error for name, error in errors.items() if error > program.rtol}
    assert not too_far, f"SILENT: {too_far}"


def check_of(programs):
    """Return the test that a file of programs has: test_equal_or_named."""

    @pytest.mark.parametrize("program,mode,face", rows(programs))
    def test_equal_or_named(program, mode, face):
        check(program, mode, face)

    return test_equal_or_named


def rows(programs):
    """Return the cells of the table as the parameters of a test; of each program one is in the first tier."""
    table = []
    for number, (name, program) in enumerate(programs.items()):
        runs = [run for mode in program.modes for run in runs_of(program, mode, number)]
        in_parts = [run for run in runs if run[1] != "step 1"] or runs
        for way, face in runs:
            marks = () if (way, face) == in_parts[number % len(in_parts)] else pytest.mark.second_tier
            table.append(pytest.param(program, way, face, marks=marks, id=f"{name}-{way}-{face}".replace(" ", "_")))
    return table


def runs_of(program, mode, number):
    """Return what of the program is run in this mode, if it is the number-th one of its file: ways and faces."""
    if program.nature:
        # The whole batch is compared, and `verify` looks at the micro batches.
        return [(mode if mode == "GRAPH" else f"{mode}, MS_JIT=0", "step 1"), (mode, "step 4")]
    whole = program.parts == 1
    faces = [face for face in program.faces if not (whole and face == "step 4")]
    # MindSpore's Model is no stand-in for its step where they differ.
    apart = {"Model"} if program.own_model else set()
    in_turn = [face for face in faces if face not in apart and (whole or face != "step 1")]
    compiled = {in_turn[number % len(in_turn)]} if in_turn else apart
    # The report and the update are in graphs of their own, which are the same for programs of the usual optimizers.
    is_usual = program.optimizer in (sgd, momentum) and program.between == nothing and number >= len(FACES)
    if mode == "PYNATIVE":
        return [(mode if face in compiled and not is_usual else f"{mode}, MS_JIT=0", face) for face in faces]
    return [(f"{mode}, network" if is_usual else mode, face) for face in faces if face in compiled | apart]
