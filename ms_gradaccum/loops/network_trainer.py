"""A network in a hand-written loop, with its optimizers and its window."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype

from ms_gradaccum._checks import (
    State,
    check_float,
    check_loss,
    check_saved,
    is_positive,
    listed,
    warn,
)
from ms_gradaccum.backend.arithmetic import ONE, Tensors, as_dtype
from ms_gradaccum.backend.arrays import as_array
from ms_gradaccum.backend.compiled import Compiled, runs_eagerly
from ms_gradaccum.backend.mindspore_private import primexpr
from ms_gradaccum.backend.optimizers import check_optimizer
from ms_gradaccum.backend.tensors import map_tensors
from ms_gradaccum.gradients.buffer import reciprocal
from ms_gradaccum.gradients.clipping import Clip, ClipByGlobalNorm, ClipByValue
from ms_gradaccum.loops.schedule import AccumulationConfig
from ms_gradaccum.parallel.factory import build_reducers, check_parallel
from ms_gradaccum.parallel.kinds import DataParallel, Kind
from ms_gradaccum.parallel.reduced import check_not_late
from ms_gradaccum.parallel.semi_auto import SemiAuto
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.grad_accumulation import as_grad_accumulation
from ms_gradaccum.training.micro_step import AddMicroBatch, where_finite
from ms_gradaccum.training.micro_steps import WindowBatch
from ms_gradaccum.training.settings import StepSettings
from ms_gradaccum.training.window import Window

_OWNER = "Accumulator"
_FROM = "Take them with value_and_grad(forward, None, optimizer.parameters)."


class TrainedNetwork(Window):
    """The window of one network of a loop."""

    has_batch = False  # True if the buffers contain parts of the current batch.
    # The last clip of the caller, for a process that joins an update of the others.
    last_clip: Clip | None = None

    def __init__(
        self,
        network: nn.Cell,
        optimizers: Sequence[nn.Cell],
        settings: StepSettings,
        config: AccumulationConfig,
        events: Events,
    ) -> None:
        if len(optimizers) > 1 and (settings.clip.has_groups or settings.clip.is_own):
            raise ValueError(
                f"For 'Accumulator', the argument 'clip' must be one for all optimizers of a "
                f"network, but got {settings.clip!r} with {len(optimizers)} optimizers. Use one "
                f"optimizer, or ClipByGlobalNorm."
            )
        kind = _with_sync(
            check_parallel(_OWNER, settings.parallel, network), config.sync_each_batch
        )
        network = as_grad_accumulation(_OWNER, network)
        for optimizer in optimizers:
            check_optimizer(_OWNER, optimizer, network)
        _check_disjoint(optimizers)
        self.names = (network, network.network)  # The caller's network, and the network inside.
        network = network.in_precision(_OWNER, settings.precision)
        agreed = {**settings.agreed(), "config": config.as_text()}
        reducers = build_reducers(_OWNER, kind, network, optimizers, agreed, **settings.of_sums())
        super().__init__(
            network,
            optimizers,
            reducers,
            replace(settings, window_length=config.window_length),
            events,
        )
        self.add_grads_cell = AddGrads(self.reducers, None, settings.drop_non_finite)
        self.mistakes: Counter[str] = Counter()
        # Compiled twice: with gradients, and without, for a network that keeps them until the end of a window.
        self.run_add_grads = Compiled(
            lambda: self.add_grads_cell, _OWNER, "the sum", needs_fixed=True
        )
        self.run_mean_loss = Compiled(BatchMeanLoss, _OWNER, "the mean loss", needs_fixed=True)

    def state_dict(self) -> dict[str, object]:
        state = super().state_dict()
        if self.last_clip is not None:
            (limit,) = self.last_clip.inputs()
            state[type(self.last_clip).__name__] = float(limit)
        return state

    def load_state_dict(self, saved: State) -> None:
        super().load_state_dict(saved)
        self.last_clip = None
        for kind in (ClipByGlobalNorm, ClipByValue):
            if kind.__name__ in saved:
                limits = check_saved(saved, "how its loop clips", {kind.__name__: is_positive})
                self.last_clip = kind(limits[kind.__name__])

    def begin_batch(self, is_last: bool) -> None:
        """Begin a batch, maybe the last one of its window."""
        self.has_batch = False
        if runs_eagerly(compiles=False):  # The caller may compute its gradients.
            self.micro_steps.jit_parts.follow()
        self.reducers[0].begin_micro_batch(is_last)

    def checked_weight(self, weight: object) -> float | None:
        """Return the caller's weight of a batch as a number. Raise if its micro batches have weights of their own."""
        if weight is None:
            return None
        network = self.network
        if "weight" in network.argument_names:
            raise ValueError(
                "For 'Accumulator', the argument 'weight' must be given by position to a network "
                "with an input 'weight', but got it by name. Such a network cannot give a batch "
                "its weight."
            )
        if network.needs_all_rows or network.weighted:
            raise ValueError(
                f"For 'Accumulator', the argument 'weight' must be None for a network with weights "
                f"of its own or a loss over all rows, but got {weight}. Leave it out."
            )
        if network.splits:
            raise ValueError(
                f"For 'Accumulator', the argument 'weight' must be None for a batch that is split, "
                f"but got {weight}. Let the network return (loss_mean, weight), and give "
                f"GradAccumulation weighted='mean'."
            )
        return check_weight(weight)

    def backward(self, batch: WindowBatch) -> Tensor:
        """Add one batch, and return its mean loss."""
        try:
            outputs = self.add(batch)
        except BaseException as error:
            self.has_batch = self.can_continue_after(error)  # The other ranks count it as a batch.
            raise
        self.has_batch = True
        sums = [output[0] for output in outputs]
        weights = [output[1] for output in outputs]
        mean: Tensor = sums[0]
        if weights[0] is not ONE:  # Otherwise it is the mean loss of the only micro batch.
            mean = self.run_mean_loss(*sums, *weights)
        elif isinstance(mean, Parameter):
            mean = mean + 0.0  # A copy.
        return as_dtype(mean, ms.float32)

    def add_grads(self, grads: object, weight: float, loss: object, factor: float) -> None:
        """Add one batch with gradients that the caller has computed."""
        number = check_loss(_OWNER, loss)
        parameters = [*self.micro_steps.parameters]
        if not self.grads_are_reduced and any(each.hooks() for each in parameters):
            check_not_late(_OWNER, self.network)
        added: Tensors = ()
        if not self.reducers[0].holds_grads:
            added = _check_grads(grads, parameters)
        self.micro_steps.events.tell("on_micro_batch_begin", 0)
        self.reducers[0].end_micro_batch(factor)
        sums = (
            Tensor(factor, ms.float32),
            Tensor(number * factor, ms.float32),
            Tensor(weight, ms.float32),
        )
        self.run_add_grads(*sums, *added)
        if self.ranks.is_on and self.ranks.first is None and not self.grads_are_reduced:
            # Leave out gradients with Inf or NaN or only zeros: they are equal for different data.
            self.ranks.note_first("gradients", list(filter(_is_telling, added)))
        if self.advisor.is_on:
            self.advisor.after_gradients(added)
        self.has_batch = True
        self.has_loss = self.has_loss and loss is not None
        self.micro_steps.events.micro_batch_end(0)

    def backward_of(self, loss: Any, weight: float) -> Tensor:
        """Run the backward pass of a tensor, and add the gradients that it stores in the parameters."""
        if not hasattr(loss, "backward"):
            raise TypeError(
                "For 'Accumulator', the argument 'args' must be a batch, as the network takes it, "
                "but got one number. Call backward(*batch), which returns the loss."
            )
        parameters = self.micro_steps.parameters
        for parameter in parameters:
            parameter.grad = None
        (loss * self.loss_scale.value()).backward()
        grads = tuple(
            ops.zeros_like(each) if each.grad is None else each.grad for each in parameters
        )
        for parameter in parameters:
            parameter.grad = None
        self.add_grads(grads, weight, loss, weight)
        return loss

    def note_step(self) -> None:
        """Warn of a loop that calls step(), but has never given gradients."""
        steps = self.micro_steps
        if (
            steps.events.micro_batches
            or steps.events.updates
            or self.reducers[0].buffer.counts_in_graph
        ):
            return
        remedy = (
            "Call accumulator(grads, weight=rows, loss=loss) or accumulator.backward(*batch) for "
            "each batch."
        )
        if any(getattr(each, "grad", None) is not None for each in steps.parameters):
            remedy = "Call accumulator.backward(loss, weight=rows) in place of loss.backward()."
        self._note_mistake("step() must follow its backward()", "the first 4 without one", remedy)

    def throw_away(self) -> None:
        """Discard a full window. Warn of a loop that does so from the start: it calls step() too late or never."""
        self.discard()
        if self.micro_steps.events.updates == 0:
            rule = "a full window must be followed by step()"
            self._note_mistake(
                rule, "zero_grad() for the first 4", "Call step() before zero_grad()."
            )

    def _note_mistake(self, rule: str, got: str, remedy: str) -> None:
        """Warn of a mistake at its fourth occurrence."""
        self.mistakes[rule] += 1
        if self.mistakes[rule] == 4:
            warn(str(disorder(rule, f"{got}, so nothing has been trained yet", remedy)))


