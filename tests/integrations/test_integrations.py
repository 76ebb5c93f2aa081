"""Steps and trainers of other projects with this package inside. Of the projects there is what they are asked for."""

import importlib
import math
import sys
import types
import warnings

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, batches, line, sgd, weight_of
from mindspore import Tensor, nn, ops
from mindspore.train import Callback
from refusal import refuses
from step_probe import Around

from ms_gradaccum import ClipByGlobalNorm, Model
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


def module(monkeypatch, name, **contents):
    """Have a module of another project imported that has these names."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    vars(sys.modules[name]).update(contents)


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
    module(monkeypatch, "mindformers.tools.register", MindFormerRegister=Register, MindFormerModuleType=kinds)
    module(monkeypatch, "mindformers.core.context.build_context", is_legacy_model=lambda: legacy[0])
    monkeypatch.delitem(sys.modules, "ms_gradaccum.integrations.mindformers", raising=False)
    importlib.import_module("ms_gradaccum.integrations.mindformers")
    yield types.SimpleNamespace(legacy=legacy, step=registered["wrapper", "AccumulatedStep"])
    sys.modules.pop("ms_gradaccum.integrations.mindformers")


@pytest.fixture
def mindcv(monkeypatch):
    """The parts of mindcv that the integration uses: its conversion, which notes its arguments, and its loss cell."""
    asked = []
    converting = {"auto_mixed_precision": lambda network, *how: asked.append((network, *how))}
    module(monkeypatch, "mindcv.utils.amp", **converting)
    module(
        monkeypatch,
        "mindcv.utils.trainer_factory",
        add_loss_network=lambda network, loss, level: nn.WithLossCell(network, loss),
    )
    return asked


class Seen(Callback):
    def __init__(self):
        super().__init__()
        self.outputs = []

    def on_train_step_end(self, run_context):
        self.outputs.append(run_context.original_args().net_outputs)


class Pair(nn.Cell):
    """The sum of squared errors of the rows whose label counts, and their number: what a model calls its tokens."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, y):
        counts = (y > 3).float()
        return (counts * (self.network(x) - y) ** 2).sum(), counts.sum()


class Terms(nn.Cell):
    """Return the output of a model of mindformers without use_legacy."""

    def __init__(self, network, per_token):
        super().__init__(auto_prefix=False)
        self.network = network
        self.per_token = per_token

    def construct(self, x, y):
        losses = (self.network(x) - y) ** 2
        rows = ops.ones_like(x).sum()
        if self.per_token:
            losses = losses.sum()
            return losses, rows, 2 * losses, rows, 3 * losses, 4 * losses
        losses = losses.mean()
        return losses, 2 * losses, 3 * losses, 4 * losses


def loss_cell(network):
    return nn.WithLossCell(network, nn.MSELoss())


def test_a_step_of_mindformers_trains_like_the_whole_batch_and_its_monitors_read_it(mindformers, mode):
    network = line()
    step = mindformers.step(loss_cell(network), sgd(network), micro_size=4, **TRAINER)
    seen = Seen()
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
    step = mindformers.step(loss_cell(network), optimizer, micro_size=4, scale_sense=given)
    graph = Around(step)
    first, second = [
        [float(item.asnumpy()) for item in graph(Tensor(x), Tensor(2 * X))] for x in (X, X * np.float32(np.inf))
    ]
    assert first == pytest.approx([102, 0, 1024, 0.02, 102])
    assert len(second) == 5 and second[1:4] == pytest.approx([1, 256, 0.02])
    assert weight_of(network) == pytest.approx(2.04)


def test_a_step_of_mindformers_clips_the_mean_gradient(mindformers):
    network = line()
    step = mindformers.step(loss_cell(network), sgd(network), micro_size=4, use_clip_grad=True, max_grad_norm=60.0)
    output = step(*BATCH)
    assert weight_of(network) == pytest.approx(1.2)  # 0.9 if each micro batch were clipped
    assert float(output[4].asnumpy()) == pytest.approx(102)


def test_a_step_of_mindformers_takes_the_mean_over_tokens(mindformers):
    network = line()
    step = mindformers.step(Pair(network), sgd(network), micro_size=4, **TRAINER | {"calculate_per_token_loss": True})
    output = step(*BATCH)
    counting = X[2 * X > 3].astype(np.float64)
    assert weight_of(network) == pytest.approx(0.02 * np.mean(4 * counting**2))
    assert float(output[0].asnumpy()) == pytest.approx(np.mean(4 * counting**2))


