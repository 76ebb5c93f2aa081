"""Which part of a network computes in half precision, by every name; what is refused, in whole sentences."""

import sys
from pathlib import Path
from unittest import mock

import mindspore as ms
import numpy as np
import pytest
from linear_toy import batches, mse, sgd, toy, toy_with_metrics, weight_of
from loop_toy import own_loop, updates_of
from mindspore import Tensor, amp, nn, ops
from refusal import refuses
from step_probe import Learned, number, sgd_step, tensors

from ms_gradaccum import Accumulator, GradAccumulation, MixedPrecision, TrainOneStepCell
from ms_gradaccum.backend import probes
from ms_gradaccum.gradients import mixed_precision


class Network(nn.Cell):
    """A matrix product, a normalisation and an operator of no class, each with a dtype that can be seen."""

    def __init__(self):
        super().__init__()
        weights = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
        self.dense = nn.Dense(6, 4, Tensor(weights), "zeros")
        self.norm = nn.LayerNorm((4,))

    def construct(self, x):
        return ops.sigmoid(self.norm(self.dense(x)))


X = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
Y = np.random.default_rng(2).normal(size=(8, 4)).astype(np.float32)


def train(mixed_precision):
    """One update from four micro batches of 2; the network's weights and the output."""
    network = Network()
    step = TrainOneStepCell(GradAccumulation(mse(network), 4), sgd(network, 0.5), mixed_precision=mixed_precision)
    output = step(*tensors(X, Y))
    return np.concatenate([weight.asnumpy().ravel() for weight in network.trainable_params()]), output


@pytest.fixture(scope="module")
def in_float32():
    return train(None)


def close_but_not_equal(name, weights, expected):
    # Half precision has 11 bits; a gradient is a sum of products of such numbers.
    np.testing.assert_allclose(weights, expected, atol=1e-2)
    assert not np.array_equal(weights, expected), f"{name} computes in float32"
    assert weights.dtype == np.float32


@pytest.mark.parametrize("name", ["fp16", "fp16_apex", "fp16_naive", "O1", "O2", "O3", "auto"])
def test_each_name_trains_in_half_precision(name, in_float32, eager):
    weights, output = train(name)
    close_but_not_equal(name, weights, in_float32[0])
    assert output.is_updated and number(output.loss_scale) == 65536
    assert number(output.loss) == pytest.approx(number(in_float32[1].loss), rel=1e-2)


def test_modules_are_found_where_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # O1 writes the networks that it rewrites
    before = list(sys.path)
    network = Network()
    TrainOneStepCell(mse(network), sgd(network), mixed_precision="fp16")
    assert sys.path == before and Path.cwd() == tmp_path and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["fp16", "fp16_apex"])
def test_on_compiled_graphs_in_both_modes(name, in_float32, mode):
    close_but_not_equal(name, train(name)[0], in_float32[0])


class OwnLoss(nn.Cell):
    def __init__(self):
        super().__init__()
        self.network = Network()
        self.loss_fn = nn.MSELoss()

    def construct(self, x, y, factor=1.0):
        return self.loss_fn(self.network(x), y) * factor


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("make, settings", [(OwnLoss, {"factor": 1.0}), (lambda: mse(Network()), {})])
def test_mindspores_losses_are_computed_in_float32_also_in_a_cell_of_ones_own(make, settings, level, eager):
    cell = make()
    precision = MixedPrecision(level=level)
    step = sgd_step(cell, 4, 0.5, mixed_precision=precision)
    # The squares of these errors are no float16 numbers.
    output = step(Tensor(X), Tensor(1000 * Y), **settings)
    assert number(output.loss) == pytest.approx(np.square(1000 * Y).mean(), rel=1e-2)


def small_gradient(weight, x):
    """Has a gradient of 2 ** -30, which is 0 in float16, unless the loss is scaled."""
    product = x * ops.cast(weight, ms.float16) * Tensor(2.0**-15, ms.float16)
    return ops.cast(product, ms.float32).mean()


def test_the_scale_saves_gradients_that_float16_would_lose(eager):
    x = Tensor(np.full((4, 1), 2.0**-15, np.float16))
    for scale, gradient in ((1.0, 0.0), (2.0**16, 2.0**-30)):
        settings = MixedPrecision(level="O0", init_scale=scale)
        step = sgd_step(Learned([1.0], small_gradient), mixed_precision=settings)
        assert number(step(x).grad_norm) == gradient


def test_model_and_accumulator_take_the_same_names(eager):
    settings = MixedPrecision("fp16", "O3", init_scale=64.0)
    network, model = toy_with_metrics(mixed_precision=settings)
    assert model.eval(batches(8))["mse"] == pytest.approx(102, rel=1e-3)
    model.train(1, batches(8))
    assert weight_of(network) == pytest.approx(2.04, rel=1e-3)
    network, accumulator = own_loop(4, mixed_precision=settings)
    updates_of(accumulator, batches(2))
    assert weight_of(network) == pytest.approx(2.04, rel=1e-3)


