"""The numbers of micro batches to try, and their order."""

from collections.abc import Callable, Sequence


def largest_part(rows: int, micro_size: int) -> int:
    """Return the rows of the largest micro batch, which determine the memory."""
    return -(-rows // micro_size)


def candidates(rows: int) -> list[int]:
    """Return the smallest number of micro batches for each size of the largest one, from few to many."""
    counts, count = [], 1
    while count < rows:
        counts.append(count)
        # The first number whose largest micro batch is smaller.
        count = largest_part(rows, largest_part(rows, count) - 1)
    return [*counts, rows]


def first_that_fits(counts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the first of ``counts`` that fits, or None. If one fits, so do all after it.

    Goes twice as far until one fits, then halves what is left: the answer is mostly among the first.
    """
    begin, end, place = 0, len(counts), 0
    while begin < end:
        if fits(counts[place]):
            end = place
        else:
            begin = place + 1
        place = (begin + end) // 2 if end < len(counts) else min(2 * place + 1, len(counts) - 1)
    return counts[begin] if begin < len(counts) else None
