"""Optimizers as programs set them up: schedules, groups, loss scales, several of them, and those of users."""

import mindspore.experimental.optim as experimental
from harness import Program, check_of
from mindspore import amp, nn, ops

RATES = [0.1, 0.05, 0.02]  # of each update


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first = nn.Dense(4, 3)
        self.second = nn.Dense(3, 1)

    def construct(self, x, y):
        return ops.square(self.second(ops.tanh(self.first(x))) - y).mean()


class CountingAdamW(nn.Optimizer):
    """An AdamW whose `get_lr()` moves `global_step`, as those of some model collections do."""

    def __init__(self, params, learning_rate, beta1=0.9, beta2=0.999, eps=0.1):
        super().__init__(learning_rate, params)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.moments1 = self.parameters.clone(prefix="moment1", init="zeros")
        self.moments2 = self.parameters.clone(prefix="moment2", init="zeros")

    def get_lr(self):
        rate = self.learning_rate
        if self.dynamic_lr:
            rate = self.learning_rate(self.global_step).reshape(())
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        return rate

    def construct(self, gradients):
        rate = self.get_lr()
        done = ()
        for weight, first, second, gradient in zip(self.parameters, self.moments1, self.moments2, gradients):
            mean = self.beta1 * first + (1 - self.beta1) * gradient
            square = self.beta2 * second + (1 - self.beta2) * gradient * gradient
            step = mean / (ops.sqrt(square) + self.eps) + 0.01 * weight
            done += (ops.assign(first, mean), ops.assign(second, square), ops.assign_sub(weight, rate * step))
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


SCALE = {"optimizer": scaled, "stock_step": {"sens": 1024.0}}


def keeps_overflows():
    return amp.FixedLossScaleManager(1024, drop_overflow_update=False)


PROGRAMS = {
    "get_lr moves global_step": Program(Net, lambda net: CountingAdamW(net.trainable_params(), RATES)),
    "loss_scale of the optimizer, Model": Program(
        Net, scaled, own_model=True, stock_model={"loss_scale_manager": keeps_overflows()}, faces=("Model",)
    ),
    "loss_scale of the optimizer, step": Program(
        Net, **SCALE, step={"mixed_precision": keeps_overflows()}, faces=("step 1", "step 4", "Accumulator")
    ),
    "gradients that are kept": Program(Net, lambda net: Optimistic(net.trainable_params()), modes=("PYNATIVE",)),
    "scheduler of an experimental optimizer": Program(Net, adamw, built=OneCycle.built, between=OneCycle.between),
}


test_equal_or_named = check_of(PROGRAMS)
