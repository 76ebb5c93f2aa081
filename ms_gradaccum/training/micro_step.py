"""Forward and backward pass of one micro batch, added to the sums of a window, as a graph or op by op.

The backward pass starts from a share of the micro batch's mean loss, and the gradients are added times a factor. Share
times factor is the number of rows, so the sums are the same for each choice of the two.
"""

from collections.abc import Sequence
from typing import Any, Literal

import mindspore as ms
from mindspore import ParameterTuple, Tensor, mint, nn, ops

from ms_gradaccum.backend.arithmetic import ONE, Tensors, scale_wide
from ms_gradaccum.backend.compiled import (
    NOTHING,
    Compiled,
    RunRecord,
    clear_autograd_records,
    op_by_op,
)
from ms_gradaccum.backend.network_code import NetworkCode
from ms_gradaccum.backend.tensors import Done, chunk_of, chunks_of, map_tensors
from ms_gradaccum.backend.thread_pool import in_thread_pool
from ms_gradaccum.batch.structure import SequenceOf
from ms_gradaccum.batch.weighted_loss import WeightedLoss
from ms_gradaccum.gradients.clipping import squares_of
from ms_gradaccum.gradients.mixed_precision import Precision
from ms_gradaccum.gradients.network_precision import computes_in_16_bits
from ms_gradaccum.parallel.reducer import GradientReducer, replicas_of
from ms_gradaccum.training.settings import StepSettings

# The outputs of a micro step: the loss sum, the weight, an ordering token, and any notes.
Outputs = Tensors
_LOGITS_LOSSES = (nn.BCEWithLogitsLoss, mint.nn.BCEWithLogitsLoss, ops.BCEWithLogitsLoss)


# The number that the backward pass of a micro batch starts from, for a mean loss over rows.
# sum: the loss times its rows, so that gradients need no factor.
# mean: the loss, so that 16-bit gradients have the size of those of a mean.
# batch: the loss times the micro batch's share of the batch's rows. Each row then gets the same gradient as in the
# whole batch, which a nonlinear backward pass needs, for example one with hooks or with clipping inside.
BackwardStart = Literal["sum", "mean", "batch"]


def share_and_factor(start: BackwardStart, rows: Any, batch_rows: Any) -> tuple[Any, Any]:
    """Return the share of the loss and the factor of the gradients. The rows are numbers or, in a graph, tensors."""
    if start == "sum":
        return rows, ONE
    if start == "mean":
        return ONE, rows
    return rows / batch_rows, batch_rows


def start_tensors(start: BackwardStart, rows: int, batch_rows: int) -> Tensors:
    return tuple(Tensor(each, ms.float32) for each in share_and_factor(start, rows, batch_rows))


def backward_start_of(weighted_loss: WeightedLoss, half: bool, eager: bool) -> BackwardStart:
    """Return the backward start of a network that is run op by op (``eager``) or compiled, in half precision or not."""
    if weighted_loss.is_prepared or NetworkCode(weighted_loss.network).has_own_backward():
        return "batch"
    if half:
        return "mean"
    return "batch" if eager else "sum"


def divides_by_earlier_rows(network: nn.Cell) -> bool:
    """Return whether MindSpore may divide a gradient by the rows of the process's first batch (`BCEWithLogitsLoss`)."""
    code = NetworkCode(network)
    return "binary_cross_entropy_with_logits" in code.names or bool(code.of_kind(_LOGITS_LOSSES))


def is_half(network: nn.Cell, precision: Precision) -> bool:
    """Return whether a network computes in 16 bits, or its loss is scaled."""
    cells = [cell for _, cell in network.cells_and_names()]
    is_converted = precision.level != "O0" or computes_in_16_bits(network.trainable_params(), cells)
    return bool(is_converted or precision.loss_scale.scales)


class MicroLoss(nn.Cell):
    """The differentiated value, followed by the outputs of `WeightedLoss`. Kept minimal: eager operators are slow."""

    def __init__(self, weighted_loss: WeightedLoss, precision: Precision, divides: bool) -> None:
        super().__init__(auto_prefix=False)
        network = weighted_loss.network
        self.loss_scale = precision.loss_scale
        self.weighted_loss = weighted_loss
        self.half = is_half(network, precision)
        # True if a loss with its own weight is divided by that weight before the backward pass.
        self.divides = divides and self.half and not weighted_loss.counts_rows
        self._get_attr_from_cell(network)

    def construct(self, share: object, *tensors: object) -> Tensors:
        outputs: Tensors = self.weighted_loss(share, *tensors)
        start = outputs[0]
        if self.divides:
            start = start / ops.maximum(ops.stop_gradient(outputs[1]), ONE)
        if self.half:
            start = start * self.loss_scale.value()
        return (start, *outputs)


