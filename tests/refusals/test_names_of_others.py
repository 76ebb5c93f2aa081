"""Cells and arguments of other libraries in the place of those of this package: taken as meant, or named."""

import mindspore as ms
import numpy as np
import pytest
from built_for import built_for
from linear_toy import X, batches, line, mse, sgd, weight_of
from mindspore import Tensor, nn
from mindspore.parallel import nn as parallel_nn
from mindspore.parallel.auto_parallel import AutoParallel
from refusal import FACES, by_step, loss_cell, refuses
from step_probe import sgd_step

from ms_gradaccum import Accumulator, GradAccumulation, Model, TrainOneStepCell

BATCH = Tensor(X), Tensor(2 * X)


@pytest.mark.parametrize("train", FACES.values(), ids=FACES)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda cell: parallel_nn.GradAccumulation(cell, 4),
        lambda cell: nn.GradAccumulationCell(cell, 4),
        lambda cell: AutoParallel(parallel_nn.GradAccumulation(cell, 4)),
    ],
    ids=["GradAccumulation", "GradAccumulationCell", "AutoParallel"],
)
def test_mindspores_grad_accumulation_trains_as_ours(wrap, train, mode):
    network = line()
    train(wrap(mse(network)), sgd(network), *BATCH)()
    assert weight_of(network) == pytest.approx(2.04)


@pytest.mark.parametrize("train", FACES.values(), ids=FACES)
@pytest.mark.parametrize(
    "wrap, name",
    [
        (lambda cell: nn.PipelineCell(cell, 4), "PipelineCell"),
        (lambda cell: parallel_nn.Pipeline(cell, 4), "Pipeline"),
        (lambda cell: parallel_nn.Pipeline(GradAccumulation(cell, 2), 2), "Pipeline"),
        (lambda cell: nn.MicroBatchInterleaved(cell, 2), "MicroBatchInterleaved"),
        (lambda cell: AutoParallel(parallel_nn.MicroBatchInterleaved(cell, 2)), "MicroBatchInterleaved"),
        (lambda cell: GradAccumulation(parallel_nn.GradAccumulation(cell, 2), 2), "GradAccumulation"),
        (lambda cell: nn.SequentialCell(parallel_nn.GradAccumulation(cell, 2)), "GradAccumulation"),
        (lambda cell: parallel_nn.GradAccumulation(nn.MicroBatchInterleaved(cell, 2), 2), "MicroBatchInterleaved"),
    ],
)
def test_cells_that_split_a_batch_themselves_are_refused(wrap, name, train, eager):
    network = line()
    with refuses(ValueError, "'network'", f"MindSpore's {name},"):
        train(wrap(mse(network)), sgd(network), *BATCH)()
    assert weight_of(network) == 0


def test_two_kinds_of_grad_accumulation_in_each_other_are_refused(eager):
    network = line()
    inner = GradAccumulation(mse(network), 2)
    with refuses(ValueError, "'network'", "product of both micro_size"):
        by_step(parallel_nn.GradAccumulation(inner, 2), sgd(network), *BATCH)


def test_a_partitioned_model_does_not_evaluate_sums(eager):
    network = line()
    partitioned = AutoParallel(parallel_nn.GradAccumulation(mse(network), 4))
    with built_for("GPU"), refuses(ValueError, "'network'", "MindSpore's"):
        Model(partitioned, optimizer=sgd(network))


def test_a_prediction_does_not_sum_parts(mode):
    network = line()
    model = Model(parallel_nn.GradAccumulation(network, 4), nn.MSELoss(), sgd(network))
    model.train(1, batches(8))
    assert model.predict(Tensor(X)).asnumpy() == pytest.approx(2.04 * X)


