"""What is sent: the collective operators of a window, in their order. Nothing here communicates."""

from dataclasses import dataclass
from typing import NamedTuple


class Message(NamedTuple):
    """One collective operator.

    Attributes:
        operator: Its class in ``mindspore.ops``: ``"AllReduce"``, ``"ReduceScatter"`` or ``"AllGather"``.
        ranks: Number of ranks that take part.
        nbytes: Size of the tensor that each of them hands in. Unit: bytes.
    """

    operator: str
    ranks: int
    nbytes: int


Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Traffic:
    """The messages that each rank sends, in their order.

    Attributes:
        per_micro_batch: Of each micro batch: gradients, if the ranks share the sums.
        per_batch: Of each batch, before its micro batches: their number, if they communicate.
        per_update: At the end of the window.
    """

    per_micro_batch: Messages = ()
    per_batch: Messages = ()
    per_update: Messages = ()

    def of_window(self, batches: int, micro_batches: int) -> Messages:
        """Return the messages of a window of so many batches and, all together, micro batches."""
        return batches * self.per_batch + micro_batches * self.per_micro_batch + self.per_update


class Ranks(NamedTuple):
    """Some ranks of a job, as far as their messages depend on them.

    Attributes:
        size: Number of these ranks. One alone sends nothing.
        world_size: Number of all ranks of the job.
        device_target: Their kind of device. One that lacks an operator has another in its place.
    """

    size: int
    world_size: int
    device_target: str

    @property
    def is_world(self) -> bool:
        """Whether these are all ranks."""
        return self.size == self.world_size

    @property
    def reduce_scatter_operator(self) -> str:
        """What adds up a part for each rank: CPU has to add up all of it everywhere."""
        return "AllReduce" if self.device_target == "CPU" else "ReduceScatter"

    @property
    def all_gather_operator(self) -> str:
        """What gathers: CPU does so over all ranks only, elsewhere it adds up what each rank has put in its place."""
        return "AllReduce" if self.device_target == "CPU" and not self.is_world else "AllGather"

    def all_reduce(self, nbytes: int) -> Messages:
        """Return what it takes to add up tensors of so many bytes."""
        return self._send("AllReduce", nbytes)

    def reduce_scatter(self, nbytes: int) -> Messages:
        """Return what it takes to give each rank its part of such a sum."""
        return self._send(self.reduce_scatter_operator, nbytes)

    def all_gather(self, nbytes: int) -> Messages:
        """Return what it takes to give each rank the parts of all, of so many bytes each."""
        operator = self.all_gather_operator
        return self._send(operator, nbytes if operator == "AllGather" else nbytes * self.size)

    def _send(self, operator: str, nbytes: int) -> Messages:
        return (Message(operator, self.size, nbytes),) if self.size > 1 else ()
