"""A disk without room."""

import resource
from contextlib import contextmanager


@contextmanager
def no_file_larger_than(size):
    """Let writing fail beyond this number of bytes in a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
