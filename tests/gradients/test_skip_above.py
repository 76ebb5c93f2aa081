"""A window whose norm is too large makes no update: next to NumPy, with all that an optimizer remembers."""

import numpy as np
import pytest
from linear_toy import line, mse, sgd, weight_of
from loop_toy import adjustable_sgd, optimizer_of, own_loop
from mindspore import Tensor, nn
from mindspore.experimental import optim
from mindspore.experimental.optim.lr_scheduler import StepLR
from refusal import refuses, told
from step_probe import Around, Weights, changed, number, values_of

from ms_gradaccum import (
    EMA,
    HSDP,
    Accumulator,
    ClipByGlobalNorm,
    GradAccumulation,
    MixedPrecision,
    NormSpike,
    StepOutput,
    TrainOneStepCell,
    load_state,
    save_state,
)
from ms_gradaccum.parallel.semi_auto import SemiAuto
from ms_gradaccum.static_graph.settings import check_step

DECAY, RATES = 0.1, [0.1, 0.05, 0.02, 0.01]


def momentum(parameters):
    return nn.Momentum(parameters, RATES, 0.9, weight_decay=DECAY)


def decoupled(parameters):
    return nn.AdamWeightDecay(parameters, RATES, weight_decay=DECAY)


def step_of(make_optimizer=momentum, check_loss=False, **settings):
    network = Weights(2)
    optimizer = make_optimizer(network.trainable_params())
    return TrainOneStepCell(GradAccumulation(network, 2), optimizer, check_loss=check_loss, **settings)


def rows(norm):
    """Rows whose mean gradient has this norm; those of the micro batches have others."""
    return np.float32([[norm * 1.2, 0], [0, norm * 1.6]])


def trained_by_numpy(norms):
    weight, velocity = np.zeros(2), np.zeros(2)
    for norm, rate in zip(norms, RATES, strict=True):
        velocity = 0.9 * velocity + np.array([0.6, 0.8]) * norm + DECAY * weight
        weight = weight - rate * velocity
    return weight


def run_windows(step, norms, split=False):
    updated = []
    for norm in norms:
        for part in np.split(rows(norm), 2) if split else [rows(norm)]:
            output = step(Tensor(part))
        if not isinstance(output, StepOutput):  # Items of a larger graph.
            output = StepOutput(*output)
        updated.append(bool(output.is_updated))
    return updated


@pytest.mark.parametrize("split", [False, True], ids=["batches", "windows"])
def test_a_window_above_a_number_is_left_out(split, mode):
    step = step_of(skip_above=4.0, accumulation_steps=2 if split else 1)
    if split:
        step(Tensor(rows(5)))
        output = step.flush()
        assert not output.is_updated and number(output.grad_norm) == pytest.approx(5)
    # One of exactly the limit is not above it.
    assert run_windows(step, [1, 3, 5, 4, 1e6, 2], split) == [True, True, False, True, False, True]
    np.testing.assert_allclose(step.network.network.weight.asnumpy(), trained_by_numpy([1, 3, 4, 2]), rtol=1e-5)
    assert (step.events.updates, step.events.skipped_updates) == (4, 3 if split else 2)


@pytest.mark.parametrize("make_optimizer", [momentum, decoupled, lambda p: optim.AdamW(p, 0.1)])
def test_nothing_moves_in_a_window_that_is_left_out(make_optimizer, mode):
    step = step_of(make_optimizer, skip_above=4.0, mixed_precision=MixedPrecision(level="O0", init_scale=8))
    run_windows(step, [1, 2])
    before = values_of(step)
    output = step(Tensor(rows(5)))
    assert changed(before, values_of(step)) == set()
    assert not number(output.overflow)
    assert number(output.weight) == 2
    assert number(output.grad_norm) == number(output.clipped_grad_norm) == pytest.approx(5)
    # Otherwise this proves nothing.
    step(Tensor(rows(1)))
    assert "weight" in changed(before, values_of(step))


