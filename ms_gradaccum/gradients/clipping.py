"""Gradient clipping, once per window, of the reduced and unscaled mean gradient."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_gradaccum._checks import FrozenAfterInit, argument_error, check_float
from ms_gradaccum.backend.arithmetic import ONE, Tensors, as_dtype, scale, sum_of_squares
from ms_gradaccum.backend.mindspore_private import primexpr
from ms_gradaccum.backend.tensors import Chunks, Done, chunk_of, copy_after, map_tensors

Grads = Tensors


def squares_of(grads: Grads, chunks: Chunks) -> Tensor:
    """Return the sum of the squares of each gradient: a float32 vector with one element per gradient."""
    squares: Tensors = ()
    done: Done = ()
    for begin, end in chunks:
        some = map_tensors(sum_of_squares, ops.depend(chunk_of(grads, begin, end), done))
        squares += some
        done = copy_after(some[0], some)
    return ops.stack(squares)


def global_norm(tensors: Grads, chunks: Chunks) -> Tensor:
    """Return the L2 norm of ``tensors`` taken as one vector, a float32 scalar."""
    return ops.sqrt(ops.sum(squares_of(tensors, chunks)))


def _limit(limit: Tensor, grad: Tensor) -> Tensor:
    return as_dtype(ops.minimum(ops.maximum(grad, -limit), limit), grad.dtype)


def pattern_indices(
    owner: str, argument: str, patterns: Iterable[str], names: Sequence[str]
) -> tuple[int, ...]:
    """Return the index of the first pattern that each name matches, -1 for none. Raise if a pattern matches no name."""
    groups = [-1] * len(names)
    for group, pattern in enumerate(patterns):
        fitting = [
            i for i, name in enumerate(names) if groups[i] == -1 and fnmatchcase(name, pattern)
        ]
        for i in fitting:
            groups[i] = group
        if not fitting:
            raise ValueError(
                f"For '{owner}', the pattern {pattern!r} in '{argument}' matches no remaining "
                f"parameter ({len(names)} in all, for example {names[0]!r}). The first pattern "
                f"that matches counts: put wide ones last."
            )
    return tuple(groups)


class Clip(nn.Cell):
    """Base class of the clips. ``construct(grads, norm)`` returns the clipped mean gradients; `Update` has their norm.

    That is all that a clip must have. The other attributes save passes over the gradients, or graphs.
    """

    # True if a clip multiplies all gradients by one number. It has two more methods: `factor(norm)` is that number, by
    # which the update multiplies as it divides, and `norm_after(norm)` is the norm after clipping.
    has_one_factor = False
    # True if `construct` takes a norm for each gradient, from `norms(squares, factor)`, in place of one for all.
    has_groups = False
    # True if it is the program's own cell.
    is_own = False

    def of(self, names: Sequence[str]) -> "Clip":
        """Return the clip for the gradients of parameters with these names."""
        return self

    def inputs(self) -> Tensors:
        """Return what `construct` takes after the norm, so that a clip with another limit needs no new graph."""
        return ()


class NoClip(Clip):
    """Placeholder used when gradients are not clipped."""

    has_one_factor = True

    def construct(self, grads: Grads, norm: Tensor) -> Grads:
        return grads

    def factor(self, norm: Tensor) -> Tensor:
        return ONE

    def norm_after(self, norm: Tensor) -> Tensor:
        return norm


class ClipByGlobalNorm(FrozenAfterInit, Clip):
    r"""Scale the window's mean gradient down so that its global L2 norm is at most `max_norm`.

    All gradients are multiplied by :math:`\min(1, max\_norm / norm)`, which keeps the direction.
    See "On the difficulty of training Recurrent Neural Networks" (Pascanu et al., 2013).

    Args:
        max_norm (Union[int, float]): The maximum norm. Positive and finite.

    Inputs:
        - **grads** (tuple[Tensor]) - Mean gradients of any shape and floating-point dtype.
        - **norm** (Tensor) - Their global norm, a float32 scalar.
        - **max_norm** (Tensor, optional) - A float32 scalar that replaces the argument. Default: ``None``.

    Outputs:
        Tuple of Tensors, the clipped gradients, with the same shapes and dtypes.

    Raises:
        TypeError: If `max_norm` is not an int or a float.
        ValueError: If `max_norm` is not positive and finite.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from ms_gradaccum import ClipByGlobalNorm
        >>> grads = ClipByGlobalNorm(1.0)((Tensor([3.0, 4.0]),), Tensor(5.0))
        >>> print(grads[0])
        [0.6 0.8]
    """

    has_one_factor = True

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        remedy = "Typical norms are 0.5 to 5."
        self.max_norm = check_float("ClipByGlobalNorm", "max_norm", max_norm, remedy)
        self._is_built = True

    def extend_repr(self) -> str:
        """Return the argument, for ``repr``."""
        return f"max_norm={self.max_norm}"

    def inputs(self) -> Tensors:
        return (Tensor(self.max_norm, ms.float32),)

    def construct(self, grads: Grads, norm: Tensor, max_norm: Tensor | None = None) -> Grads:
        return map_tensors(ops.partial(scale, self.factor(norm, max_norm)), grads)

    def factor(self, norm: Tensor, max_norm: Tensor | None = None) -> Tensor:
        """Return the factor for all gradients of this norm."""
        if max_norm is None:
            max_norm = Tensor(self.max_norm, ms.float32)
        return max_norm / ops.maximum(norm, max_norm)

    def norm_after(self, norm: Tensor, max_norm: Tensor | None = None) -> Tensor:
        """Return the norm after clipping."""
        if max_norm is None:
            max_norm = Tensor(self.max_norm, ms.float32)
        return ops.minimum(norm, max_norm)


class ClipByValue(FrozenAfterInit, Clip):
    r"""Limit each element of the window's mean gradient to :math:`[-limit, limit]`.

    Args:
        limit (Union[int, float]): The maximum absolute value. Positive and finite.

    Inputs:
        - **grads** (tuple[Tensor]) - Mean gradients of any shape and floating-point dtype.
        - **norm** (Tensor) - Their global norm, a float32 scalar.
        - **limit** (Tensor, optional) - A float32 scalar that replaces the argument. Default: ``None``.

    Outputs:
        Tuple of Tensors, the clipped gradients, with the same shapes and dtypes.

    Raises:
        TypeError: If `limit` is not an int or a float.
        ValueError: If `limit` is not positive and finite.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from ms_gradaccum import ClipByValue
        >>> grads = ClipByValue(3.0)((Tensor([-3.0, 9.0, 4.0]),), Tensor(10.3))
        >>> print(grads[0])
        [-3.  3.  3.]
    """

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = check_float("ClipByValue", "limit", limit, "Typical limits are 0.1 to 10.")
        self._is_built = True

    def extend_repr(self) -> str:
        """Return the argument, for ``repr``."""
        return f"limit={self.limit}"

    def inputs(self) -> Tensors:
        return (Tensor(self.limit, ms.float32),)

    def construct(self, grads: Grads, norm: Tensor, limit: Tensor | None = None) -> Grads:
        if limit is None:
            limit = Tensor(self.limit, ms.float32)
        return map_tensors(ops.partial(_limit, limit), grads)


class ClipByGroupNorm(FrozenAfterInit, Clip):
    r"""Scale the window's mean gradient down group by group, each by the L2 norm of its own gradients.

    A parameter belongs to the first pattern that its name matches; without a match it is not clipped. The norms of the
    groups and the norm after clipping each take one more pass over the gradients.

    Args:
        limits (dict[str, float]): The maximum norm of each group, by a pattern of parameter names with ``*`` and ``?``
            as in file names. Positive and finite.

    Raises:
        TypeError: If `limits` is not a dict of numbers.
        ValueError: If a limit is not positive and finite, or `limits` is empty. Building a training step raises it if
            a pattern matches no parameter of the optimizer.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import nn, ops
        >>> from ms_gradaccum import ClipByGroupNorm, TrainOneStepCell
        >>> network = nn.Dense(1, 1, weight_init="zeros", bias_init="zeros")
        >>> optimizer = nn.SGD(network.trainable_params(), 1.0)
        >>> clip = ClipByGroupNorm({"*bias": 0.5, "*": 2.0})
        >>> train_step = TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, clip=clip)
        >>> output = train_step(ops.ones((4, 1)), 10 * ops.ones((4, 1)))
        >>> print(network.weight.value(), network.bias.value())
        [[2.]] [0.5]
    """

    has_groups = True

    def __init__(self, limits: Mapping[str, float]) -> None:
        super().__init__()
        rule = "a dict of a norm per pattern"
        remedy = "For example {'*embedding*': 0.1, '*': 1.0}."
        if not isinstance(limits, Mapping):
            raise TypeError(argument_error("ClipByGroupNorm", "limits", rule, repr(limits), remedy))
        if not limits:
            raise ValueError(
                argument_error("ClipByGroupNorm", "limits", rule, "an empty one", remedy)
            )
        self.limits: dict[str, float] = {}
        for pattern, limit in limits.items():
            name = f"limits[{pattern!r}]"
            self.limits[str(pattern)] = check_float("ClipByGroupNorm", name, limit, "It is a norm.")
        self._is_built = True

    def extend_repr(self) -> str:
        """Return the argument, for ``repr``."""
        return f"limits={self.limits}"

    def of(self, names: Sequence[str]) -> Clip:
        return GroupClip(
            list(self.limits.values()),
            pattern_indices("ClipByGroupNorm", "limits", self.limits, names),
        )


class GroupClip(Clip):
    """A `ClipByGroupNorm` for certain gradients: ``groups`` has the group of each of them, -1 for none."""

    has_groups = True

    def __init__(self, limits: list[float], groups: tuple[int, ...]) -> None:
        super().__init__()
        self.limits = Tensor(limits, ms.float32)
        # The last one for none.
        self.groups = Tensor([group % (len(limits) + 1) for group in groups], ms.int32)
        self.members = Tensor(np.arange(len(limits))[:, None] == np.array(groups))

    def norms(self, squares: Tensor, factor: Tensor) -> Grads:
        """Return for each gradient the norm of its group, over the group's limit; 0 for one without a group.

        The gradients are sums with these ``squares``, times ``factor``.
        """
        squares = ops.broadcast_to(squares, self.members.shape)
        # A product with 0 would spread the NaN of one group to all.
        squares = ops.select(self.members, squares, ops.zeros_like(squares))
        norms = ops.sqrt(ops.sum(squares, (1,))) * factor / self.limits
        norms = ops.concat((norms, ops.zeros((1,), ms.float32)))
        each: Grads = ops.unstack(ops.gather(norms, self.groups, 0))
        return each

    def construct(self, grads: Grads, norms: Grads) -> Grads:
        return map_tensors(_scale_down, norms, grads)


def _scale_down(norm: Tensor, grad: Tensor) -> Tensor:
    return scale(1.0 / ops.maximum(norm, ONE), grad)


class OwnClip(Clip):
    """A cell of the program as a clip. It gets all mean gradients at once, and runs in MindSpore's mode."""

    is_own = True

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.cell = cell

    def __repr__(self) -> str:
        return type(self.cell).__name__

    def construct(self, grads: Grads, norm: Tensor) -> Grads:
        clipped: Grads = self.cell(grads, norm)
        if isinstance(clipped, list):
            clipped = tuple(clipped)
        _check_returned(map_tensors(ops.shape, grads), map_tensors(_shape_of, clipped))
        return clipped


