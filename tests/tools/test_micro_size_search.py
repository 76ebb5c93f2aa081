"""The parts of `find_micro_size` that need no child process."""

import functools
import json
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest import mock

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings
from linear_toy import sgd
from memory_networks import misbehaving, nothing
from mindspore import Tensor, nn, ops
from refusal import refuses, typed

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, MixedPrecision, find_micro_size
from ms_gradaccum.backend.device import is_out_of_memory
from ms_gradaccum.tools import micro_size_finder
from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.micro_size_finder import Measured, Training
from ms_gradaccum.tools.processes import IN_JOB


def answer_of(rows, limit, **settings):
    """The answer, and the numbers that were measured, where the memory is two bytes for each row of a micro batch."""
    asked = []

    def measure(builder, micro_size, *others):
        asked.append(micro_size)
        return Measured(rows, 0, 2 * math.ceil(rows / micro_size))

    with mock.patch.object(micro_size_finder, "measure", measure):
        return find_micro_size(nothing, limit, **settings), asked


@hypothesis_settings(max_examples=200, deadline=None)
@given(rows=strategies.integers(1, 2000), limit=strategies.integers(2, 5000))
def test_the_answer_is_the_smallest_that_fits_and_few_are_measured(rows, limit):
    found, asked = answer_of(rows, limit)
    assert found == next(count for count in range(1, rows + 1) if 2 * math.ceil(rows / count) <= limit)
    sizes = {math.ceil(rows / count) for count in range(1, rows + 1)}
    assert len(asked) == len(set(asked)) <= 2 * math.log2(len(sizes) + 1) + 1
    # The next larger micro batches were measured too.
    if found > 1:
        larger = math.ceil(rows / (found - 1))
        assert min(count for count in range(1, found) if math.ceil(rows / count) == larger) in asked


@pytest.mark.parametrize(
    "text, count",
    [(7, 7), ("1000", 1000), ("4GiB", 4 * 2**30), ("500MB", 500 * 10**6), (" 1.5 gi ", 3 * 2**29), ("12b", 12)],
)
def test_a_limit_is_a_number_or_a_text(text, count):
    """A batch that takes just so much fits, and one that takes two bytes more does not."""
    rows = count // 2
    assert answer_of(rows, text)[0] == 1
    with mock.patch.object(micro_size_finder, "measure", lambda *args: Measured(1, 0, count + 1)):
        with pytest.raises(MemoryError):
            find_micro_size(nothing, text)


@pytest.mark.parametrize(
    "name, value, error, got",
    [
        ("memory_limit", "much", ValueError, repr),
        ("memory_limit", "0.1", ValueError, lambda value: 0),
        ("memory_limit", 2**63, ValueError, repr),
        ("build", 3, TypeError, typed),
        ("build", lambda: None, ValueError, repr),
        ("build", functools.partial(misbehaving, "nothing"), ValueError, repr),
        ("build", "train.py", ValueError, repr),
        ("build", "nofile.py:build", ValueError, lambda value: f"'{value}', whose file is not there"),
        ("timeout", 0, ValueError, repr),
        ("report", 3, TypeError, typed),
    ],
    # Another address in each process makes another test of it.
    ids=lambda value: "" if " at 0x" in str(value) else None,
)
def test_a_wrong_argument_is_refused_at_once_in_one_sentence(name, value, error, got, monkeypatch):
    # No process is started for it.
    monkeypatch.setattr(micro_size_finder, "measure", None)
    given = {"build": nothing, "memory_limit": "1GiB", name: value}
    with refuses(error, f"'{name}'", f"but got {got(value)}."):
        find_micro_size(**given)


def test_neither_a_child_nor_the_ranks_of_a_job_search(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv(IN_JOB, "1")
        with refuses(RuntimeError, "Put the call"):
            find_micro_size(nothing, "1GiB")
    monkeypatch.setattr(micro_size_finder, "current_world", lambda owner: mock.Mock(size=2))
    with refuses(RuntimeError, "search must run"):
        find_micro_size(nothing, "1GiB")


def test_memory_that_the_search_itself_lacks_is_no_measurement(monkeypatch):
    def wait(job, *args, **settings):
        raise MemoryError("of the search")

    monkeypatch.setattr(micro_size_finder.Job, "wait", wait)
    with refuses(MemoryError, "of the search"):
        find_micro_size(nothing, "1GiB")


class Nested:
    @staticmethod
    def build():
        """A member of a class can be imported, too."""


def test_a_function_is_found_by_its_module_and_name(tmp_path, monkeypatch):
    assert Builder.of(nothing)[:2] == ("memory_networks", "nothing")
    assert Builder.of(Nested.build)[:2] == (__name__, "Nested.build")
    assert Builder.of("json.module:build")[:3] == ("json.module", "build", ["json.module"])
    train = tmp_path / "here" / "train.py"
    train.parent.mkdir()
    train.write_text("def build(): pass\n")
    monkeypatch.chdir(tmp_path)
    assert Builder.of("here/train.py:build")[:3] == (str(train), "build", [str(train)])
    monkeypatch.setattr(sys, "argv", ["program", "--rows=3"])
    assert Builder.of(nothing).argv == ["program", "--rows=3"]


def main_program(monkeypatch, **names):
    """Let a module with one function be the program that runs."""
    main = ModuleType("__main__")
    exec("def build(): pass", vars(main))
    vars(main).update(names)
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main.build


def test_a_function_of_the_program_itself_is_found_by_file_or_module(monkeypatch):
    assert Builder.of(main_program(monkeypatch, __file__=__file__))[:2] == (__file__, "build")
    spec = ModuleSpec("package.program", None)
    build = main_program(monkeypatch, __file__="/zipped/program.py", __spec__=spec)
    assert Builder.of(build)[:2] == ("package.program", "build")
    # That of a notebook is in no file.
    for names in ({}, {"__file__": "<stdin>"}):
        with refuses(ValueError, "'build'", "'train.py:build' or 'module:build'"):
            find_micro_size(main_program(monkeypatch, **names), "1GiB")


@pytest.fixture
def importing(monkeypatch):
    """Undo what a child does to find modules."""
    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)


