"""Tables of text."""

from collections.abc import Iterable, Iterator


def aligned(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Return lines with columns of equal width: two left-aligned columns of words, and right-aligned ones."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        words = map(str.ljust, row[:2], widths)
        numbers = map(str.rjust, row[2:], widths[2:])
        yield "  ".join([*words, *numbers]).rstrip()


def size_text(count: int) -> str:
    """Return a number of bytes with its unit."""
    if count < 2**20:
        return f"{count} bytes"
    if count < 2**30:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**30:.2f} GiB"
