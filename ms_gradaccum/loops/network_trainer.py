"""A network in a hand-written loop, with the optimizers of its weights and the sums of its window."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype

from ms_gradaccum._checks import check_loss, sentence, warn_of_dropped
from ms_gradaccum.backend.compiled import Compiled
from ms_gradaccum.backend.optimizers import check_optimizer
from ms_gradaccum.gradients.clipping import ClipByGroupNorm, ClipByValue
from ms_gradaccum.gradients.mixed_precision import Precision
from ms_gradaccum.loops.external_gradients import AddGrads
from ms_gradaccum.parallel.data_parallel import DataParallel
from ms_gradaccum.parallel.factory import build_parallel, check_parallel
from ms_gradaccum.parallel.semi_auto import SemiAuto
from ms_gradaccum.training.grad_accumulation import as_grad_accumulation
from ms_gradaccum.training.micro_steps import MicroSteps
from ms_gradaccum.training.step_output import StepOutput
from ms_gradaccum.training.window import Window

_OWNER = "Accumulator"


class TrainedNetwork:
    """The sums of one network, from the gradients of its micro batches to the update of its optimizers.

    Args:
        network: A loss cell, or a GradAccumulation.
        optimizers: The optimizers of its weights.
        clip: Clipping of its mean gradient where the caller chooses none.
        parallel: What the caller has said.
        sync_each_batch: Whether the ranks add up their gradients in each micro batch.
        precision: What computes in 16 bits, and the loss scale.
        drops: Whether a micro batch that is not finite is left out.
        settings: What all ranks must agree about.
        compiles: Whether code of the user's is compiled in PYNATIVE mode too.
    """

    # What the end of the window has measured; its clip.
    outputs: list[StepOutput] | None = None
    clip: nn.Cell | None = None
    # What the caller has last clipped with, for a process that joins in an update of the others.
    last_clip: nn.Cell | None = None

    def __init__(
        self,
        network: Any,
        optimizers: Sequence[Any],
        clip: Any,
        parallel: Any,
        sync_each_batch: bool,
        precision: Precision,
        drops: bool,
        settings: dict[str, Any],
        compiles: bool = False,
    ) -> None:
        _check_groups(clip, optimizers)
        kind = _with_sync(check_parallel(_OWNER, parallel, network), sync_each_batch)
        self.network = as_grad_accumulation(_OWNER, network)
        for optimizer in optimizers:
            check_optimizer(_OWNER, optimizer, self.network)
        # What the caller knows it by.
        self.names = (self.network, self.network.network)
        self.network = self.network.in_precision(_OWNER, precision)
        self.loss_scale = precision.loss_scale
        self.optimizers = list(optimizers)
        self.weights = [optimizer.parameters for optimizer in optimizers]
        _check_disjoint(self.weights)
        self.parallels = [
            build_parallel(_OWNER, kind, each, self.network, settings, drops, precision.reduce_dtype)
            for each in optimizers
        ]
        self.several = self.parallels[0].several
        self.micro_steps = MicroSteps(_OWNER, self.network, self.parallels, self.weights, precision, drops, compiles)
        self.windows = [
            Window(_OWNER, optimizer, clip, each, self.loss_scale, compiles)
            for optimizer, each in zip(optimizers, self.parallels)
        ]
        self.add_grads_cell = AddGrads(self.parallels, drops)
        self.run_add_grads = Compiled(lambda: self.add_grads_cell, _OWNER, "the sum")
        # Whether there is something in the buffers, and whether the current batch has put something there.
        self.is_open = self.has_batch = False

    def backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Add one batch and return its mean loss."""
        try:
            outputs = self.micro_steps.run(args, kwargs)
        except BaseException:
            if self.micro_steps.has_added:
                self._abandon()
            raise
        self.is_open = self.has_batch = True
        return _mean_loss([output[:2] for output in outputs])

    def add_grads(self, grads: Any, weight: float, loss: Any, factor: float) -> None:
        """Add one batch of which the caller has taken the gradients."""
        grads = _check_grads(grads, [weight for group in self.weights for weight in group])
        loss = check_loss(_OWNER, loss)
        self.run_add_grads(*(Tensor(number, ms.float32) for number in (loss * factor, weight, factor)), *grads)
        self.is_open = self.has_batch = True

    def join(self) -> None:
        """Take part in a batch of the other processes without one."""
        self.micro_steps.join()
        self.is_open = self.has_batch = True

    def so_far(self) -> StepOutput:
        """Return the report on a window that goes on."""
        return self.windows[0].so_far()

    def batches_in_buffer(self) -> int:
        """Return how many batches a compiled function has left in the buffer."""
        return int(self.parallels[0].buffer.batches.asnumpy())

    def check_clip_with(self, clip: nn.Cell) -> None:
        """Raise if ``clip`` cannot clip in the coming step, because something else does."""
        if self.clip is not None and type(self.clip) is not type(clip):
            raise RuntimeError(
                f"For '{_OWNER}', an update must be clipped by its norm or by value, but got both. Call one of "
                f"clip_grad_norm() and clip_grad_value()."
            )

    def measure(self) -> StepOutput:
        """Return the report of the window, which is full, before clipping and update."""
        if self.outputs is None:
            self.outputs = [window.measure() for window in self.windows]
            if len(self.outputs) > 1:
                self.outputs = _as_one_gradient(self.outputs)
        return self.outputs[0]

    def step(self) -> StepOutput:
        """Update, empty the buffers and return the report."""
        self.measure()
        outputs, clip = self.outputs or [], self.clip
        self._close()
        try:
            outputs = [window.finish(output, clip) for window, output in zip(self.windows, outputs)]
            self.windows[0].adjust(outputs[0])
        except BaseException:
            self.drop()
            raise
        return (
            outputs[0]
            if len(outputs) == 1
            else _as_one_report(outputs, clip or self.windows[0].update.gradients.clip.clip)
        )

    def drop(self) -> None:
        """Throw the window away."""
        for parallel in self.parallels:
            parallel.buffer.clear()
        self._close()

    def _abandon(self) -> None:
        """Take back what a failed batch has added: the sums cannot be parted, so an open window goes with it."""
        batches = self.batches_in_buffer() if self.is_open else 0
        self.drop()
        warn_of_dropped(_OWNER, batches)

    def _close(self) -> None:
        self.is_open, self.outputs, self.clip = False, None, None