class AddGrads(AddMicroBatch):
    """Add gradients that the caller has computed to the buffers."""

    def construct(self, factor: Tensor, value: Tensor, weight: Tensor, *grads: Tensor) -> Tensors:
        """Add ``factor`` times the gradients and the loss sum ``value``, or nothing if it is 0. Return as `added`."""
        # A mean over nothing is 0 / 0.
        has_rows = factor != 0.0
        if len(grads) > 0:
            grads = map_tensors(ops.partial(where_finite, has_rows), grads)
        return self.added(where_finite(has_rows, value), weight, factor, grads, ())


class BatchMeanLoss(nn.Cell):
    """The mean loss of a batch from the loss sums and weights of its micro batches, without a read from the device."""

    def construct(self, *parts: Tensor) -> Tensor:
        count = len(parts) // 2
        total = ops.addn(parts[:count])
        weight = ops.addn(parts[count:])
        return ops.cast(total * reciprocal(weight), ms.float32)


def check_weight(weight: object) -> float:
    """Return the weight of a batch as a number."""
    return check_float(
        _OWNER, "weight", weight, "It is the number of rows or tokens of the batch.", least=0
    )


def disorder(rule: str, got: str, remedy: str) -> Exception:
    return RuntimeError(f"For 'Accumulator', {rule}, but got {got}. {remedy}")


