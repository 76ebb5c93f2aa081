"""Messages from a graph. They come while it is compiled, and their arguments must be constants."""

from ms_gradaccum._checks import warn
from ms_gradaccum.backend.mindspore_private import primexpr

warn_in_graph = primexpr(warn)


@primexpr
def fail_in_graph(text: str) -> None:
    raise ValueError(text)
