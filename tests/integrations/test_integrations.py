"""Steps and trainers of other projects with this package inside. Of the projects there is what they are asked for."""

import importlib
import math
import sys
import types

import mindspore as ms
import numpy as np
import pytest
from linear_toy import Recorder, X, batches, line, mse, sgd, weight_of
from mindspore import Tensor, nn, ops
from mindspore.train import LambdaCallback
from refusal import no_warning, refuses
from stand_in import stand_in
from step_probe import Around, Of

from ms_gradaccum import Model
from ms_gradaccum.integrations.mindcv import create_trainer
from ms_gradaccum.integrations.mindone import ModelLoss, train_step
from ms_gradaccum.integrations.mindyolo import create_train_step_fn

pytestmark = pytest.mark.usefixtures("eager")

BATCH = (Tensor(X), Tensor(2 * X))
# What mindformers' trainer gives to each wrapper beside the network and the optimizer.
TRAINER = {
    "calculate_per_token_loss": None,
    "global_norm_spike_threshold": 1.0,
    "print_separate_loss": True,
    "use_skip_data_by_global_norm": False,
    "lr_scheduler": None,
    "grouped_lr_scheduler": None,
}


@pytest.fixture
def mindformers(monkeypatch):
    """The integration, imported with a registry of mindformers' interface; ``legacy[0]`` is what its context says."""
    legacy, registered = [True], {}

    class Register:
        @classmethod
        def register_cls(cls, register_class, module_type=None):
            registered[module_type, register_class.__name__] = register_class
            return register_class

    kinds = types.SimpleNamespace(WRAPPER="wrapper")
    stand_in(monkeypatch, "mindformers.tools.register", MindFormerRegister=Register, MindFormerModuleType=kinds)
    stand_in(monkeypatch, "mindformers.core.context.build_context", is_legacy_model=lambda: legacy[0])
    monkeypatch.delitem(sys.modules, "ms_gradaccum.integrations.mindformers", raising=False)
    importlib.import_module("ms_gradaccum.integrations.mindformers")
    yield types.SimpleNamespace(legacy=legacy, step=registered["wrapper", "AccumulatedStep"])
    sys.modules.pop("ms_gradaccum.integrations.mindformers")


@pytest.fixture
def mindcv(monkeypatch):
    """The parts of mindcv that the integration uses: its conversion, which notes its arguments, and its loss cell."""
    asked = []
    converting = {"auto_mixed_precision": lambda network, *how: asked.append((network, *how))}
    stand_in(monkeypatch, "mindcv.utils.amp", **converting)
    stand_in(
        monkeypatch,
        "mindcv.utils.trainer_factory",
        add_loss_network=lambda network, loss, level: nn.WithLossCell(network, loss),
    )
    return asked


def pair(network):
    """The sum of squared errors of the rows whose label counts, and their number: what a model calls its tokens."""
    return Of(network, lambda out, y: (((y > 3) * (out - y) ** 2).sum(), (y > 3).float().sum()))


def terms(network, per_token):
    """Return the output of a model of mindformers without use_legacy."""

    def of(out, y):
        losses = (out - y) ** 2
        if per_token:
            rows, losses = ops.ones_like(y).sum(), losses.sum()
            return losses, rows, 2 * losses, rows, 3 * losses, 4 * losses
        losses = losses.mean()
        return losses, 2 * losses, 3 * losses, 4 * losses

    return Of(network, of)


def built(mindformers, **settings):
    network = line()
    return network, mindformers.step(mse(network), sgd(network), micro_size=4, **settings)


def test_a_step_of_mindformers_trains_like_the_whole_batch_and_its_monitors_read_it(mindformers, mode):
    network, step = built(mindformers, **TRAINER)
    seen = Recorder()
    ms.Model(step).train(1, batches(8), seen, dataset_sink_mode=False)
    assert weight_of(network) == pytest.approx(2.04)
    (output,) = seen.outputs
    # Loss, overflow, loss scale, learning rate, norm.
    assert [float(item.asnumpy()) for item in output] == pytest.approx([102, 0, 1, 0.02, 102])


