"""The thread pool runs small micro steps on CPU, and computes the same."""

import os
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import JitConfig, Tensor, nn
from open_window import compiled_micro_steps, reducer_of, window_of
from quick_mindspore import compiling
from step_probe import Around, Of, Weights, compilations, operators, sgd_step, values_of

from ms_gradaccum import GradAccumulation, TrainOneStepCell
from ms_gradaccum.backend import thread_pool
from ms_gradaccum.training import micro_steps


@pytest.fixture(autouse=True)
def two_cores(monkeypatch, restored_mode):
    ms.set_context(mode=ms.GRAPH_MODE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


def is_faster(number, width, rows, jit_config=None):
    parameters = [SimpleNamespace(size=size) for size in (width * width, width)] * number
    return thread_pool.thread_pool_is_faster(nn.Cell(), parameters, rows, (), jit_config or {})


@pytest.mark.parametrize(
    "number, width, rows, faster",
    [
        (6, 64, 512, False),
        (6, 64, 4096, True),
        (6, 128, 256, False),
        (6, 512, 4, False),
        (6, 512, 16, True),
        (6, 1024, 2, True),
        (25, 512, 16, True),
        (26, 512, 16, False),
    ],
)
def test_they_are_faster_where_there_is_enough_to_compute(number, width, rows, faster):
    """As it was measured, see docs/performance.md; graphs of many parameters they run in any case."""
    assert is_faster(number, width, rows) == faster


@pytest.mark.parametrize("cores, much, some", [(1, 0, 0), (2, 1, 1), (4, 1, 0), (5, 0, 0)])
def test_only_on_few_cores_of_which_each_has_enough(cores, much, some, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert (is_faster(6, 1024, 64), is_faster(6, 512, 16)) == (much, some)


def test_only_on_cpu(monkeypatch):
    monkeypatch.setattr(thread_pool.ms, "get_context", lambda name: "GPU")
    assert not is_faster(6, 1024, 64)


@pytest.mark.parametrize("policy, faster", [(None, False), ("active", False), ("passive", True), ("PASSIVE", True)])
@pytest.mark.parametrize("how", ["jit_config", "context"])
def test_fused_kernels_must_not_spin(how, policy, faster, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    if how == "context":
        values = {"device_target": "CPU", "enable_graph_kernel": True}
        monkeypatch.setattr(thread_pool.ms, "get_context", values.get)
    settings = JitConfig(jit_level="O1").jit_config_dict if how == "jit_config" else {}
    assert is_faster(6, 1024, 64, settings) == faster


def columns(rows, seed=0):
    return Tensor(np.array(np.random.default_rng(seed).standard_normal((rows, 3)), np.float32))


def run_by(monkeypatch, pooled):
    monkeypatch.setattr(micro_steps, "thread_pool_is_faster", lambda *inputs: pooled)


def trained(dtype, **settings):
    """A step and all its values after windows of changing shapes, one with a NaN."""
    network = Weights(3, dtype)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    step = TrainOneStepCell(GradAccumulation(network, 3), optimizer, check_loss=False, **settings)
    for seed, rows in enumerate((9, 9, 7, 6, 6, 9)):
        batch = columns(rows, seed).asnumpy()
        if seed == 3:
            batch[0, 0] = np.nan
        step(Tensor(batch))
    return step, values_of(step)


@pytest.mark.parametrize(
    "mode, dtype, settings",
    [
        (ms.GRAPH_MODE, ms.float32, {}),
        (ms.PYNATIVE_MODE, ms.float32, {"compile": True}),
        (ms.GRAPH_MODE, ms.float32, {"bad_micro_batch": "drop"}),
        (ms.GRAPH_MODE, ms.float16, {}),
    ],
    indirect=["mode"],
    ids=["GRAPH", "PYNATIVE", "drop", "half"],
)
def test_the_results_are_the_same_bit_for_bit(dtype, settings, mode, monkeypatch):
    with compiling("the network"):
        step, values = trained(dtype, **settings)
        run_by(monkeypatch, True)
        pooled_step, pooled_values = trained(dtype, **settings)
    assert values.keys() == pooled_values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(pooled_values[name], value)
    assert np.abs(values["weight"]).min() > 0.01
    assert runs_in_the_pool(pooled_step) and not runs_in_the_pool(step)


def runs_in_the_pool(step):
    """Return whether all micro steps that have run are graphs with a condition."""
    found = {("Switch" in operators(c.cell, c.cell.current_phase)) for c in compiled_micro_steps(step).values()}
    assert len(found) == 1
    return found.pop()


def mean(out):
    return out.mean()


def ones(*shape):
    return Tensor(np.ones(shape, np.float32))


@pytest.mark.parametrize(
    "make, x, pooled",
    [
        (lambda: nn.Dense(400, 400), ones(4, 400), False),
        (lambda: nn.Dense(400, 400), ones(400, 400), True),
        (lambda: nn.Conv2d(3, 32, 3), ones(4, 3, 16, 16), False),
        (lambda: nn.Conv2d(3, 32, 3), ones(4, 3, 160, 160), True),
    ],
    ids=["few rows", "many rows", "few pixels", "many pixels"],
)
def test_rows_and_pixels_decide(make, x, pooled):
    step = sgd_step(Of(make(), mean), check_loss=False)
    step(x)
    assert runs_in_the_pool(step) == pooled


def test_the_first_batch_decides():
    step = sgd_step(Of(nn.Dense(400, 400), mean), check_loss=False)
    step(ones(400, 400))
    with compilations() as compiled:
        step(ones(4, 400))
    assert compiled == ["MicroStep"]
    assert len(compiled_micro_steps(step)) == 1
    assert runs_in_the_pool(step)


def test_not_among_several_processes(monkeypatch):
    run_by(monkeypatch, True)
    step = sgd_step(Weights(3), check_loss=False)
    monkeypatch.setattr(reducer_of(step), "is_distributed", True)
    structure, micro_batches, *_ = window_of(step).network.split(columns(4))
    compiled = window_of(step).micro_steps._compile(structure, micro_batches[0], False)
    assert not compiled.cell.is_pooled


@pytest.mark.parametrize("how", ["MS_JIT=0", "a hook"])
def test_what_runs_op_by_op_is_not_concerned(how, monkeypatch):
    run_by(monkeypatch, True)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network, x = Weights(3), columns(4)
    if how == "MS_JIT=0":
        monkeypatch.setenv("MS_JIT", "0")
    else:
        network.register_forward_hook(lambda cell, inputs, output: None)
    sgd_step(network, rate=1.0)(x)
    np.testing.assert_allclose(network.weight.asnumpy(), -x.asnumpy().mean(0), rtol=1e-5)


def test_a_larger_graph_has_no_condition_of_it(monkeypatch):
    run_by(monkeypatch, True)
    ms.set_context(mode=ms.GRAPH_MODE)
    network = Weights(3)
    step = sgd_step(network)
    assert not step.body.micro_step.is_pooled
    program = Around(step)
    program(columns(4))
    assert network.weight.asnumpy().all()
    assert not compiled_micro_steps(step)
