"""Build cells for a device, while operators still run on the device of this process."""

from unittest import mock

from ms_gradaccum.backend import device


def built_for(target):
    """A context in which cells are built for this device."""
    return mock.patch.object(device, "simulated", target)
