"""Build cells for a device, while operators still run on the device of this process."""

from contextlib import contextmanager
from unittest import mock

from ms_gradaccum.backend import device
from ms_gradaccum.gradients import mixed_precision
from ms_gradaccum.static_graph import settings


@contextmanager
def built_for(target):
    """A context in which cells are built for this device, which cannot be asked what it computes."""
    with (
        mock.patch.object(device, "device_target", lambda: target),
        mock.patch.object(mixed_precision, "multiply"),
        mock.patch.object(mixed_precision, "clamps_overflow", lambda: False),
        mock.patch.object(settings, "launches_block", lambda: True),
    ):
        yield
