"""Gradients that come reduced: hooks of the network, or the caller, have already added them up over the ranks.

HyperParallel's `hsdp` is recognised by its protocol. A cell has an `hsdp_scheduler` with `config.grad_scale`,
`requires_acc_grad`, `set_requires_grad_sync()`, `zero_grads()` and `hsdp_state.shard()`. Its parameters have hooks that
reduce; if a rank holds only a part of one between two steps, that parameter has an `hsdp_effective_shard_size`. A
forward pass leaves such parameters whole, until a backward pass or `shard()` cuts them.
"""

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_gradaccum._checks import argument_error, first_line, require
from ms_gradaccum.backend.arithmetic import scale_wide
from ms_gradaccum.backend.compiled import runs_eagerly
from ms_gradaccum.backend.tensors import map_tensors
from ms_gradaccum.gradients.buffer import GradientBuffer
from ms_gradaccum.parallel.kinds import Reduced
from ms_gradaccum.parallel.layout import Layout, shard_size_of
from ms_gradaccum.parallel.reducer import DataParallelReducer
from ms_gradaccum.parallel.world import RanksDiffer, gather_counts

_PROTOCOL = ("config", "requires_acc_grad", "set_requires_grad_sync", "zero_grads", "hsdp_state")
UNKNOWN_LAST = (
    "For '{owner}', a network that reduces its gradients in the last micro batch of a window must know it beforehand, "
    "but got {got}. Write 'with accumulator.accumulate():' around each batch, or leave enable_grad_accumulation out."
)
UNSAVED = (
    "For '{owner}', a state must be saved right after an update where the network adds up its gradients itself, but "
    "got an open window. Leave enable_grad_accumulation out."
)


def schedulers_of(network: nn.Cell) -> list[Any]:
    """Return the schedulers that reduce the gradients of a network's cells by HyperParallel's protocol."""
    cells = network.cells_and_names() if isinstance(network, nn.Cell) else ()
    return [each for _, cell in cells if (each := getattr(cell, "hsdp_scheduler", None)) is not None]


def check_hooks_run(owner: str, eager: bool) -> None:
    """Raise if a network runs as a graph, which would not call the hooks that reduce its gradients."""
    rule, got = "run op by op for hooks that reduce its gradients", "a graph, which calls none"
    require(eager, owner, "network", rule, got, "Call set_context(mode=PYNATIVE_MODE).")


def check_reducing(owner: str, parallel: object, network: nn.Cell, schedulers: Sequence[Any]) -> Reduced:
    """Return the kind of parallelism of a network that reduces its gradients itself, or raise."""
    rule, remedy = "'auto' for a network that reduces its gradients itself", "They would be added up twice."
    require(parallel == "auto" or isinstance(parallel, Reduced), owner, "parallel", rule, repr(parallel), remedy)
    if isinstance(parallel, Reduced) and parallel.mean:
        rule, remedy = "'auto' for a network of hsdp(), which says itself how it scales", "Leave it out."
        raise ValueError(argument_error(owner, "parallel", rule, repr(parallel), remedy))
    check_hooks_run(owner, runs_eagerly(False))
    for each in schedulers:
        says = all(map(partial(hasattr, each), _PROTOCOL)) and hasattr(each.config, "grad_scale")
        rule, got = "one of hsdp(), which says how it reduces", f"a {type(each).__name__}, which does not"
        require(says, owner, "network", rule, got, "Use hsdp() in place of fully_shard().")
    scales = {(each.config.grad_scale, bool(each.requires_acc_grad)) for each in schedulers}
    rule = "one with one grad_scale and enable_grad_accumulation"
    require(len(scales) == 1, owner, "network", rule, sorted(scales), "Give each part of the network the same ones.")
    rule, remedy = "one that reduces all its gradients over all processes", "Give the whole network to hsdp()."
    for parameter in network.trainable_params():
        got = f"{parameter.name!r}, which has no hook that reduces it"
        require(parameter.hooks(), owner, "network", rule, got, remedy)
    try:
        for each in schedulers:
            each.zero_grads()
    except RuntimeError as error:
        got, remedy = first_line(error), "Leave enable_grad_accumulation out."
        rule = "one that adds up its gradients with operators of this device"
        raise ValueError(argument_error(owner, "network", rule, got, remedy)) from error
    return parallel if isinstance(parallel, Reduced) else Reduced()