class AddMicroBatch(nn.Cell):
    """Add the outputs of a `MicroLoss` and its gradients to the optimizers' buffers. It contains no user code."""

    # True if a micro batch may have the weight 0 and, as a mean over nothing, NaN in its gradient.
    may_be_empty = False

    def __init__(
        self, reducers: Sequence[GradientReducer], loss: MicroLoss | None, drop_non_finite: bool
    ) -> None:
        super().__init__(auto_prefix=False)
        self.reducers = nn.CellList(reducers, auto_prefix=False)
        self.buffer = reducers[0].buffer
        self.counts_rows = loss is None or loss.weighted_loss.counts_rows
        self.divides = loss is not None and loss.divides
        # True if the loss returns further values that are passed on.
        self.has_notes = loss is not None and loss.weighted_loss.is_prepared
        self.drops = drop_non_finite
        # The begin and end of each reducer's gradients among all gradients.
        bounds = []
        sizes: list[int] = []
        for reducer in reducers:
            begin = len(sizes)
            sizes += [each.size for each in reducer.replicas()]
            bounds.append((begin, len(sizes)))
        self.bounds = tuple(bounds)
        self.chunks = chunks_of(sizes)
        # False for gradients from the caller, who may leave out the loss: it is NaN then.
        self.checks_loss = loss is not None
        # True if gradients are reduced before they are added, so that this rank's factor must be applied first.
        self.scales_first = reducers[0].every_batch
        # The number of further values beside loss sum and weight, which are added up or passed on.
        self.others = int(self.has_notes or self.buffer.other_losses is not None)

    def construct(self, factor: Tensor, value: Tensor, weight: Tensor, *grads: Tensor) -> Tensors:
        """Add ``grads`` from outside of this graph, which follow any other losses or notes. Return as `added`."""
        loss_sum, weight, factor = self.totals(value, weight, factor)
        return self.added(loss_sum, weight, factor, grads[self.others :], grads[: self.others])

    def totals(
        self, value: Tensor, weight: Tensor, factor: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss sum, the weight and the factor of the gradients, from the factor of the backward start."""
        if self.counts_rows:
            return value * factor, weight * factor, factor
        if self.divides:
            return value, weight, ops.maximum(weight, ONE)
        return value, weight, ONE

    def added(
        self, loss_sum: Tensor, weight: Tensor, factor: Tensor, grads: Outputs, others: Outputs
    ) -> Outputs:
        """Add a loss sum, its weight, the gradients times a factor, and the values to report. Return `Outputs`."""
        done: Done = ()
        if self.may_be_empty:
            # Not ops.greater, which would leave out a weight that is NaN, too.
            has_weight = weight != 0.0
            loss_sum = where_finite(has_weight, loss_sum)
            grads = map_tensors(ops.partial(where_finite, has_weight), grads)
        if self.drops:
            # The squares must be finite in float32, as those of a window must be.
            finite = ops.isfinite(ops.sum(squares_of(grads, self.chunks)))
            if self.checks_loss:
                finite = ops.logical_and(finite, ops.isfinite(loss_sum + weight))
            loss_sum, weight = map_tensors(ops.partial(where_finite, finite), (loss_sum, weight))
            grads = map_tensors(ops.partial(where_finite, finite), grads)
            for reducer in self.reducers:
                done = reducer.buffer.count_dropped(ops.depend(finite, done))
        if len(others) > 0 and not self.has_notes:
            # They are weighted like the loss, with 0 if the micro batch is left out.
            done = self.buffer.add_other_losses(others[0], ops.depend(weight, done))
        # By index, because zip would double the compile time of this loop.
        for i in range(len(self.bounds)):
            begin, end = self.bounds[i]
            reducer = self.reducers[i]
            if len(grads) == 0:
                done = reducer.buffer.add_totals(loss_sum, weight)
            else:
                # One after the other: all ranks must send their messages in the same order.
                own = ops.depend(chunk_of(grads, begin, end), done)
                if self.scales_first:
                    own = map_tensors(ops.partial(scale_wide, factor), own)
                    factor_of_sum = ONE
                else:
                    factor_of_sum = factor
                own = reducer.reduce_scatter_micro_batch(own)
                done = reducer.buffer.add(loss_sum, weight, own, factor_of_sum)
        notes: Tensors = ()
        if self.has_notes:
            notes = others
        # The compiler needs a token that depends on no value of this micro batch.
        return (loss_sum, weight, ops.depend(self.buffer.weight + 0.0, done), *notes)

    def add_nothing(self, nothing: Tensor) -> Done:
        """Take part, without a micro batch, in the collectives of a micro batch of other ranks."""
        done: Done = ()
        for reducer in self.reducers:
            grads = reducer.buffer.no_grads(reducer.replicas(), done)
            done = reducer.buffer.add(
                nothing, nothing, reducer.reduce_scatter_micro_batch(grads), ONE
            )
        return done


def where_finite(condition: Tensor, value: Tensor) -> Tensor:
    """Return ``value``, or zeros unless ``condition`` is true. A product with 0 would keep NaN and Inf."""
    return ops.select(condition, value, ops.zeros_like(value))


class MicroStep(nn.Cell):
    """Forward and backward of one micro batch, added into the buffers, as one graph; or the parts of an eager step."""

    is_pooled = False  # True if MindSpore's thread pool runs it.

    def __init__(
        self,
        loss: WeightedLoss,
        reducers: Sequence[GradientReducer],
        settings: StepSettings,
        eager: bool,
        is_empty: bool = False,
    ) -> None:
        """Build the step for a loss, run op by op (``eager``) or compiled; ``is_empty`` for batches of weight 0."""
        super().__init__(auto_prefix=False)
        grads_are_reduced = reducers[0].grads_are_reduced
        # If a loss were divided by its own weight, each rank would have another factor.
        self.micro_loss = MicroLoss(loss, settings.precision, divides=not grads_are_reduced)
        # The whole parameters that are updated.
        self.parameters = ParameterTuple(replicas_of(reducers))
        self.adding = AddMicroBatch(reducers, self.micro_loss, settings.drop_non_finite)
        # Gradients that come reduced are those of all ranks, of which others may have a weight.
        self.adding.may_be_empty = (loss.may_be_empty or is_empty) and not grads_are_reduced
        # With "sum", gradients of all ranks have the same factor, for any rows per rank.
        self.backward_start: BackwardStart = "sum"
        if not grads_are_reduced:
            self.backward_start = backward_start_of(loss, self.micro_loss.half, eager)
        self.scales = self.backward_start != "sum" or self.micro_loss.half
        self.loss_and_grads = ops.value_and_grad(
            self.micro_loss, None, self.parameters, has_aux=True
        )
        self._get_attr_from_cell(loss.network)

    def construct(self, share: Tensor, factor: Tensor, *tensors: object) -> Tensors:
        """Return the loss sum and the weight of this micro batch, and an ordering token."""
        outputs, grads = self.loss_and_grads(share, *tensors)
        loss_sum, weight, factor = self.adding.totals(outputs[1], outputs[2], factor)
        if not self.scales:
            factor = ONE  # A constant factor of 1 is free.
        outputs = self.adding.added(loss_sum, weight, factor, grads, outputs[3:])
        if self.is_pooled:
            outputs = (outputs[0], outputs[1], in_thread_pool(outputs[2])) + outputs[3:]
        return outputs


class EagerMicroStep:
    """Micro step op by op: the user's code runs in Python, hooks included. A graph adds the gradients."""

    structure: SequenceOf  # That of the inputs of the current batch.
    is_whole = False  # True if the batch has a single micro batch, and starts from its mean loss.
    ends_window = False  # True if the batch is the last one of its window.
    left = 0  # The number of micro batches of the batch that have not begun.

    def __init__(self, owner: str, cell: MicroStep) -> None:
        self.cell = cell
        self.forgets_passes = divides_by_earlier_rows(cell.micro_loss.weighted_loss.network)
        self.reducer = cell.adding.reducers[0]
        # Compiled twice for a network that accumulates its own gradients: without them, and with them.
        self.adding = Compiled(
            lambda: cell.adding,
            owner,
            "the sum of the gradients",
            needs_fixed=self.reducer.accumulates,
        )

    def begin_batch(
        self, structure: SequenceOf, micro_batches: int, ends_window: bool = False
    ) -> None:
        loss = self.cell.micro_loss.weighted_loss
        is_mean = loss.counts_rows and not loss.is_prepared and self.cell.backward_start != "sum"
        self.structure = structure
        self.is_whole = is_mean and micro_batches == 1
        self.ends_window = ends_window
        self.left = micro_batches

    def __call__(
        self, share: Tensor, factor: Tensor, *tensors: Tensor, record: RunRecord | None = None
    ) -> Tensors:
        if self.forgets_passes:
            clear_autograd_records()
        self.left -= 1
        self.reducer.begin_micro_batch(self.ends_window and self.left == 0)
        with op_by_op():
            # On a GPU, convolutions of a function without arguments take 3 to 7 times as long (MindSpore 2.10, H200).
            grad_fn = ops.value_and_grad(self._loss, None, self.cell.parameters, has_aux=True)
            (_, *values), grads = grad_fn(share, *tensors)
        self.reducer.end_micro_batch()
        inputs = values if self.reducer.holds_grads else (*values, *grads)
        outputs: Tensors = self.adding(factor, *inputs, record=record)
        if self.is_whole and not (self.adding.cell.drops or self.adding.cell.may_be_empty):
            # Its mean loss, which is not rounded as a sum that is divided again.
            return (values[0], ONE, NOTHING)
        return outputs

    def _loss(self, share: Tensor, *tensors: Tensor) -> Tensors:
        rows = None if self.is_whole else share
        outputs: Tensors = self.cell.micro_loss(rows, *self.structure.rebuild(tensors))
        return outputs
