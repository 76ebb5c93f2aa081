"""The body of a training step, and its form for semi-auto-parallel on Ascend and GPU, which the compiler partitions.

The compiler recognises accumulation by three things: the attribute ``grad_accu_num`` of the slice that cuts a micro
batch; a parameter ``accu_grads.<name>`` for the sums, cloned from each weight; and one gradient of the whole unrolled
forward pass. Then it reduces once per parameter and window; otherwise once per micro batch, with all activations alive.
`construct` is written for the whole batch of all devices.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import initializer

from ms_gradaccum._checks import warn
from ms_gradaccum.advice.loss_measurement import not_measured
from ms_gradaccum.backend.arithmetic import scale
from ms_gradaccum.backend.compiled import Compiled, graph_mode
from ms_gradaccum.backend.in_graph import warn_in_graph
from ms_gradaccum.backend.mindspore_private import primexpr
from ms_gradaccum.backend.optimizer_progress import OptimizerProgress
from ms_gradaccum.backend.optimizers import LearningRate, scale_for
from ms_gradaccum.backend.tensors import map_tensors
from ms_gradaccum.batch.arguments import Args, Kwargs
from ms_gradaccum.batch.split import BatchAxis, Shape, split_shapes
from ms_gradaccum.gradients.buffer import reciprocal
from ms_gradaccum.gradients.clipping import Clip
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.parallel.semi_auto import SemiAuto, check_compiling, gradient_is_returned
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.settings import StepSettings
from ms_gradaccum.training.step_output import StepOutput, items_of
from ms_gradaccum.training.window_end import MAX_OVERFLOWS, NO_END, broken_gradient, decide

_NO_NORM = Tensor(0.0, ms.float32)


class Step(nn.Cell):
    """The body of a `TrainOneStepCell`, with one interface for all kinds. In this class, each call ends its window."""

    accumulation_steps = 1
    is_carried = False  # True if a Model leaves windows open at the end of its data.
    has_claims = True  # False once a later step was built with the same optimizer.
    is_unmeasured = False  # True until the loss was measured, if it should be.
    reducers: Sequence[GradientReducer] = ()

    def __init__(self, network: nn.Cell, settings: StepSettings) -> None:
        super().__init__(auto_prefix=False)
        self.owner, self.network = settings.owner, network
        self.events = Events(settings.owner)
        self.loss_scale = settings.precision.loss_scale

    def compiled_cells(self) -> list[nn.Cell | Compiled]:
        """Return the compiled cells, each with its own mode and settings."""
        return []

    def compiling(self) -> AbstractContextManager[None]:
        """Return a context for the compilation of the whole step as one graph."""
        return nullcontext()

    def run(self, args: Args, kwargs: Kwargs, as_graph: Callable[..., tuple[Tensor, ...]]) -> StepOutput:
        """Train one batch. ``as_graph`` runs the step as one graph, from its outermost cell on."""
        raise NotImplementedError

    def join(self) -> StepOutput:
        """Count a batch of the window without local data."""
        raise NotImplementedError

    def measure_loss(self, batch: tuple[object, ...]) -> None:
        """Measure the loss of a batch that a larger graph will train."""

    def open_batches(self) -> int:
        return 0

    def flush(self) -> StepOutput | None:
        return None

    def drop(self) -> int:
        return 0


class PartitionedStep(Step):
    """One batch, one window, one update, in one graph, which the compiler partitions on Ascend and GPU."""

    is_distributed = False
    # A hook on the optimizer would change the graph that the compiler partitions.
    watches_calls = False

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, kind: SemiAuto, settings: StepSettings) -> None:
        super().__init__(network, settings)
        steps, clip = settings.accumulation_steps, settings.clip
        kind.check(network, optimizer, accumulation_steps=steps, clip=clip, **settings.of_sums())
        self.is_unmeasured = settings.check_loss and network.micro_size > 1
        self.optimizer, self.optimizers = optimizer, [optimizer]
        self.semi_auto, self.micro_size = kind, network.micro_size
        self.sums = BatchSums(network)
        self.parameters = optimizer.parameters
        self.accumulators = ParameterTuple(_accumulator_of(parameter) for parameter in self.parameters)
        self.clip: Clip = clip
        self.learning_rate = LearningRate(optimizer)
        self.progress = OptimizerProgress(optimizer)
        self.handed_scale = scale_for(settings.owner, optimizer, self.loss_scale)
        # The overflow and update flags of up to 100 last windows, which are read together.
        self.skipped: list[tuple[Tensor, Tensor]] = []
        self.is_called = False
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)

    def compiling(self) -> AbstractContextManager[None]:
        return self.semi_auto.compiling()

    def run(self, args: Args, kwargs: Kwargs, as_graph: Callable[..., tuple[Tensor, ...]]) -> StepOutput:
        if self.is_unmeasured:
            self.is_unmeasured = False
            warn(not_measured("the compiler partitions the whole step"))
        self.is_called = True
        self.events.tell("on_update_begin")
        before = self.progress.snapshot() if self.progress.may_leave_out else None
        with graph_mode():
            output = StepOutput(*as_graph(*self.network.positional(args, kwargs)))
        if before is not None and not self.progress.has_updated(before, output.grad_norm, output.learning_rate):
            output = output._replace(updated=Tensor(False))
        if self.events.heard:  # Otherwise do not wait for the device.
            self.events.update_end(output)
        self.skipped.append((output.overflow, output.updated))
        if len(self.skipped) == MAX_OVERFLOWS:
            broken = all(overflow.asnumpy() and not updated.asnumpy() for overflow, updated in self.skipped)
            self.skipped.clear()
            if broken:
                raise RuntimeError(broken_gradient(self.events.owner))
        return output

    def join(self) -> StepOutput:
        """Raise: in semi-auto-parallel a batch belongs to all devices."""
        raise RuntimeError(
            f"For '{self.events.owner}', each device must have as many batches as the others in semi-auto-parallel, "
            f"but got a join() in place of one. Give all devices data of one length, or leave the last batches out."
        )

    def construct(self, *inputs: object) -> tuple[Tensor, ...]:
        check_compiling(True)
        sums = self.sums(*inputs)
        # Differentiate only the loss sum, not the weight beside it.
        loss_scale = self.loss_scale.value()
        grads = self.grad(self.sums, self.parameters)(*inputs, loss_scale * Tensor([1.0, 0.0], ms.float32))
        weight = sums[1]
        factor = reciprocal(weight)
        # Each device has its part of the mean gradient, in the dtype of the parameter.
        totals = grads if gradient_is_returned(self.micro_size) else ops.depend(self.accumulators, grads)
        mean = map_tensors(ops.partial(_mean_like, self.loss_scale.unscaled(factor)), totals, self.parameters)
        if self.clip.has_one_factor:
            norm = ops.sqrt(ops.addn(map_tensors(_marked_square, mean)))[0]
            clipped_norm = self.clip.norm_after(norm)
        else:
            # A clip by value needs no norm. Both norms for the report go in one message.
            norms = ops.sqrt(ops.addn(map_tensors(_marked_squares, mean, self.clip(mean, _NO_NORM))))
            norm, clipped_norm = norms[0, 0], norms[0, 1]
        overflow, updated = decide(norm, weight, self.loss_scale.skips_overflow)
        learning_rate = self.learning_rate()
        mean = self.clip(mean, norm)
        if self.handed_scale != 1.0:
            mean = map_tensors(ops.partial(scale, Tensor(self.handed_scale, ms.float32)), mean)
        named = {"loss": sums[0] * factor, "overflow": overflow, "loss_scale": loss_scale, "updated": updated}
        named["grad_norm"] = norm
        named["clipped_grad_norm"] = clipped_norm
        named["learning_rate"] = learning_rate
        named["weight"] = weight
        report: tuple[Tensor, ...] = items_of(named)
        if updated:
            report = ops.depend(report, self.optimizer(mean))
        if not self.is_called:
            warn_in_graph(NO_END)
        # Assign zeros, because a product with 0 would keep NaN and Inf forever.
        report = ops.depend(report, map_tensors(_clear, ops.depend(self.accumulators, report)))
        report = ops.depend(report, self.loss_scale(updated, overflow, report))
        return report


class BatchSums(nn.Cell):
    """The loss sum and the weight of a batch as one tensor, since the compiler partitions a single output."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.micro_size = network.micro_size
        self.batch_axis = network.batch_axis
        self.weighted_loss = network.loss_of()
        self.weighted_loss.reports = False
        # One primitive per micro batch, or the compiler would merge them.
        self.cuts = [ops.StridedSlice().add_prim_attr("grad_accu_num", self.micro_size) for _ in range(self.micro_size)]
        # These mark the end of each micro batch. With `lazy_inline`, the forward pass is one function for all micro
        # batches: without the marks, the compiler could not tell their backward passes apart.
        marked = [ops.Add().add_prim_attr("forward_end", i) for i in range(self.micro_size)]
        self.joins = marked if self.micro_size > 1 else [ops.Add()]
        # Without this sharding the compiler would put one of the two elements on each of two devices.
        self.at_place = ops.Mul().shard(((), (1,)))
        self.add_places = ops.Add().shard(((1,), (1,)))
        self._get_attr_from_cell(network)

    def construct(self, *inputs: object) -> Tensor:
        shapes: tuple[object, ...] = ()
        for item in inputs:
            shapes += (item.shape if isinstance(item, Tensor) else None,)
        rows, bounds = _cut_bounds(shapes, self.batch_axis, self.micro_size)
        loss_sum = Tensor(0.0, ms.float32)
        weight: Tensor | None = None
        for i, cut in enumerate(self.cuts):
            part: tuple[object, ...] = (Tensor(rows, ms.float32),)
            for item, bound in zip(inputs, bounds[i]):
                part += (item if bound is None else cut(item, *bound),)
            part_sum, part_weight = self.weighted_loss(*part)
            loss_sum = self.joins[i](loss_sum, part_sum)
            weight = part_weight if weight is None else weight + part_weight
        first = self.at_place(loss_sum, Tensor([1.0, 0.0], ms.float32))
        return self.add_places(first, self.at_place(ops.stop_gradient(weight), Tensor([0.0, 1.0], ms.float32)))