def check_not_late(owner: str, network: nn.Cell) -> None:
    """Raise if a network reduces its gradients although its training step was built for one that does not."""
    if schedulers_of(network):
        raise RanksDiffer(
            f"For '{owner}', hsdp() must come before the optimizer and the training step, but got it afterwards. Call "
            f"hsdp() first: the step would add up the gradients once more."
        )


class ReducedReducer(DataParallelReducer):
    """Reducer for gradients that are already reduced, e.g. by hooks: it adds up only loss, weight and squares."""

    is_empty = True  # True until the first micro batch of a window.

    def __init__(
        self, optimizer: nn.Cell, buffer: GradientBuffer, layout: Layout, rank: int, settings: Reduced, network: nn.Cell
    ) -> None:
        super().__init__(optimizer, buffer, layout, rank, settings)
        ranks = layout.world.size
        self.is_distributed = ranks > 1
        self.grads_are_reduced = True
        self.schedulers = schedulers_of(network)
        # True if the network accumulates its gradients itself and reduces them in the last micro batch of a window.
        self.accumulates = any(each.requires_acc_grad for each in self.schedulers)
        self.has_shards = any(shard_size_of(parameter) > 1 for parameter in optimizer.parameters)
        # The factor that undoes a mean over ranks and the network's own scale.
        scale = self.schedulers[0].config.grad_scale if self.schedulers else 1.0
        self.is_scaled = settings.mean or scale != 1.0
        self.factor = Tensor((ranks if settings.mean else 1.0) / scale, ms.float32)
        self.shares = Tensor(layout.shares, ms.float32)
        self.checks_next = self.is_distributed  # If gradients were not reduced, the first update shows it.
        self.restart()

    def max_micro_batches(self, micro_batches: int) -> int:
        counts = gather_counts("begins a batch", micro_batches)
        if len(set(counts)) > 1:
            raise ValueError(
                f"For 'GradAccumulation', a batch must have as many micro batches on all ranks where the network "
                f"itself communicates, but got {counts}. Give each rank as many batches, of at least micro_size rows."
            )
        return micro_batches

    def check_window(self, owner: str) -> None:
        if self.holds_grads:
            raise RuntimeError(UNKNOWN_LAST.format(owner=owner, got="the end of one in its middle"))
        factors = self.factors
        own = zlib.crc32(np.array(factors).tobytes()) >> 1
        hashes = gather_counts("ends a window", own) if factors else []
        is_one = len(set(hashes)) <= 1 and not (self.accumulates and len(set(factors)) > 1)
        rule, remedy = "the same for all means that the network adds up", "Differentiate sums and give reduction='sum'."
        require(is_one, owner, "weight", rule, f"{factors} on this rank", remedy)

    def begin_micro_batch(self, is_last: bool) -> None:
        if self.accumulates:
            for each in self.schedulers:
                if self.is_empty:
                    each.zero_grads()
                each.set_requires_grad_sync(is_last)
            self.is_empty, self.holds_grads = False, not is_last

    def end_micro_batch(self, factor: float | None = None) -> None:
        if factor is not None:
            self.factors.append(factor)
        for each in self.schedulers[:1]:
            if getattr(each.config, "comm_async", False):
                each.platform.wait_grad_handle()

    def reshard(self) -> None:
        for each in self.schedulers:
            each.hsdp_state.shard()

    def restart(self) -> None:
        self.is_empty, self.holds_grads = True, self.accumulates
        self.factors: list[float] = []  # The factors of the caller's gradients in this window.

    def reduce_scatter_micro_batch(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.is_scaled:
            grads = map_tensors(ops.partial(scale_wide, self.factor), grads)
        return grads

    def all_reduce_squares(self, squares: Tensor) -> Tensor:
        return self.all_reduce_world(squares * self.shares) if self.has_shards else squares

    def shared(self) -> tuple[Parameter, ...]:
        return tuple(parameter for parameter in self.parameters if shard_size_of(parameter) == 1)


def check_state(owner: str, optimizer: nn.Cell) -> None:
    """Raise if the optimizer was built before its parameters were sharded."""
    shapes = [parameter.shape for parameter in optimizer.parameters]
    for value in vars(optimizer).values():
        if isinstance(value, ParameterTuple) and len(value) == len(shapes):
            for item, shape in zip(value, shapes):
                fits = item.ndim != len(shape) or item.shape == shape
                rule, got = "one of the network's shards", f"the state {item.name!r} of shape {tuple(item.shape)}"
                require(fits, owner, "optimizer", rule, got, "Build it after hsdp() has cut the parameters.")
