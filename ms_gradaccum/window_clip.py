"""Clipping of the mean gradients of a window one at a time, so that no copy of all of them is needed."""

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_gradaccum.grad_clip import ClipByGroupNorm, Grads


class EachClip(nn.Cell):
    """Does what a clip does, gradient by gradient.

    Args:
        clip: What clips each gradient by itself, given the norm of all.
    """

    def __init__(self, clip: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.clip = clip

    def decide(self, sums: Grads, factor: Tensor, norm: Tensor, *limit: Tensor) -> Any:
        """Return what `clipped` needs to know of all gradients, which are ``sums`` times ``factor``."""
        return (norm, *limit)

    def clipped(self, index: int, grad: Tensor, decision: Any) -> Tensor:
        """Return gradient number ``index`` after clipping."""
        return self.clip((grad,), *decision)[0]

    def norm_after(self, norm: Tensor, *limit: Tensor) -> Any:
        """Return the norm after clipping, or None if it takes a pass of its own."""
        return self.clip.norm_after(norm, *limit)


class GroupClip(nn.Cell):
    """The same for `ClipByGroupNorm`.

    Args:
        groups: The number of each gradient's group, -1 for none.
        limits: The largest norm of each group.
        parallel: What takes the norms over all shards.
    """

    def __init__(self, groups: tuple[int, ...], limits: Sequence[float], parallel: Any) -> None:
        super().__init__(auto_prefix=False)
        self.groups = groups
        self.members = tuple(
            tuple(i for i, group in enumerate(groups) if group == number) for number in range(len(limits))
        )
        self.limits = Tensor(limits, ms.float32)
        self.parallel = parallel

    def decide(self, sums: Grads, factor: Tensor, norm: Tensor) -> Tensor:
        """Return the factor of each group."""
        norms = ops.sqrt(self.parallel.squares(sums, self.members)) * factor
        return self.limits / ops.maximum(norms, self.limits)

    def clipped(self, index: int, grad: Tensor, decision: Tensor) -> Tensor:
        """Return gradient number ``index`` after clipping."""
        return grad if self.groups[index] < 0 else grad * decision[self.groups[index]]

    def norm_after(self, norm: Tensor) -> None:
        """Return None: the norm after clipping takes a pass of its own."""
        return None


def clip_of(clip: Any, names: Sequence[str], parallel: Any) -> nn.Cell:
    """Return the cell that clips the gradients of parameters of these names."""
    if isinstance(clip, ClipByGroupNorm):
        return GroupClip(clip.groups_of(names), list(clip.limits.values()), parallel)
    return EachClip(clip)
