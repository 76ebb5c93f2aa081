"""A program as a user writes it, with what an editor and a type checker must know of it.

mypy and pyright check all of it; what needs no further process is also run.
"""

from collections.abc import Iterator
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.dataset import Dataset, NumpySlicesDataset
from mindspore.experimental.optim import SGD
from mindspore.train import LossMonitor
from typing_extensions import assert_type

from ms_gradaccum import (
    EMA,
    HSDP,
    AccumulationConfig,
    Accumulator,
    ClipByGlobalNorm,
    ClipByGroupNorm,
    ClipByValue,
    CompileReport,
    DataParallel,
    GradAccumulation,
    MetricsLogger,
    MixedPrecision,
    Model,
    ParameterDifference,
    ProgressBar,
    SavedState,
    StateCheckpoint,
    StepEvent,
    StepOutput,
    StepReport,
    StepReporter,
    TokenMeanLoss,
    TrainingPlan,
    TrainOneStepCell,
    VerifyReport,
    find_micro_size,
    load_state,
    save_state,
    verify,
)


class Watch:
    """A callback of the user, which hears of updates alone."""

    updates = 0

    def on_update_end(self, event: StepEvent) -> None:
        assert_type(event.output, StepOutput | None)
        self.updates = event.updates


def build() -> tuple[nn.Cell, nn.Cell, tuple[Tensor, Tensor]]:
    """Return a network with its loss, an optimizer, and a batch."""
    network: nn.Cell = nn.SequentialCell(nn.Dense(1, 1, weight_init="zeros", has_bias=False))
    x = np.arange(1, 9, dtype=np.float32).reshape(8, 1)
    optimizer = nn.SGD(network.trainable_params(), 0.02)
    return nn.WithLossCell(network, nn.MSELoss()), optimizer, (Tensor(x), Tensor(2 * x))


def dataset() -> Dataset:
    _, _, (x, y) = build()
    return NumpySlicesDataset((x.asnumpy(), y.asnumpy()), shuffle=False).batch(2)


def step_by_step(folder: Path) -> StepReport | None:
    loss_cell, optimizer, batch = build()
    network = GradAccumulation(loss_cell, 4, batch_axis=(0, 0), losses="first")
    step = TrainOneStepCell(
        network,
        optimizer,
        clip=ClipByGlobalNorm(1000.0),
        parallel=HSDP(optimizer_level="level2"),
        bad_micro_batch="drop",
        compile=False if ms.get_context("mode") == ms.GRAPH_MODE else None,
    )
    watch = Watch()
    step.add_callback(watch)
    output = step(*batch)
    assert_type(output, StepOutput)
    assert_type(output.loss, Tensor | None)
    loss, _overflow, _scale = output
    assert_type(loss, Tensor)
    assert_type(step.flush(), StepOutput | None)
    names: Iterator[tuple[str, Parameter]] = step.parameters_and_names()
    assert_type(step.set_train(), TrainOneStepCell)
    saved = save_state(step, folder / "states", extra={"epoch": 1, "name": "toy", "losses": [1.0, 0.5]})
    assert_type(saved, SavedState)
    loaded = load_state(step, str(folder / "states"))
    epoch = loaded.extra["epoch"]
    assert isinstance(epoch, int) and watch.updates == 1 and len(list(names)) > 0
    reporter = StepReporter(step, weight_norm=True)
    report = reporter.report(output)
    assert_type(report, StepReport | None)
    if report is not None:
        assert_type(report.loss, float | None)
        assert_type(report.learning_rate, float | tuple[float, ...])
    return report


def by_model(folder: Path) -> Model:
    network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
    model = Model(
        GradAccumulation(network, 2),
        nn.MSELoss(),
        nn.SGD(network.trainable_params(), 0.02),
        eval_network=nn.WithEvalCell(network, nn.MSELoss()),
        eval_indexes=[0, 1, 2],
        accumulation_steps=4,
        clip=ClipByValue(1000.0),
        parallel=DataParallel(),
        last_window="drop",
        amp_level="O0",
        metrics={"loss"},
    )
    ema = EMA(0.5, warmup_updates=0)
    logger = MetricsLogger(folder / "run.jsonl", log=lambda numbers, step: None)
    callbacks = [ProgressBar(live=False), ema, logger, StateCheckpoint(folder, save_checkpoint_seconds=60.0)]
    assert_type(model.train(1, dataset(), callbacks, dataset_sink_mode=False, resume=True), None)
    model.fit(2, dataset(), dataset(), callbacks=LossMonitor(), initial_epoch=1)
    assert_type(ema.parameters, list[Parameter])
    with ema.swapped():
        pass
    return model


def by_loop() -> int:
    loss_cell, _, _ = build()
    optimizer = SGD(loss_cell.trainable_params(), 0.02)
    config = AccumulationConfig(schedule={0: 2, 3: 4}, sync_with_dataloader=True)
    accumulator = Accumulator(loss_cell, optimizer, config=config, clip=ClipByGroupNorm({"*": 1000.0}))
    x = np.arange(1, 9, dtype=np.float32).reshape(4, 2, 1)
    batches = [(Tensor(rows), Tensor(2 * rows)) for rows in x]
    prepared, _, cell = accumulator.prepare(batches, optimizer, loss_cell)
    assert_type(cell, nn.Cell)
    assert_type(prepared, list[tuple[Tensor, Tensor]])
    updates = 0
    for inputs, labels in prepared:
        with accumulator.accumulate():
            assert_type(accumulator.backward(inputs, labels), Tensor)
            output = accumulator.step()
            assert_type(output, StepOutput | tuple[StepOutput, ...] | None)
            if isinstance(output, StepOutput):
                assert_type(output.grad_norm, Tensor)
                updates += accumulator.updated
            accumulator.zero_grad()
    only = accumulator.step(network=loss_cell) if accumulator.sync_gradients else None
    assert_type(only, StepOutput | None)
    return updates


def before_a_training() -> TrainingPlan:
    loss_cell, _, batch = build()
    plan = TrainingPlan(dataset_size=8, batch_size=2, epochs=1, accumulation_steps=4)
    report = verify(loss_cell, batch, 4)
    assert_type(report, VerifyReport)
    assert_type(report.parameters, tuple[ParameterDifference, ...])
    assert_type(report.compiled, CompileReport | None)
    assert report.equal and plan.updates == 1
    return plan


def in_processes_of_their_own() -> None:
    """Is not run by the test: it starts processes that import this file."""
    assert_type(find_micro_size(build, "4GiB", report=print), int)


def settings() -> nn.Cell:
    MixedPrecision(ms.bfloat16, "O2", reduce_dtype="bf16")
    tokens = TokenMeanLoss(nn.Embedding(8, 8))
    assert_type(tokens(Tensor([[1, 2]]), Tensor([[1, 2]])), tuple[Tensor, Tensor])
    assert_type(GradAccumulation(tokens, 2).micro_size, int | None)
    return tokens
