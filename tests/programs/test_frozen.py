"""Programs with a part that is not trained, or not in training mode: pretrained backbones, frozen BatchNorm.

What `set_train(False)` means is what MindSpore's own step makes of it, before it is built, afterwards and in
mid-training; `Model.train` puts all cells in training mode when it begins, MindSpore's as ours.
"""

import numpy as np
from harness import Program, check_of, momentum
from mindspore import Tensor, nn, ops


class Doubles(nn.Cell):
    """Shows its mode: what Dropout and BatchNorm do, without their chance and their statistics."""

    def construct(self, x):
        if self.training:
            return 2 * x
        return x


def batch_norm(**settings):
    means, variances = Tensor(np.linspace(-1, 1, 5, dtype=np.float32)), Tensor(np.linspace(1, 2, 5, dtype=np.float32))
    return nn.BatchNorm1d(5, moving_mean_init=means, moving_var_init=variances, **settings)


class Pretrained(nn.Cell):
    def __init__(self, layer):
        super().__init__()
        self.backbone = nn.SequentialCell(nn.Dense(4, 5), layer(), nn.Tanh())
        self.head = nn.Dense(5, 1)

    def construct(self, x, y):
        return ops.square(self.head(self.backbone(x)) - y).mean()


def with_layer(layer):
    return lambda: Pretrained(layer)


def freeze_mode(cell, optimizer):
    cell.backbone.set_train(False)


def freeze_later(i, cell, optimizer):
    if i == 0:
        cell.backbone.set_train(False)


def freeze_weights(cell, optimizer):
    for parameter in cell.backbone.get_parameters():
        parameter.requires_grad = False


class Teacher(nn.Cell):
    """A teacher that no optimizer knows and an EMA of the student, which the loop updates (mean teacher, BYOL)."""

    def __init__(self):
        super().__init__()
        self.student = nn.Dense(4, 2)
        self.teacher = nn.Dense(4, 2, weight_init="ones")

    def construct(self, x, y):
        wanted = ops.stop_gradient(self.teacher(x))
        return ops.square(self.student(x) - wanted).mean() + ops.square(self.student(x) - y).mean()


def follow(i, cell, optimizer):
    for mine, other in zip(cell.teacher.get_parameters(), cell.student.get_parameters()):
        ops.assign(mine, 0.9 * mine + 0.1 * other)


STEPS = ("step 1", "step 4", "Accumulator")
DOUBLES = {"network": with_layer(Doubles), "optimizer": momentum, "own_model": True}
NORM = {"network": with_layer(batch_norm), "optimizer": momentum, "own_model": True}

PROGRAMS = {
    "mode before building": Program(**DOUBLES, prepare=freeze_mode),
    "mode after building": Program(**DOUBLES, built=freeze_mode),
    "mode in mid-training": Program(**DOUBLES, between=freeze_later),
    "never in training mode": Program(**DOUBLES, prepare=lambda cell, optimizer: cell.set_train(False)),
    "BatchNorm before building": Program(**NORM, prepare=freeze_mode, faces=STEPS),
    "BatchNorm before building, Model": Program(
        **NORM, prepare=freeze_mode, faces=("Model",), parts=1, warned="which was in evaluation mode"
    ),
    "BatchNorm in mid-training": Program(**NORM, between=freeze_later, parts=1),
    "BatchNorm in training": Program(**NORM, nature="BatchNorm"),
    "BatchNorm of moving averages": Program(
        with_layer(lambda: batch_norm(use_batch_statistics=False)), momentum, prepare=freeze_weights
    ),
    "head alone, by the optimizer": Program(with_layer(Doubles), lambda cell: momentum(cell.head)),
    "head alone, by requires_grad": Program(**DOUBLES, prepare=freeze_weights),
    "teacher that follows the student": Program(Teacher, lambda cell: momentum(cell.student), between=follow),
}


test_equal_or_named = check_of(PROGRAMS)
