"""The pass before the micro steps of a batch, which finds the gradient of a `GradCacheLoss`."""

import re
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype

from ms_gradaccum._checks import require
from ms_gradaccum.backend.arithmetic import ONE
from ms_gradaccum.backend.compiled import NOTHING, Compiled, Method, like_mode, op_by_op
from ms_gradaccum.backend.tensors import map_tensors
from ms_gradaccum.batch.grad_cache_loss import GradCacheLoss, check_output
from ms_gradaccum.batch.split import Flattened, MicroBatch, SplitBatch, cut
from ms_gradaccum.batch.structure import SequenceOf
from ms_gradaccum.batch.weighted_loss import RowWeight
from ms_gradaccum.parallel.reducer import GradientReducer

# The largest rounding difference between the two passes, relative to the largest number of a row, in 16 bits too.
_ROUNDING, _ROUNDING_16_BIT = 1e-4, 2e-2
# A word in the names of operators that draw random numbers, with a pattern that does not match L2Normalize.
_DRAWS = re.compile("(Dropout|Random|Rand|Randn|Randperm|Uniform|Normal|Laplace|Multinomial|Bernoulli)(?![a-z])")
_LOSS_REMEDY = "Its loss_fn returns one number: report other values in a callback."


class CachePass:
    """The pass before the micro steps of a `GradCacheLoss`, compiled with the mode and the settings of ``like``."""

    def __init__(self, owner: str, network: nn.Cell, like: nn.Cell, reducer: GradientReducer) -> None:
        self.owner, self.like, self.reducer = owner, like, reducer
        self.network: GradCacheLoss = network.network
        self.batch_axis = network.batch_axis
        self.tolerance = _ROUNDING_16_BIT if like.micro_loss.half else _ROUNDING
        # A forward pass may change parameters that no optimizer updates.
        known = {id(parameter) for parameter in like.parameters}
        state = _State([each for each in self.network.backbone.get_parameters() if id(each) not in known])
        self.has_state = len(state.state) > 0
        self.keep = Compiled(lambda: Method(state, "keep"), owner, "the state of the network")
        self.put_back = Compiled(lambda: Method(state, "put_back"), owner, "the state of the network")
        # The keys are the structures of the inputs.
        self.forwards: dict[SequenceOf, Compiled] = {}
        self.losses: dict[Hashable, Compiled] = {}
        drawn = random_cells(self.network.loss_fn)
        rule, got = "a loss that is the same on all processes", f"one that draws random numbers: {drawn}"
        is_same, remedy = not (drawn and reducer.is_distributed), "Draw them in the backbone."
        require(is_same, "GradCacheLoss", "loss_fn", rule, got, remedy)

    def compiled_cells(self) -> list[Compiled]:
        return [*self.forwards.values(), *self.losses.values()]

    def run(self, inputs: tuple[object, ...], batch: SplitBatch, eager: bool) -> tuple[SplitBatch, int]:
        """Return the micro batches for the micro steps, and the number of rows of all processes."""
        end = len(inputs) - self.network.labels
        if end < 1:
            self.network(*inputs)  # This call raises the right error.
        labels, axes = Flattened(inputs[end:]), Flattened(inputs, self.batch_axis).axes
        axes = axes[len(axes) - len(labels.leaves) :]
        structure = SequenceOf(tuple, batch.structure.children[:end])
        firsts = self._outputs(structure, batch.micro_batches, eager)
        outputs = [parts[0] if len(parts) == 1 else ops.concat(list(parts)) for parts in zip(*firsts)]
        floats = tuple(i for i, output in enumerate(outputs) if output.dtype in mstype.float_type)
        got = ", ".join(str(output.dtype) for output in outputs) or "nothing"
        rule, remedy = "a network that returns a floating-point tensor", "There is no gradient without one."
        require(floats, "GradCacheLoss", "backbone", rule, got, remedy)
        counts = [part.rows for part in batch.micro_batches]
        own_rows = [_moved(leaf, axis, 0) for leaf, axis in zip(labels.tensors, axes) if axis is not None]
        begin, rows, whole = self.reducer.gather_rows(sum(counts), [*outputs, *own_rows])
        # Split labels are gathered from all processes, the others are those of this process.
        gathered = iter(whole[len(outputs) :])
        pairs = zip(labels.tensors, axes)
        leaves = [leaf if axis is None else _moved(next(gathered), 0, axis) for leaf, axis in pairs]
        loss, cache, own = self._loss(labels.structure, whole[: len(outputs)], floats, leaves, eager)
        ends = [*accumulate(counts, initial=begin)]
        caches = zip(*(cut(grad, 0, [*zip(ends, ends[1:])]) for grad in cache))
        parts, around = [], batch.structure
        for part, first, start in zip(batch.micro_batches, firsts, caches):
            given = structure.rebuild(part.tensors)
            flat = Flattened((loss, own, tuple(first[i] for i in floats), start, *given))
            parts.append(MicroBatch(part.rows, flat.tensors))
            around = flat.structure
        return SplitBatch(around, parts), rows

    def check(self, outputs: Sequence[tuple[Tensor, ...]]) -> None:
        """Raise if the outputs of the micro steps differ from the outputs of this pass."""
        for part in (each for output in outputs for each in output[3].asnumpy()):
            if not part <= self.tolerance:  # Not '>': a NaN must fail, too.
                cells = random_cells(self.network.backbone)
                place = f", where {cells} may draw anew" if cells else ""
                raise RuntimeError(
                    f"For 'GradCacheLoss', the backbone must compute in the second pass what it has in the first, but "
                    f"its outputs differ by {part:.3g} of the largest number in their row in "
                    f"{type(self.network.backbone).__name__}{place}. Use ReplayDropout in place of Dropout, and keep "
                    f"what the forward pass changes in parameters."
                )

    def _outputs(self, structure: SequenceOf, micro_batches: list[MicroBatch], eager: bool) -> list[tuple[Tensor, ...]]:
        """Return the network's outputs for each micro batch, and undo the changes of these forward passes."""
        run = self.forwards.get(structure)
        if run is None:
            build = partial(Forward, self.network, structure)
            run = self.forwards[structure] = self._compiled(build, "the network", self.network.backbone)
        kept = self.keep(NOTHING) if self.has_state else ()
        outputs = []
        try:
            for rows, tensors in micro_batches:
                outputs.append(_called(run, tensors, eager))
                for output in outputs[-1]:
                    check_output(tuple(output.shape), rows)
        finally:
            if self.has_state:
                self.put_back(*kept)
        return outputs

    def _loss(
        self, labels: SequenceOf, outputs: list[Tensor], floats: tuple[int, ...], leaves: list[Tensor], eager: bool
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the loss of all rows and its gradients, with respect to the outputs and to its own parameters."""
        key, loss_fn = (labels, tuple(str(output.dtype) for output in outputs)), self.network.loss_fn
        run = self.losses.get(key)
        if run is None:
            build = partial(LossAndCache, loss_fn, len(outputs), labels, floats)
            # A graph for each number of rows: with some losses a graph for changing lengths fails while it runs.
            run = self.losses[key] = self._compiled(build, "the loss", loss_fn, needs_fixed=True)
        loss, grads = _called(run, (*outputs, *leaves), eager)
        cache, own = grads if run.cell.has_own else (grads, ())
        # For a single output, MindSpore returns its gradient outside of a tuple.
        cache = cache if isinstance(cache, tuple) else (cache,)
        # Otherwise MindSpore would differentiate the loss once more through them, op by op.
        detach = ops.stop_gradient
        return detach(loss), tuple(detach(grad) for grad in cache), tuple(detach(grad) for grad in own)

    def _compiled(self, build: Callable[[], nn.Cell], what: str, code: nn.Cell, needs_fixed: bool = False) -> Compiled:
        return Compiled(lambda: like_mode(build(), self.like), self.owner, what, code, needs_fixed)


class Forward(nn.Cell):
    def __init__(self, network: GradCacheLoss, structure: SequenceOf) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.rebuild = structure.as_cell()

    def construct(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.network.outputs(self.rebuild(tensors))
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
        self.rebuild = labels.as_cell()

    def construct(self, *tensors: Tensor) -> Tensor:
        returned = self.network(*tensors[: self.count], *self.rebuild(tensors[self.count :]))
        loss = self.first(returned, "its loss", _LOSS_REMEDY) * ONE
        self.further(returned, 1, _LOSS_REMEDY)
        return loss


class _State(nn.Cell):
    """Parameters that a forward pass may change."""

    def __init__(self, state: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.state = ParameterTuple(state)

    def keep(self, nothing: Tensor) -> tuple[Tensor, ...]:
        return map_tensors(_copy, self.state)

    def put_back(self, *values: Tensor) -> tuple[Tensor, ...]:
        return map_tensors(ops.assign, self.state, values)


def _copy(parameter: Parameter) -> Tensor:
    return parameter.copy()


def random_cells(network: nn.Cell) -> str:
    """Return the names of the cells that are known to draw random numbers in training."""
    found = []
    for name, cell in network.cells_and_names():
        operators = (each.name for each in vars(cell).values() if isinstance(each, ops.Primitive))
        draws = any(_DRAWS.search(operator) for operator in operators)
        off = not cell.training or getattr(cell, "p", None) == 0 or getattr(cell, "keep_prob", None) == 1
        if draws and not off or (isinstance(cell, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)) and not off):
            found.append(f"{type(cell).__name__} {name!r}" if name else type(cell).__name__)
    return ", ".join(found[:5])


def _called(run: Compiled, tensors: Sequence[Tensor], eager: bool) -> Any:
    if not eager:
        return run(*tensors)
    with op_by_op():
        return run.cell(*tensors)


def _moved(tensor: Tensor, axis: int, to: int) -> Tensor:
    return tensor if axis == to else ops.movedim(tensor, axis, to)