@pytest.mark.parametrize("groups", [False, True])
def test_a_step_of_mindformers_inside_a_larger_graph_is_read_too(mindformers, groups, monkeypatch):
    """As in data sink mode, which CPU lacks. The second batch overflows, so that the scale after it is less."""
    monkeypatch.delenv("MS_JIT")
    ms.set_context(mode=ms.GRAPH_MODE)
    network = line()
    weights = network.trainable_params()
    optimizer = nn.SGD([{"params": weights, "lr": 0.02}] if groups else weights, 0.02)
    given = nn.DynamicLossScaleUpdateCell(1024, 4, 1000)
    step = mindformers.step(mse(network), optimizer, micro_size=4, scale_sense=given)
    graph = Around(step)
    first, second = [
        [float(item.asnumpy()) for item in graph(Tensor(x), Tensor(2 * X))] for x in (X, X * np.float32(np.inf))
    ]
    assert first == pytest.approx([102, 0, 1024, 0.02, 102])
    assert len(second) == 5 and second[1:4] == pytest.approx([1, 256, 0.02])
    assert weight_of(network) == pytest.approx(2.04)


def skips_above(threshold):
    return TRAINER | {"use_skip_data_by_global_norm": True, "global_norm_spike_threshold": threshold}


SCALES = [512, 512.0, Tensor(512.0), Tensor([512.0]), nn.FixedLossScaleUpdateCell(512), ms.amp.StaticLossScaler(512)]
# The settings, the weight after a batch, and an item of the output: the scale or the norm.
STEPS = [
    ({"use_clip_grad": True, "max_grad_norm": 60.0}, 1.2, 4, 102),  # 0.9 if each micro batch were clipped
    (skips_above(101.0), 0.0, 4, 102),
    (skips_above(103.0), 2.04, 4, 102),
    *(({"scale_sense": scale}, 2.04, 2, 512) for scale in SCALES),
]


@pytest.mark.parametrize("settings, weight, item, number", STEPS)
def test_a_step_of_mindformers_obeys_its_settings(mindformers, settings, weight, item, number):
    network, step = built(mindformers, **settings)
    output = step(*BATCH)
    assert weight_of(network) == pytest.approx(weight)
    assert float(output[item].asnumpy()) == pytest.approx(number)


def test_a_step_of_mindformers_takes_the_mean_over_tokens(mindformers):
    network = line()
    step = mindformers.step(pair(network), sgd(network), micro_size=4, **TRAINER | {"calculate_per_token_loss": True})
    output = step(*BATCH)
    counting = X[2 * X > 3].astype(np.float64)
    assert weight_of(network) == pytest.approx(0.02 * np.mean(4 * counting**2))
    assert float(output[0].asnumpy()) == pytest.approx(np.mean(4 * counting**2))


@pytest.mark.parametrize("per_token", [False, True])
def test_the_terms_of_a_newer_model_of_mindformers_are_added(mindformers, per_token):
    mindformers.legacy[0] = False
    network = line()
    settings = TRAINER | {"calculate_per_token_loss": per_token, "print_separate_loss": False}
    step = mindformers.step(terms(network, per_token), sgd(network), micro_size=4, **settings)
    output = step(*BATCH)
    assert float(output[0].asnumpy()) == pytest.approx(10 * 102)
    assert weight_of(network) == pytest.approx(10 * 2.04)  # 2.04 with the first term alone


def test_the_rate_of_the_last_group_is_shown(mindformers):
    network = nn.Dense(1, 1, weight_init="zeros", bias_init="zeros")
    groups = [{"params": [network.weight], "lr": 0.25}, {"params": [network.bias], "lr": 0.5}]
    output = mindformers.step(mse(network), nn.SGD(groups, 0.125), micro_size=4)(*BATCH)
    assert float(output[3].asnumpy()) == 0.5


