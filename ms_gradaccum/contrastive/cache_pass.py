"""The pass before the micro steps of a batch, which finds the gradient of a `GradCacheLoss`."""

import re
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype

from ms_gradaccum.backend.arithmetic import ONE
from ms_gradaccum.backend.compiled import NOTHING, Compiled, Method, like_mode, op_by_op
from ms_gradaccum.backend.tensors import map_tensors
from ms_gradaccum.batch.split import BatchAxis, Flattened, MicroBatch, SplitBatch, cut, spread_axes
from ms_gradaccum.batch.structure import SequenceOf
from ms_gradaccum.batch.weighted_loss import RowWeight
from ms_gradaccum.batch.whole_batch_loss import Preparation
from ms_gradaccum.contrastive.cached_loss import check_rows
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.settings import StepSettings

# The largest rounding difference between the two passes, relative to the largest number of a row.
_MAX_DISTANCE = 1e-4
_MAX_DISTANCE_16_BIT = 2e-2
# A word in the names of operators that draw random numbers, with a pattern that does not match L2Normalize.
_DRAWS = re.compile("(Dropout|Random|Rand|Randn|Randperm|Uniform|Normal|Laplace|Multinomial|Bernoulli)(?![a-z])")
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_LOSS_REMEDY = "Its loss_fn returns one number: report other values in a callback."


class AllRows(NamedTuple):
    """The outputs and the labels of all processes."""

    begin: int  # The place of this process's first row.
    total: int  # The number of rows of all processes.
    outputs: list[Tensor]
    labels: list[Tensor]


class LossGrads(NamedTuple):
    """The loss of all rows, and its gradients."""

    loss: Tensor
    cache: tuple[Tensor, ...]  # With respect to the floating-point outputs.
    own: tuple[Tensor, ...]  # With respect to the parameters of the loss.