# The functions below are for maps, because the compiler would nest a loop over the parameters.


def _mean_like(factor: Tensor, total: Tensor, weight: Parameter) -> Tensor:
    return ops.cast(ops.cast(total, ms.float32) * factor, weight.dtype)


def _clear(accumulator: Parameter) -> Tensor:
    return ops.assign(accumulator, ops.zeros_like(accumulator))


# The global norm of gradients of which devices have parts or copies. Between a gradient and a square root, the compiler
# looks for a square, a sum and an ExpandDims with the attribute ``grad_scale``. It divides each sum by the number of
# devices with the same values, and adds the sums up over all devices.
_mark = ops.ExpandDims().add_prim_attr("grad_scale", True)
# Reduce over all axes without naming them, since the shapes on the devices differ from those in this graph.
_reduce_sum = ops.ReduceSum()


def _sum_of_squares(grad: Tensor) -> Tensor:
    return _reduce_sum(ops.square(ops.cast(grad, ms.float32)), ())


def _marked_square(grad: Tensor) -> Tensor:
    return _mark(_sum_of_squares(grad), 0)


def _marked_squares(before: Tensor, after: Tensor) -> Tensor:
    total = _sum_of_squares(before)
    both = ops.stack((total, _sum_of_squares(after)))
    # The stack hides the path from the gradient, so add that dependency explicitly.
    return _mark(ops.depend(both, total), 0)


