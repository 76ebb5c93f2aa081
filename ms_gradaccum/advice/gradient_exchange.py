"""The gradient of two micro batches, which other parts of their rows must have, too: what hides from the loss shows."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from ms_gradaccum.advice.loss_of_rows import LossOfRows, relative
from ms_gradaccum.advice.rows import Rows, RowsDiffer
from ms_gradaccum.backend.arrays import Array, as_array
from ms_gradaccum.gradients.buffer import GradientBuffer

# The relative difference of gradients that rounding explains.
GRADIENT_TOLERANCE = 1e-3
# A difference must exceed the noise so many times: that of the same gradient in another order of the rows, which is
# rounded otherwise, and with other random numbers.
NUM_DEVIATIONS = 10
_SIGNS = np.random.default_rng(0).choice(np.array([-1.0, 1.0], np.float32), (4, 9973))

AddRows = Callable[[Rows], object]  # Adds the gradients of rows to the buffers.


class Program(NamedTuple):
    """The training program: its micro step, the same built anew, and the empty buffers of its window."""

    add: AddRows
    add_anew: AddRows
    buffers: list[GradientBuffer]

    def gradient_of(self, losses: LossOfRows, add: AddRows, *parts: Rows) -> Array:
        """Return what rows add to the loss and to the sums of the gradients, from the state before the window."""
        losses.restore()
        try:
            for rows in parts:
                losses.random.put_back(1)
                add(rows)
            return _totals(self.buffers)
        finally:
            for buffer in self.buffers:
                buffer.clear()


def gradient_error(losses: LossOfRows, program: Program, first: Rows, second: Rows) -> float:
    """Return how far the gradient of two micro batches together is from that of each; 0.0 if rounding explains it."""
    try:
        both = first.joined(second)
    except RowsDiffer:
        return 0.0
    first = first.beside(second)
    own = program.gradient_of(losses, program.add, first, second)
    size = max(first.size, second.size)
    shift = size // 2
    if losses.is_eager:
        size = shift  # Smaller parts show a sum, too. Compiled, they would take a graph.
        shift = 0
    if size:  # Single rows have no halves, and joining takes a graph.
        with suppress(Exception):  # Networks whose rows belong in groups may not take fewer rows.
            error = _distance(
                own, program.gradient_of(losses, program.add, *_parts(both, size, shift))
            )
            if not GRADIENT_TOLERANCE < error < math.inf:
                return 0.0
    # Rows may belong in groups, which other parts break and joining does not.
    joined = program.gradient_of(losses, program.add_anew, both)
    if abs(relative(joined[0] - own[0], own[0])) > GRADIENT_TOLERANCE:
        # A number was changed after the program was compiled, or the random numbers are others.
        return 0.0
    losses.random.note()
    noise = _distance(joined, program.gradient_of(losses, program.add_anew, second.joined(first)))
    error = _distance(own, joined)
    return error if error > max(GRADIENT_TOLERANCE, NUM_DEVIATIONS * noise) else 0.0


def _parts(both: Rows, size: int, shift: int) -> list[Rows]:
    """Return parts of so many rows. A shift by half of a micro batch lets two exchange rows."""
    places = np.roll(range(both.size), shift).tolist()
    return [both.take(places[begin : begin + size]) for begin in range(0, both.size, size)]


def _totals(buffers: Sequence[GradientBuffer]) -> Array:
    """Return the loss, and sums of each gradient with random signs, which are enough to compare it."""
    sums = [float(buffers[0].loss.asnumpy())]
    for buffer in buffers:
        for total in buffer.sums:
            grad = as_array(total).reshape(-1)
            sums += [grad @ np.resize(signs, grad.size) for signs in _SIGNS]
    return np.array(sums)


def _distance(a: Array, b: Array) -> float:
    """Return how far two gradients are apart."""
    size = max(float(np.linalg.norm(a[1:])), float(np.linalg.norm(b[1:])))
    return float(np.linalg.norm(a[1:] - b[1:])) / size if size else 0.0
