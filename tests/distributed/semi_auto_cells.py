"""The steps that the processes of the semi-auto-parallel tests build: ours, MindSpore's, and one on the whole batch."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, lazy_inline, nn, ops
from mindspore.common.initializer import Constant
from mindspore.nn.utils import no_init_parameters
from mindspore.nn.wrap.cell_wrapper import _TrainGradAccuStepCell
from mindspore.parallel import nn as parallel_nn
from mindspore.parallel._utils import _clear_auto_parallel_context, _init_auto_parallel_context
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum import ClipByGlobalNorm, ClipByValue, GradAccumulation, MixedPrecision, TrainOneStepCell

ROWS = 64
# Each update sees another batch.
BATCHES = [
    (rng.randn(ROWS, 8).astype(np.float32), rng.randn(ROWS, 4).astype(np.float32))
    for rng in (np.random.RandomState(1), np.random.RandomState(2))
]


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    micro_size: int
    level: str | None = None
    optimizer: str = "momentum"
    weighted: bool = False
    max_norm: float | None = None
    limit: float | None = None
    loss_scale: float | None = None
    half: bool = False  # All layers but the first compute in float16.
    strategy: Any = "data_parallel"
    shard_size: int = -1
    no_init: bool = False
    lazy: bool = False
    recompute: bool = False
    # Operators that are sharded: the rows over dp, the columns of the first layer and rows of the second over mp.
    dp: int = 0
    mp: int = 1


class Network(nn.Cell):
    """Four parameters, which ``constant`` lets MindSpore make without their values."""

    def __init__(self, dp: int = 0, mp: int = 1, constant: bool = False) -> None:
        super().__init__()
        rng = np.random.RandomState(0)

        def values(*shape: int) -> Any:
            return Constant(0.05) if constant else Tensor(rng.randn(*shape).astype(np.float32) * 0.3)

        self.first = nn.Dense(8, 16, weight_init=values(16, 8), bias_init=values(16))
        self.second = nn.Dense(16, 4, weight_init=values(4, 16), bias_init=values(4))
        self.relu = ops.ReLU()
        if dp:
            self.relu.shard(((dp, mp),))
            self.first.matmul.shard(((dp, 1), (mp, 1)))
            self.first.bias_add.shard(((dp, mp), (mp,)))
            self.second.matmul.shard(((dp, mp), (1, mp)))
            self.second.bias_add.shard(((dp, 1), (1,)))

    def construct(self, x):
        return self.second(self.relu(self.first(x)))


class LazyNetwork(Network):
    """The same, compiled once for all micro batches."""

    @lazy_inline
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)


class PositiveTokens(nn.Cell):
    """Sum of the squared errors where the label is positive, and how many these are."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, y):
        valid = ops.cast(y > 0, ms.float32)
        return (ops.square(self.network(x) - y) * valid).sum(), valid.sum()


def network_of(variant: Variant) -> nn.Cell:
    """Return a network that starts with the same values every time."""
    with no_init_parameters() if variant.no_init else nullcontext():
        network = (LazyNetwork if variant.lazy else Network)(variant.dp, variant.mp, variant.no_init)
    if variant.recompute:
        network.first.recompute()
    if variant.half:
        network.second.to_float(ms.float16)
    return network


def optimizer_of(variant: Variant, network: nn.Cell) -> nn.Cell:
    with no_init_parameters() if variant.no_init else nullcontext():
        if variant.optimizer == "adam":
            return nn.Adam(network.trainable_params(), 0.01)
        return nn.Momentum(network.trainable_params(), 0.1, 0.9)


def settings_of(variant: Variant, network: nn.Cell) -> AutoParallel:
    parallel = AutoParallel(network)
    parallel.dataset_strategy(((variant.dp, 1),) * 2 if variant.dp else variant.strategy)
    if variant.level is not None:
        parallel.hsdp(shard_size=variant.shard_size, threshold=0, optimizer_level=variant.level)
    return parallel


def loss_of(variant: Any, network: nn.Cell) -> nn.Cell:
    """Return the network with its loss: a mean, or a sum and its weight."""
    return PositiveTokens(network) if variant.weighted else nn.WithLossCell(network, nn.MSELoss())


def loss_cell_of(variant: Variant, network: nn.Cell) -> GradAccumulation:
    return GradAccumulation(loss_of(variant, network), variant.micro_size, weighted=variant.weighted)


def our_step(variant: Variant) -> TrainOneStepCell:
    network = network_of(variant)
    settings: dict[str, Any] = {}
    if variant.max_norm is not None:
        settings["clip"] = ClipByGlobalNorm(variant.max_norm)
    if variant.limit is not None:
        settings["clip"] = ClipByValue(variant.limit)
    if variant.loss_scale is not None:
        settings["mixed_precision"] = MixedPrecision(level="O0", init_scale=variant.loss_scale, growth_interval=2)
    cell = settings_of(variant, loss_cell_of(variant, network))
    return TrainOneStepCell(cell, optimizer_of(variant, network), **settings)


@contextmanager
def stock_step(variant: Variant) -> Iterator[nn.Cell]:
    """Build MindSpore's own step, with its settings in force, as its Model has them while it trains."""
    network = network_of(variant)
    stock = parallel_nn.GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), variant.micro_size)
    settings = settings_of(variant, stock)
    _init_auto_parallel_context(settings)
    try:
        step = _TrainGradAccuStepCell(stock, optimizer_of(variant, network))
        step.set_train()
        yield step
    finally:
        _clear_auto_parallel_context(settings)
        ms.set_auto_parallel_context(grad_accumulation_step=1)