@pytest.mark.parametrize("per_token", [False, True])
def test_the_terms_of_a_newer_model_of_mindformers_are_added(mindformers, per_token):
    mindformers.legacy[0] = False
    network = line()
    settings = TRAINER | {"calculate_per_token_loss": per_token, "print_separate_loss": False}
    step = mindformers.step(Terms(network, per_token), sgd(network), micro_size=4, **settings)
    output = step(*BATCH)
    assert float(output[0].asnumpy()) == pytest.approx(10 * 102)
    assert weight_of(network) == pytest.approx(10 * 2.04)  # 2.04 with the first term alone


def test_the_rate_of_the_last_group_is_shown(mindformers):
    network = nn.Dense(1, 1, weight_init="zeros", bias_init="zeros")
    groups = [{"params": [network.weight], "lr": 0.25}, {"params": [network.bias], "lr": 0.5}]
    output = mindformers.step(loss_cell(network), nn.SGD(groups, 0.125), micro_size=4)(*BATCH)
    assert float(output[3].asnumpy()) == 0.5


def test_a_scale_follows_the_rule_of_the_cell_that_is_given(mindformers):
    """The oracle is the cell itself, told what happens."""
    factor, interval = 4, 2
    cell, scale = nn.DynamicLossScaleUpdateCell(1024, factor, interval), ms.Parameter(Tensor(1024.0), name="scale")
    network = line()
    given = nn.DynamicLossScaleUpdateCell(1024, factor, interval)
    step = mindformers.step(loss_cell(network), sgd(network, 1e-6), micro_size=4, scale_sense=given)
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


@pytest.mark.parametrize(
    "scale_sense",
    [512, 512.0, Tensor(512.0), Tensor([512.0]), nn.FixedLossScaleUpdateCell(512), ms.amp.StaticLossScaler(512)],
)
def test_a_fixed_scale_is_taken_out_again(mindformers, scale_sense):
    network = line()
    output = mindformers.step(loss_cell(network), sgd(network), micro_size=4, scale_sense=scale_sense)(*BATCH)
    assert float(output[2].asnumpy()) == 512
    assert weight_of(network) == pytest.approx(2.04)


@pytest.mark.parametrize(("setting", "value"), [("local_norm", True), ("micro_batch_num", 4)])
def test_what_a_step_of_mindformers_does_not_know_is_refused(mindformers, setting, value):
    network = line()
    with refuses(ValueError, f"'{setting}'", "left out"):
        mindformers.step(loss_cell(network), sgd(network), 4, **TRAINER | {setting: value})


@pytest.mark.parametrize("threshold, weight", [(101.0, 0.0), (103.0, 2.04)])
def test_a_batch_above_the_threshold_of_mindformers_makes_no_update(mindformers, threshold, weight):
    network = line()
    skips = {"use_skip_data_by_global_norm": True, "global_norm_spike_threshold": threshold}
    output = mindformers.step(loss_cell(network), sgd(network), 4, **TRAINER | skips)(*BATCH)
    assert float(output[4].asnumpy()) == pytest.approx(102)
    assert weight_of(network) == pytest.approx(weight)


def test_single_terms_are_not_shown(mindformers):
    mindformers.legacy[0] = False
    network = line()
    with refuses(ValueError, "'print_separate_loss'"):
        mindformers.step(Terms(network, False), sgd(network), 4, **TRAINER)


def test_a_scale_of_another_kind_is_refused(mindformers):
    class Own(nn.DynamicLossScaleUpdateCell):
        pass

    network = line()
    with refuses(TypeError, "'scale_sense'"):
        mindformers.step(loss_cell(network), sgd(network), 4, scale_sense=Own(1024, 2, 1000))
    with refuses(ValueError, "'scale_sense'"):
        mindformers.step(loss_cell(network), sgd(network), 4, scale_sense=0)


def test_mindformers_accumulates_itself_where_the_compiler_partitions(mindformers):
    network = line()
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    try:
        with refuses(ValueError, "'parallel_mode'"):
            mindformers.step(loss_cell(network), sgd(network), 4)
    finally:
        ms.reset_auto_parallel_context()


def trainer(network, optimizer=None, metrics=None, kind="fixed", scale=1.0, **settings):
    """A model by mindcv's signature."""
    optimizer = sgd(network) if optimizer is None else optimizer
    return create_trainer(network, nn.MSELoss(), optimizer, metrics, "O1", "[nn.Dense]", kind, scale, **settings)