def test_the_norm_is_that_of_the_mean_gradient_before_the_clip(mode):
    step = step_of(
        skip_above=4.0, clip=ClipByGlobalNorm(1.0), mixed_precision=MixedPrecision(level="O0", init_scale=2.0**16)
    )
    # Before it is unscaled, the norm is 65536 times that; that of a micro batch is 1.2 and 1.6 times that.
    assert run_windows(step, [3.9, 4.1]) == [True, False]
    np.testing.assert_allclose(step.network.network.weight.asnumpy(), [-0.06, -0.08], rtol=1e-5)


def spikes(norms, std, windows):
    """Return whether each norm is above the mean of the last ones by so many standard deviations."""
    history, decided = [], []
    for norm in norms:
        recent = np.array(history[-windows:])
        is_spike = False
        if len(recent) >= windows // 2:
            limit = recent.mean() + std * recent.std(ddof=1)
            assert abs(norm - limit) > 1e-4 * limit or not np.isfinite(norm)  # no matter of rounding
            is_spike = norm > limit
        decided.append(bool(is_spike))
        if np.isfinite(norm):
            history.append(norm)
    return decided


# A level with noise, two spikes in the first windows and two later, a NaN, and then a higher level, which stays.
LEVELS = np.concatenate([np.full(26, 2.0), np.full(10, 9.0)]) + np.random.default_rng(0).uniform(0, 0.5, 36)
LEVELS[[1, 10, 14]] = 40, 50, 1e18
LEVELS[12] = np.nan
SPIKE = {"std": 3.0, "windows": 8}


@pytest.mark.parametrize("kind", ["a step", "a larger graph"])
def test_a_spike_is_told_from_a_level_as_numpy_does(kind, mode):
    step = step_of(sgd_of, skip_above=NormSpike(**SPIKE))
    found = run_windows(Around(step) if kind == "a larger graph" else step, LEVELS)
    is_spike = spikes(LEVELS, **SPIKE)
    assert found == [not (spike or np.isnan(norm)) for spike, norm in zip(is_spike, LEVELS)]
    # The early one is none yet; the new level begins as one, and is the normal one soon.
    assert [i for i, spike in enumerate(is_spike) if spike] == [10, 14, 26]


def sgd_of(parameters):
    return nn.SGD(parameters, 1e-30)


def test_equal_norms_are_no_spikes_of_their_mean(mode):
    step = step_of(sgd_of, skip_above=NormSpike(std=0.01, windows=4))
    assert run_windows(step, [0.1] * 8 + [0.11]) == [True] * 8 + [False]


@pytest.mark.parametrize("at", [3, 11, 26])
def test_a_resumed_training_knows_the_norms_of_before(at, tmp_path, eager):
    step = step_of(sgd_of, skip_above=NormSpike(**SPIKE))
    run_windows(step, LEVELS[:at])
    save_state(step, tmp_path)
    rest = run_windows(step, LEVELS[at:])
    resumed = step_of(sgd_of, skip_above=NormSpike(**SPIKE))
    load_state(resumed, tmp_path)
    assert run_windows(resumed, LEVELS[at:]) == rest
    assert changed(values_of(step), values_of(resumed)) == set()
    # One that forgets them decides otherwise.
    assert run_windows(step_of(sgd_of, skip_above=NormSpike(**SPIKE)), LEVELS[at:]) != rest or at == 3


