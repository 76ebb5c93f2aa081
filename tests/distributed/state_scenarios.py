"""States that are saved on some ranks and loaded on others."""

from scenarios import KINDS

# Batches before the state is saved, in the middle of a window of two, and after it.
FIRST, LAST = range(3), range(3, 6)
# Kind that saves on two ranks, kind that loads on four.
MOVES = [(name, name) for name in KINDS] + [("data parallel", "level2"), ("level2", "data parallel")]