def test_a_scale_follows_the_rule_of_the_cell_that_is_given(mindformers):
    """The oracle is the cell itself, told what happens."""
    factor, interval = 4, 2
    cell, scale = nn.DynamicLossScaleUpdateCell(1024, factor, interval), ms.Parameter(Tensor(1024.0), name="scale")
    network = line()
    given = nn.DynamicLossScaleUpdateCell(1024, factor, interval)
    step = mindformers.step(mse(network), sgd(network, 1e-6), micro_size=4, scale_sense=given)
    ours, theirs = [], []
    for overflows in (False, False, False, True, False, False, True, True, True, True, True, True, True, True, False):
        x = X * (np.inf if overflows else 1)
        output = step(Tensor(x), Tensor(2 * X))
        cell(scale, Tensor(overflows))
        assert bool(output[1].asnumpy()) == overflows
        ours.append(float(output[2].asnumpy()))
        theirs.append(float(scale.asnumpy()))
    assert ours == theirs
    assert min(ours) == 1 and max(ours) == 4096


class OwnScale(nn.DynamicLossScaleUpdateCell):
    """A rule for the loss scale that nobody knows."""


@pytest.mark.parametrize(
    "settings, error",
    [
        ({"local_norm": True}, ValueError),
        ({"micro_batch_num": 4}, ValueError),
        ({"scale_sense": OwnScale(1024, 2, 1000)}, TypeError),
        ({"scale_sense": 0}, ValueError),
    ],
)
def test_what_a_step_of_mindformers_does_not_know_is_refused(mindformers, settings, error):
    with refuses(error, f"'{next(iter(settings))}'"):
        built(mindformers, **settings)
    mindformers.legacy[0] = False
    network = line()
    with refuses(ValueError, "'print_separate_loss'"):
        mindformers.step(terms(network, False), sgd(network), 4, **TRAINER)
    # Where the compiler partitions, mindformers accumulates itself.
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    try:
        with refuses(ValueError, "'parallel_mode'"):
            built(mindformers)
    finally:
        ms.reset_auto_parallel_context()


def trainer(network, optimizer=None, metrics=None, kind="fixed", scale=1.0, **settings):
    optimizer = sgd(network) if optimizer is None else optimizer
    return create_trainer(network, nn.MSELoss(), optimizer, metrics, "O1", "[nn.Dense]", kind, scale, **settings)


CLIPPED = {"clip_grad": True, "clip_value": 60.0}


@pytest.mark.parametrize(
    ("rows", "settings", "weight"),
    [
        (8, {"micro_size": 4}, 2.04),
        (2, {"gradient_accumulation_steps": 4}, 2.04),
        (2, {"gradient_accumulation_steps": 4} | CLIPPED, 1.2),  # 0.9 if each micro batch were clipped, as in mindcv
    ],
)
def test_a_trainer_of_mindcv_trains_like_the_whole_batch(mindcv, rows, settings, weight):
    network = line()
    model = trainer(network, metrics={"mse"}, **settings)
    model.train(1, batches(rows), dataset_sink_mode=False)
    assert weight_of(network) == pytest.approx(weight)
    assert mindcv == [(network, "O1", "[nn.Dense]")]
    found = model.eval(batches(8), dataset_sink_mode=False)["mse"]
    assert found == pytest.approx(np.mean(((weight - 2) * X) ** 2), rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "drops", "moved", "scale"),
    [("fixed", True, False, 1024), ("fixed", False, True, 1024), ("dynamic", True, False, 512)],
)
def test_a_trainer_of_mindcv_updates_in_spite_of_an_overflow_if_told_so(mindcv, kind, drops, moved, scale):
    network = line()
    model = trainer(network, kind=kind, scale=1024.0, drop_overflow_update=drops, micro_size=4)
    model.train(1, batches(8, X * np.float32(np.inf)), dataset_sink_mode=False)
    assert math.isnan(weight_of(network)) == moved
    assert moved or float(model.train_network.scale_sense.asnumpy()) == scale


def test_an_optimizer_with_a_scale_of_its_own_trains_the_same_with_a_trainer_of_mindcv(mindcv):
    network = line()
    scaled = nn.SGD(network.trainable_params(), 0.02, loss_scale=1024.0)
    trainer(network, scaled, micro_size=4).train(1, batches(8), dataset_sink_mode=False)
    assert weight_of(network) == pytest.approx(2.04)


