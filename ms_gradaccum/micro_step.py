"""Forward and backward of a batch, micro batch by micro batch, added into the sums of a window."""

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore.common.sparse_tensor import RowTensorInner

from ms_gradaccum.bad_micro_batch import KeepFinite
from ms_gradaccum.half_precision import computes_in_16_bits
from ms_gradaccum.loss_scale import NoLossScale
from ms_gradaccum.loss_weight import WeightedLoss
from ms_gradaccum.parallel.single import SingleProcess
from ms_gradaccum.precision import Precision
from ms_gradaccum.runs import run_of
from ms_gradaccum.thread_pool import with_condition


class MicroStep(nn.Cell):
    """Forward and backward of one micro batch, added into the buffers of the optimizers of the network.

    Args:
        weighted_loss: The network's loss.
        parallels: One per optimizer: its buffer, and what becomes of its gradients.
        weights: One per optimizer: the parameters that it updates.
    """

    # Whether it is the last one of its window and the ranks add up the sums with it.
    reduces = False
    # Whether MindSpore's threads shall run it, see thread_pool.py.
    in_thread_pool = False

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
        number = ops.depend(self.buffer.weight + 0.0, added)
        return with_condition(number) if self.in_thread_pool else number


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
