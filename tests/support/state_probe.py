"""Small trainings whose state is saved and loaded, and what to compare of them."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.experimental import optim

from ms_gradaccum import AccumulationConfig, Accumulator, GradAccumulation, TrainOneStepCell, save_state
from ms_gradaccum.backend.optimizers import all_parameters

_RANDOM = np.random.default_rng(0)
INPUTS = _RANDOM.normal(size=(40, 3)).astype(np.float32)
LABELS = _RANDOM.normal(size=(40, 1)).astype(np.float32)
BATCHES = [(Tensor(INPUTS[i : i + 4]), Tensor(LABELS[i : i + 4])) for i in range(0, 40, 4)]


class Net(nn.Cell):
    """A layer, a normalisation that has statistics of its own, and another layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Dense(4, 1)

    def construct(self, x):
        return self.last(self.norm(self.first(x)))


def new_step(make_optimizer=None, accumulation_steps=3, **settings):
    """A new step that begins as every other one. It measures its loss, which takes most of the time, if told to."""
    settings.setdefault("check_loss", False)
    ms.set_seed(1)
    network = Net()
    make_optimizer = make_optimizer or (lambda p: nn.Momentum(p, [0.05, 0.04, 0.03, 0.02, 0.01], 0.9))
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 2)
    optimizer = make_optimizer(network.trainable_params())
    return TrainOneStepCell(loss_cell, optimizer, accumulation_steps=accumulation_steps, **settings).set_train()


def train_step(step, batches):
    outputs = [step(*batch) for batch in batches]
    return [[np.asarray(item.asnumpy()).tolist() for item in (*output, output.updated)] for output in outputs]


def new_loop(schedule=None, **settings):
    """A new loop: its accumulator, its prepared data of five batches a pass, and its scheduler."""
    settings.setdefault("check_loss", False)
    ms.set_seed(1)
    network = Net()
    optimizer = optim.Adam(network.trainable_params(), lr=0.05)
    if schedule is not None:
        settings["config"] = AccumulationConfig(schedule=schedule, sync_with_dataloader=False)
    accumulator = Accumulator(nn.WithLossCell(network, nn.MSELoss()), optimizer, **settings)
    data = NumpySlicesDataset((INPUTS[:20], LABELS[:20]), shuffle=True).batch(4)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data, scheduler = accumulator.prepare(data, scheduler)
    return accumulator.set_train(), data, scheduler


def train_loop(accumulator, data, scheduler, epochs, first_epoch=0, save_after=None, **save):
    """Train, and return what each batch was and gave; with ``save_after``, save after so many and stop there."""
    seen = []
    for _ in range(first_epoch, epochs):
        for x, y in data:
            with accumulator.accumulate():
                loss = accumulator.backward(x, y)
                accumulator.clip_grad_norm(1.0)
                accumulator.step()
                scheduler.step()
                accumulator.zero_grad()
            seen.append([x.asnumpy().tolist(), float(loss.asnumpy()), accumulator.updated])
            if len(seen) == save_after:
                return save_state(accumulator, **save)
    return seen


def bits_of(step):
    if isinstance(step, Accumulator):
        window = step.driver
        counts = [window.batches, window.updates, step.sync_gradients, window.is_open]
    else:
        counts = [step.open_batches()]
    events = step.events
    values = [counts, events.batches, events.micro_batches, events.updates, events.skipped_updates]
    for window in step.windows:
        loss_scale = window.loss_scale
        found = [*window.network.get_parameters(), *loss_scale.get_parameters()]
        for optimizer, reducer in zip(window.optimizers, window.reducers):
            found += [*all_parameters(optimizer), *reducer.buffer.get_parameters()]
        values += [(item.name, item.asnumpy().tobytes()) for item in found]
        if isinstance(getattr(loss_scale, "chooser", None), ms.amp.LossScaleManager):
            values.append(dict(vars(loss_scale.chooser)))
    return values


def compare(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(one.asnumpy()), getattr(other, "asnumpy", lambda o=other: o)())
