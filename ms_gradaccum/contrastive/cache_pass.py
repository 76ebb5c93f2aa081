"""The pass before the micro steps of a batch, which finds the gradient of a `GradCacheLoss`."""

import functools
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype

from ms_gradaccum.backend.arithmetic import ONE, Tensors
from ms_gradaccum.backend.compiled import NOTHING, Compiled, Method, like_mode, op_by_op
from ms_gradaccum.backend.tensors import map_tensors
from ms_gradaccum.backend.tolerances import TOLERANCES
from ms_gradaccum.backend.training_cells import DROPOUTS
from ms_gradaccum.batch.split import BatchAxis, Flattened, MicroBatch, SplitBatch, cut, spread_axes
from ms_gradaccum.batch.structure import SequenceOf
from ms_gradaccum.batch.weighted_loss import WeightedLoss
from ms_gradaccum.batch.whole_batch_loss import BatchSettings, Preparation
from ms_gradaccum.contrastive.cached_loss import check_rows
from ms_gradaccum.parallel.reducer import GradientReducer

# A word in the names of operators that draw random numbers, with a pattern that does not match L2Normalize.
_DRAWS = re.compile(
    "(Dropout|Random|Rand|Randn|Randperm|Uniform|Normal|Laplace|Multinomial|Bernoulli)(?![a-z])"
)
_LOSS_REMEDY = "Its loss_fn returns one number: report other values in a callback."

Run = Callable[..., Any]  # Runs a cell, op by op or compiled.


