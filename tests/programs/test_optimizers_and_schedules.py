"""Optimizers as programs set them up: schedules, groups, loss scales, several of them, and those of users."""

import mindspore as ms
import mindspore.experimental.optim as experimental
from harness import UPDATES, Program, checks_of
from mindspore import amp, nn, ops

RATES = [0.1, 0.05, 0.02]
assert len(RATES) == UPDATES


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


class Warmup(nn.learning_rate_schedule.LearningRateSchedule):
    """A schedule of a user."""

    def construct(self, global_step):
        return 0.02 * (ops.cast(global_step, ms.float32) + 1)


def groups(cell):
    biases = [each for each in cell.trainable_params() if "bias" in each.name]
    others = [each for each in cell.trainable_params() if "bias" not in each.name]
    return [
        {"params": others, "lr": RATES, "weight_decay": 0.1},
        {"params": biases, "lr": 0.2},
        {"order_params": cell.trainable_params()},
    ]


def scaled(cell):
    """As MindSpore's documents ask where overflows are not dropped: the optimizer divides by the loss scale."""
    return nn.Momentum(cell.trainable_params(), 0.05, 0.9, weight_decay=0.1, loss_scale=1024.0)


def adjustable(optimizer, **settings):
    return lambda cell: optimizer(cell.trainable_params(), **settings)


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
    "get_lr moves global_step, a list": Program(Net, lambda net: CountingAdamW(net.trainable_params(), RATES)),
    "get_lr moves global_step, a cell": Program(Net, lambda net: CountingAdamW(net.trainable_params(), Warmup())),
    "get_lr moves global_step, a number": Program(Net, lambda net: CountingAdamW(net.trainable_params(), 0.05)),
    "loss_scale of the optimizer, Model": Program(
        Net, scaled, own_model=True, stock_model={"loss_scale_manager": keeps_overflows()}, faces=("Model",)
    ),
    "loss_scale of the optimizer, step": Program(
        Net, **SCALE, step={"mixed_precision": keeps_overflows()}, faces=("step 1", "step 4", "Accumulator")
    ),
    "groups with rates of their own": Program(Net, lambda net: nn.Momentum(groups(net), 0.1, 0.9)),
    "cosine decay": Program(
        Net, lambda net: nn.Adam(net.trainable_params(), nn.CosineDecayLR(0.01, 0.1, UPDATES), eps=0.1)
    ),
    "gradients that are kept": Program(Net, lambda net: Optimistic(net.trainable_params()), modes=("PYNATIVE",)),
    "scheduler of an experimental optimizer": Program(
        Net, adjustable(experimental.AdamW, lr=0.1, eps=0.1), built=OneCycle.built, between=OneCycle.between
    ),
}


test_equal_or_named, test_lost_rows_would_be_seen = checks_of(PROGRAMS)
