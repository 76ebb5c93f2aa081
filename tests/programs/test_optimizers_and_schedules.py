"""Optimizers as programs set them up: schedules, groups, loss scales, several of them, and those of users."""

import mindspore as ms
import mindspore.experimental.optim as experimental
import pytest
from harness import UPDATES, Program, check, checks_of, rows
from mindspore import Tensor, amp, nn, ops
from optimizers_tried import OPTIMIZERS
from quick_mindspore import compiling

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


def step_rates(i, cell, optimizer):
    """Step a scheduler of the experimental optimizers after each update."""
    for rate in optimizer.lrs:
        ops.assign(rate, Tensor(0.1 / (i + 2), ms.float32))


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


def sensitive(settings):
    """Settings with an epsilon as small as the gradients of this network."""
    return settings | {"eps": 0.1} if "eps" in settings else settings


# Their loss, which is measured above, is always the same.
ONE_FACE = {"faces": ("step 4",), "step": {"check_loss": False}}


def with_rate(i, name):
    """The optimizer with a list of rates or a schedule in turn, in one of the modes in turn."""
    optimizer, settings = OPTIMIZERS[name]
    base = settings["learning_rate"]
    rates = [base, base / 2, base / 5]

    def build(cell):
        rate = rates if i % 2 else nn.ExponentialDecayLR(base, 0.5, 1)
        return optimizer(cell.trainable_params(), **{**sensitive(settings), "learning_rate": rate})

    return Program(Net, build, **ONE_FACE, modes=(("GRAPH", "PYNATIVE")[i // 2 % 2],))


def with_scheduler(i, name):
    """The experimental or mint optimizer, whose rates a scheduler moves after each update."""
    optimizer, settings = OPTIMIZERS[name]
    modes = ("GRAPH",) if name.startswith("mint") or i % 2 else ("PYNATIVE",)
    # The rates are parameters, which a graph reads anew.
    oracle = None if name.startswith("mint") or name.endswith(("AdamW", "RAdam", "NAdam")) else "PYNATIVE"
    build, settings = adjustable(optimizer, **sensitive(settings)), {"modes": modes, "oracle": oracle}
    return Program(Net, build, between=step_rates, **ONE_FACE, **settings)


# One of each way to come by a rate: those of a package share it, apart from what has a schedule of its own.
RATED = ["SGD", "Adam", "AdamWeightDecay", "ASGD", "AdaFactor, own rate", "user-defined"]
MOVED = ["experimental SGD", "experimental AdamW", "experimental ASGD", "experimental RAdam", "experimental NAdam"]
MOVED += ["mint SGD", "mint Adam"]
SCHEDULES = {name: with_rate(i, name) for i, name in enumerate(RATED)}
SCHEDULES |= {name: with_scheduler(i, name) for i, name in enumerate(MOVED)}


@pytest.mark.parametrize("program,mode,face", rows(SCHEDULES))
def test_each_optimizer_with_a_schedule(program, mode, face):
    # The rate is in the compiled report in GRAPH mode alone: in PYNATIVE mode that is the same for all.
    with compiling("the optimizer", *(["the report"] if mode == "GRAPH" else [])):
        check(program, mode, face)


test_equal_or_named, test_lost_rows_would_be_seen = checks_of(PROGRAMS)
