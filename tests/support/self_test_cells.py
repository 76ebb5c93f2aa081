"""Cells that go wrong, for the tests of `python -m ms_gradaccum test`."""

import os
import time

from ms_gradaccum.tools.self_test.training import Found


def well(place, **settings):
    return Found(0.0, 1.0, "nothing")


def hangs(place, **settings):
    """The last process does not come back."""
    if place.rank == place.size - 1:
        time.sleep(600)
    return Found(0.0, 1.0, "nothing")


def dies(place, **settings):
    os._exit(3)


def raises(place, **settings):
    raise OSError("no such data\nand more")
