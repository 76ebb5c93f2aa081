"""The update of a window: divide the sums, unscale, clip, run the optimizer, clear the buffer.

The sums are processed in place and chunk by chunk, so that no copy of all gradients is needed.
"""

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_gradaccum._checks import warn
from ms_gradaccum.backend.arithmetic import cast_each_like, scale, scale_each_in_place, set_in_place
from ms_gradaccum.backend.compiled import NOTHING, Compiled, Method, op_by_op
from ms_gradaccum.backend.device import has_mint_optimizers
from ms_gradaccum.backend.network_code import is_user
from ms_gradaccum.backend.optimizers import (
    all_parameters,
    jit_parts_of,
    may_have_branches,
    needs_call,
    scale_for,
)
from ms_gradaccum.backend.tensors import Done, chunk_of, copy_after, map_tensors
from ms_gradaccum.gradients.clipping import Grads
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.settings import StepSettings


def _value_of(grad: Tensor) -> Tensor:
    return grad.value()


def _look_at(parameter: Tensor) -> Tensor:
    return ops.expand_dims(parameter, 0)


class Update(nn.Cell):
    """Second half of the end of a window: mean gradient, clip, optimizer, clear."""

    def __init__(
        self, optimizer: nn.Cell, reducer: GradientReducer, settings: StepSettings
    ) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.reducer = reducer
        self.buffer = reducer.buffer
        self.loss_scale = settings.precision.loss_scale
        # An optimizer that knows the loss scale divides by it: it gets gradients times this scale.
        self.handed_scale = scale_for(optimizer, self.loss_scale)
        self.clip = settings.clip.of(self.buffer.names)
        self.chunks = self.buffer.chunks
        if self.clip.is_own:
            self.chunks = ((0, len(self.buffer.names)),)
        # True if the optimizer takes the sums themselves.
        pairs = zip(reducer.sums, reducer.parameters)
        self.in_place = all(total.dtype == parameter.dtype for total, parameter in pairs)
        self.parameters = all_parameters(optimizer)
        self.has_branches = may_have_branches(optimizer)
        # Otherwise a graph runs the optimizer, without the hook that detects other callers.
        self.needs_call = needs_call(optimizer)

    def construct(self, norm: Tensor, *limit: Tensor) -> Tensor:
        """Update with the mean gradient, whose norm is ``norm``, and return the norm after clipping."""
        clipped_norm, grads = self.gradients(norm, *limit)
        clipped_norm = ops.depend(clipped_norm, self.end(self.optimized(grads)))
        return self.keep_storage(clipped_norm) if self.has_branches else clipped_norm

    def mean_gradients(self, norm: Tensor, *limit: Tensor) -> tuple[Tensor, Grads]:
        """Return as `gradients`, but no gradients if an optimizer outside of the graph takes the sums themselves.

        A clip of the program comes after this graph: the sums are then means that are not clipped.
        """
        if self.clip.is_own:
            return ops.depend(
                norm, self.scaled(self.loss_scale.unscaled(self.buffer.reciprocal_weight()))
            ), ()
        clipped_norm, grads = self.gradients(norm, *limit)
        if self.in_place:
            return ops.depend(clipped_norm, grads), ()
        return clipped_norm, grads

    def gradients(self, norm: Tensor, *limit: Tensor) -> tuple[Tensor, Grads]:
        """Return the norm after clipping and the optimizer's input. A ``limit`` replaces the clip's own limit."""
        means = self.means(norm, *limit)
        if self.clip.has_one_factor:
            clipped_norm = self.clip.norm_after(norm, *limit)
        else:
            clipped_norm = self.reducer.norm(means)
        if self.handed_scale != 1.0:
            factor = ops.depend(Tensor(self.handed_scale, ms.float32), (clipped_norm, means))
            means = scale_each_in_place(factor, tuple(self.reducer.sums))
        ready = cast_each_like(means, self.reducer.parameters)
        return clipped_norm, ops.depend(ready, self.reducer.before_update())

    def means(self, norm: Tensor, *limit: Tensor) -> Grads:
        """Replace the sums by the clipped means, chunk by chunk."""
        factor = self.loss_scale.unscaled(self.buffer.reciprocal_weight())
        if self.clip.has_one_factor:
            return self.scaled(factor * self.clip.factor(norm, *limit))
        norms: Grads = ()
        if self.clip.has_groups:
            # A norm of means could underflow: the squares of the sums are finite.
            norms = self.clip.norms(self.reducer.squares(tuple(self.reducer.sums)), factor)
            factor = ops.depend(factor, norms)
        means: Grads = ()
        for begin, end in self.chunks:
            sums = chunk_of(self.reducer.sums, begin, end)
            clipped = map_tensors(ops.partial(scale, factor), sums)
            if self.clip.has_groups:
                clipped = self.clip(clipped, chunk_of(norms, begin, end))
            else:
                clipped = self.clip(clipped, norm, *limit)
            stored = map_tensors(set_in_place, sums, clipped)
            means += stored
            factor = copy_after(factor, stored)
        return means

    def scaled(self, factor: Tensor) -> Grads:
        """Multiply the sums by a number, chunk by chunk."""
        means: Grads = ()
        for begin, end in self.buffer.chunks:
            stored = scale_each_in_place(factor, tuple(chunk_of(self.reducer.sums, begin, end)))
            means += stored
            factor = copy_after(factor, stored)
        return means

    def end(self, updated: Done) -> Done:
        """Distribute the parameters and clear the buffer after ``updated``."""
        return self.buffer.clear(self.reducer.after_update(updated))

    def optimized(self, grads: Grads) -> Done:
        if self.has_branches:
            # The compiler drops a branch that changes parameters if a called function has read a parameter before it.
            grads = map_tensors(_value_of, grads)
        return self.optimizer(grads) if self.needs_call else self.optimizer.construct(grads)

    def keep_storage(self, value: Tensor) -> Tensor:
        """Return ``value`` after reading all parameters of the optimizer, so that the graph follows their storage."""
        # A parameter used only in a branch would keep its old storage when a checkpoint is loaded. The reads have no
        # order: reads after the update would make the compiler copy each parameter several times.
        return ops.depend(value, map_tensors(_look_at, self.parameters))


