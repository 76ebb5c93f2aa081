"""Forward and backward of a batch, micro batch by micro batch, added into the sums of a window."""

from collections.abc import Hashable, Sequence
from typing import Any

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore.common.sparse_tensor import RowTensorInner

from ms_gradaccum._checks import warn
from ms_gradaccum.bad_micro_batch import KeepFinite
from ms_gradaccum.compiled import NOTHING, Compiled
from ms_gradaccum.events import Events
from ms_gradaccum.half_precision import computes_in_16_bits
from ms_gradaccum.loss_scale import NoLossScale
from ms_gradaccum.loss_weight import WeightedLoss
from ms_gradaccum.parallel.single import SingleProcess
from ms_gradaccum.precision import Precision
from ms_gradaccum.runs import run_of
from ms_gradaccum.structure import why_no_graph

_MANY_STRUCTURES = 8


class MicroStep(nn.Cell):
    """Forward and backward of one micro batch, added into the buffers of the optimizers of the network.

    Args:
        weighted_loss: The network's loss.
        parallels: One per optimizer: its buffer, and what becomes of its gradients.
        weights: One per optimizer: the parameters that it updates.
    """

    # Whether it is the last one of its window and the ranks add up the sums with it.
    reduces = False

    def __init__(
        self, weighted_loss: WeightedLoss, parallels: Sequence[SingleProcess], weights: Sequence[ParameterTuple]
    ) -> None:
        super().__init__(auto_prefix=False)
        self.weighted_loss = weighted_loss
        self.parallels = nn.CellList(parallels, auto_prefix=False)
        self.buffer = parallels[0].buffer
        self.weights = ParameterTuple(weight for group in weights for weight in group)
        ends = [sum(len(group) for group in weights[: i + 1]) for i in range(len(weights))]
        self.bounds = tuple(zip([0, *ends[:-1]], ends))
        self.loss_and_grads = ops.value_and_grad(weighted_loss, None, self.weights, has_aux=True)
        self._get_attr_from_cell(weighted_loss.network)

    def construct(self, rows: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        """Return the loss sum and the weight of this part, and what is there once they are added."""
        (loss_sum, weight), grads = self.loss_and_grads(rows, *tensors)
        added = self.add(0, loss_sum, weight, grads, ())
        return loss_sum, weight, self.done(added)

    def add(self, term: int, loss_sum: Tensor, weight: Tensor, grads: tuple[Any, ...], done: Any) -> Any:
        """Add the gradients of one term of the loss, after ``done``."""
        for parallel, (begin, end) in zip(self.parallels, self.bounds):
            buffer = parallel.buffer if term == 0 else parallel.buffer.others[term - 1]
            # One after the other: the messages of all ranks must come in one order.
            shared = parallel.share(ops.depend(run_of(grads, begin, end), done))
            done = buffer.add(loss_sum, weight, shared)
        return done

    def done(self, added: Any) -> Tensor:
        """Return something that depends on ``added`` and, for the compiler's sake, on nothing of this micro batch."""
        if self.reduces:
            added = self.parallels[0].reduce(added)
        return ops.depend(self.buffer.weight + 0.0, added)


class ScaledMicroStep(MicroStep):
    """The same for a loss of several terms, and for networks that compute in half precision.

    The backward pass starts from each term's mean times the loss scale, and the gradient is multiplied by the weight
    in float32: a gradient of a sum over many rows or tokens can be more than a half-precision number can hold.

    Args:
        half: Whether the network computes in half precision.
        loss_scale: The loss scale.
        drops: Whether a micro batch that is not finite is left out.
    """

    def __init__(
        self,
        weighted_loss: WeightedLoss,
        parallels: Sequence[SingleProcess],
        weights: Sequence[ParameterTuple],
        half: bool,
        loss_scale: NoLossScale,
        drops: bool,
    ) -> None:
        super().__init__(weighted_loss, parallels, weights)
        self.terms = 1 + len(self.buffer.others)
        self.half = half
        self.loss_scale = loss_scale
        self.keep: Any = KeepFinite(self.weights) if drops else None
        self.map = ops.HyperMap()

    def construct(self, rows: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        values, backward = ops.vjp(self.weighted_loss, rows, *tensors, weights=self.weights)
        if self.keep is not None:
            return self.add_finite(values, backward)
        added: Any = ()
        for term in range(self.terms):
            grads = self.grads_of(term, values, backward)
            added = self.add(term, values[2 * term], values[2 * term + 1], grads, added)
        return self.report(values, added)

    def grads_of(self, term: int, values: tuple[Tensor, ...], backward: Any) -> Any:
        """Return the gradients of one term's sum, times the loss scale."""
        weight = values[2 * term + 1]
        factor = ops.maximum(weight, Tensor(1.0, ms.float32)) if self.half else ops.ones_like(weight)
        start: tuple[Tensor, ...] = ()
        for i in range(2 * self.terms):
            start += (self.loss_scale.value() / factor if i == 2 * term else ops.zeros_like(weight),)
        grads = backward(*start)[1]
        return self.map(ops.partial(_scale, factor), grads) if self.half else grads

    def add_finite(self, values: tuple[Tensor, ...], backward: Any) -> tuple[Tensor, ...]:
        """Add the micro batch if all of it is finite: one decision for all terms."""
        all_grads: tuple[Any, ...] = ()
        finite = ops.isfinite(ops.sum(ops.stack(values)))
        for term in range(self.terms):
            grads = self.grads_of(term, values, backward)
            finite = ops.logical_and(finite, self.keep.is_finite(grads))
            all_grads += (grads,)
        kept = self.keep.kept(finite, values)
        added: Any = ()
        for parallel in self.parallels:
            added = parallel.buffer.count_dropped(ops.depend(finite, added))
        for term in range(self.terms):
            grads = self.keep.kept(finite, all_grads[term])
            added = self.add(term, kept[2 * term], kept[2 * term + 1], grads, added)
        return self.report(kept, added)

    def report(self, values: tuple[Tensor, ...], added: Any) -> tuple[Tensor, ...]:
        """Return what `construct` returns, after ``added``."""
        loss_sums: tuple[Tensor, ...] = ()
        weights: tuple[Tensor, ...] = ()
        for term in range(self.terms):
            loss_sums += (values[2 * term],)
            weights += (values[2 * term + 1],)
        return ops.stack(loss_sums), ops.stack(weights), self.done(added)


def make_micro_step(
    weighted_loss: WeightedLoss,
    parallels: Sequence[SingleProcess],
    weights: Sequence[ParameterTuple],
    precision: Precision,
    drops: bool = False,
) -> MicroStep:
    """Return the micro step that the network needs."""
    network = weighted_loss.network
    cells = [cell for _, cell in network.cells_and_names()]
    half = computes_in_16_bits(network.trainable_params(), cells) or not precision.is_full
    if half or drops or parallels[0].buffer.others:
        return ScaledMicroStep(weighted_loss, parallels, weights, half, precision.loss_scale, drops)
    return MicroStep(weighted_loss, parallels, weights)


_scale = ops.MultitypeFuncGraph("scale_gradient")


@_scale.register("Tensor", "Tensor")
def _scale_dense(factor: Tensor, grad: Tensor) -> Tensor:
    return ops.cast(grad, ms.float32) * factor


@_scale.register("Tensor", "RowTensor")
def _scale_rows(factor: Tensor, grad: Any) -> Any:
    return RowTensorInner(grad.indices, ops.cast(grad.values, ms.float32) * factor, grad.dense_shape)


class EmptyStep(nn.Cell):
    """The part of a rank that has no micro batch left in what the ranks add up for each micro batch."""

    def __init__(self, parallels: Sequence[SingleProcess]) -> None:
        super().__init__(auto_prefix=False)
        self.parallels = nn.CellList(parallels, auto_prefix=False)

    def construct(self, nothing: Tensor) -> Any:
        done: Any = ()
        for parallel in self.parallels:
            buffer = parallel.buffer
            for term in (buffer, *buffer.others):
                grads = buffer.no_grads(parallel.replicas(), done)
                done = term.add(nothing, nothing, parallel.share(grads))
        return done


class MicroSteps:
    """The micro steps of the batches of a network, each run as a compiled graph.

    Args:
        owner: Whose name errors begin with.
        network: The GradAccumulation.
        parallels: One per optimizer.
        weights: One per optimizer: the parameters that it updates.
        precision: What computes in 16 bits, and the loss scale.
        drops: Whether a micro batch that is not finite is left out.
    """

    def __init__(
        self,
        owner: str,
        network: Any,
        parallels: Sequence[SingleProcess],
        weights: Sequence[ParameterTuple],
        precision: Precision,
        drops: bool,
    ) -> None:
        self.owner = owner
        self.precision = precision
        self.drops = drops
        self.network = network
        self.parallels = parallels
        self.weights = weights
        # For a larger graph, which takes inputs as they are.
        self.cell = self._build(network.weighted_loss)
        # One per structure of the inputs, nearly always one, and per whether the sums are reduced with it.
        self.by_structure: dict[tuple[Hashable, bool], Compiled] = {}
        self.empty_step = EmptyStep(parallels)
        self.run_empty_step = Compiled(lambda: self.empty_step, owner, "the empty step")
        # Whether the last batch may have added something before it failed.
        self.has_added = False
        # Who is told of each micro batch.
        self.events = Events(owner)

    def compiled_cells(self) -> list[Any]:
        """Return what has a mode and settings of its own."""
        return [self.cell, self.empty_step, *self.by_structure.values()]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], reduces: bool = False) -> list[Any]:
        """Add one batch and return what each of its micro steps returned; the last one may reduce the sums too."""
        self.has_added = False
        structure, micro_batches = self.network.split(*args, **kwargs)
        micro_step = self._for(structure)
        # Before any of them: the messages of all ranks must come in one order.
        rounds = self.parallels[0].rounds(len(micro_batches))
        outputs: list[Any] = []
        done = self.events.micro_batches
        # A callback may raise before its first run.
        micro_step.has_run = False
        counts = {rows: Tensor(rows, ms.float32) for rows in {part.rows for part in micro_batches}}
        try:
            for index, (rows, tensors) in enumerate(micro_batches):
                self.events.micro_batch_begin(index, rows)
                if reduces and index == len(micro_batches) - 1:
                    micro_step = self._for(structure, reduces)
                outputs.append(micro_step(counts[rows], *tensors))
                self.events.micro_batch_end(index, rows)
        except BaseException:
            self.has_added = bool(outputs) or micro_step.has_run
            self.events.micro_batches = done
            raise
        self._add_nothing(rounds - len(outputs))
        return outputs

    def join(self) -> None:
        """Take part in a batch of the other processes without one."""
        self._add_nothing(self.parallels[0].rounds(0))

    def _add_nothing(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            self.run_empty_step(NOTHING)

    def _for(self, structure: Hashable, reduces: bool = False) -> Compiled:
        key = (structure, reduces)
        if key not in self.by_structure:
            self.by_structure[key] = Compiled(
                lambda: self._build(self.network.loss_of(structure), reduces),
                self.owner,
                "the network",
                why_no_graph(structure),
                takes_gradient=True,
            )
            if len({known for known, _ in self.by_structure}) == _MANY_STRUCTURES and not reduces:
                warn(
                    f"For '{self.owner}', the inputs must keep their structure and Python values, but got "
                    f"{_MANY_STRUCTURES} different ones, each compiled on its own. Make values that change tensors.",
                )
        return self.by_structure[key]

    def _build(self, weighted_loss: WeightedLoss, reduces: bool = False) -> MicroStep:
        cell = make_micro_step(weighted_loss, self.parallels, self.weights, self.precision, self.drops)
        cell.reduces = reduces
        if hasattr(self, "cell"):
            cell.set_train(self.cell.training)
            cell._get_attr_from_cell(self.cell)  # What `set_jit_config` has said.
        else:
            cell.set_train()
        return cell