def _with_sync(kind: Any, sync_each_batch: bool) -> Any:
    """Return the kind of parallelism with the setting of AccumulationConfig."""
    if isinstance(kind, SemiAuto):
        got, remedy = (
            "AutoParallel on this device",
            "Use TrainOneStepCell or Model: the compiler partitions a whole step.",
        )
        raise ValueError(sentence(_OWNER, "network", "for a loop whose micro batches are run one by one", got, remedy))
    if isinstance(kind, DataParallel) and kind.overlap:
        remedy = "Its step() adds up the gradients; overlap is for TrainOneStepCell and Model."
        raise ValueError(sentence(_OWNER, "parallel", "one without overlap", repr(kind), remedy))
    if not sync_each_batch or kind is None:
        return kind
    if isinstance(kind, DataParallel):
        return replace(kind, sync_each_batch=True)
    if kind.sync_each_batch:
        return kind
    remedy = "Give HSDP(optimizer_level='level2'), which shares the gradients of each micro batch."
    raise ValueError(sentence(_OWNER, "parallel", "one that sync_each_batch fits", repr(kind), remedy))


def _check_groups(clip: Any, optimizers: Sequence[Any]) -> None:
    if isinstance(clip, ClipByGroupNorm) and len(optimizers) > 1:
        remedy = "A group would be two: use one optimizer, or ClipByGlobalNorm."
        got = f"{clip!r} with {len(optimizers)} optimizers"
        raise ValueError(sentence(_OWNER, "clip", "one for all optimizers of a network", got, remedy))


def _check_disjoint(weights: list[Any]) -> None:
    seen: set[int] = set()
    for weight in (weight for group in weights for weight in group):
        if id(weight) in seen:
            remedy = "Give each parameter to one optimizer."
            got = f"{weight.name!r} in two of them"
            raise ValueError(sentence(_OWNER, "optimizer", "optimizers of different parameters", got, remedy))
        seen.add(id(weight))