class EagerUpdate:
    """Update with an optimizer that runs op by op, as in MindSpore's own step in PYNATIVE mode."""

    def __init__(self, owner: str, update: Update) -> None:
        self.optimizer = update.optimizer
        self.update = update
        self.sums = update.reducer.sums
        self.optimizer.init_parameters_data()
        self.is_users = is_user(type(self.optimizer))
        self.mean_gradients = Compiled(
            lambda: Method(update, "mean_gradients"), owner, "the mean gradient"
        )
        self.end = Compiled(lambda: Method(update, "end"), owner, "the end of the update")
        self.jit_parts = jit_parts_of(self.optimizer)
        kind = type(self.optimizer)
        if kind.__module__.startswith("mindspore.mint.") and not has_mint_optimizers():
            does = "changes nothing on CPU in PYNATIVE mode"
            remedy = "Use an optimizer of mindspore.nn or mindspore.experimental, or compile=True."
            if kind.__name__ == "AdamW":
                does = "has no kernel on CPU"
                remedy = "Use an optimizer of mindspore.nn or mindspore.experimental."
            warn(
                f"For '{owner}', {kind.__name__} of mindspore.mint {does}, in MindSpore's own step "
                f"too. {remedy}"
            )

    def __call__(self, norm: Tensor, *limit: Tensor) -> Tensor:
        clipped_norm, grads = self.mean_gradients(norm, *limit)
        self.jit_parts.follow()
        # Bypass the hook that detects other callers.
        run = self.optimizer if needs_call(self.optimizer) else self.optimizer.construct
        with op_by_op():
            if not grads:
                grads = tuple(self.sums)
                if self.is_users or self.update.clip.is_own:  # They may keep their inputs.
                    grads = tuple(total.value() for total in self.sums)
            if self.update.clip.is_own:
                clipped_norm, grads = self._clipped(grads, norm)
            run(grads)
        if self.is_users:  # It may have moved them itself.
            self.jit_parts.note_places()
        self.end(NOTHING)
        return clipped_norm

    def _clipped(self, means: Grads, norm: Tensor) -> tuple[Tensor, Grads]:
        """Return what the program's clip makes of the means: their norm, and the optimizer's input."""
        clipped = self.update.clip(means, norm)
        clipped_norm = self.update.reducer.norm(clipped)
        handed = Tensor(self.update.handed_scale, ms.float32)
        scaled = map_tensors(ops.partial(scale, handed), clipped)
        return clipped_norm, cast_each_like(scaled, self.update.reducer.parameters)
