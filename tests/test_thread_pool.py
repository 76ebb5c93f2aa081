"""Who runs the micro steps on CPU is tried with the first batches, and makes no difference to what they compute."""

import os
from itertools import chain, cycle, repeat
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import JitConfig, Tensor, nn
from step_probe import Around, Weights, operators, values_of

from ms_gradaccum import GradAccumulation, TrainOneStepCell, micro_steps, thread_pool
from ms_gradaccum.events import Events
from ms_gradaccum.thread_pool import ThreadPoolTrial, may_help


def tried(plain, pooled, micro_batches=16, trial=None):
    """Who ran each of 100 batches, if one micro batch took the next of these seconds."""
    trial = trial or ThreadPoolTrial(possible=True)
    seconds = {False: iter(plain), True: iter(pooled)}
    chosen = []
    for _ in range(100):
        chosen.append(trial.pooled)
        trial.took(next(seconds[trial.pooled]) * micro_batches, micro_batches)
    return chosen


@pytest.mark.parametrize("micro_batches", [1, 16, 64])
@pytest.mark.parametrize("ratio, faster", [(0.7, True), (0.98, True), (1.02, False), (1.3, False)])
def test_the_faster_one_is_kept(ratio, faster, micro_batches):
    compiling = 2.0 / micro_batches
    plain, pooled = chain([compiling], repeat(0.01)), chain([compiling], repeat(0.01 * ratio))
    chosen = tried(plain, pooled, micro_batches)
    assert chosen[-10:] == [faster] * 10
    assert True in chosen and False in chosen


def test_a_machine_that_is_busy_now_and_then_does_not_change_it():
    slow = [1, 1, 2, 1, 1, 1, 3, 1, 1]
    assert tried(cycle(0.010 * s for s in slow), repeat(0.008))[-1]
    assert tried(repeat(0.010), cycle(0.008 * s for s in slow))[-1]
    assert not tried(cycle(0.008 * s for s in slow), repeat(0.010))[-1]


def test_a_machine_that_gets_slower_does_not_change_it():
    growing = [0.010 * 1.02**i for i in range(100)]
    assert not tried(growing, [0.01 * t for t in growing], micro_batches=64)[0]
    assert tried(growing, (0.8 * t for t in growing), micro_batches=64)[-1]
    assert not tried(growing, growing, micro_batches=64)[-1]


@pytest.mark.parametrize("micro_batches", [1, 64])
def test_short_micro_batches_are_not_tried(micro_batches):
    plain = chain([2.0], repeat(0.0029))
    assert True not in tried(plain, repeat(0.001), micro_batches)
    assert True in tried(repeat(0.0031), repeat(0.001), micro_batches)


def test_batches_of_no_micro_batch_say_nothing():
    trial = ThreadPoolTrial(possible=True)
    for _ in range(100):
        trial.took(0.0, 0)
    assert tried(repeat(0.01), repeat(0.005), trial=trial)[-1]


