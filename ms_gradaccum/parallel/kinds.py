"""Parallelism options, and the processes that they are for."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

from ms_gradaccum._checks import check_bool, check_choice, check_int, check_type

_HSDP = "HSDP"
_Level = Literal["level1", "level2", "level3"]


class World(NamedTuple):
    """The rank of this process and the number of processes."""

    rank: int
    size: int


class _Flags:
    """Options that are all bools."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_bool(type(self).__name__, name, value, "The default is False.")


@dataclass(frozen=True)
class DataParallel(_Flags):
    """Data parallelism over all processes. ``parallel="auto"`` chooses it when there are several.

    The sums of a window and its weight are added over the ranks in a few fused messages per update, none in between.

    Args:
        sync_each_batch (bool): Whether to add up the gradients of each micro batch over the ranks instead, and to shard
            sums and optimizer as ``HSDP(threshold=0, optimizer_level="level2")`` does. The name is that of Hugging Face
            Accelerate's ``GradientAccumulationPlugin``. Default: ``False``.
        check_weights (bool): Whether to compare a hash of the weights over the ranks after each update and raise a
            RuntimeError if they differ; for debugging. Default: ``False``.

    Raises:
        TypeError: If an argument is not a bool.
        ValueError: Later, if an optimizer looks at whole parameters, with `sync_each_batch`.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from ms_gradaccum import DataParallel
        >>> print(DataParallel(sync_each_batch=True))
        DataParallel(sync_each_batch=True, check_weights=False)
    """

    sync_each_batch: bool = False
    check_weights: bool = False
    threshold: ClassVar[int] = 0

    @property
    def shard_size(self) -> int:
        """Number of ranks that share one copy of sums and optimizer. -1 means all ranks."""
        return -1 if self.sync_each_batch else 1


@dataclass(frozen=True)
class HSDP:
    """Hybrid sharded data parallelism: each rank of a shard group keeps and updates its rows of every parameter.

    The name and the arguments are those of ``AutoParallel.hsdp``; the idea is that of ZeRO (Rajbhandari et al., 2020),
    stage 1, with the hybrid groups of PyTorch's HSDP.

    Shards are rows of axis 0. ``level1`` shards the optimizer's state: an update costs a reduce-scatter of the sums, an
    all-gather of the weights inside each group and, if there are several groups, an all-reduce of the shards across
    them. ``level2`` shards the sums, too, and each micro batch costs the reduce-scatter. ``level3`` is the same with a
    warning: sharding the weights takes the compiler's HSDP, inside ``AutoParallel`` on Ascend or GPU.

    Args:
        shard_size (int): Number of ranks that share one copy, a divisor of all; ``-1``: all. Default: ``-1``.
        threshold (int): Parameters smaller than this stay whole on each rank. Unit: KB. Default: ``64``.
        optimizer_level (str): ``"level1"``, ``"level2"`` or ``"level3"``. Default: ``"level1"``.
        check_weights (bool): Whether to compare a hash of the weights over the ranks after each update and raise a
            RuntimeError if they differ; for debugging. Default: ``False``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from ms_gradaccum import HSDP
        >>> print(HSDP(shard_size=2, threshold=0).optimizer_level)
        level1
    """

    shard_size: int = -1
    threshold: int = 64
    optimizer_level: _Level = "level1"
    check_weights: bool = False

    def __post_init__(self) -> None:
        check_type(
            _HSDP,
            "shard_size",
            self.shard_size,
            int,
            "an int of at least 1 or -1",
            "-1 means all ranks.",
        )
        if self.shard_size < 1 and self.shard_size != -1:
            raise ValueError(
                f"For '{_HSDP}', the argument 'shard_size' must be an int of at least 1 or -1, but "
                f"got {self.shard_size}. -1 means all ranks."
            )
        check_int(_HSDP, "threshold", self.threshold, "It is in KB.", least=0)
        remedy = "Higher levels shard more and communicate more."
        check_choice(_HSDP, "optimizer_level", self.optimizer_level, get_args(_Level), remedy)
        check_bool(_HSDP, "check_weights", self.check_weights, "True is for debugging.")

    @property
    def sync_each_batch(self) -> bool:
        """True if the ranks reduce the gradients of each micro batch and keep only their shards of the sums."""
        return self.optimizer_level != "level1"


@dataclass(frozen=True)
class Reduced(_Flags):
    """Gradients that are added up over all processes before this package sees them.

    Hooks of the network add them up, or the caller before ``accumulator(grads)``. The ranks then add up only the loss,
    the weight and, if a rank has only shards of some gradients, the squares for the norm.
    ``parallel="auto"`` chooses it for a network of HyperParallel's ``hsdp``.

    Args:
        mean (bool): Whether gradients come as the mean over the processes, and not as their sum. Default: ``False``.
        check_weights (bool): Whether to compare a hash of the weights over the ranks after each update, and not only
            after the first, and raise a RuntimeError if they differ. Default: ``False``.

    Raises:
        TypeError: If an argument is not a bool.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from ms_gradaccum import Reduced
        >>> print(Reduced(mean=True))
        Reduced(mean=True, check_weights=False)
    """

    mean: bool = False
    check_weights: bool = False
    # For the interface of the other kinds: this package shards nothing, and sends nothing in a micro batch.
    shard_size: ClassVar[int] = 1
    threshold: ClassVar[int] = 0
    sync_each_batch: ClassVar[bool] = False


Kind = DataParallel | HSDP | Reduced  # The type of the argument `parallel`.
ParallelChoice = Literal["auto"] | Kind


def check_kind(owner: str, parallel: ParallelChoice) -> ParallelChoice:
    """Return ``parallel`` if it is a kind of parallelism or 'auto'."""
    # '==' with a tensor would not return a bool.
    is_auto = isinstance(parallel, str) and parallel == "auto"
    if not is_auto and not isinstance(parallel, Kind):
        raise TypeError(
            f"For '{owner}', the argument 'parallel' must be 'auto', DataParallel(), HSDP() or "
            f"Reduced(), but got {parallel!r}. 'auto' looks at the number of processes."
        )
    return parallel


def choose_kind(parallel: ParallelChoice, ranks: int) -> Kind:
    """Return the kind of parallelism for ``ranks`` ranks."""
    kind = DataParallel() if isinstance(parallel, str) else parallel
    if ranks % kind.shard_size:
        raise ValueError(
            f"For 'HSDP', the argument 'shard_size' must be a divisor of the {ranks} processes, "
            f"but got {kind.shard_size}. -1 means all processes."
        )
    return kind
