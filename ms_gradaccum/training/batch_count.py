"""The number of batches in an open window."""

import weakref

import mindspore as ms
from mindspore import Parameter, Tensor

from ms_gradaccum.gradients.buffer import GradientBuffer


class BatchCount:
    """The number of batches in an open window: the host counts, and a parameter keeps it for checkpoints and graphs."""

    known = 0  # The number as the host knows it.
    is_ahead = False  # True if the host has not written it yet.
    is_stale = False  # True if others have written the parameter since the host has read it.
    is_changed = False  # True if others have changed the number since the host set it.

    def __init__(self, buffer: GradientBuffer) -> None:
        self.buffer, self.parameter = buffer, buffer.batches
        for name in ("set_data", "assign_value"):
            vars(self.parameter)[name] = _Writing(self, name)

    def get(self) -> int:
        """Return the number, without a read of the device unless others may have written it."""
        return self.read() if self.is_stale or self.buffer.counts_in_graph else self.known

    def read(self) -> int:
        """Return the number that the parameter has, once the host has written what it knows."""
        if self.is_ahead:
            self.set(self.known)
        found = int(self.parameter.asnumpy())
        self.is_changed = self.is_changed or found != self.known
        self.known, self.is_stale = found, False
        return found

    def set(self, batches: int, writes: bool = True) -> None:
        """Set the number. It need not be written at once if the update of a full window may clear it before."""
        if batches != self.known or self.is_stale or self.buffer.counts_in_graph:
            self.known, self.is_ahead = batches, True
        if writes and self.is_ahead:
            Parameter.set_data(self.parameter, Tensor(batches, ms.int32))
            self.is_ahead = False
        self.is_stale = self.is_changed = False

    def was_cleared(self) -> None:
        """Note that the parameter is 0, since the buffer was cleared."""
        self.known, self.is_ahead, self.is_stale, self.is_changed = 0, False, False, False

    def was_changed(self) -> bool:
        """Return whether others have changed the number since the host set it or asked this."""
        self.get()
        changed, self.is_changed = self.is_changed, False
        return changed


class _Writing:
    """A method of a parameter that writes it, after which the number that its `BatchCount` knows is stale."""

    def __init__(self, count: BatchCount, method: str) -> None:
        # Weak, since it is an attribute of the parameter.
        self.count, self.parameter, self.method = weakref.ref(count), weakref.ref(count.parameter), method

    def __call__(self, *args: object, **kwargs: object) -> object:
        count, parameter = self.count(), self.parameter()
        if count is not None:
            count.is_ahead, count.is_stale = False, True
        return getattr(type(parameter), self.method)(parameter, *args, **kwargs)
