"""Programs in which Python decides, from one step to the next, what the network does.

In PYNATIVE mode MindSpore's own step obeys all of it. In GRAPH mode some is compiled in for ever, by MindSpore's step
and by ours; there the two must agree.
"""

import mindspore as ms
import numpy as np
import pytest
from harness import Net, Program, check_of, outcome, stock, train_ours
from mindspore import Tensor, nn, ops


class Annealed(Net):
    """A VAE's beta, a temperature: a weight of a term of the loss that moves with the training."""

    beta = 0.0

    def construct(self, x, y):
        out = self.forward(x)
        return ops.square(out - y).mean() + self.beta * ops.square(out).mean()


def anneal(i, cell, optimizer):
    cell.beta = 0.5 * (i + 1)


class WithConstant(Net):
    """A tensor of the cell that the training loop replaces by another one, such as the target of a DQN."""

    def __init__(self):
        super().__init__()
        self.target = Tensor(np.float32(0.0))

    def construct(self, x, y):
        return ops.square(self.forward(x) - y - self.target).mean()


def replace_target(i, cell, optimizer):
    cell.target = Tensor(np.float32(i + 1))


def freeze_first(i, cell, optimizer):
    for parameter in cell.first.get_parameters():
        parameter.requires_grad = False


class Activated(nn.Cell):
    def __init__(self, layer):
        super().__init__(auto_prefix=False)
        self.layer = layer

    def construct(self, x):
        return ops.tanh(self.layer(x))


class OpByOp(Net):
    """A part runs once more in the backward pass, a tensor changes in place, and arrays of the host are kept."""

    def forward(self, x):
        hidden = ms.recompute(Activated(self.first), x)
        alias = hidden
        alias *= 2
        with ms.saved_tensors_hooks(lambda tensor: tensor.asnumpy(), Tensor):
            return self.second(hidden)

    def construct(self, x, y):
        with ms._no_grad():
            target = self.forward(0.5 * x)
        return super().construct(x, y + target)


class Grows(Net):
    def __init__(self):
        super().__init__()
        self.history = []
        self.calls = {}

    def construct(self, x, y):
        loss = super().construct(x, y)
        self.history.append(float(loss))
        self.calls[len(self.history)] = len(self.history)
        return loss * (1.0 + 0.1 * len(self.calls))


class EarlyExit(Net):
    def construct(self, x, y):
        out = self.forward(x)
        loss = ops.square(out - y).mean()
        if loss > 1e-6:
            loss = loss + 0.1 * ops.abs(out).mean()
        return loss


class NumpyOfValues(Net):
    def construct(self, x, y):
        weights = Tensor(np.abs(y.asnumpy()))
        return (ops.square(self.forward(x) - y) * weights).mean()


class TypedNumpy(Net):
    """The same with its type said, so that MindSpore's compiler can take its gradient."""

    def construct(self, x, y):
        weights = Tensor(np.abs(y.asnumpy()))  # @jit.typing: () -> tensor_type[float32]
        return (ops.square(self.forward(x) - y) * weights).mean()


def hook_cell(cell, optimizer):
    cell.second.register_backward_hook(lambda hooked, grad_input, grad_output: tuple(2 * grad for grad in grad_input))


def hook_parameter(cell, optimizer):
    cell.second.weight.register_hook(lambda grad: 3 * grad)


def hook_later(i, cell, optimizer):
    if i == 0:
        cell.first.register_forward_hook(lambda hooked, inputs, output: output * 2)


class PythonSGD(nn.Optimizer):
    factor = 1.0

    def __init__(self, params):
        super().__init__(0.1, params)

    def construct(self, gradients):
        for parameter, gradient in zip(self.parameters, gradients):
            ops.assign_add(parameter, -0.1 * self.factor * gradient)
        return True


def change_factor(i, cell, optimizer):
    optimizer.factor = 0.5 / (i + 1)