class CachePass(Preparation):
    """The pass before the micro steps of a `GradCacheLoss`, compiled with the mode and the settings of ``like``."""

    def __init__(
        self,
        network: nn.Cell,
        batch_axis: BatchAxis,
        settings: BatchSettings,
        like: nn.Cell,
        reducer: GradientReducer,
    ) -> None:
        _check_settings(settings, reducer, network.loss_fn)
        self.owner = settings.owner
        self.network = network
        self.batch_axis = batch_axis
        self.like = like
        self.reducer = reducer
        dtype = mstype.float32
        if like.micro_loss.half:
            dtype = mstype.float16
        # The largest rounding difference between the two passes, relative to the largest number of a row.
        self.max_distance = TOLERANCES[dtype].tensors
        self.state = _State(network.backbone, like.parameters)
        what = "the state of the network"
        self.save_state = Compiled(lambda: Method(self.state, "save"), self.owner, what)
        self.restore_state = Compiled(lambda: Method(self.state, "restore"), self.owner, what)
        self.compiled: list[Compiled] = []
        self.forward_for = functools.cache(self._build_forward)
        self.loss_for = functools.cache(self._build_loss)

    def compiled_cells(self) -> list[Compiled]:
        return self.compiled

    def prepare(
        self,
        inputs: tuple[object, ...],
        batch: SplitBatch,
        rows: int,
        eager: bool,
    ) -> tuple[SplitBatch, int]:
        end = len(inputs) - self.network.labels
        if end < 1:
            self.network(*inputs)  # This call raises the right error.
        structure = SequenceOf(tuple, batch.structure.children[:end])
        outputs_of_parts = self._outputs(structure, batch.micro_batches, eager)
        outputs = [*map(_concat, zip(*outputs_of_parts))]
        floats = _floats_among(outputs)
        axes = (0,) * len(outputs) + spread_axes(self.batch_axis, inputs)[end:]
        of_loss = Flattened((*outputs, *inputs[end:]), axes)
        begin, total, tensors = self._gathered(rows, of_loss)
        loss, cache, own_grads = self._loss_and_grads(of_loss.structure, tensors, floats, eager)
        counts = [part.rows for part in batch.micro_batches]
        bounds = [*pairwise(accumulate(counts, initial=begin))]
        cache_of_parts = zip(*(cut(grads, 0, bounds) for grads in cache))
        prepared = []
        for part, firsts, grads in zip(batch.micro_batches, outputs_of_parts, cache_of_parts):
            given = structure.rebuild(part.tensors)
            firsts = tuple(firsts[i] for i in floats)
            prepared.append(Flattened((loss, own_grads, firsts, grads, *given)))
        parts = [MicroBatch(count, each.tensors) for count, each in zip(counts, prepared)]
        return SplitBatch(prepared[0].structure, parts), total

    def check(self, outputs: Sequence[Tensors]) -> None:
        """Raise if the outputs of the micro steps differ from the outputs of this pass."""
        for _, _, _, distances in outputs:
            for distance in distances.asnumpy():
                if not distance <= self.max_distance:  # Not '>': a NaN must fail, too.
                    raise RuntimeError(self._message_of(distance))

    def join(self) -> None:
        self.reducer.gather_rows(0, [])

    def _outputs(
        self,
        structure: SequenceOf,
        micro_batches: list[MicroBatch],
        eager: bool,
    ) -> list[Tensors]:
        """Return the network's outputs for each micro batch, and undo the changes of these forward passes."""
        run = self.forward_for(structure, eager)
        if not self.state.parameters:
            return _outputs_of_each(run, micro_batches)
        values = self.save_state(NOTHING)
        try:
            return _outputs_of_each(run, micro_batches)
        finally:
            self.restore_state(*values)

    def _gathered(self, rows: int, inputs: Flattened) -> tuple[int, int, list[Tensor]]:
        """Return the place of this process's first row, the number of rows of all processes, and these rows.

        Labels that are not split are those of this process.
        """
        own = []
        for tensor, axis in zip(inputs.tensors, inputs.axes):
            if axis is not None:
                own.append(_moved(tensor, axis, 0))
        begin, total, gathered = self.reducer.gather_rows(rows, own)
        of_all = iter(gathered)
        tensors = []
        for tensor, axis in zip(inputs.tensors, inputs.axes):
            if axis is not None:
                tensor = _moved(next(of_all), 0, axis)
            tensors.append(tensor)
        return begin, total, tensors

    def _loss_and_grads(
        self,
        structure: SequenceOf,
        tensors: list[Tensor],
        floats: tuple[int, ...],
        eager: bool,
    ) -> tuple[Tensor, Tensors, Tensors]:
        """Return the loss of all rows, and its gradients for their outputs and for its own parameters."""
        run = self.loss_for(structure, floats, eager)
        loss, (grads, own) = run(*tensors)
        if not isinstance(grads, tuple):  # MindSpore returns a single gradient outside of a tuple.
            grads = (grads,)
        # Otherwise MindSpore would differentiate the loss once more through them, op by op.
        detach = ops.stop_gradient
        grads = tuple(map(detach, grads))
        own = tuple(map(detach, own))
        return detach(loss), grads, own

    def _build_forward(self, structure: SequenceOf, eager: bool) -> Run:
        build = functools.partial(Method, self.network, "outputs_of", structure)
        return self._runner(build, "the network", self.network.backbone, eager)

    def _build_loss(self, structure: SequenceOf, floats: tuple[int, ...], eager: bool) -> Run:
        loss_fn = self.network.loss_fn
        # A graph for each number of rows: with some losses a graph for changing lengths fails while it runs.
        return self._runner(
            lambda: LossAndCache(loss_fn, structure, floats), "the loss", loss_fn, eager, True
        )

    def _runner(
        self,
        build: Callable[[], nn.Cell],
        what: str,
        code: nn.Cell,
        eager: bool,
        needs_fixed: bool = False,
    ) -> Run:
        """Return what runs a cell op by op or compiled, with the mode and the settings of the micro step."""

        def make() -> nn.Cell:
            return like_mode(build(), self.like)

        if eager:
            run: Run = op_by_op()(make().__call__)
            return run
        compiled = Compiled(make, self.owner, what, code, needs_fixed)
        self.compiled.append(compiled)
        return compiled

    def _message_of(self, distance: float) -> str:
        drawn = random_cells(self.network.backbone)
        place = type(self.network.backbone).__name__
        if drawn:
            place += f", perhaps because of {drawn}"
        return (
            f"For 'GradCacheLoss', the backbone returned other outputs in the second forward pass: "
            f"they differ by {distance:.3g} of the largest number in their row in {place}. Use "
            f"ReplayDropout in place of Dropout, and keep all that the forward pass changes in "
            f"parameters."
        )


