"""The gradients of two micro batches, which must stay when these exchange rows: what hides from the loss shows here."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ms_gradaccum.advice.loss_of_rows import Passes
from ms_gradaccum.advice.rows import Rows, RowsDiffer
from ms_gradaccum.backend.snapshot import Array, as_array
from ms_gradaccum.gradients.buffer import GradientBuffer

# The relative difference of gradients that rounding explains.
GRADIENT_TOLERANCE = 1e-3
# A difference must exceed the noise so many times: that of the same gradient computed again, or of a random loss.
NUM_DEVIATIONS = 10
_LENGTH = 9973
_SIGNS = np.random.default_rng(0).choice(np.array([-1.0, 1.0], np.float32), (4, _LENGTH))

AddMicroBatch = Callable[[Rows], object]  # Adds the gradients of rows to the buffers.


class Program(NamedTuple):
    """The training program: its micro step, the same op by op, and the empty buffers of its window."""

    add: AddMicroBatch
    add_eagerly: AddMicroBatch
    buffers: list[GradientBuffer]


def gradient_error(passes: Passes, program: Program, a: Rows, b: Rows) -> float:
    """Return how far the gradients of two micro batches move if these exchange rows; 0.0 if rounding explains it."""
    size = min(a.size, b.size)
    first = a.take(range(size))
    second = b.take(range(size))
    try:
        both = first.joined(second)
    except RowsDiffer:
        return 0.0

    def gradient(add: AddMicroBatch, *parts: Rows) -> Array:
        try:
            for rows in parts:
                passes.state.put_back_random(0)
                add(rows)
            return _signed_sums(program.buffers)
        finally:
            for buffer in program.buffers:
                buffer.clear()

    own = gradient(program.add, first, second)
    if size > 1:
        other = gradient(program.add, first.exchanged(second), second.exchanged(first))
    elif passes.is_eager:
        other = gradient(program.add_eagerly, both)
    else:
        return 0.0
    error = _distance(own, other)
    if not GRADIENT_TOLERANCE < error < math.inf:
        return 0.0
    noise = _distance(own, gradient(program.add, first, second))
    # Rows may belong in groups, which an exchange breaks and joining does not.
    error = min(error, _distance(own, gradient(program.add_eagerly, both)))
    return error if error > max(GRADIENT_TOLERANCE, NUM_DEVIATIONS * noise) else 0.0


def _signed_sums(buffers: Sequence[GradientBuffer]) -> Array:
    """Return some sums of each gradient with random signs, which are enough to compare it."""
    sums = []
    for buffer in buffers:
        for total in buffer.sums:
            grad = as_array(total).reshape(-1)
            end = grad.size - grad.size % _LENGTH
            of_blocks = grad[:end].reshape(-1, _LENGTH) @ _SIGNS.T
            sums.append(of_blocks.sum(0) + _SIGNS[:, : grad.size - end] @ grad[end:])
    return np.concatenate(sums)


def _distance(a: Array, b: Array) -> float:
    size = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    return float(np.linalg.norm(a - b)) / size if size else 0.0