class ReturnsADict(nn.Cell):
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, inputs=None, unused=None, labels=None, return_dict=True):
        outputs = self.network(inputs)
        loss = ((outputs - labels) ** 2).mean()
        return {"loss": loss} if return_dict else (loss, outputs)


@pytest.mark.parametrize(("calls", "settings"), [(1, {"micro_size": 4}), (4, {"gradient_accumulation_steps": 4})])
def test_a_step_of_mindone_trains_like_the_whole_batch(mode, calls, settings):
    network = line()
    step = train_step(ModelLoss(ReturnsADict(network), ("labels", "inputs")), sgd(network), 1024.0, **settings)
    step.set_train()
    for part in np.split(X, calls):
        loss, overflow, scale = step(Tensor(2 * part), Tensor(part))
    assert weight_of(network) == pytest.approx(2.04)
    assert (float(loss.asnumpy()), bool(overflow.asnumpy()), float(scale.asnumpy())) == (102, False, 1024)


@pytest.mark.parametrize(("drops", "moved"), [(True, False), (False, True)])
def test_a_step_of_mindone_clips_and_updates_in_spite_of_an_overflow_if_told_so(drops, moved):
    network = line()
    settings = {"clip_grad": True, "clip_norm": 60.0, "drop_overflow_update": drops, "micro_size": 4}
    step = train_step(mse(network), sgd(network), **settings)
    step(*BATCH)
    assert weight_of(network) == pytest.approx(1.2)
    step(Tensor(X * np.float32(np.inf)), Tensor(X))
    assert math.isnan(weight_of(network)) == moved


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_scale_of_a_step_that_divides_by_it_is_nothing_to_warn_of(mindcv, scale):
    with no_warning():
        theirs, network = line(), line()
        model = trainer(theirs, scale=scale, micro_size=4)
        step = train_step(mse(network), sgd(network), scale, drop_overflow_update=False, micro_size=4)
    step(*BATCH)
    model.train(1, batches(8), dataset_sink_mode=False)
    assert weight_of(network) == weight_of(theirs) == pytest.approx(2.04)


@pytest.mark.parametrize("drops", [False, True])
def test_an_optimizer_divides_by_its_own_scale(drops):
    """As in MindSpore's own step, except where the scale is left to the optimizer: that is given what it divides."""
    network = line()
    scaled = nn.SGD(network.trainable_params(), 0.02, loss_scale=512.0)
    step = train_step(mse(network), scaled, 1024.0, drop_overflow_update=drops)
    step(*BATCH)
    assert weight_of(network) == pytest.approx(2.04 / 512 if drops else 2.04)


@pytest.mark.parametrize("kind", [ms.Model, Model])
def test_callbacks_read_the_loss_scale_where_mindspores_own_step_has_it(kind):
    """At the end of an epoch, as mindocr's ``EvalSaveCallback`` does."""
    network, read = line(), []
    train_network = train_step(mse(network), sgd(network), nn.FixedLossScaleUpdateCell(512))
    reads = LambdaCallback(on_train_epoch_end=lambda context: read.append(context.original_args().train_network))
    kind(train_network).train(1, batches(8), reads, dataset_sink_mode=False)
    # CPU cannot run it, but it has the attribute.
    own = nn.TrainOneStepWithLossScaleCell(mse(network), sgd(network), nn.FixedLossScaleUpdateCell(512))
    for each in (own, *read):
        assert each.loss_scaling_manager.get_loss_scale() == 512
    step = train_step(mse(network), sgd(network), nn.DynamicLossScaleUpdateCell(1024, 2, 1000))
    assert read and not step(Tensor(X * np.inf), Tensor(X)).updated
    assert step.loss_scaling_manager.get_loss_scale() == 512
    assert train_step(mse(network), sgd(network)).loss_scaling_manager.get_loss_scale() == 1


