"""The pass before the micro steps of a batch, which finds the gradient of a `GradCacheLoss`."""

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype

from ms_gradaccum._checks import argument_error
from ms_gradaccum.backend.compiled import NOTHING, Compiled, follow_mode, op_by_op
from ms_gradaccum.backend.kernels import ONE
from ms_gradaccum.batch.grad_cache_loss import GradCacheLoss, check_output
from ms_gradaccum.batch.nested_inputs import first_inputs, flatten, unflatten, unflattener
from ms_gradaccum.batch.split import MicroBatch, SplitBatch, cut, leaf_axes
from ms_gradaccum.batch.weighted_loss import RowWeight
from ms_gradaccum.parallel.reducer import GradientReducer

# How much the second pass may differ from the first one, by the largest of a row: what rounding makes, in 16 bits too.
_ROUNDING, _ROUNDING_16_BIT = 1e-4, 2e-2
# A word in the name of an operator that draws: the one of L2Normalize is another.
_DRAWS = re.compile("(Dropout|Random|Rand|Randn|Randperm|Uniform|Normal|Laplace|Multinomial|Bernoulli)(?![a-z])")
_LOSS_REMEDY = "Its loss_fn returns one number: put what else there is to see into a callback."


class FirstPass:
    """The pass over a batch before the micro steps of a `GradCacheLoss`.

    Args:
        owner: Class name used in error messages.
        network: The GradAccumulation.
        like: The cell whose mode and settings those that are compiled follow.
        updated: The parameters that an optimizer updates; a forward pass may change the others.
        reducer: What gathers rows over the processes.
        half: Whether the network computes in 16 bits.
    """

    def __init__(
        self,
        owner: str,
        network: nn.Cell,
        like: nn.Cell,
        updated: Sequence[Parameter],
        reducer: GradientReducer,
        half: bool,
    ) -> None:
        self.owner, self.like, self.reducer = owner, like, reducer
        self.network: GradCacheLoss = network.network
        self.batch_axis = network.batch_axis
        self.tolerance = _ROUNDING_16_BIT if half else _ROUNDING
        known = {id(parameter) for parameter in updated}
        state = [each for each in self.network.backbone.get_parameters() if id(each) not in known]
        self.keep = Compiled(lambda: _Keep(state), owner, "the state of the network") if state else None
        self.put_back = Compiled(lambda: _PutBack(state), owner, "the state of the network")
        # By the structure of what they are given.
        self.forwards: dict[Hashable, Compiled] = {}
        self.losses: dict[Hashable, Compiled] = {}
        drawn = random_cells(self.network.loss_fn)
        if drawn and reducer.several:
            rule, got = "a loss that is the same on all processes", f"one that draws random numbers: {drawn}"
            raise ValueError(argument_error("GradCacheLoss", "loss_fn", rule, got, "Draw them in the backbone."))

    def compiled_cells(self) -> list[Compiled]:
        """Return what has a mode and settings of its own."""
        return [*self.forwards.values(), *self.losses.values()]

    def run(self, batch: SplitBatch, eager: bool) -> tuple[SplitBatch, int]:
        """Return the micro batches for the micro steps, and the number of rows of all processes."""
        inputs = [unflatten(batch.structure, part.tensors) for part in batch.micro_batches]
        end = len(inputs[0]) - self.network.labels
        if end < 1:
            self.network(*inputs[0])  # It says so.
        counts = [part.rows for part in batch.micro_batches]
        labels, leaves, axes = self._labels(inputs, end)
        firsts = self._outputs(first_inputs(batch.structure, end), batch.micro_batches, eager)
        outputs = [_joined(parts) for parts in zip(*firsts)]
        floats = [i for i, output in enumerate(outputs) if output.dtype in mstype.float_type]
        if not floats:
            got = ", ".join(str(output.dtype) for output in outputs) or "nothing"
            rule, remedy = "a network that returns a floating-point tensor", "There is no gradient without one."
            raise ValueError(argument_error("GradCacheLoss", "backbone", rule, got, remedy))
        split = [axis is not None for axis in axes]
        own_rows = [*outputs, *(leaf for leaf, is_split in zip(leaves, split) if is_split)]
        begin, rows, whole = self.reducer.gather_rows(sum(counts), own_rows)
        # Labels that are split are those of all processes, the others this one's own.
        gathered = iter(whole[len(outputs) :])
        leaves = [next(gathered) if s else leaf for leaf, s in zip(leaves, split)]
        leaves = [_rows_to(axis, leaf) for axis, leaf in zip(axes, leaves)]
        loss, cache, own = self._loss(labels, whole[: len(outputs)], floats, leaves, eager)
        ends = [begin + sum(counts[: i + 1]) for i in range(len(counts))]
        bounds = list(zip([begin, *ends[:-1]], ends))
        caches = zip(*(cut(grad, 0, bounds) for grad in cache))
        parts, structure = [], batch.structure
        for count, first, start, given in zip(counts, firsts, caches, inputs):
            tensors: list[Tensor] = []
            items = (loss, tuple(own), tuple(first[i] for i in floats), tuple(start), *given[:end])
            structure = flatten(items, tensors)
            parts.append(MicroBatch(count, tuple(tensors)))
        return SplitBatch(structure, parts), rows

    def join(self) -> None:
        """Take part in a batch of the other processes without one."""
        self.reducer.gather_rows(0, [])

    def check(self, outputs: Sequence[tuple[Tensor, ...]]) -> None:
        """Raise if the outputs of the micro steps show that they have not computed what this pass has."""
        for part in (each for output in outputs for each in output[3].asnumpy()):
            if not part <= self.tolerance:  # A NaN is no small difference.
                cells = random_cells(self.network.backbone)
                place = f", where {cells} may draw anew" if cells else ""
                raise RuntimeError(
                    f"For 'GradCacheLoss', the backbone must compute in the second pass what it has in the first, but "
                    f"its outputs differ by {part:.3g} of the largest number in their row in "
                    f"{type(self.network.backbone).__name__}{place}. Use ReplayDropout in place of Dropout, and keep "
                    f"what the forward pass changes in parameters."
                )

    def _labels(self, inputs: list[Sequence[object]], end: int) -> tuple[Hashable, list[Tensor], list[int | None]]:
        """Return the structure of the labels, those of all rows of this process, and where their rows are."""
        columns: list[list[Tensor]] = []
        structure: Hashable = None
        for given in inputs:
            tensors: list[Tensor] = []
            structure = flatten(tuple(given[end:]), tensors)
            columns.append(tensors)
        axes = leaf_axes(tuple(inputs[0]), self.batch_axis)
        axes = axes[len(axes) - len(columns[0]) :]
        leaves = [
            parts[0] if axis is None else _joined([_rows_first(axis, part) for part in parts])
            for axis, parts in zip(axes, zip(*columns))
        ]
        return structure, leaves, axes

    def _outputs(
        self, structure: Hashable, micro_batches: Sequence[MicroBatch], eager: bool
    ) -> list[tuple[Tensor, ...]]:
        """Return what the network returns for each micro batch. What that changes is then as it was before."""
        run = self._compiled(
            self.forwards, structure, lambda: Forward(self.network, structure), "the network", self.network.backbone
        )
        kept = self.keep(NOTHING) if self.keep is not None else ()
        outputs = []
        try:
            for rows, tensors in micro_batches:
                outputs.append(_called(run, tensors, eager))
                for output in outputs[-1]:
                    check_output(tuple(output.shape), rows)
        finally:
            if self.keep is not None:
                self.put_back(*kept)
        return outputs

    def _loss(
        self, labels: Hashable, outputs: list[Tensor], floats: list[int], leaves: list[Tensor], eager: bool
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the loss of all rows and its gradients, with respect to the outputs and to its own parameters."""
        places = tuple(floats)
        # A graph for each number of rows: of some losses one for changing lengths fails while it runs.
        run = self._compiled(
            self.losses,
            (labels, tuple(str(output.dtype) for output in outputs)),
            lambda: LossAndCache(self.network.loss_fn, len(outputs), labels, places),
            "the loss",
            self.network.loss_fn,
            needs_fixed=True,
        )
        tensors = (*outputs, *leaves)
        loss, grads = _called(run, tensors, eager)
        cache, own = grads if run.cell.has_own else (grads, ())
        # Of one output MindSpore returns the gradient alone.
        cache = cache if isinstance(cache, tuple) else (cache,)
        # Op by op, MindSpore would else go back from them into the loss once more.
        detach = ops.stop_gradient
        return detach(loss), tuple(detach(grad) for grad in cache), tuple(detach(grad) for grad in own)

    def _compiled(
        self,
        known: dict[Hashable, Compiled],
        structure: Hashable,
        make: Callable[[], nn.Cell],
        what: str,
        code: nn.Cell,
        needs_fixed: bool = False,
    ) -> Compiled:
        def build() -> nn.Cell:
            cell = make()
            follow_mode(cell, self.like)
            cell._get_attr_from_cell(self.like)
            return cell

        if structure not in known:
            known[structure] = Compiled(build, self.owner, what, code, needs_fixed)
        return known[structure]


class Forward(nn.Cell):
    """Forward pass of a network for a micro batch."""

    def __init__(self, network: GradCacheLoss, structure: Hashable) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.rebuild = unflattener(structure)

    def construct(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.network.outputs(self.rebuild(tensors))
        return outputs


class LossAndCache(nn.Cell):
    """A loss of all rows, its gradients with respect to outputs of the network, and those of its own parameters.

    Args:
        loss_fn: The loss.
        count: The number of outputs.
        labels: What `flatten` left of the labels.
        floats: The places of the outputs that have gradients.
    """

    def __init__(self, loss_fn: nn.Cell, count: int, labels: Hashable, floats: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        own = ParameterTuple(loss_fn.trainable_params())
        self.has_own = len(own) > 0
        self.loss_and_grads = ops.value_and_grad(
            _WholeLoss(loss_fn, count, labels), floats, own if self.has_own else None
        )

    def construct(self, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        found: tuple[Tensor, tuple[Tensor, ...]] = self.loss_and_grads(*tensors)
        return found


class _WholeLoss(RowWeight):
    def __init__(self, loss_fn: nn.Cell, count: int, labels: Hashable) -> None:
        super().__init__(loss_fn)
        self.count = count
        self.rebuild = unflattener(labels)

    def construct(self, *tensors: Tensor) -> Tensor:
        returned = self.network(*tensors[: self.count], *self.rebuild(tensors[self.count :]))
        loss = self.first(returned, "its loss", _LOSS_REMEDY) * ONE
        self.other_losses(returned, 1, _LOSS_REMEDY)
        return loss


class _Keep(nn.Cell):
    def __init__(self, state: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.state = ParameterTuple(state)

    def construct(self, nothing: Tensor) -> tuple[Tensor, ...]:
        copies: tuple[Tensor, ...] = ()
        for each in self.state:
            copies += (each.copy(),)
        return copies


class _PutBack(nn.Cell):
    def __init__(self, state: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.state = ParameterTuple(state)

    def construct(self, *values: Tensor) -> tuple[Tensor, ...]:
        done: tuple[Tensor, ...] = ()
        for i, each in enumerate(self.state):
            done += (ops.assign(each, values[i]),)
        return done


def random_cells(network: nn.Cell) -> str:
    """Return the names of the cells that draw random numbers in training, as far as it shows."""
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


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else ops.concat(list(parts))


def _rows_first(axis: int, tensor: Tensor) -> Tensor:
    return tensor if axis == 0 else ops.movedim(tensor, axis, 0)


def _rows_to(axis: int | None, tensor: Tensor) -> Tensor:
    return tensor if axis in (0, None) else ops.movedim(tensor, 0, axis)
