"""Optimizers as programs set them up: schedules, groups, loss scales, several of them, and those of users."""

import mindspore.experimental.optim as experimental
from harness import Net, Program, check_of
from mindspore import amp, nn, ops


class Counting(nn.Optimizer):
    """Its `get_lr()` moves `global_step`, as those of some model collections do."""

    def get_lr(self):
        rate = self.learning_rate
        if self.dynamic_lr:
            rate = self.learning_rate(self.global_step).reshape(())
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        return rate

    def construct(self, gradients):
        rate = self.get_lr()
        done = ()
        for weight, gradient in zip(self.parameters, gradients):
            done += (ops.assign_sub(weight, rate * gradient),)
        return done


def scaled(cell):
    """As MindSpore's documents ask where overflows are not dropped: the optimizer divides by the loss scale."""
    return nn.Momentum(cell.trainable_params(), 0.05, 0.9, weight_decay=0.1, loss_scale=1024.0)


def adamw(cell):
    return experimental.AdamW(cell.trainable_params(), lr=0.1, eps=0.1)


class Optimistic(nn.Optimizer):
    """Keeps the gradients of the last update, as methods that look ahead do."""

    def __init__(self, params):
        super().__init__(0.1, params)
        self.previous = None

    def construct(self, gradients):
        previous, self.previous = self.previous or gradients, gradients
        for parameter, gradient, before in zip(self.parameters, gradients, previous):
            ops.assign_add(parameter, -0.1 * (2 * gradient - before))
        return True


class OneCycle:
    """A scheduler of the experimental optimizers, which belongs to the optimizer that it was built for."""

    schedulers = {}

    @classmethod
    def built(cls, cell, optimizer):
        cls.schedulers = {optimizer: experimental.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)}

    @classmethod
    def between(cls, i, cell, optimizer):
        cls.schedulers[optimizer].step()


def keeps_overflows():
    return amp.FixedLossScaleManager(1024, drop_overflow_update=False)


PROGRAMS = {
    "get_lr moves global_step": Program(Net, lambda net: Counting([0.1, 0.05, 0.02], net.trainable_params())),
    "loss_scale of the optimizer, Model": Program(
        Net, scaled, own_model=True, stock_model={"loss_scale_manager": keeps_overflows()}, faces=("Model",)
    ),
    "loss_scale of the optimizer, step": Program(
        Net,
        scaled,
        stock_step={"sens": 1024.0},
        step={"mixed_precision": keeps_overflows()},
        faces=("step 1", "step 4", "Accumulator"),
    ),
    "gradients that are kept": Program(Net, lambda net: Optimistic(net.trainable_params()), modes=("PYNATIVE",)),
    "scheduler of an experimental optimizer": Program(Net, adamw, built=OneCycle.built, between=OneCycle.between),
}


test_equal_or_named = check_of(PROGRAMS)
