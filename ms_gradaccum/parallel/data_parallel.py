"""Data parallel: every rank holds everything, and the sums of a window are added over the ranks once."""

from dataclasses import dataclass
from typing import Any

from mindspore import ParameterTuple, Tensor

from ms_gradaccum._checks import check_bool, sentence
from ms_gradaccum.backend.tensors import Done
from ms_gradaccum.gradients.buffer import GradientBuffer
from ms_gradaccum.parallel.layout import ReducerLayout
from ms_gradaccum.parallel.reducer import CollectiveReducer
from ms_gradaccum.parallel.shards import ShardedReducer


@dataclass(frozen=True)
class DataParallel:
    """Data parallelism over all processes. ``parallel="auto"`` chooses it when there are several.

    The sums of a window and its weight are added over the ranks in a few fused messages, once per update; micro
    batches in between communicate nothing.

    Args:
        sync_each_batch (bool): Whether to add up the gradients of each micro batch over the ranks instead. Each rank
            then keeps 1 / ranks of the sums, in exchange for a message per micro batch. The name is that of Hugging
            Face Accelerate's ``GradientAccumulationPlugin``. Default: ``False``.
        overlap (bool): Whether the last micro batch of a window adds up its gradients over the ranks while its backward
            pass goes on, as PyTorch's DistributedDataParallel does, where a device computes and communicates at a
            time. That takes one more graph of the network to be compiled; where PYNATIVE mode runs the network op by
            op, the messages follow the backward pass. Default: ``False``.
        check_weights (bool): Whether to compare a hash of the weights over the ranks after each update and raise a
            RuntimeError if they differ; for debugging. Default: ``False``.

    Raises:
        TypeError: If an argument is not a bool.
        ValueError: If `overlap` is set together with `sync_each_batch`; later, if the loss has several terms, or an
            :class:`Accumulator` gets it, which adds up in `step()`.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from ms_gradaccum import DataParallel
        >>> print(DataParallel(sync_each_batch=True))
        DataParallel(sync_each_batch=True, overlap=False, check_weights=False)
    """

    sync_each_batch: bool = False
    overlap: bool = False
    check_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("sync_each_batch", "overlap", "check_weights"):
            check_bool("DataParallel", name, getattr(self, name), "The default is False.")
        if self.sync_each_batch and self.overlap:
            remedy = "Each micro batch sends its gradients already."
            raise ValueError(sentence("DataParallel", "overlap", "False with sync_each_batch", True, remedy))


class DataParallelReducer(CollectiveReducer):
    """Data parallelism: all ranks add up all sums at the end of a window."""

    def __init__(
        self,
        parameters: ParameterTuple,
        buffer: GradientBuffer,
        layout: ReducerLayout,
        rank: int,
        settings: DataParallel,
    ) -> None:
        super().__init__(parameters, buffer, layout, rank, settings)
        self.overlaps = settings.overlap

    def reduce(self, added: Any = ()) -> Done:
        return self.bucketed_all_reduce(added)


class ShardedBufferReducer(ShardedReducer):
    """Data parallelism with ``sync_each_batch``: only the buffer is sharded."""

    takes_sums = False

    def for_optimizer(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.shards.all_gather(grads, tuple(self.parameters))