def test_a_spike_may_come_and_go_with_a_resume(tmp_path, eager):
    plain = step_of(sgd_of)
    run_windows(plain, LEVELS[:9])
    save_state(plain, tmp_path / "without")
    watched = step_of(sgd_of, skip_above=NormSpike(**SPIKE))
    run_windows(watched, [100, *LEVELS[:20]])
    load_state(watched, tmp_path / "without")
    # The norms begin anew, also those that the step itself had.
    assert run_windows(watched, LEVELS) == run_windows(step_of(sgd_of, skip_above=NormSpike(**SPIKE)), LEVELS)
    save_state(watched, tmp_path / "with")
    load_state(plain, tmp_path / "with")
    expected = {name: value for name, value in values_of(watched).items() if "skip_above" not in name}
    assert changed(values_of(plain), expected) == set()
    # Those of another number of windows are no norms of this one.
    with refuses(ValueError, "skip_above.norms"):
        load_state(step_of(sgd_of, skip_above=NormSpike(windows=16)), tmp_path / "with")


def test_two_optimizers_of_a_network_have_one_norm(eager):
    network = nn.Dense(1, 1, "zeros", "zeros")
    optimizers = [nn.SGD([each], 1.0) for each in network.trainable_params()]
    accumulator = Accumulator(network, optimizers, skip_above=4.5)
    updated = []
    for grads in ((3.0, 4.0), (3.0, 3.0)):  # norms of 5 and 4.2; each optimizer has at most 4
        output = accumulator((Tensor([[grads[0]]]), Tensor([grads[1]])), 1.0)
        updated.append(bool(output.is_updated))
    assert updated == [False, True]
    assert [each.asnumpy().item() for each in network.trainable_params()] == [-3, -3]


def test_a_loop_whose_window_is_left_out(eager):
    network, accumulator = own_loop(make_optimizer=adjustable_sgd, skip_above=60.0)
    optimizer = optimizer_of(accumulator)
    ema = EMA(0.5, warmup_updates=0)
    accumulator.add_callback(ema)
    scheduler = accumulator.prepare(StepLR(optimizer, 1, 0.5))
    seen = []
    for x in (1.0, 5.0, 3.0):  # gradients of -4, -96 and -34.56
        x = Tensor(np.float32([[x]]))
        with accumulator.accumulate():
            accumulator.backward(x, 2 * x)
            norm = number(accumulator.clip_grad_norm(10.0))
            accumulator.step()
            scheduler.step()
        seen.append((norm, accumulator.updated, number(optimizer.lrs[0]), ema.updates))
    np.testing.assert_allclose([norm for norm, *_ in seen], [4, 96, 34.56], rtol=1e-5)
    assert [updated for _, updated, *_ in seen] == [True, False, True]
    np.testing.assert_allclose([rate for *_, rate, _ in seen], [0.01, 0.01, 0.005], rtol=1e-5)
    assert [updates for *_, updates in seen] == [1, 1, 2]
    assert weight_of(network) == pytest.approx(0.08 + 0.01 * 10, rel=1e-5)


def test_the_first_window_that_is_left_out_is_named(eager):
    for norms, count in (([1, 2], 0), ([1, 5, 6], 1)):
        with told("skip_above") as said:
            run_windows(step_of(skip_above=4.0), norms)
        assert len(said) == count
    assert "the norm 5 of a window is above skip_above=4.0: this window makes no update" in said[0]


def test_a_spike_is_above_the_mean_and_needs_a_history():
    for wrong in (0, -1.0, np.inf, np.nan):
        with refuses(ValueError, "'skip_above'"):
            step_of(skip_above=wrong)
        with refuses(ValueError, "'std'"):
            NormSpike(std=wrong)
    with refuses(ValueError, "'windows'"):
        NormSpike(windows=3)
    with refuses(TypeError, "'windows'"):
        NormSpike(windows=8.0)


def test_the_compiler_partitions_no_such_step():
    cell = GradAccumulation(mse(line()), 2)
    with refuses(ValueError, "'skip_above'"):
        check_step(SemiAuto(None), cell, sgd(cell), skip_above=4.0)


def test_with_hsdp_in_one_process_the_norm_is_the_same(eager):
    assert run_windows(step_of(skip_above=4.0, parallel=HSDP(threshold=0)), [5, 3]) == [False, True]