@pytest.mark.parametrize(("rows", "settings"), [(8, {"micro_size": 4}), (2, {"gradient_accumulation_steps": 4})])
def test_a_trainer_of_mindcv_trains_like_the_whole_batch(mindcv, rows, settings):
    network = line()
    model = trainer(network, metrics={"mse"}, **settings)
    model.train(1, batches(rows), dataset_sink_mode=False)
    assert weight_of(network) == pytest.approx(2.04)
    assert mindcv == [(network, "O1", "[nn.Dense]")]
    assert model.eval(batches(8), dataset_sink_mode=False)["mse"] == pytest.approx(np.mean((0.04 * X) ** 2), rel=1e-4)


def test_a_trainer_of_mindcv_clips_the_mean_gradient(mindcv):
    network = line()
    model = trainer(network, clip_grad=True, clip_value=60.0, gradient_accumulation_steps=4)
    model.train(1, batches(2), dataset_sink_mode=False)
    assert weight_of(network) == pytest.approx(1.2)  # 0.9 if each micro batch were clipped, as in mindcv


@pytest.mark.parametrize(("drops", "moved"), [(True, False), (False, True)])
def test_a_trainer_of_mindcv_updates_in_spite_of_an_overflow_if_told_so(mindcv, drops, moved):
    network = line()
    model = trainer(network, scale=1024.0, drop_overflow_update=drops, micro_size=4)
    model.train(1, batches(8, X * np.float32(np.inf)), dataset_sink_mode=False)
    assert math.isnan(weight_of(network)) == moved


def test_a_dynamic_scale_of_mindcv_halves(mindcv):
    network = line()
    model = trainer(network, kind="dynamic", scale=1024.0, micro_size=4)
    model.train(1, batches(8, X * np.float32(np.inf)), dataset_sink_mode=False)
    assert weight_of(network) == 0
    assert float(model.train_network.scale_sense.asnumpy()) == 512


def test_a_trainer_of_mindcv_refuses_what_would_go_wrong(mindcv):
    network = line()
    with refuses(ValueError, "'ema'", "EMA(0.9999, trainable_only=False)"):
        trainer(network, ema=True)
    with refuses(ValueError, "'loss_scale_type'"):
        trainer(network, kind="none")


class ReturnsADict(nn.Cell):
    """A model with the interface of mindone's transformers."""

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
    step = train_step(loss_cell(network), sgd(network), **settings)
    step(*BATCH)
    assert weight_of(network) == pytest.approx(1.2)
    step(Tensor(X * np.float32(np.inf)), Tensor(X))
    assert math.isnan(weight_of(network)) == moved


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_scale_of_a_step_that_divides_by_it_is_nothing_to_warn_of(mindcv, scale):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs, network = line(), line()
        model = trainer(theirs, scale=scale, micro_size=4)
        step = train_step(loss_cell(network), sgd(network), scale, drop_overflow_update=False, micro_size=4)
    step(*BATCH)
    model.train(1, batches(8), dataset_sink_mode=False)
    assert weight_of(network) == weight_of(theirs) == pytest.approx(2.04)


@pytest.mark.parametrize("drops", [False, True])
def test_an_optimizer_divides_by_its_own_scale(drops):
    """As in MindSpore's own step, except where the scale is left to the optimizer: that is given what it divides."""
    network = line()
    scaled = nn.SGD(network.trainable_params(), 0.02, loss_scale=512.0)
    step = train_step(loss_cell(network), scaled, 1024.0, drop_overflow_update=drops)
    step(*BATCH)
    assert weight_of(network) == pytest.approx(2.04 / 512 if drops else 2.04)


def test_an_optimizer_with_a_scale_of_its_own_trains_the_same_with_a_trainer_of_mindcv(mindcv):
    network = line()
    scaled = nn.SGD(network.trainable_params(), 0.02, loss_scale=1024.0)
    trainer(network, scaled, micro_size=4).train(1, batches(8), dataset_sink_mode=False)
    assert weight_of(network) == pytest.approx(2.04)


def test_a_step_of_mindone_refuses_what_has_another_place():
    network = line()
    with refuses(ValueError, "'ema'", "add_callback()"):
        train_step(loss_cell(network), sgd(network), ema=object())
    with refuses(ValueError, "'zero_helper'"):
        train_step(loss_cell(network), sgd(network), zero_helper=object())
    for columns in ("labels", (1,), ()):
        with refuses(TypeError, "'columns'"):
            ModelLoss(network, columns)