def _shape_of(value: object) -> tuple[int, ...] | None:
    """Return the shape of a tensor, and None for anything else."""
    return value.shape if isinstance(value, Tensor) else None


@primexpr
def _check_returned(
    expected: Sequence[tuple[int, ...]], found: Sequence[tuple[int, ...] | None] | None
) -> None:
    if found is None or [*found] != [*expected]:
        raise ValueError(
            f"For 'clip', the cell must return one gradient for each that it gets, of shapes "
            f"{[*expected]}, but got shapes {found}. Return a tuple in the same order."
        )


# The type of the argument `clip`.
ClipChoice: TypeAlias = ClipByGlobalNorm | ClipByGroupNorm | ClipByValue | nn.Cell | None


def check_clip(owner: str, clip: ClipChoice) -> Clip:
    """Return ``clip``, a `NoClip` for None, or an `OwnClip` for a cell of the program."""
    if clip is None:
        return NoClip()
    if isinstance(clip, Clip):
        return clip
    if not isinstance(clip, nn.Cell):
        raise TypeError(
            f"For '{owner}', the argument 'clip' must be a ClipByGlobalNorm, a ClipByGroupNorm, a "
            f"ClipByValue, a cell or None, but got {clip!r}. For example "
            f"clip=ClipByGlobalNorm(1.0)."
        )
    try:
        inspect.signature(clip.construct).bind("grads", "norm")
    except TypeError:
        raise TypeError(
            f"For '{owner}', the argument 'clip' must be a cell with construct(grads, norm), but "
            f"got {type(clip).__name__} with construct{inspect.signature(clip.construct)}. It "
            f"returns the gradients of the update."
        ) from None
    return OwnClip(clip)