def _accumulator_of(weight: Parameter) -> Parameter:
    """Return float32 zeros for the sums of ``weight``'s gradient, which the compiler recognises by a clone's name."""
    # Not `weight.clone()`, which keeps the dtype and the pending initializer of the weight.
    name = f"accu_grads.{weight.name}"
    accumulator = Parameter(initializer("zeros", weight.shape, ms.float32), name)
    info = weight.param_info.clone()
    info.obj = accumulator
    accumulator.param_info = info
    accumulator.name = name
    return accumulator


@primexpr
def _cut_bounds(shapes: tuple[Shape, ...], batch_axis: BatchAxis, micro_size: int) -> tuple[int, tuple[object, ...]]:
    """Return the rows of a micro batch, and for each the begin, end and step of each input (None: not cut)."""
    axes, rows = split_shapes(shapes, batch_axis, micro_size)
    for axis, shape in zip(axes, shapes):
        if axis is not None and shape is not None and axis % len(shape) != 0:
            raise ValueError(
                f"For 'GradAccumulation', the argument 'batch_axis' must be 0 or None for each input in "
                f"semi-auto-parallel, but got {axis}. Transpose that input."
            )
    count = rows[-1][1]
    if len(rows) != micro_size or count % micro_size != 0:
        raise ValueError(
            f"For 'GradAccumulation', the argument 'micro_size' must divide the {count} rows of the batch of all "
            f"devices in semi-auto-parallel, but got {micro_size}. Choose another one, or drop the last rows."
        )
    is_cut = [axis is not None and micro_size > 1 for axis in axes]
    bounds = [[_bound(shape, *part) if each else None for each, shape in zip(is_cut, shapes)] for part in rows]
    return count // micro_size, tuple(map(tuple, bounds))


def _bound(shape: Shape, begin: int, end: int) -> object:
    rest = tuple(shape or ())[1:]
    return (begin, *[0] * len(rest)), (end, *rest), (1,) * (len(rest) + 1)