def test_a_clip_that_would_be_replaced_by_another_is_refused(mindcv):
    network = line()
    with pytest.raises(TypeError, match="unexpected keyword argument 'clip'"):
        train_step(loss_cell(network), sgd(network), clip=ClipByGlobalNorm(1.0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'clip'"):
        trainer(network, clip=ClipByGlobalNorm(1.0))


class ReadsTheScale(Callback):
    """Reads the loss scale of the step at the end of an epoch, as mindocr's ``EvalSaveCallback`` does."""

    def on_train_epoch_end(self, run_context):
        train_network = run_context.original_args().train_network
        self.scale = train_network.loss_scaling_manager.get_loss_scale()


@pytest.mark.parametrize("kind", [ms.Model, Model])
def test_callbacks_read_the_loss_scale_where_mindspores_own_step_has_it(kind):
    network = line()
    train_network = train_step(loss_cell(network), sgd(network), nn.FixedLossScaleUpdateCell(512))
    reads = ReadsTheScale()
    kind(train_network).train(1, batches(8), reads, dataset_sink_mode=False)
    # CPU cannot run it, but it has the attribute.
    own = nn.TrainOneStepWithLossScaleCell(loss_cell(network), sgd(network), nn.FixedLossScaleUpdateCell(512))
    assert reads.scale == own.loss_scaling_manager.get_loss_scale() == 512


def test_the_loss_scale_that_is_read_is_the_present_one():
    network = line()
    step = train_step(loss_cell(network), sgd(network), nn.DynamicLossScaleUpdateCell(1024, 2, 1000))
    assert step.loss_scaling_manager.get_loss_scale() == 1024
    assert not step(Tensor(X * np.inf), Tensor(X)).updated
    assert step.loss_scaling_manager.get_loss_scale() == 512
    assert train_step(loss_cell(network), sgd(network)).loss_scaling_manager.get_loss_scale() == 1


class Boxes(nn.Cell):
    """A loss of mindyolo's form: boxes name their image, the mean is over all boxes, and the batch size a factor."""

    def construct(self, predictions, labels, images):
        boxes = labels.reshape((-1, 6))
        counts = (boxes[:, 1] >= 0).float()
        chosen = predictions[0].gather(boxes[:, 0].int(), 0)
        loss = (counts * (chosen[:, 0] - boxes[:, 2]) ** 2).sum() / counts.sum()
        return loss * images.shape[0], ops.stop_gradient(loss)


class Heads(nn.Cell):
    """Two outputs of each image."""

    def __init__(self):
        super().__init__()
        self.head = nn.Dense(1, 1, weight_init="zeros", has_bias=False)

    def construct(self, images):
        return self.head(images), self.head(images)


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
    network = Heads()
    optimizer = sgd(network, 1e-3)
    arguments = ("detect", network, Boxes(), optimizer, 1, scaler, None, average, False, False, True, 0.5)
    function = create_train_step_fn(*arguments, micro_size=3)
    loss, terms, grads, finite = function(images, labels, True)

    valid = labels.asnumpy()[:, :, 1] >= 0
    goals = labels.asnumpy()[:, :, 2]
    numbers = np.broadcast_to(X[:6], goals.shape)
    mean = (goals[valid] ** 2).mean()
    gradient = -6 * 2 * (goals * numbers)[valid].mean()
    assert float(loss.asnumpy()) == pytest.approx(6 * mean, rel=1e-6)
    assert float(terms[0].asnumpy()) == pytest.approx(mean, rel=1e-6)
    assert weight_of(network.head) == pytest.approx(-1e-3 * max(-0.5, gradient), rel=1e-6)
    assert gradient < -0.5 and grads is None and bool(finite) and moved == [True]

    loss, _, _, finite = function(images * np.inf, labels, True)
    assert not bool(finite) and moved == [True]
    assert float(scaler.scale_value.asnumpy()) == 64


def test_mindyolos_own_accumulation_and_masks_are_refused():
    network = Heads()
    arguments = (network, Boxes(), sgd(network), 1, ms.amp.StaticLossScaler(1.0), None)
    with pytest.raises(ValueError, match="'task' must be one of 'detect', but got 'segment'. Masks are not"):
        create_train_step_fn("segment", *arguments)
    function = create_train_step_fn("detect", *arguments, micro_size=3)
    with pytest.raises(ValueError, match="mindyolo's setting 'accumulate' must be 1"):
        function(Tensor(X[:6]), Tensor(boxes_of(6)), False)