def _is_telling(grad: Tensor) -> bool:
    array = as_array(grad)
    return bool(np.isfinite(array).all() and array.any())


def _with_sync(kind: Kind | SemiAuto | None, sync_each_batch: bool) -> Kind | None:
    """Return the kind of parallelism with the setting of AccumulationConfig."""
    if isinstance(kind, SemiAuto):
        raise ValueError(
            "For 'Accumulator', the argument 'network' must not be in AutoParallel on this device, "
            "but got AutoParallel. Use TrainOneStepCell or Model: the compiler partitions a whole "
            "step."
        )
    if not sync_each_batch or kind is None:
        return kind
    if isinstance(kind, DataParallel):
        return replace(kind, sync_each_batch=True)
    if not kind.sync_each_batch:
        raise ValueError(
            f"For 'Accumulator', the argument 'parallel' must share the gradients of each micro "
            f"batch for sync_each_batch, but got {kind!r}. Give HSDP(optimizer_level='level2')."
        )
    return kind


def _check_disjoint(optimizers: Sequence[nn.Cell]) -> None:
    seen: set[int] = set()
    for optimizer in optimizers:
        for parameter in optimizer.parameters:
            if id(parameter) in seen:
                raise ValueError(
                    f"For 'Accumulator', the argument 'optimizer' must be a list of optimizers "
                    f"without common parameters, but got {parameter.name!r} in two of them. Give "
                    f"each parameter to one optimizer."
                )
            seen.add(id(parameter))


def _check_shapes(
    found: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]] | None
) -> None:
    """Raise unless the gradients have the parameters' shapes, which are None for a loop that no graph can contain."""
    if expected is None:
        raise ValueError(
            "For 'Accumulator', a compiled function must call an Accumulator of one network and "
            "one optimizer without a schedule, but got another one. Call it from Python."
        )
    if [*found] != [*expected]:
        raise ValueError(
            f"For 'Accumulator', the argument 'grads' must be gradients of the optimizer's "
            f"{len(expected)} parameters, of shapes {[*expected]}, but got shapes {[*found]}. "
            f"{_FROM}"
        )


