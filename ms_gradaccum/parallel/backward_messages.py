"""Messages that are sent op by op while the backward pass of a window's last micro batch goes on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, mint, ops
from mindspore.communication import GlobalComm

from ms_gradaccum.backend.device import device_target
from ms_gradaccum.parallel.reducer import DataParallelReducer, GradientReducer

# MindSpore has no asynchronous collectives op by op for GPUs. On CPU the cores that send are those that compute: two
# processes on 2 cores took 1.6 times the time.
_ASYNC = ("Ascend",)
_CHANGED = (
    "For 'DataParallel', with overlap a gradient must be complete when the backward pass has made it, but that of "
    "{name!r} has changed later (by a gradient inside construct, or a hook that it registers). Leave overlap out."
)


class BackwardMessages:
    """All-reduce the sums and the last gradients of a window, message by message, as these gradients arrive.

    A hook of a parameter gets its gradient as soon as it is complete. Where `construct` takes gradients of its own, or
    registers hooks, that is another one than the pass returns: `finish` raises. The messages are those of `reduce_kept`
    in the same order, so that ranks without rows, which call that, take part in them. The caller sends the last one,
    with the loss and the weight.
    """

    def __init__(self, reducer: DataParallelReducer) -> None:
        self.sums, self.buckets = reducer.sums, reducer.kept[:-1]
        self.group = GlobalComm.WORLD_COMM_GROUP
        self.grads: dict[int, Tensor] = {}
        self.sent: list[tuple[Tensor, Any]] = []  # Each message, which is reduced in place, with its handle.
        self.factor: Callable[[], Tensor] = Tensor  # Returns what the gradients are multiplied by.

    @staticmethod
    def of(reducer: GradientReducer) -> "BackwardMessages | None":
        """Return the messages of a reducer, or None if this device or this reducer sends all after the pass."""
        can_wait = device_target() in _ASYNC and hasattr(mint, "distributed")
        # In 16 bits the sums are divided by the weight of all ranks, which is known last.
        if not (can_wait and reducer.overlaps and isinstance(reducer, DataParallelReducer)):
            return None
        is_worth_it = len(reducer.kept) > 2 and {bucket.dtype for bucket in reducer.layout.kept} == {ms.float32}
        return BackwardMessages(reducer) if is_worth_it else None

    @contextmanager
    def sending(self, parameters: Sequence[Parameter], factor: Callable[[], Tensor]) -> Iterator[None]:
        """Send during a backward pass inside, whose gradients are multiplied by ``factor()`` after its forward pass."""
        self.factor, self.sent, self.grads = factor, [], {}
        early = [index for bucket in self.buckets for index in bucket]
        handles = [parameters[index].register_hook(self._hook(index, self.grads)) for index in early]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            # MindSpore 2.10 keeps removed hooks after an error in a backward pass, and goes on to call them.
            kept = {**self.grads}
            self.grads.clear()
            self.grads = kept

    def _hook(self, index: int, grads: dict[int, Tensor]) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            if self.grads is grads:
                grads.setdefault(index, grad)
                self._send_complete()

        return hook

    def _send_complete(self) -> None:
        """Send the messages that are complete, in their order, which is the same on all ranks."""
        while len(self.sent) < len(self.buckets) and all(i in self.grads for i in self.buckets[len(self.sent)]):
            factor = self.factor()
            self._send([self.sums[i] + self.grads[i] * factor for i in self.buckets[len(self.sent)]])

    def _send(self, totals: Sequence[Tensor]) -> None:
        message = ops.concat([ops.cast(total, ms.float32).reshape(-1) for total in totals])
        self.sent.append((message, mint.distributed.all_reduce(message, group=self.group, async_op=True)))

    def finish(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Send what no hook has seen of the gradients of the parameters, and return the reduced messages."""
        for i in (i for bucket in self.buckets for i in bucket):
            if self.grads.setdefault(i, grads[i]).data_ptr() != grads[i].data_ptr():
                raise RuntimeError(_CHANGED.format(name=self.sums[i].name.removeprefix("accu_grads.")))
        self._send_complete()
        return self._waited()

    def fail(self) -> tuple[Tensor, ...]:
        """Return as `finish` after an error in the backward pass: the other ranks get the messages that they await."""
        for bucket in self.buckets[len(self.sent) :]:
            self._send([self.sums[i] for i in bucket])
        return self._waited()

    def _waited(self) -> tuple[Tensor, ...]:
        for _, handle in self.sent:
            handle.wait()
        messages, self.sent, self.grads = tuple(message for message, _ in self.sent), [], {}
        return messages
