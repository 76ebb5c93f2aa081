"""Networks whose operators are sharded (dp x mp), and how they are trained: ours partitioned, and one whole batch."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llama import LazyLlamaLoss, Llama, LlamaLoss, tokens_of
from mindspore import Tensor, lazy_inline, nn, ops
from mindspore.parallel.auto_parallel import AutoParallel
from semi_auto_cells import WholeBatch, loss_of

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, MixedPrecision, TrainOneStepCell

ROWS = 16
UPDATES = 3


@dataclass(frozen=True)
class Sharded:
    """One way to train."""

    dp: int
    mp: int
    micro_size: int = 2
    level: str | None = None
    lazy: bool = False
    adam: bool = False
    weighted: bool = False
    max_norm: float | None = None
    loss_scale: float | None = None
    # Of a network of Llama's shape in place of two layers; its loss is weighted.
    llama: Llama | None = None


class TwoLayers(nn.Cell):
    """The first layer's columns are split over mp, the second's rows."""

    def __init__(self, dp: int, mp: int) -> None:
        super().__init__()
        rng = np.random.RandomState(0)
        self.first = nn.Dense(8, 16, weight_init=_random(rng, 16, 8), bias_init=_random(rng, 16))
        self.second = nn.Dense(16, 4, weight_init=_random(rng, 4, 16), bias_init=_random(rng, 4))
        self.relu = ops.ReLU().shard(((dp, mp),))
        self.first.matmul.shard(((dp, 1), (mp, 1)))
        self.first.bias_add.shard(((dp, mp), (mp,)))
        self.second.matmul.shard(((dp, mp), (1, mp)))
        self.second.bias_add.shard(((dp, 1), (1,)))

    def construct(self, x):
        return self.second(self.relu(self.first(x)))


class LazyTwoLayers(TwoLayers):
    """The same, compiled once for all micro batches."""

    @lazy_inline
    def __init__(self, dp: int, mp: int) -> None:
        super().__init__(dp, mp)


def _random(rng: Any, *shape: int) -> Tensor:
    return Tensor(rng.randn(*shape).astype(np.float32) * 0.3)


def loss_cell_of(variant: Sharded) -> nn.Cell:
    """Return a loss cell that starts with the same values every time."""
    if variant.llama is not None:
        shape = replace(variant.llama, dp=variant.dp, mp=variant.mp)
        return LazyLlamaLoss(shape) if variant.lazy else LlamaLoss(shape)
    return loss_of(variant, (LazyTwoLayers if variant.lazy else TwoLayers)(variant.dp, variant.mp))


def is_weighted(variant: Sharded) -> bool:
    """Return whether the loss cell returns a sum and its weight."""
    return variant.weighted or variant.llama is not None


def optimizer_of(variant: Sharded, network: nn.Cell) -> nn.Cell:
    """Return an optimizer with state."""
    if variant.adam:
        return nn.Adam(network.trainable_params(), 0.01)
    return nn.Momentum(network.trainable_params(), 0.1, 0.9)


def our_step(variant: Sharded) -> TrainOneStepCell:
    """Return our step around AutoParallel."""
    network = loss_cell_of(variant)
    cell = AutoParallel(GradAccumulation(network, variant.micro_size, weighted=is_weighted(variant)))
    cell.dataset_strategy(((variant.dp, 1), (variant.dp, 1)))
    if variant.level is not None:
        cell.hsdp(threshold=0, optimizer_level=variant.level)
    clip = None if variant.max_norm is None else ClipByGlobalNorm(variant.max_norm)
    scale = variant.loss_scale
    precision = None if scale is None else MixedPrecision(level="O0", init_scale=scale, growth_interval=2)
    return TrainOneStepCell(cell, optimizer_of(variant, network), clip=clip, mixed_precision=precision)


def batch_of(variant: Sharded, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows of a batch. Each update sees another one."""
    if variant.llama is not None:
        return tokens_of(variant.llama, ROWS, number)
    rng = np.random.RandomState(number)
    return rng.randn(ROWS, 8).astype(np.float32), rng.randn(ROWS, 4).astype(np.float32)


def whole_batch_of(variant: Sharded) -> WholeBatch:
    """Return what makes updates from the whole batch in one process."""
    loss = loss_cell_of(replace(variant, lazy=False))
    whole = WholeBatch(loss, optimizer_of(variant, loss), is_weighted(variant), variant.max_norm)
    return whole.set_train()