CLIP = "clip=ClipByGlobalNorm(1.0)"
OTHER_NAMES = [
    ("micro_size", "micro_size of GradAccumulation", None),
    ("gradient_accumulation_steps", "accumulation_steps", "accumulation_steps of TrainOneStepCell or Model"),
    ("accumulate_grad_batches", "accumulation_steps", "accumulation_steps of TrainOneStepCell or Model"),
    ("acumulation_steps", "accumulation_steps", None),
    ("num_micro_batches", "micro_size of GradAccumulation", "micro_size"),
    ("max_grad_norm", CLIP, f"{CLIP} of TrainOneStepCell or Model"),
]


@pytest.mark.parametrize("name, meant, inside", OTHER_NAMES)
def test_arguments_by_other_names_are_answered_with_the_right_ones(name, meant, inside, eager):
    cell = loss_cell()
    for owner, build in (
        ("Model", lambda: Model(cell, optimizer=sgd(cell), **{name: 4})),
        ("TrainOneStepCell", lambda: TrainOneStepCell(cell, sgd(cell), **{name: 4})),
        ("Accumulator", lambda: Accumulator(cell, sgd(cell), **{name: 4})),
    ):
        with refuses(TypeError, f"For '{owner}', unexpected argument {name!r}. Did you mean {meant}?"):
            build()
    if inside is not None:
        with refuses(TypeError, f"For 'GradAccumulation', unexpected argument {name!r}. Did you mean {inside}?"):
            GradAccumulation(cell, 4, **{name: 4})


def test_each_of_several_arguments_is_answered(eager):
    cell = loss_cell()
    with refuses(TypeError, "'use_amp', 'max_norm'", "mixed_precision='fp16' for use_amp", f"{CLIP} for max_norm"):
        TrainOneStepCell(cell, sgd(cell), use_amp=True, max_norm=1.0)
    names = "network, micro_size, micro_tokens, lengths, length_axis, weighted, batch_axis, losses"
    with refuses(TypeError, "'x'", names):
        GradAccumulation(cell, 4, x=1)


@pytest.mark.parametrize(
    "value, meant",
    [("float16", "'fp16'"), ("bf16-mixed", "'bf16'"), ("no", "None"), (ms.float16, "'fp16'"), (True, "'fp16'")],
)
def test_mixed_precision_by_other_names(value, meant, eager):
    cell = loss_cell()
    with pytest.raises((TypeError, ValueError), match=rf"^For 'Model', .*'mixed_precision'.* Did you mean {meant}\?$"):
        Model(cell, optimizer=sgd(cell), mixed_precision=value)


def test_arguments_of_a_model_are_headed_by_its_name(eager):
    cell = loss_cell()
    for wrong in ({"accumulation_steps": 0}, {"clip": 1.0}, {"bad_micro_batch": "x"}, {"compile": 1}):
        with refuses((TypeError, ValueError), "For 'Model'", f"'{next(iter(wrong))}'"):
            Model(cell, optimizer=sgd(cell), **wrong)
    with refuses(ValueError, "For 'Model'", "'optimizer'"):
        Model(cell, optimizer=sgd(line()))


MISSING = "missing a required argument: '{}'"
COLUMNS = [
    ({"image": X, "label": X}, MISSING.format("data"), "Rename 'image' to 'data'"),
    ({"image": X, "target": X}, MISSING.format("data"), "Rename 'image', 'target' to 'data', 'label'"),
    ({"data": X, "label": X, "index": X}, "got an unexpected keyword argument 'index'", "Leave out 'index'."),
    ({"data": X}, MISSING.format("label"), "as the network takes them"),
]


@pytest.mark.parametrize("batch, got, remedy", COLUMNS)
def test_columns_of_other_names_are_named(batch, got, remedy, eager):
    cell = loss_cell()
    step = sgd_step(cell)
    with refuses(TypeError, "construct(data, label)", got, remedy):
        step(**{name: Tensor(value) for name, value in batch.items()})
    cell = loss_cell()
    accumulator = Accumulator(GradAccumulation(cell, 2), sgd(cell))
    with refuses(TypeError, remedy):
        accumulator.backward(**{name: Tensor(np.array(value)) for name, value in batch.items()})