class CachePass(Preparation):
    """The pass before the micro steps of a `GradCacheLoss`, compiled with the mode and the settings of ``like``."""

    def __init__(
        self, network: nn.Cell, batch_axis: BatchAxis, settings: StepSettings, like: nn.Cell, reducer: GradientReducer
    ) -> None:
        self.owner = settings.owner
        self.network = network
        self.batch_axis = batch_axis
        self.like = like
        self.reducer = reducer
        _check_settings(settings, reducer, network.loss_fn)
        self.max_distance = _MAX_DISTANCE_16_BIT if like.micro_loss.half else _MAX_DISTANCE
        self.state = _State(network.backbone, like.parameters)
        self.save_state = Compiled(lambda: Method(self.state, "save"), self.owner, "the state of the network")
        self.restore_state = Compiled(lambda: Method(self.state, "restore"), self.owner, "the state of the network")
        # The keys are the structures of the inputs.
        self.forwards: dict[SequenceOf, Compiled] = {}
        self.losses: dict[Hashable, Compiled] = {}

    def compiled_cells(self) -> list[Compiled]:
        return [*self.forwards.values(), *self.losses.values()]

    def prepare(self, inputs: tuple[object, ...], batch: SplitBatch, rows: int, eager: bool) -> tuple[SplitBatch, int]:
        end = len(inputs) - self.network.labels
        if end < 1:
            self.network(*inputs)  # This call raises the right error.
        structure = SequenceOf(tuple, batch.structure.children[:end])
        labels = Flattened(inputs[end:], spread_axes(self.batch_axis, inputs)[end:])
        firsts = self._outputs(structure, batch.micro_batches, eager)
        outputs = [ops.concat(list(parts)) if len(parts) > 1 else parts[0] for parts in zip(*firsts)]
        floats = _floats_among(outputs)
        whole = self._gathered(rows, outputs, labels)
        loss, cache, own = self._loss(whole, labels.structure, floats, eager)
        counts = [part.rows for part in batch.micro_batches]
        bounds = [*pairwise(accumulate(counts, initial=whole.begin))]
        cache_of_parts = zip(*(cut(grad, 0, bounds) for grad in cache))
        prepared = []
        for part, first, grads in zip(batch.micro_batches, firsts, cache_of_parts):
            given = structure.rebuild(part.tensors)
            prepared.append(Flattened((loss, own, tuple(first[i] for i in floats), grads, *given)))
        parts = [MicroBatch(count, each.tensors) for count, each in zip(counts, prepared)]
        return SplitBatch(prepared[0].structure, parts), whole.total

    def check(self, outputs: Sequence[tuple[Tensor, ...]]) -> None:
        """Raise if the outputs of the micro steps differ from the outputs of this pass."""
        for _, _, _, distances in outputs:
            for distance in distances.asnumpy():
                if not distance <= self.max_distance:  # Not '>': a NaN must fail, too.
                    raise RuntimeError(self._message_of(distance))

    def join(self) -> None:
        self.reducer.gather_rows(0, [])

    def _outputs(self, structure: SequenceOf, micro_batches: list[MicroBatch], eager: bool) -> list[tuple[Tensor, ...]]:
        """Return the network's outputs for each micro batch, and undo the changes of these forward passes."""
        run = self.forwards.get(structure)
        if run is None:
            build = partial(Forward, self.network, structure)
            run = self.forwards[structure] = self._compiled(build, "the network", self.network.backbone)
        if not self.state.parameters:
            return _outputs_of_each(run, micro_batches, eager)
        values = self.save_state(NOTHING)
        try:
            return _outputs_of_each(run, micro_batches, eager)
        finally:
            self.restore_state(*values)

    def _gathered(self, rows: int, outputs: list[Tensor], labels: Flattened) -> AllRows:
        """Return the rows of all processes. Labels that are not split are those of this process."""
        own = [*outputs]
        for label, axis in zip(labels.tensors, labels.axes):
            if axis is not None:
                own.append(_moved(label, axis, 0))
        begin, total, gathered = self.reducer.gather_rows(rows, own)
        split_labels = iter(gathered[len(outputs) :])
        all_labels = []
        for label, axis in zip(labels.tensors, labels.axes):
            if axis is not None:
                label = _moved(next(split_labels), 0, axis)
            all_labels.append(label)
        return AllRows(begin, total, gathered[: len(outputs)], all_labels)

    def _loss(self, rows: AllRows, labels: SequenceOf, floats: tuple[int, ...], eager: bool) -> LossGrads:
        """Return the loss of all rows, for labels of this structure, with its gradients."""
        loss_fn = self.network.loss_fn
        key = (labels, tuple(str(output.dtype) for output in rows.outputs))
        run = self.losses.get(key)
        if run is None:
            build = partial(LossAndCache, loss_fn, len(rows.outputs), labels, floats)
            # A graph for each number of rows: with some losses a graph for changing lengths fails while it runs.
            run = self.losses[key] = self._compiled(build, "the loss", loss_fn, needs_fixed=True)
        loss, grads = _called(run, (*rows.outputs, *rows.labels), eager)
        cache, own = grads if run.cell.has_own else (grads, ())
        if not isinstance(cache, tuple):  # MindSpore returns a single gradient outside of a tuple.
            cache = (cache,)
        # Otherwise MindSpore would differentiate the loss once more through them, op by op.
        return LossGrads(ops.stop_gradient(loss), _detached(cache), _detached(own))

    def _compiled(self, build: Callable[[], nn.Cell], what: str, code: nn.Cell, needs_fixed: bool = False) -> Compiled:
        return Compiled(lambda: like_mode(build(), self.like), self.owner, what, code, needs_fixed)

    def _message_of(self, distance: float) -> str:
        drawn = random_cells(self.network.backbone)
        place = type(self.network.backbone).__name__
        if drawn:
            place += f", where {drawn} may draw anew"
        return (
            f"For 'GradCacheLoss', the backbone must compute in the second pass what it has in the first, but its "
            f"outputs differ by {distance:.3g} of the largest number in their row in {place}. Use ReplayDropout in "
            f"place of Dropout, and keep what the forward pass changes in parameters."
        )