@pytest.mark.parametrize(
    "cores, parameters, helps", [(1, 12, False), (2, 12, True), (11, 50, True), (12, 12, False), (2, 51, False)]
)
def test_where_it_may_help(cores, parameters, helps, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert may_help(parameters) == helps


def test_only_on_cpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(thread_pool.ms, "get_context", lambda name: "GPU")
    assert not may_help(12)


def columns(rows, seed=0):
    return Tensor(np.array(np.random.default_rng(seed).standard_normal((rows, 3)), np.float32))


def trained(pooled, make_network, **settings):
    """A step and all its values after windows of changing shapes, one with a NaN, run by the one or the other."""
    network = make_network()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    step = TrainOneStepCell(GradAccumulation(network, 3), optimizer, **settings)
    step.micro_steps.trial.end(pooled)
    for seed, rows in enumerate((9, 9, 7, 6, 5, 2)):
        batch = columns(rows, seed).asnumpy()
        if seed == 3:
            batch[0, 0] = np.nan
        step(Tensor(batch))
    return step, values_of(step)


def half_precision():
    return Weights(3, ms.float16)


@pytest.mark.parametrize(
    "mode, make_network, settings",
    [
        (ms.GRAPH_MODE, lambda: Weights(3), {}),
        (ms.PYNATIVE_MODE, lambda: Weights(3), {}),
        (ms.GRAPH_MODE, lambda: Weights(3), {"bad_micro_batch": "drop"}),
        (ms.GRAPH_MODE, half_precision, {}),
    ],
    indirect=["mode"],
    ids=["GRAPH", "PYNATIVE", "drop", "half"],
)
def test_the_results_are_the_same_bit_for_bit(make_network, settings, mode):
    step, values = trained(False, make_network, **settings)
    pooled_step, pooled_values = trained(True, make_network, **settings)
    assert values.keys() == pooled_values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(pooled_values[name], value)
    assert np.abs(values["weight"]).min() > 0.01
    assert runs_in_the_pool(pooled_step) and not runs_in_the_pool(step)


def runs_in_the_pool(step):
    """Whether all micro steps that have run are graphs with a condition."""
    found = {("Switch" in operators(c.cell, c.cell.current_phase)) for c in step.micro_steps.by_structure.values()}
    assert len(found) == 1
    return found.pop()


def test_a_training_tries_both_and_keeps_the_faster_one(monkeypatch, mode):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(thread_pool, "WARM_UP", 4)
    monkeypatch.setattr(thread_pool, "PAIRS", 2)
    network = Weights(3)
    step = TrainOneStepCell(GradAccumulation(network, 2), nn.SGD([network.weight], 1.0))
    trial = step.micro_steps.trial
    # As if the calling thread were slow.
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(micro_steps, "time", clock)

    def micro_batch_end(*args):
        clock.now += 0.004 if trial.pooled else 0.02

    monkeypatch.setattr(Events, "micro_batch_end", micro_batch_end)
    ran, expected = [], np.zeros(3)
    for seed in range(12):
        x = columns(4, seed)
        ran.append(trial.pooled)
        step(x)
        expected -= x.asnumpy().mean(0)
    np.testing.assert_allclose(network.weight.asnumpy(), expected, rtol=1e-5)
    assert ran == [False] * 2 + [True] * 2 + [False, True] * 2 + [True] * 4


@pytest.mark.parametrize("how", ["MS_JIT=0", "a hook", "an error of the compiler"])
def test_what_cannot_be_compiled_goes_on_as_it_is(how, monkeypatch):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = Weights(3)
    step = TrainOneStepCell(GradAccumulation(network, 2), nn.SGD([network.weight], 1.0))
    x = columns(4)
    step(x)
    if how == "MS_JIT=0":
        monkeypatch.setenv("MS_JIT", "0")
    elif how == "a hook":
        network.register_forward_hook(lambda cell, inputs, output: None)
    else:
        monkeypatch.setattr("ms_gradaccum.micro_step.with_condition", lambda number: open(number))
    step.micro_steps.trial.pooled = True
    if how == "a hook":
        with pytest.warns(UserWarning, match="hook"):
            step(x)
    else:
        step(x)
    assert not step.micro_steps.trial.pooled
    np.testing.assert_allclose(network.weight.asnumpy(), -2 * x.asnumpy().mean(0), rtol=1e-5)


def test_a_larger_graph_has_no_condition_of_it():
    ms.set_context(mode=ms.GRAPH_MODE)
    network = Weights(3)
    step = TrainOneStepCell(GradAccumulation(network, 2), nn.SGD([network.weight], 1.0))
    step.micro_steps.trial.end(pooled=True)
    assert not step.micro_step.in_thread_pool
    program = Around(step)
    program(columns(4))
    assert network.weight.asnumpy().all()


def test_settings_reach_the_graph_of_the_trial():
    network = Weights(3)
    step = TrainOneStepCell(GradAccumulation(network, 2), nn.SGD([network.weight], 1.0))
    step.micro_steps.trial.end(pooled=True)
    step.set_jit_config(JitConfig(jit_level="O1"))
    step.set_train(False)
    step(columns(4))
    (compiled,) = step.micro_steps.by_structure.values()
    assert compiled.cell.in_thread_pool and not compiled.cell.training
    assert compiled.cell.jit_config_dict["jit_level"] == "O1"
