"""Gradients that come reduced: hooks of the network, or the caller, have already added them up over the ranks.

HyperParallel's `hsdp` is recognised by its protocol. A cell has an `hsdp_scheduler` with `config.grad_scale`,
`requires_acc_grad`, `set_requires_grad_sync()`, `zero_grads()` and `hsdp_state.shard()`. Its parameters have hooks that
reduce; if a rank holds only a part of one between two steps, that parameter has an `hsdp_effective_shard_size`. A
forward pass leaves such parameters whole, until a backward pass or `shard()` cuts them.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_gradaccum._checks import first_line
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
    "For '{owner}', the network reduces its gradients in the last micro batch of a window and must "
    "know it beforehand, but got {got}. Write 'with accumulator.accumulate():' around each batch, "
    "or leave enable_grad_accumulation out."
)
UNSAVED = (
    "For '{owner}', a network that accumulates its own gradients must be saved right after an "
    "update, but got an open window. Leave enable_grad_accumulation out."
)


def schedulers_of(network: nn.Cell) -> list[Any]:
    """Return the schedulers that reduce the gradients of a network's cells by HyperParallel's protocol."""
    if not isinstance(network, nn.Cell):
        return []
    found = [getattr(cell, "hsdp_scheduler", None) for _, cell in network.cells_and_names()]
    return [each for each in found if each is not None]


def check_hooks_run(owner: str, eager: bool) -> None:
    """Raise if a network runs as a graph, which would not call the hooks that reduce its gradients."""
    if not eager:
        raise ValueError(
            f"For '{owner}', the hooks of the network reduce its gradients, but got a graph, which "
            f"calls no hooks. Call set_context(mode=PYNATIVE_MODE)."
        )


def check_reducing(
    owner: str, parallel: object, network: nn.Cell, schedulers: Sequence[Any]
) -> Reduced:
    """Return the kind of parallelism of a network that reduces its gradients itself, or raise."""
    if parallel != "auto" and not isinstance(parallel, Reduced):
        raise ValueError(
            f"For '{owner}', the argument 'parallel' must be 'auto' for a network that reduces its "
            f"gradients itself, but got {parallel!r}. They would be added up twice."
        )
    kind = parallel if isinstance(parallel, Reduced) else Reduced()
    if kind.mean:
        raise ValueError(
            f"For '{owner}', the argument 'parallel' must be 'auto' for a network of hsdp(), but "
            f"got {parallel!r}. Leave it out."
        )
    check_hooks_run(owner, runs_eagerly(False))
    for each in schedulers:
        if not all(hasattr(each, name) for name in _PROTOCOL) or not hasattr(
            each.config, "grad_scale"
        ):
            raise ValueError(
                f"For '{owner}', the argument 'network' must come from hsdp(), but got a "
                f"{type(each).__name__} of another function. Use hsdp() in place of fully_shard()."
            )
    scales = {(each.config.grad_scale, bool(each.requires_acc_grad)) for each in schedulers}
    if len(scales) > 1:
        raise ValueError(
            f"For '{owner}', the argument 'network' must have one grad_scale and one "
            f"enable_grad_accumulation, but got {sorted(scales)}. Give all its parts the same "
            f"settings."
        )
    for parameter in network.trainable_params():
        if not parameter.hooks():
            raise ValueError(
                f"For '{owner}', the argument 'network' must reduce all its gradients over the "
                f"processes, but got {parameter.name!r} without a hook for it. Give the whole "
                f"network to hsdp()."
            )
    try:
        for each in schedulers:
            each.zero_grads()
    except RuntimeError as error:
        raise ValueError(
            f"For '{owner}', the argument 'network' must accumulate its gradients with operators "
            f"of this device, but got {first_line(error)}. Leave enable_grad_accumulation out."
        ) from error
    return kind


def check_not_late(owner: str, network: nn.Cell) -> None:
    """Raise if a network reduces its gradients although its training step was built for one that does not."""
    if schedulers_of(network):
        raise RanksDiffer(
            f"For '{owner}', hsdp() must come before the optimizer and the training step, but got "
            f"it afterwards. Call hsdp() first, or the gradients are added up twice."
        )


class ReducedReducer(DataParallelReducer):
    """Reducer for gradients that are already reduced, e.g. by hooks: it adds up only loss, weight and squares."""

    is_empty = True  # True until the first micro batch of a window.

    def __init__(
        self,
        optimizer: nn.Cell,
        buffer: GradientBuffer,
        layout: Layout,
        settings: Reduced,
        network: nn.Cell,
    ) -> None:
        super().__init__(optimizer, buffer, layout)
        ranks = layout.world.size
        self.is_distributed = ranks > 1
        self.grads_are_reduced = True
        self.schedulers = schedulers_of(network)
        # True if the network accumulates its gradients itself and reduces them in the last micro batch of a window.
        self.accumulates = any(each.requires_acc_grad for each in self.schedulers)
        sizes = list(map(shard_size_of, optimizer.parameters))
        self.has_shards = max(sizes) > 1
        # The share of each gradient's squares that a rank adds to the norm.
        self.shares = Tensor(np.divide(sizes, ranks), ms.float32)
        # The factor that undoes a mean over ranks and the network's own scale.
        scale = self.schedulers[0].config.grad_scale if self.schedulers else 1.0
        factor = (ranks if settings.mean else 1.0) / scale
        self.is_scaled = factor != 1.0
        self.factor = Tensor(factor, ms.float32)
        # If gradients were not reduced, the first update shows it.
        self.checks_next = self.is_distributed
        self.restart()

    def max_micro_batches(self, micro_batches: int) -> int:
        counts = gather_counts("begins a batch", micro_batches)
        if len(set(counts)) > 1:
            raise ValueError(
                f"For 'GradAccumulation', a network that communicates must have equally many micro "
                f"batches on all ranks, but got {counts}. Give each rank as many batches, of at "
                f"least micro_size rows."
            )
        return micro_batches

    def check_window(self, owner: str) -> None:
        if self.holds_grads:
            raise RuntimeError(UNKNOWN_LAST.format(owner=owner, got="the end of one in its middle"))
        if not self.factors:
            return
        hashes = gather_counts("ends a window", zlib.crc32(np.array(self.factors).tobytes()) >> 1)
        differ_here = self.accumulates and len(set(self.factors)) > 1
        if differ_here or len(set(hashes)) > 1:
            raise ValueError(
                f"For '{owner}', the argument 'weight' must be the same for all batches of a "
                f"window whose means the network adds up, but got {self.factors} on this rank. "
                f"Differentiate sums and give reduction='sum'."
            )

    def begin_micro_batch(self, is_last: bool) -> None:
        if self.accumulates:
            for each in self.schedulers:
                if self.is_empty:
                    each.zero_grads()
                each.set_requires_grad_sync(is_last)
            self.is_empty = False
            self.holds_grads = not is_last

    def end_micro_batch(self, factor: float | None = None) -> None:
        if factor is not None:
            self.factors.append(factor)
        if self.schedulers and getattr(self.schedulers[0].config, "comm_async", False):
            self.schedulers[0].platform.wait_grad_handle()

    def reshard(self) -> None:
        for each in self.schedulers:
            each.hsdp_state.shard()

    def restart(self) -> None:
        self.is_empty = True
        self.holds_grads = self.accumulates
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
    parameters = optimizer.parameters
    for value in vars(optimizer).values():
        if not isinstance(value, ParameterTuple) or len(value) != len(parameters):
            continue
        for item, parameter in zip(value, parameters):
            if item.ndim == parameter.ndim and item.shape != parameter.shape:
                raise ValueError(
                    f"For '{owner}', the argument 'optimizer' must be built from the network's "
                    f"shards, but got the state {item.name!r} of shape {tuple(item.shape)}. Build "
                    f"it after hsdp() has cut the parameters."
                )
