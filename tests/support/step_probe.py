"""Helpers of the tests of the training step: gradients and compilations that can be looked at."""

import itertools
from contextlib import contextmanager
from functools import partialmethod
from unittest import mock

import mindspore as ms
import numpy as np
from linear_toy import X
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.api import _cell_graph_executor
from mindspore.train import Callback, mind_ir_pb2

from ms_gradaccum import GradAccumulation, StepEvent, StepOutput, TrainOneStepCell
from ms_gradaccum.backend.compiled import Method


class KeepGradients(nn.Optimizer):
    """An optimizer that keeps the gradients it is given and leaves the weights alone."""

    def __init__(self, parameters):
        super().__init__(1.0, parameters)
        kept = [Parameter(ops.zeros(p.shape, p.dtype), f"kept.{p.name}", requires_grad=False) for p in self.parameters]
        self.kept = ParameterTuple(kept)
        self.map = ops.HyperMap()

    def construct(self, gradients):
        self.assignadd(self.global_step, self.global_step_increase_tensor)  # It is an update, though it moves nothing.
        return self.map(ops.assign, self.kept, gradients)

    def gradients(self):
        return [gradient.asnumpy().copy() for gradient in self.kept]


def keeping_step(loss_cell, micro_size=1, *, weighted=False, batch_axis=0, **settings):
    """A step that trains nothing, whose `optimizer.gradients()` are the window's mean gradients."""
    network = GradAccumulation(loss_cell, micro_size, weighted=weighted, batch_axis=batch_axis)
    return TrainOneStepCell(network, KeepGradients(loss_cell.trainable_params()), **settings)


class Around(nn.Cell):
    """A larger program that the step is a part of."""

    def __init__(self, step):
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self, *inputs):
        return self.step(*inputs)


class Listener(Callback):
    """Notes what it is told: the name without "on_", the counts, and the loss if there is one."""

    def __init__(self):
        super().__init__()
        self.told = []
        self.events = []

    def note(self, name, event):
        assert isinstance(event, StepEvent)
        self.events.append(event)
        place = (event.batch,) if event.micro_batch is None else (event.batch, event.micro_batch, event.rows)
        self.told.append((name, *place, event.updates, event.skipped_updates))

    on_micro_batch_begin = partialmethod(note, "micro_batch_begin")
    on_micro_batch_end = partialmethod(note, "micro_batch_end")
    on_update_begin = partialmethod(note, "update_begin")
    on_update_end = partialmethod(note, "update_end")

    def outputs(self):
        return [event.output for event in self.events if event.output is not None]

    def ends(self):
        """The updates and the skipped ones at the end of each window."""
        return [told[-2:] for told in self.told if told[0] == "update_end"]


class Of(nn.Cell):
    """What a function makes of the output of a network and of the other inputs."""

    def __init__(self, network, function):
        super().__init__()
        self.network, self.function = network, function

    def construct(self, x, *others):
        return self.function(self.network(x), *others)


class Learned(nn.Cell):
    """What a function makes of a parameter and the inputs."""

    def __init__(self, start, function, dtype=ms.float32):
        super().__init__()
        self.weight, self.function = Parameter(Tensor(start, dtype), "weight"), function

    def construct(self, *inputs):
        return self.function(self.weight, *inputs)


def fails_at(number, error):
    """Return a forward hook that raises an error at one of its calls. Hooks make the network run op by op."""
    calls = itertools.count(1)

    def hook(cell, inputs, output):
        if next(calls) == number:
            raise error

    return hook


def sgd_step(cell, micro_size=2, rate=0.1, **settings):
    """A step that trains a loss cell by plain gradient descent."""
    return TrainOneStepCell(GradAccumulation(cell, micro_size), nn.SGD(cell.trainable_params(), rate), **settings)


class OwnTrainStep(nn.Cell):
    """The training cell that many projects write for themselves; its optimizer may be where no cell shows it."""

    def __init__(self, network, optimizer, hides=False):
        super().__init__(auto_prefix=False)
        self.network = network
        self.update = [optimizer] if hides else optimizer
        self.hides = hides
        self.weights = ParameterTuple(network.trainable_params())
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, *batch):
        loss = self.network(*batch)
        grads = self.gradient(self.network, self.weights)(*batch)
        update = self.update[0] if self.hides else self.update
        return ops.depend(loss, update(grads))


class Squared(nn.Cell):
    """A loss cell, or a part of one, that MindSpore compiles in PYNATIVE mode."""

    def __init__(self, dense):
        super().__init__()
        self.dense = dense

    @ms.jit
    def construct(self, x, y):
        return ops.mse_loss(self.dense(x), y)


class Weights(nn.Cell):
    """One float32 weight per column; the loss is the mean over the rows of x @ weights, its gradient the mean row."""

    def __init__(self, columns, dtype=ms.float32):
        super().__init__()
        self.weight = Parameter(ops.zeros((columns,), dtype), "weight")

    def construct(self, x):
        return (x * self.weight).sum(-1).mean()


def values_of(step):
    """Copies of all parameters of a step by name: weights, optimizer state, buffer."""
    return {parameter.name: parameter.asnumpy().copy() for parameter in step.get_parameters()}


def changed(before, after):
    assert before.keys() == after.keys()
    return {name for name in before if not np.array_equal(before[name], after[name], equal_nan=True)}


def number(tensor):
    return tensor.asnumpy().item()


def output_of(updated=True, overflow=None, **items):
    """An output at the end of a window, without a training."""
    numbers = {"loss": 1.0, "loss_scale": 1.0, "grad_norm": 3.0, "clipped_grad_norm": 2.0, "learning_rate": 0.1}
    numbers |= {"weight": 8.0, **items}
    flags = {"updated": updated, "overflow": not updated if overflow is None else overflow}
    made = {name: Tensor(value, ms.float32) for name, value in numbers.items()}
    return StepOutput(**made, **{name: Tensor(flag) for name, flag in flags.items()})


def tensors(*arrays):
    return [Tensor(array) for array in arrays]


def operators(cell, graph_id):
    """Names of the operators of a compiled cell, one for each call."""
    model = mind_ir_pb2.ModelProto()
    model.ParseFromString(_cell_graph_executor._get_func_graph_proto(cell, graph_id, "mind_ir"))
    nodes = [node.op_type.split(":") for graph in (model.graph, *model.functions) for node in graph.node]
    return [parts[2] for parts in nodes if len(parts) > 2]


@contextmanager
def compilations():
    """Collect the names of the cells, or of the methods of cells, that are compiled meanwhile."""
    names, compile_cell = [], _cell_graph_executor.compile

    def record(cell, *inputs, **settings):
        phase, is_new = compile_cell(cell, *inputs, **settings)
        name = cell.method.__qualname__ if isinstance(cell, Method) else type(cell).__name__
        names.extend([name] * bool(is_new))
        return phase, is_new

    with mock.patch.object(_cell_graph_executor, "compile", record):
        yield names


LABELS = np.int32([0, 1, 2, 0, 1, 2, 0, 1])


def with_a_bad_label(row):
    labels = LABELS.copy()
    labels[row] = 7
    return tensors(X, labels)