check_in_graph = primexpr(_check_shapes)


def _check_grads(grads: object, parameters: list[Parameter]) -> Tensors:
    if isinstance(grads, Tensor):
        grads = (grads,)
    if not isinstance(grads, (tuple, list)) or not all(isinstance(grad, Tensor) for grad in grads):
        got = type(grads).__name__
        remedy = _FROM
        if isinstance(grads, (tuple, list)):
            got = f"a {got} of {listed([type(each).__name__ for each in grads], 3)}"
            if isinstance(grads[-1], (tuple, list)):
                remedy = (
                    "Take the loss apart: loss, grads = ..., and then accumulator(grads, weight, "
                    "loss)."
                )
        raise TypeError(
            f"For 'Accumulator', the argument 'grads' must be a tuple of tensors, but got {got}. "
            f"{remedy}"
        )
    _check_shapes(_shapes_of(grads), _shapes_of(parameters))
    checked = []
    for grad in grads:
        if grad.dtype not in mstype.float_type:
            raise TypeError(
                f"For 'Accumulator', the argument 'grads' must be floating-point tensors, but got "
                f"one of {grad.dtype}. {_FROM}"
            )
        # A graph takes no parameter as an input, but gradients can be kept in parameters.
        checked.append(grad.value() if isinstance(grad, Parameter) else grad)
    return tuple(checked)


def _shapes_of(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in tensors]


def pair_networks(network: object, optimizer: object) -> list[tuple[nn.Cell, list[nn.Cell]]]:
    """Return each network with its optimizers."""
    networks = _as_list(network)
    groups = [_as_list(each) for each in _as_list(optimizer)]
    remedy = "Several networks take a list with the optimizer (or optimizers) of each."
    if not networks:
        raise ValueError(
            f"For '{_OWNER}', the argument 'network' must be at least one, but got []. {remedy}"
        )
    if not (groups and all(groups)):
        raise ValueError(
            f"For '{_OWNER}', the argument 'optimizer' must be at least one per network, but got "
            f"[]. {remedy}"
        )
    if len(networks) == 1 and all(len(group) == 1 for group in groups):
        groups = [[group[0] for group in groups]]
    if len(networks) != len(groups):
        raise ValueError(
            f"For '{_OWNER}', the argument 'optimizer' must be one per network, but got "
            f"{len(groups)} for {len(networks)} networks. {remedy}"
        )
    if not _differ(networks):
        raise ValueError(
            f"For '{_OWNER}', the argument 'network' must be different networks, but got one of "
            f"them twice. Put all losses of a network into one cell."
        )
    if len(groups) > 1 and not _differ(list(itertools.chain(*groups))):
        raise ValueError(
            f"For '{_OWNER}', the argument 'optimizer' must be different optimizers, but got one "
            f"of them twice. Put all losses of the same weights into one cell."
        )
    return list(zip(networks, groups))


def _as_list(items: object) -> list[nn.Cell]:
    if isinstance(items, (list, tuple)):
        return list(items)
    return [items]


def _differ(items: list[nn.Cell]) -> bool:
    return len(set(map(id, items))) == len(items)


def chosen_of(
    networks: Sequence[TrainedNetwork], network: nn.Cell | None
) -> Sequence[TrainedNetwork]:
    """Return the trainer of ``network`` in a list, or all of them for None."""
    if network is None:
        return networks
    chosen = [each for each in networks if id(network) in map(id, each.names)]
    if not chosen:
        raise ValueError(
            f"For 'Accumulator', the argument 'network' must be a network of this Accumulator, but "
            f"got {type(network).__name__}. Give one that it was built with."
        )
    return chosen


def only_of(
    networks: Sequence[TrainedNetwork],
    network: nn.Cell | None,
    owner: str = _OWNER,
    remedy: str = "Name it: backward(*batch, network=loss_cell).",
) -> TrainedNetwork:
    """Return the trainer of ``network``, or the only one for None."""
    chosen = chosen_of(networks, network)
    if len(chosen) > 1:
        raise ValueError(
            f"For '{owner}', the argument 'network' must be one of the {len(chosen)} networks, but "
            f"got None. {remedy}"
        )
    return chosen[0]