class Forward(nn.Cell):
    def __init__(self, network: nn.Cell, structure: SequenceOf) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.unflatten = structure.as_cell()

    def construct(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.network.outputs(self.unflatten(tensors))
        return outputs


class LossAndCache(nn.Cell):
    """A loss of ``count`` outputs and labels, its gradients for the outputs at ``floats``, and for its parameters."""

    def __init__(self, loss_fn: nn.Cell, count: int, labels: SequenceOf, floats: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        own = ParameterTuple(loss_fn.trainable_params())
        self.has_own = len(own) > 0
        self.loss_and_grads = ops.value_and_grad(_WholeLoss(loss_fn, count, labels), floats, own or None)

    def construct(self, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        found: tuple[Tensor, tuple[Tensor, ...]] = self.loss_and_grads(*tensors)
        return found


class _WholeLoss(RowWeight):
    def __init__(self, loss_fn: nn.Cell, count: int, labels: SequenceOf) -> None:
        super().__init__(loss_fn)
        self.count = count
        self.unflatten_labels = labels.as_cell()

    def construct(self, *tensors: Tensor) -> Tensor:
        returned = self.network(*tensors[: self.count], *self.unflatten_labels(tensors[self.count :]))
        loss = self.first(returned, "its loss", _LOSS_REMEDY) * ONE
        self.further(returned, 1, _LOSS_REMEDY)
        return loss


class _State(nn.Cell):
    """Parameters of a network that its forward pass may change, because no optimizer updates them."""

    def __init__(self, network: nn.Cell, updated: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        known = set(map(id, updated))
        self.parameters = ParameterTuple(each for each in network.get_parameters() if id(each) not in known)

    def save(self, nothing: Tensor) -> tuple[Tensor, ...]:
        return map_tensors(_copy, self.parameters)

    def restore(self, *values: Tensor) -> tuple[Tensor, ...]:
        return map_tensors(ops.assign, self.parameters, values)


def _copy(parameter: Parameter) -> Tensor:
    return parameter.copy()


def random_cells(network: nn.Cell) -> str:
    """Return the names of the cells that are known to draw random numbers in training."""
    found = []
    for name, cell in network.cells_and_names():
        if _draws(cell):
            kind = type(cell).__name__
            found.append(f"{kind} {name!r}" if name else kind)
    return ", ".join(found[:5])


def _draws(cell: nn.Cell) -> bool:
    if not cell.training or getattr(cell, "p", None) == 0 or getattr(cell, "keep_prob", None) == 1:
        return False
    if isinstance(cell, _DROPOUTS):
        return True
    operators = (each.name for each in vars(cell).values() if isinstance(each, ops.Primitive))
    return any(map(_DRAWS.search, operators))


def _check_settings(settings: StepSettings, reducer: GradientReducer, loss_fn: nn.Cell) -> None:
    """Raise for settings with which a batch cannot be prepared."""
    if settings.drop_non_finite:
        raise ValueError(
            f"For '{settings.owner}', the argument 'bad_micro_batch' must be 'skip_window' for a GradCacheLoss, but "
            f"got 'drop'. Its loss has seen all micro batches before one can be left out."
        )
    if reducer.grads_are_reduced:
        raise ValueError(
            f"For '{settings.owner}', the argument 'network' must be one without GradCacheLoss where gradients come "
            f"reduced, but got something else. Leave it out, and convert a network before hsdp() cuts it."
        )
    drawn = random_cells(loss_fn)
    if drawn and reducer.is_distributed:
        raise ValueError(
            f"For 'GradCacheLoss', the argument 'loss_fn' must be a loss that is the same on all processes, but got "
            f"one that draws random numbers: {drawn}. Draw them in the backbone."
        )


def _outputs_of_each(run: Compiled, micro_batches: list[MicroBatch], eager: bool) -> list[tuple[Tensor, ...]]:
    found = []
    for rows, tensors in micro_batches:
        outputs = _called(run, tensors, eager)
        check_rows(outputs, rows)
        found.append(outputs)
    return found


def _floats_among(outputs: list[Tensor]) -> tuple[int, ...]:
    """Return the places of the floating-point outputs."""
    dtypes = [output.dtype for output in outputs]
    floats = tuple(i for i, dtype in enumerate(dtypes) if dtype in mstype.float_type)
    if not floats:
        got = ", ".join(map(str, dtypes)) or "nothing"
        raise ValueError(
            f"For 'GradCacheLoss', the argument 'backbone' must be a network that returns a floating-point tensor, but "
            f"got {got}. There is no gradient without one."
        )
    return floats


def _called(run: Compiled, tensors: Sequence[Tensor], eager: bool) -> Any:
    if not eager:
        return run(*tensors)
    with op_by_op():
        return run.cell(*tensors)


def _detached(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(map(ops.stop_gradient, grads))


def _moved(tensor: Tensor, axis: int, to: int) -> Tensor:
    return tensor if axis == to else ops.movedim(tensor, axis, to)
