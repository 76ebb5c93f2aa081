"""The mean gradients of a window, clipped run by run, so that no copy of all of them is needed."""

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum.backend.kernels import scale_in_place
from ms_gradaccum.backend.tensors import once, run_of
from ms_gradaccum.gradients.clipping import ClipByGroupNorm, Grads, NoClip, scale
from ms_gradaccum.parallel.reducer import GradientReducer


class EachClip(nn.Cell):
    """Means that are clipped as a clip does it, which takes each by itself.

    Args:
        clip: What clips gradients, given the norm of all.
        reducer: What has the sums.
    """

    def __init__(self, clip: Any, reducer: GradientReducer) -> None:
        super().__init__(auto_prefix=False)
        self.clip = clip
        self.reducer = reducer
        self.runs = reducer.buffer.runs
        self.map = ops.HyperMap()

    def construct(self, factor: Tensor, norm: Tensor, *limit: Tensor) -> Grads:
        """Return the sums times ``factor``, whose norm is ``norm``, clipped; they take the place of the sums.

        A ``limit`` is what they are clipped to, if not what the clip says.
        """
        decision = self.decide(factor, norm, *limit)
        factor = ops.depend(factor, decision)
        means: Grads = ()
        for begin, end in self.runs:
            sums = run_of(self.reducer.sums, begin, end)
            stored = self.stored(begin, sums, factor, decision)
            means += stored
            factor = once(factor, stored)
        return means

    def decide(self, factor: Tensor, norm: Tensor, *limit: Tensor) -> Any:
        """Return what `clipped` needs to know of all gradients."""
        return (norm, *limit)

    def stored(self, begin: int, sums: Grads, factor: Tensor, decision: Any) -> Grads:
        """Put clipped means in the place of sums, of which the first is number ``begin``."""
        clipped = self.clipped(begin, self.map(ops.partial(scale, factor), sums), decision)
        stored: Grads = self.map(ops.assign, sums, clipped)
        return stored

    def clipped(self, begin: int, grads: Grads, decision: Any) -> Grads:
        """Return gradients after clipping, of which the first is number ``begin``."""
        clipped: Grads = self.clip(grads, *decision)
        return clipped

    def norm_after(self, norm: Tensor, *limit: Tensor) -> Any:
        """Return the norm after clipping, or None if it takes a pass of its own."""
        return self.clip.norm_after(norm, *limit)


scale_one = ops.MultitypeFuncGraph("scale_in_place")


@scale_one.register("Tensor", "Tensor")
def _scale_one_in_place(factor: Tensor, total: Parameter) -> Tensor:
    return scale_in_place(total, factor)


class Means(EachClip):
    """The same for `NoClip`: the means as they are."""

    def stored(self, begin: int, sums: Grads, factor: Tensor, decision: Any) -> Grads:
        stored: Grads = self.map(ops.partial(scale_one, factor), sums)
        return stored


class GroupClip(EachClip):
    """The same for `ClipByGroupNorm`.

    Args:
        groups: The number of each gradient's group, -1 for none.
        limits: The largest norm of each group.
        reducer: What has the sums, and takes their squares over all shards.
    """

    def __init__(self, groups: tuple[int, ...], limits: Sequence[float], reducer: GradientReducer) -> None:
        super().__init__(None, reducer)
        # Which gradients each group has, and the group of each gradient; the last one has those of none.
        self.members = Tensor(np.arange(len(limits))[:, None] == np.array(groups))
        self.groups = Tensor([group % (len(limits) + 1) for group in groups], ms.int32)
        self.limits = Tensor(limits, ms.float32)

    def decide(self, factor: Tensor, norm: Tensor, *limit: Tensor) -> Grads:
        """Return the factor of each gradient."""
        squares = ops.broadcast_to(self.reducer.squares(tuple(self.reducer.sums)), self.members.shape)
        # No product with 0, which would take the NaN of one group to all.
        norms = ops.sqrt(ops.sum(ops.select(self.members, squares, ops.zeros_like(squares)), (1,))) * factor
        factors = ops.concat((self.limits / ops.maximum(norms, self.limits), ops.ones((1,), ms.float32)))
        each: Grads = ops.unstack(ops.gather(factors, self.groups, 0))
        return each

    def clipped(self, begin: int, grads: Grads, decision: Grads) -> Grads:
        """Return gradients after clipping, of which the first is number ``begin``."""
        clipped: Grads = self.map(scale, run_of(decision, begin, begin + len(grads)), grads)
        return clipped

    def norm_after(self, norm: Tensor, *limit: Tensor) -> None:
        """Return None: the norm after clipping takes a pass of its own."""
        return None


def clip_of(clip: Any, names: Sequence[str], reducer: GradientReducer) -> EachClip:
    """Return the cell that clips the means of gradients of parameters of these names."""
    if isinstance(clip, ClipByGroupNorm):
        return GroupClip(clip.groups_of(names), list(clip.limits.values()), reducer)
    return Means(clip, reducer) if isinstance(clip, NoClip) else EachClip(clip, reducer)
