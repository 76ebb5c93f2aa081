"""A process of `test_overlap.py`: windows op by op whose messages go out during the last backward pass."""

import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.communication import get_rank

sys.path.insert(0, str(Path(__file__).parent))
from launch import report  # noqa: E402
from quick_mindspore import eagerly  # noqa: E402
from scenarios import batch, share, weights_of  # noqa: E402

from ms_gradaccum import ClipByGlobalNorm, DataParallel, GradAccumulation, MixedPrecision, TrainOneStepCell  # noqa: E402
from ms_gradaccum.parallel import backward_messages, layout  # noqa: E402

BUCKET = 70  # Elements of a message here, so that a small network has several.
SETTINGS = {
    "mean": {},
    "tokens": {},
    "16 bits": {"mixed_precision": MixedPrecision(level="O0", init_scale=1.0, reduce_dtype="fp16")},
    "drop": {"bad_micro_batch": "drop"},
}


class Network(nn.Cell):
    """A table that is used twice, a layer that is not used, a frozen one, and a hook that doubles a gradient.

    The loss is a mean over rows, or the sum over some of them with their number.
    """

    def __init__(self, loss):
        super().__init__(auto_prefix=False)
        numbers = np.random.default_rng(0)
        self.table = Parameter(Tensor(numbers.normal(size=(6, 8)).astype(np.float32)), "table")
        # The zeros of what is not used come last in a backward pass.
        self.unused, self.first, self.second, self.frozen = (nn.Dense(size, size) for size in (2, 8, 8, 8))
        for name, cell in self.name_cells().items():
            for parameter in cell.get_parameters():
                parameter.name = f"{name}.{parameter.name}"
                parameter.requires_grad = name != "frozen"
                parameter.set_data(Tensor(0.3 * numbers.normal(size=parameter.shape).astype(np.float32)))
        self.first.weight.register_hook(lambda grad: 2 * grad)
        self.counts_rows, self.watched, self.handle = loss != "tokens", (), None
        self.registers = False  # True if each pass registers a hook of a parameter anew.

    def construct(self, x, y):
        hidden = ops.tanh(self.first(ops.matmul(x, self.table)))
        for hook in self.watched:
            hidden.register_hook(hook)
        if self.registers:
            if self.handle is not None:
                self.handle.remove()
            self.handle = self.second.weight.register_hook(lambda grad: 3 * grad)
        hidden = ops.tanh(self.second(self.frozen(hidden)))
        errors = ops.square(ops.matmul(hidden, self.table.T)[:, :3] - y).sum(1)
        if self.counts_rows:
            return errors.mean()
        counted = (y[:, 0] > 0).float()
        return (errors * counted).sum(), counted.sum()


def build(loss, **settings):
    network = Network(loss)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    cell = GradAccumulation(network, 3, weighted=loss == "tokens")
    settings = {"accumulation_steps": 2, "clip": ClipByGlobalNorm(0.5), "check_loss": False, **settings}
    return network, TrainOneStepCell(cell, optimizer, parallel=DataParallel(overlap=True), **settings)


@contextmanager
def noting(network, events):
    """Note when a gradient is complete and when a message is sent op by op, in this order."""
    real = mint.distributed.all_reduce

    def send(*args, **kwargs):
        events.append("message")
        return real(*args, **kwargs)

    hooks = [each.register_hook(lambda _, name=each.name: events.append(name)) for each in network.trainable_params()]
    try:
        with mock.patch.object(mint.distributed, "all_reduce", send):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def train(name, rank, results):
    """Two windows of two batches of uneven rows."""
    network, step = build(name, **SETTINGS[name])
    windows = []
    for number in range(4):
        events = []
        with noting(network, events):
            output = step(*[Tensor(array) for array in share(batch(number), rank, 2)])
        windows.append(events)
    results[name] = {
        "weights": weights_of(network),
        "events": windows,
        "messages": len(step.body.reducer.kept),
        "weight": float(output.weight.asnumpy()),
        "norm": float(output.grad_norm.asnumpy()),
    }


def run_out_of_data(rank, results):
    """Rank 1 has no rows in the last batch of the window: it sends all messages at its end."""
    network, step = build("mean")
    step(*[Tensor(array) for array in share(batch(0), rank, 2)])
    step.join() if rank else step(*[Tensor(array) for array in share(batch(1), 0, 2)])
    results["no rows"] = weights_of(network)


def fail(place, steps, fails, rank, results):
    """The backward passes with the numbers ``fails`` raise on rank 1, and the program goes on with further windows."""
    network, step = build("mean", accumulation_steps=steps)
    passes, errors, events = [], [], []

    def raises(grad):
        passes.append(place)
        if rank and len(passes) in fails:
            raise OverflowError("of this rank")

    if place == "in a layer":
        network.watched = (raises,)
    else:  # Its gradient is one of the last.
        network.table.register_hook(raises)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range((len(fails) + 1) * steps):
            try:
                with noting(network, events if number < steps else []):
                    output = step(*[Tensor(array) for array in share(batch(number), rank, 2)])
            except OverflowError as error:
                errors.append(str(error))
    results[f"fails {place}, {steps}, {len(fails)}"] = {
        "weights": weights_of(network),
        "errors": errors,
        "sent": [events.count("message"), len(step.body.reducer.kept) - 1],
        "updates": [step.events.updates, step.events.skipped_updates, step.open_batches()],
        "warnings": [text for each in caught if "whole on all ranks" in (text := str(each.message))],
        "weight": float(output.weight.asnumpy()),
    }


def change_a_gradient_late(rank, results):
    """A hook that `construct` registers comes behind those that send."""
    network, step = build("mean")
    network.registers, start, errors = True, weights_of(network), []
    for number in range(2):
        try:
            step(*[Tensor(array) for array in share(batch(number), rank, 2)])
        except RuntimeError as error:
            errors.append(str(error))
    results["late"] = {"errors": errors, "is_still": weights_of(network) == start, "updates": step.events.updates}


def main():
    rank, results = get_rank(), {}
    on_cpu = mock.patch.object(backward_messages, "_ASYNC", ("CPU",))
    with eagerly(), on_cpu, mock.patch.object(layout, "BUCKET_SIZE", BUCKET):
        for name in SETTINGS:
            train(name, rank, results)
        run_out_of_data(rank, results)
        for place in ("in a layer", "at the table"):
            for steps in (1, 2):
                fail(place, steps, [3 * steps], rank, results)
            fail(place, 1, [3, 4], rank, results)
        change_a_gradient_late(rank, results)
    report(rank, results)