def _check_grads(grads: Any, weights: list[Any]) -> tuple[Tensor, ...]:
    remedy = "Take them with value_and_grad(forward, None, optimizer.parameters)."
    if isinstance(grads, Tensor):
        grads = (grads,)
    if not isinstance(grads, (tuple, list)) or not all(isinstance(grad, Tensor) for grad in grads):
        raise TypeError(sentence(_OWNER, "grads", "a tuple of tensors", type(grads).__name__, remedy))
    found = [tuple(grad.shape) for grad in grads]
    expected = [tuple(weight.shape) for weight in weights]
    if found != expected:
        rule = f"gradients of the optimizer's {len(expected)} parameters, of shapes {expected}"
        raise ValueError(sentence(_OWNER, "grads", rule, f"shapes {found}", remedy))
    strange = [str(grad.dtype) for grad in grads if grad.dtype not in mstype.float_type]
    if strange:
        raise TypeError(sentence(_OWNER, "grads", "floating-point tensors", f"one of {strange[0]}", remedy))
    # A graph takes no parameter as an input, and somebody may keep gradients in some.
    return tuple(grad.value() if isinstance(grad, Parameter) else grad for grad in grads)


def _mean_loss(parts: list[Any]) -> Tensor:
    """Return the mean loss of a batch from the loss sums and weights of its micro batches, per term or not."""
    # From the host: of the ways to add a few numbers it is the quickest.
    sums = np.array([[value.asnumpy() for value in part] for part in parts], np.float64).sum(0)
    mean = np.divide(sums[0], sums[1], out=np.zeros_like(sums[0]), where=sums[1] != 0)
    return Tensor(mean.sum(), ms.float32)


def _total_norm(norms: list[Tensor]) -> Tensor:
    return Tensor(math.hypot(*(float(norm.asnumpy()) for norm in norms)), ms.float32)


def _as_one_gradient(outputs: list[StepOutput]) -> list[StepOutput]:
    """Let the gradients of several optimizers have one norm and one fate."""
    norm = _total_norm([output.grad_norm for output in outputs])
    overflow = Tensor(any(bool(output.overflow.asnumpy()) for output in outputs))
    updated = Tensor(all(bool(output.updated.asnumpy()) for output in outputs))
    together = {"overflow": overflow, "updated": updated, "grad_norm": norm, "clipped_grad_norm": norm}
    return [output._replace(**together) for output in outputs]


def _as_one_report(outputs: list[StepOutput], clip: nn.Cell) -> StepOutput:
    rates = np.concatenate([output.learning_rate.asnumpy().reshape(-1) for output in outputs])
    clipped = outputs[0].clipped_grad_norm
    if isinstance(clip, ClipByValue) and outputs[0].updated.asnumpy():
        clipped = _total_norm([output.clipped_grad_norm for output in outputs])
    return outputs[0]._replace(learning_rate=Tensor(rates), clipped_grad_norm=clipped)


def pair_networks(network: Any, optimizer: Any) -> list[tuple[Any, list[Any]]]:
    """Return each network with its optimizers."""
    networks = list(network) if isinstance(network, (list, tuple)) else [network]
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    remedy = "Several networks take a list with the optimizer (or optimizers) of each."
    for name, items in (("network", networks), ("optimizer", optimizers)):
        if not items:
            raise ValueError(sentence(_OWNER, name, "at least one", "an empty list", remedy))
    if any(isinstance(each, (list, tuple)) and not each for each in optimizers):
        raise ValueError(sentence(_OWNER, "optimizer", "at least one per network", "an empty list", remedy))
    if len({id(each) for each in networks}) < len(networks):
        got, remedy = "one of them twice", "Nobody could tell its batches apart: put its losses into one cell."
        raise ValueError(sentence(_OWNER, "network", "different networks", got, remedy))
    if len(networks) == 1 and not isinstance(optimizers[0], (list, tuple)):
        return [(networks[0], optimizers)]
    if len(networks) != len(optimizers):
        got = f"{len(optimizers)} for {len(networks)} networks"
        raise ValueError(sentence(_OWNER, "optimizer", "one per network", got, remedy))
    groups = [list(each) if isinstance(each, (list, tuple)) else [each] for each in optimizers]
    if len({id(each) for group in groups for each in group}) < sum(len(group) for group in groups):
        got, remedy = "one of them twice", "Put losses that train the same weights into one cell."
        raise ValueError(sentence(_OWNER, "optimizer", "different optimizers", got, remedy))
    return list(zip(networks, groups))
