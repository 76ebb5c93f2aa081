"""Messages that are sent op by op during the backward pass of a window's last micro batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, mint, ops
from mindspore.communication import GlobalComm

from ms_gradaccum.backend.device import device_target
from ms_gradaccum.parallel.reducer import DataParallelReducer, GradientReducer

# MindSpore has no asynchronous collectives op by op for GPUs. On CPU, sending and computing share the cores: two
# processes on 2 cores took 1.6 times the time.
_ASYNC = ("Ascend",)
_CHANGED = (
    "For 'DataParallel', with overlap a gradient must be complete when the backward pass has made it, but that of "
    "{name!r} has changed later (by a gradient inside construct, or a hook that it registers). Leave overlap out."
)


class BackwardMessages:
    """All-reduce the sums and the last gradients of a window, message by message, as these gradients arrive.

    The hook of a parameter gets its gradient as soon as it is complete. If `construct` computes gradients or registers
    hooks, the pass may return another gradient than the hook got: then `finish` raises. The messages and their order
    are those of `reduce_kept`, so that ranks without rows can take part by calling it. The caller sends the last
    message, with the loss and the weight.
    """

    def __init__(self, reducer: DataParallelReducer) -> None:
        self.sums, self.buckets = reducer.sums, reducer.kept[:-1]
        self.group = GlobalComm.WORLD_COMM_GROUP
        self.grads: dict[int, Tensor] = {}
        self.sent: list[tuple[Tensor, Any]] = []  # Each message, reduced in place, with its handle.
        self.factor: Callable[[], Tensor] = Tensor  # Returns the factor of the gradients.

    @staticmethod
    def of(reducer: GradientReducer) -> "BackwardMessages | None":
        """Return the messages of a reducer, or None if this device or this reducer sends only after the pass."""
        can_wait = device_target() in _ASYNC and hasattr(mint, "distributed")
        # Messages in 16 bits are divided by the weight of all ranks, which is known only after the pass.
        if not (can_wait and reducer.overlaps and isinstance(reducer, DataParallelReducer)):
            return None
        is_worth_it = len(reducer.kept) > 2 and {bucket.dtype for bucket in reducer.layout.kept} == {ms.float32}
        return BackwardMessages(reducer) if is_worth_it else None

    @contextmanager
    def sending(self, parameters: Sequence[Parameter], factor: Callable[[], Tensor]) -> Iterator[None]:
        """Send during the backward pass in this context. ``factor()`` is known after the forward pass."""
        self.factor, self.sent, self.grads = factor, [], {}
        early = [index for bucket in self.buckets for index in bucket]
        handles = [parameters[index].register_hook(self._hook(index, self.grads)) for index in early]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            # After an error in a backward pass, MindSpore 2.10 still calls hooks that were removed.
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
        """Send the complete messages, in an order that is the same on all ranks."""
        while len(self.sent) < len(self.buckets) and all(i in self.grads for i in self.buckets[len(self.sent)]):
            factor = self.factor()
            self._send([self.sums[i] + self.grads[i] * factor for i in self.buckets[len(self.sent)]])

    def _send(self, totals: Sequence[Tensor]) -> None:
        message = ops.concat([ops.cast(total, ms.float32).reshape(-1) for total in totals])
        self.sent.append((message, mint.distributed.all_reduce(message, group=self.group, async_op=True)))

    def finish(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Send the gradients that no hook has seen, and return the reduced messages."""
        for i in (i for bucket in self.buckets for i in bucket):
            if self.grads.setdefault(i, grads[i]).data_ptr() != grads[i].data_ptr():
                raise RuntimeError(_CHANGED.format(name=self.sums[i].name.removeprefix("accu_grads.")))
        self._send_complete()
        return self._waited()

    def fail(self) -> tuple[Tensor, ...]:
        """Like `finish`, after an error in the backward pass: send the messages that the other ranks wait for."""
        for bucket in self.buckets[len(self.sent) :]:
            self._send([self.sums[i] for i in bucket])
        return self._waited()

    def _waited(self) -> tuple[Tensor, ...]:
        for _, handle in self.sent:
            handle.wait()
        messages, self.sent, self.grads = tuple(message for message, _ in self.sent), [], {}
        return messages