class LossAndCache(nn.Cell):
    """A loss of outputs and labels, its gradients for the outputs at ``floats``, and for its own parameters."""

    def __init__(self, loss_fn: nn.Cell, structure: SequenceOf, floats: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        own = ParameterTuple(loss_fn.trainable_params())
        self.loss_and_grads = ops.value_and_grad(_WholeLoss(loss_fn, structure), floats, own)

    def construct(self, *tensors: Tensor) -> Any:
        return self.loss_and_grads(*tensors)


class _WholeLoss(WeightedLoss):
    def construct(self, *tensors: Tensor) -> Tensor:
        returned = self.outputs(tensors)
        loss = self.first(returned, "its loss", _LOSS_REMEDY) * ONE
        self.further(returned, 1, _LOSS_REMEDY)
        return loss


class _State(nn.Cell):
    """Parameters of a network that its forward pass may change, because no optimizer updates them."""

    def __init__(self, network: nn.Cell, updated: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        known = set(map(id, updated))
        others = [each for each in network.get_parameters() if id(each) not in known]
        self.parameters = ParameterTuple(others)

    def save(self, nothing: Tensor) -> Tensors:
        return map_tensors(_copy, self.parameters)

    def restore(self, *values: Tensor) -> Tensors:
        return map_tensors(ops.assign, self.parameters, values)


def _copy(parameter: Parameter) -> Tensor:
    return parameter.copy()


def random_cells(network: nn.Cell) -> str:
    """Return the names of the cells that are known to draw random numbers in training."""
    found = []
    for name, cell in network.cells_and_names():
        if _draws(cell):
            text = type(cell).__name__
            if name:
                text += f" {name!r}"
            found.append(text)
    return ", ".join(found[:5])


def _draws(cell: nn.Cell) -> bool:
    if not cell.training:
        return False
    if getattr(cell, "p", None) == 0 or getattr(cell, "keep_prob", None) == 1:
        return False
    if isinstance(cell, DROPOUTS):
        return True
    for value in vars(cell).values():
        if isinstance(value, ops.Primitive) and _DRAWS.search(value.name):
            return True
    return False


def _check_settings(settings: BatchSettings, reducer: GradientReducer, loss_fn: nn.Cell) -> None:
    """Raise for settings with which a batch cannot be prepared."""
    if settings.drop_non_finite:
        raise ValueError(
            f"For '{settings.owner}', the argument 'bad_micro_batch' must be 'skip_window' for a "
            f"GradCacheLoss, but got 'drop'. Its loss has seen all micro batches before one can be "
            f"left out."
        )
    if reducer.grads_are_reduced:
        raise ValueError(
            f"For '{settings.owner}', the argument 'network' must not be one of hsdp() with a "
            f"GradCacheLoss, but got both. Give parallel=HSDP(...) in place of hsdp()."
        )
    drawn = random_cells(loss_fn)
    if drawn and reducer.is_distributed:
        raise ValueError(
            f"For 'GradCacheLoss', the argument 'loss_fn' must be deterministic on several "
            f"processes, but got random numbers of {drawn}. Draw them in the backbone."
        )


def _outputs_of_each(run: Run, micro_batches: list[MicroBatch]) -> list[Tensors]:
    found = []
    for rows, tensors in micro_batches:
        outputs = run(*tensors)
        check_rows(outputs, rows)
        found.append(outputs)
    return found


def _floats_among(outputs: list[Tensor]) -> tuple[int, ...]:
    """Return the places of the floating-point outputs."""
    dtypes = [output.dtype for output in outputs]
    floats = tuple(i for i, dtype in enumerate(dtypes) if dtype in mstype.float_type)
    if not floats:
        raise ValueError(
            f"For 'GradCacheLoss', the argument 'backbone' must return a floating-point tensor, "
            f"but got {', '.join(map(str, dtypes)) or 'nothing'}. Return one: there is no gradient "
            f"without it."
        )
    return floats


def _concat(parts: Tensors) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return ops.concat(parts)


def _moved(tensor: Tensor, axis: int, to: int) -> Tensor:
    if axis == to:
        return tensor
    return ops.movedim(tensor, axis, to)