class Boxes(nn.Cell):
    """A loss of mindyolo's form: boxes name their image, the mean is over all boxes, and the batch size a factor."""

    def construct(self, predictions, labels, images):
        boxes = labels.reshape((-1, 6))
        counts = (boxes[:, 1] >= 0).float()
        chosen = predictions[0].gather(boxes[:, 0].int(), 0)
        loss = (counts * (chosen[:, 0] - boxes[:, 2]) ** 2).sum() / counts.sum()
        return loss * images.shape[0], ops.stop_gradient(loss)


def twice(out):
    return out, out


def boxes_of(rows):
    """Labels of (rows, 3, 6): the number of the image as two loaders count, a class, or -1 for padding, and the box."""
    labels = np.random.default_rng(0).uniform(1, 2, (rows, 3, 6)).astype(np.float32)
    labels[np.arange(3) > np.arange(rows)[:, None] % 3, 1] = -1
    labels[:, :, 0] = np.arange(rows)[:, None] % (rows // 2)
    return labels


def test_a_detector_of_mindyolo_trains_like_the_whole_batch(mode):
    images, labels = Tensor(X[:6]), Tensor(boxes_of(6))
    scaler = ms.amp.StaticLossScaler(64.0)
    moved = []
    average = types.SimpleNamespace(update=lambda: moved.append(True))
    network = Of(line(), twice)  # Two outputs of each image.
    optimizer = sgd(network, 1e-3)
    arguments = ("detect", network, Boxes(), optimizer, 1, scaler, None, average, False, False, True, 0.5)
    function = create_train_step_fn(*arguments, micro_size=3)
    loss, terms, grads, finite = function(images, labels, True)

    valid = labels.asnumpy()[:, :, 1] >= 0
    goals = labels.asnumpy()[:, :, 2]
    numbers = np.broadcast_to(X[:6], goals.shape)
    mean = (goals[valid] ** 2).mean()
    gradient = -6 * 2 * (goals * numbers)[valid].mean()
    assert float(loss.asnumpy()) == pytest.approx(6 * mean)
    assert float(terms[0].asnumpy()) == pytest.approx(mean)
    assert weight_of(network.network) == pytest.approx(-1e-3 * max(-0.5, gradient))
    assert gradient < -0.5 and grads is None and bool(finite) and moved == [True]

    loss, _, _, finite = function(images * np.inf, labels, True)
    assert not bool(finite) and moved == [True]
    assert float(scaler.scale_value.asnumpy()) == 64


def mindyolo(task, **settings):
    network = Of(line(), twice)
    return create_train_step_fn(task, network, Boxes(), sgd(network), 1, ms.amp.StaticLossScaler(1.0), None, **settings)


def mindone(**settings):
    network = line()
    return train_step(mse(network), sgd(network), **settings)


REFUSED = {
    "the average of mindcv": (lambda: trainer(line(), ema=True), "'ema'", "EMA(0.9999, trainable_only=False)"),
    "no scale of mindcv": (lambda: trainer(line(), kind="none"), "'loss_scale_type'", ""),
    "the average of mindone": (lambda: mindone(ema=object()), "'ema'", "add_callback()"),
    "ZeRO of mindone": (lambda: mindone(zero_helper=object()), "'zero_helper'", ""),
    "one column": (lambda: ModelLoss(line(), "labels"), "'columns'", ""),
    "a number for a column": (lambda: ModelLoss(line(), (1,)), "'columns'", ""),
    "no column": (lambda: ModelLoss(line(), ()), "'columns'", ""),
    "masks of mindyolo": (lambda: mindyolo("segment"), "'task'", "Masks are not"),
    "accumulation of mindyolo": (
        lambda: mindyolo("detect", micro_size=3)(Tensor(X[:6]), Tensor(boxes_of(6)), False),
        "'accumulate'",
        "must be 1",
    ),
}


@pytest.mark.parametrize("call, name, key", REFUSED.values(), ids=REFUSED)
def test_what_would_train_otherwise_is_refused(call, name, key, mindcv):
    with refuses((TypeError, ValueError), name, key):
        call()
