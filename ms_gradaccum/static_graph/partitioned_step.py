"""The training step for semi-auto-parallel on Ascend and GPU, which the compiler partitions.

The compiler recognises accumulation by three things: the attribute ``grad_accu_num`` of the slice that cuts a micro
batch; a parameter ``accu_grads.<name>`` for the sums, cloned from each weight; and one gradient of the whole unrolled
forward pass. Then it reduces once per parameter and window; otherwise once per micro batch, with all activations alive.
`construct` is written for the whole batch of all devices.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import initializer

from ms_gradaccum._checks import warn
from ms_gradaccum.advice.loss_measurement import not_measured
from ms_gradaccum.backend.arithmetic import Tensors, scale
from ms_gradaccum.backend.compiled import graph_mode, warn_in_graph
from ms_gradaccum.backend.optimizer_progress import OptimizerProgress
from ms_gradaccum.backend.optimizers import LearningRate, scale_for
from ms_gradaccum.backend.tensors import map_tensors
from ms_gradaccum.batch.arguments import Args, Kwargs
from ms_gradaccum.gradients.buffer import reciprocal
from ms_gradaccum.gradients.clipping import Clip
from ms_gradaccum.parallel.semi_auto import SemiAuto
from ms_gradaccum.static_graph.batch_sums import BatchSums
from ms_gradaccum.static_graph.settings import (
    check_step,
    compiling,
    gradient_is_returned,
    require_partition,
)
from ms_gradaccum.training.settings import StepSettings
from ms_gradaccum.training.step import Step
from ms_gradaccum.training.step_output import StepOutput, items_of
from ms_gradaccum.training.window_end import MAX_OVERFLOWS, broken_gradient, decide, unraised

_NO_NORM = Tensor(0.0, ms.float32)
_gradient = ops.GradOperation(get_by_list=True, sens_param=True)


class PartitionedStep(Step):
    """One batch, one window, one update, in one graph, which the compiler partitions on Ascend and GPU."""

    is_distributed = False
    # A hook on the optimizer would change the graph that the compiler partitions.
    watches_calls = False

    def __init__(
        self, network: nn.Cell, optimizer: nn.Cell, kind: SemiAuto, settings: StepSettings
    ) -> None:
        super().__init__(network, settings)
        check_step(
            kind,
            network,
            optimizer,
            window_length=settings.window_length,
            skip_above=settings.norm_limit.given,
            **settings.of_sums(),
        )
        self.kind = kind
        self.optimizer = optimizer
        self.sums = BatchSums(network)
        self.accumulators = ParameterTuple(
            _accumulator_of(parameter) for parameter in optimizer.parameters
        )
        self.clip: Clip = settings.clip
        self.learning_rate = LearningRate(optimizer)
        self.progress = OptimizerProgress(optimizer)
        self.handed_scale = scale_for(optimizer, self.loss_scale)
        # Set when the step is called from Python, which can end a training. Inside a larger graph it stays False.
        self.is_called = False
        self.unraised = unraised(settings.owner)
        self.is_unmeasured = settings.check_loss and network.splits
        # The overflow and update flags of up to 100 last windows, which are read together and then cleared.
        self.last_flags: list[tuple[Tensor, Tensor]] = []

    @property
    def optimizers(self) -> list[nn.Cell]:
        return [self.optimizer]

    def compiling(self) -> AbstractContextManager[None]:
        return compiling(self.kind)

    def run(self, args: Args, kwargs: Kwargs, as_graph: Callable[..., Tensors]) -> StepOutput:
        if self.is_unmeasured:
            self.is_unmeasured = False
            warn(not_measured("the compiler partitions the whole step"))
        self.is_called = True
        self.events.batches += 1
        self.events.tell("on_update_begin")
        before = self.progress.snapshot() if self.progress.may_leave_out else None
        with graph_mode():
            output = StepOutput(*as_graph(*self.network.positional(args, kwargs)))
        if before is not None and not self.progress.has_updated(
            before, output.grad_norm, output.learning_rate
        ):
            output = output._replace(updated=Tensor(False))
        if self.events.listeners:
            self.events.update_end(output)
        else:  # Do not wait for the device.
            self.events.uncounted.append(output)
        self.last_flags.append((output.overflow, output.updated))
        if len(self.last_flags) == MAX_OVERFLOWS:
            broken = all(
                overflow.asnumpy() and not updated.asnumpy()
                for overflow, updated in self.last_flags
            )
            self.last_flags.clear()
            self.events.count()
            if broken:
                raise RuntimeError(broken_gradient(self.events.owner))
        return output

    def join(self) -> StepOutput:
        """Raise: in semi-auto-parallel a batch belongs to all devices."""
        raise RuntimeError(
            f"For '{self.events.owner}', all devices must have equally many batches in "
            f"semi-auto-parallel, but got join() in place of one. Give all devices data of one "
            f"length, or leave the last batches out."
        )

    def construct(self, *inputs: object) -> Tensors:
        require_partition()
        sums = self.sums(*inputs)
        # Differentiate only the loss sum, not the weight beside it.
        loss_scale = self.loss_scale.value()
        grads = _gradient(self.sums, self.optimizer.parameters)(
            *inputs, loss_scale * Tensor([1.0, 0.0], ms.float32)
        )
        weight = sums[1]
        factor = reciprocal(weight)
        # Each device has its part of the mean gradient, in the dtype of the parameter.
        totals = (
            grads
            if gradient_is_returned(self.sums.micro_size)
            else ops.depend(self.accumulators, grads)
        )
        mean = map_tensors(
            ops.partial(_mean_like, self.loss_scale.unscaled(factor)),
            totals,
            self.optimizer.parameters,
        )
        if self.clip.has_one_factor:
            norm = ops.sqrt(ops.addn(map_tensors(_marked_square, mean)))[0]
            clipped_norm = self.clip.norm_after(norm)
        else:
            # A clip by value needs no norm. Both norms for the report go in one message.
            norms = ops.sqrt(
                ops.addn(map_tensors(_marked_squares, mean, self.clip(mean, _NO_NORM)))
            )
            norm, clipped_norm = norms[0, 0], norms[0, 1]
        overflow, updated = decide(norm, weight, self.loss_scale.skips_overflow)
        learning_rate = self.learning_rate()
        mean = self.clip(mean, norm)
        if self.handed_scale != 1.0:
            mean = map_tensors(ops.partial(scale, Tensor(self.handed_scale, ms.float32)), mean)
        named = {
            "loss": sums[0] * factor,
            "overflow": overflow,
            "loss_scale": loss_scale,
            "updated": updated,
            "grad_norm": norm,
            "clipped_grad_norm": clipped_norm,
            "learning_rate": learning_rate,
            "weight": weight,
        }
        report: Tensors = items_of(named)
        if updated:
            report = ops.depend(report, self.optimizer(mean))
        if not self.is_called:
            warn_in_graph(self.unraised)
        # Assign zeros, because a product with 0 would keep NaN and Inf forever.
        report = ops.depend(report, map_tensors(_clear, ops.depend(self.accumulators, report)))
        report = ops.depend(report, self.loss_scale(updated, overflow, report))
        return report


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