def set_learning_rate(i, cell, optimizer):
    ops.assign(optimizer.learning_rate, Tensor(0.1 / (i + 2), ms.float32))


def clipped(grad):
    return ops.clip_by_value(grad, -0.01, 0.01)


class HookedTensor(Net):
    def construct(self, x, y):
        hidden = ops.tanh(self.first(x))
        hidden.register_hook(clipped)
        return ops.square(self.second(hidden) - y).mean()


class Clip(nn.Cell):
    def construct(self, x):
        return x * 1.0

    def bprop(self, x, out, grad):
        return (clipped(grad),)


class ByHiddenCell(Net):
    def __init__(self):
        super().__init__()
        self.clips = [Clip()]

    def construct(self, x, y):
        return ops.square(self.second(self.clips[0](ops.tanh(self.first(x)))) - y).mean()


def clip_parameter(cell, optimizer):
    cell.second.weight.register_hook(clipped)


def clip_parameter_later(i, cell, optimizer):
    if i == 0:
        clip_parameter(cell, optimizer)


def clip_cell_later(i, cell, optimizer):
    if i == 0:
        cell.second.register_backward_hook(lambda hooked, inputs, outputs: (clipped(inputs[0]),))


# A hook of a parameter gets the gradient of each micro batch.
HOOKED = "hook of the parameter 'second.weight' must be linear"

# And in a window of several batches, all that is called in the backward pass gets that of each batch.
BACKWARD = "does in the backward pass .* must be linear"
WHOLE = {"faces": ("step 1", "step 4", "Model")}

ONLY_EAGER = {"modes": ("PYNATIVE",)}

PROGRAMS = {
    "annealed weight": Program(Annealed, between=anneal),
    "replaced tensor": Program(WithConstant, between=replace_target),
    "requires_grad=False in mid-training": Program(Net, between=freeze_first),
    "what no graph does": Program(OpByOp, **ONLY_EAGER),
    "list and dict that grow": Program(Grows, parts=1, **ONLY_EAGER),
    "branch on a value": Program(EarlyExit),
    "numpy of values": Program(NumpyOfValues, **ONLY_EAGER),
    "numpy of values, typed": Program(TypedNumpy),
    "backward hook of a cell": Program(Net, prepare=hook_cell, warned=BACKWARD, **ONLY_EAGER),
    "forward hook in mid-training": Program(Net, between=hook_later, **ONLY_EAGER),
    "hook of a parameter": Program(Net, prepare=hook_parameter, warned=HOOKED, **ONLY_EAGER),
    "hook of a parameter that clips": Program(Net, prepare=clip_parameter, named=HOOKED),
    "hook of a parameter that clips in mid-training": Program(
        Net, between=clip_parameter_later, named=HOOKED, **ONLY_EAGER
    ),
    "backward hook of a cell that clips in mid-training": Program(
        Net, between=clip_cell_later, named=BACKWARD, faces=("Accumulator",), **ONLY_EAGER
    ),
    "hook of a tensor that clips": Program(HookedTensor, **WHOLE),
    "bprop that clips, in a list": Program(ByHiddenCell, **WHOLE),
    "bprop that clips, batch by batch": Program(ByHiddenCell, named=BACKWARD, faces=("Accumulator",)),
    "optimizer's attribute": Program(Net, lambda net: PythonSGD(net.trainable_params()), between=change_factor),
    "learning rate by hand": Program(Net, between=set_learning_rate),
}


test_equal_or_named = check_of(PROGRAMS)


def test_numpy_without_a_type_is_refused_where_it_would_not_train():
    """In GRAPH mode MindSpore's own step returns a loss here and moves no weight."""
    ms.set_context(mode=ms.GRAPH_MODE)
    program = Program(NumpyOfValues)
    with pytest.raises(AssertionError, match="nothing moves"):
        stock(program, "step", "GRAPH")
    for face in ("step 1", "step 4"):
        with pytest.raises(ValueError, match="must return its mean loss.*got a Python object"):
            outcome(program, train_ours, face)
