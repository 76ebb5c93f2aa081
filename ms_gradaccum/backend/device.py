"""The kind of device that cells are built for: MindSpore's own, or another one whose compiler is only tried."""

from collections.abc import Iterator
from contextlib import contextmanager

import mindspore as ms

_stand_in_for: str | None = None


def device_target() -> str:
    """Return ``"CPU"``, ``"GPU"`` or ``"Ascend"``."""
    return _stand_in_for or ms.get_context("device_target")


def stands_in() -> bool:
    """Return whether cells are built for a device that this machine may not have."""
    return _stand_in_for is not None


@contextmanager
def built_for(target: str) -> Iterator[None]:
    """Build cells for ``target``, while what runs here and now runs on the device of this process."""
    global _stand_in_for
    before, _stand_in_for = _stand_in_for, target
    try:
        yield
    finally:
        _stand_in_for = before