class AnyInputs(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=False)
        self.network = nn.SequentialCell(nn.Dense(2, 1), nn.ReLU())

    def construct(self, *inputs):
        return self.network(*inputs).mean()


def local_network():
    class Local(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(2, 1)

        def construct(self, x):
            return self.dense(x).mean()

    return Local()


NOT_REWRITTEN = {
    "Please handle custom-object first": AnyInputs,
    "define the classes of the network outside of functions": local_network,
}


@pytest.mark.parametrize("said", NOT_REWRITTEN)
def test_a_network_that_mindspore_cannot_rewrite(said, eager, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # O1 writes the networks that it rewrites
    network = NOT_REWRITTEN[said]()
    with refuses(ValueError, "'mixed_precision'", said):
        TrainOneStepCell(network, sgd(network), mixed_precision="fp16")
    network = NOT_REWRITTEN[said]()
    step = TrainOneStepCell(network, sgd(network), mixed_precision="fp16_apex")
    assert np.isfinite(step(Tensor(np.ones((2, 2), np.float32))).item())


def test_a_network_is_converted_once(eager):
    network = Network()
    loss_cell = mse(network)
    first = TrainOneStepCell(GradAccumulation(loss_cell, 2), sgd(network), mixed_precision="O2")
    cells = len(list(network.cells_and_names()))
    del first
    TrainOneStepCell(GradAccumulation(loss_cell, 2), sgd(network), mixed_precision="O2")
    assert len(list(network.cells_and_names())) == cells
    with refuses(ValueError, "'mixed_precision'", "give that level"):
        TrainOneStepCell(GradAccumulation(loss_cell, 2), sgd(network), mixed_precision="O3")


@pytest.mark.parametrize("mixed_precision", ["bf16", MixedPrecision(ms.bfloat16, "O2")])
def test_bfloat16_is_refused_where_the_device_has_none(mixed_precision):
    with refuses(ValueError, "'mixed_precision'", "Use float16"):
        toy(mixed_precision=mixed_precision)


def test_bfloat16_needs_no_scale_where_the_device_has_it():
    with mock.patch.object(ops, "matmul"):
        found = mixed_precision.check_precision("Model", "bf16")
    assert (found.level, found.dtype, number(found.loss_scale.value())) == ("O1", ms.bfloat16, 1)


def test_a_search_for_inf_is_refused_where_an_overflow_gives_none(monkeypatch):
    add, get_context = Tensor.__add__, ms.get_context
    on_ascend = {"device_target": "Ascend"}
    monkeypatch.setattr(ms, "get_context", lambda name: on_ascend.get(name) or get_context(name))
    assert not probes.clamps_overflow()
    # As a device in saturation mode adds.
    monkeypatch.setattr(Tensor, "__add__", lambda a, b: Tensor(np.clip(add(a, b).asnumpy(), -65504.0, 65504.0)))
    assert probes.clamps_overflow()
    for searching in ("fp16", "O2", amp.DynamicLossScaler(1024.0, 2, 50), amp.FixedLossScaleManager(8.0)):
        with refuses(ValueError, "Set MS_ASCEND_CHECK_OVERFLOW_MODE=INFNAN_MODE (Atlas"):
            mixed_precision.check_precision("Model", searching)
    # MindSpore's own step does not look for an overflow there either.
    for other in (None, amp.FixedLossScaleManager(8.0, drop_overflow_update=False)):
        mixed_precision.check_precision("Model", other)


@pytest.mark.parametrize(
    "settings, error, key",
    [
        ({"amp_level": "O2", "mixed_precision": "fp16"}, ValueError, "amp_level='O2'"),
        ({"loss_scale_manager": amp.StaticLossScaler(8), "mixed_precision": "fp16"}, ValueError, "loss_scale_manager"),
        ({"mixed_precision": 16}, TypeError, "Did you mean 'fp16'?"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, error, key):
    with refuses(error, "'mixed_precision'", key):
        toy(**settings)


def test_a_dtype_may_be_given_by_its_name_and_in_a_dict_of_patterns():
    assert MixedPrecision("fp16", "O2") == MixedPrecision(ms.float16, "O2")
    for dtype in (ms.float32, None):
        with refuses(ValueError, "'dtype'"):
            MixedPrecision(dtype, "O1")
    with refuses(ValueError, "'reduce_dtype'"):
        MixedPrecision(reduce_dtype={1: "fp16"})
    with refuses(ValueError, "float16 or bfloat16"):
        MixedPrecision(reduce_dtype={"*": "int8"})


def test_a_pattern_must_fit_parameters_of_an_optimizer_in_one_process_too(eager):
    network = nn.SequentialCell(nn.Dense(1, 1), nn.Dense(1, 1))

    def loop(pattern):
        precision = MixedPrecision(level="O0", init_scale=1.0, reduce_dtype={pattern: "fp16"})
        return Accumulator(mse(network), [sgd(cell) for cell in network], mixed_precision=precision)

    with refuses(ValueError, "matches no remaining"):
        loop("*typo")
    accumulator, x = loop("1.*"), ops.ones((4, 1))
    accumulator.backward(x, x)
    assert accumulator.step().is_updated