def test_a_file_is_imported_beside_its_own_modules_and_not_as_the_program(importing, tmp_path):
    (tmp_path / "its_neighbour.py").write_text("number = 7")
    # The name of the file is no module's name.
    file = tmp_path / "train-7"
    file.write_text(
        "import sys, its_neighbour\n"
        "assert __name__ != '__main__'\n"
        "def build(): return its_neighbour.number, sys.argv, sys.modules[build.__module__].build is build\n"
        "text = 'no function'\n"
    )
    there = {"place": str(file), "name": "build", "argv": ["program", "--rows=3"]}
    builder = Builder.of(nothing)._replace(**there)
    assert builder.call() == (7, ["program", "--rows=3"], True)
    with refuses(ValueError, "'build'", "called without arguments"):
        builder._replace(name="text").call()


def test_a_function_computes_as_the_caller_does(importing, monkeypatch):
    devices = []
    # A process that has computed something already cannot choose any more.
    monkeypatch.setattr(ms, "set_device", lambda *device: devices.append(device))
    for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE):
        ms.set_context(mode=mode)
        builder = Builder.of(nothing)
        ms.set_context(mode=ms.PYNATIVE_MODE)
        assert Builder(*json.loads(json.dumps(builder))) == builder
        builder.call()
        assert ms.get_context("mode") == mode
    # The default is left to the function, which could not choose another one.
    assert devices == []
    builder._replace(device=["Ascend", 3]).call()
    assert devices == [("Ascend", 3)]


@pytest.mark.parametrize("made, got", [(None, "NoneType"), ((1, 2), "tuple of 2"), ((1, 2, 3, 4), "tuple of 4")])
def test_a_function_must_return_a_tuple_of_three_or_four(made, got):
    with refuses(TypeError, "'build'", f"but got {got}."):
        Training(made, 1)


@pytest.mark.parametrize("place, value, name", [(0, 3, "network"), (2, 3, "batch"), (3, {"clip": 3}, "clip")])
def test_what_a_function_returns_is_checked(place, value, name):
    made = [*nothing(), {}]
    made[place] = value
    with pytest.raises(TypeError, match=rf"^For '\w+', the argument '{name}' must be "):
        Training(tuple(made), 1)


def test_micro_batches_that_are_limited_by_tokens_have_no_number_to_look_for():
    network, optimizer, batch = nothing()
    with refuses(ValueError, "'network'", "micro_tokens"):
        Training((GradAccumulation(network, micro_tokens=8), optimizer, batch), 1)


def test_the_settings_of_a_training_are_kept_also_in_half_precision(eager):
    class Weighted(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(2, 1)

        def construct(self, x, y):
            return ops.square(self.dense(x.transpose(1, 0)) - y).sum(), y.sum()

    network = Weighted()
    outer = GradAccumulation(network, 7, weighted=True, batch_axis=(1, 0))
    batch = {"x": Tensor(np.ones((2, 6), np.float32)), "y": Tensor(np.ones((6, 1), np.float32))}
    optimizer = sgd(network, 0.1)
    # The loss scale begins so high that some windows are skipped before there are two updates.
    half = MixedPrecision("fp16", "O2", init_scale=2.0**24)
    settings = {"mixed_precision": half, "clip": ClipByGlobalNorm(1.0), "accumulation_steps": 2}
    training = Training((outer, optimizer, batch, settings), 6)
    parts = training.step.network
    assert (parts.micro_size, parts.weighted, parts.batch_axis) == (6, True, (1, 0))
    training.run()
    assert optimizer.global_step.asnumpy().item() == 2


def test_a_long_window_is_measured_by_two_of_its_batches_and_one_without_updates_ends(eager):
    network, optimizer, batch = nothing()
    for rows, settings in ((batch * np.nan, {}), (batch, {"accumulation_steps": 10_000})):
        assert optimizer.global_step.asnumpy().item() == 0
        Training((network, optimizer, rows, settings), 1).run()
    assert optimizer.global_step.asnumpy().item() == 2


def test_cells_are_measured_in_training_mode_unless_the_function_has_set_it():
    network, optimizer, batch = nothing()
    assert not network.dense.training
    Training((network, optimizer, batch), 1)
    assert network.training and network.dense.training
    network, optimizer, batch = nothing()
    network.set_train()
    network.dense.set_train(False)
    Training((network, optimizer, batch), 1)
    assert network.training and not network.dense.training


def test_missing_memory_is_told_from_other_errors():
    assert is_out_of_memory("RuntimeError", "Memory not enough:\nMemory isn't enough and alloc failed, kernel: MatMul")
    assert is_out_of_memory("RuntimeError", "CUDA error: out of memory")
    assert not is_out_of_memory("RuntimeError", "the shapes do not match")
    assert not is_out_of_memory("ValueError", "out of memory")
    # What this device lacks.
    with pytest.raises(MemoryError) as numpys:
        np.ones(2**45)
    with pytest.raises(RuntimeError) as mindspores:
        ops.ones((2**40,), ms.float32).sum().asnumpy()
    for error in (numpys.value, mindspores.value):
        assert is_out_of_memory(type(error).__name__, str(error))
