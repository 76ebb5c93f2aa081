"""The gradients of two micro batches, which must stay when these exchange rows: what hides from the loss shows here."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from mindspore import Tensor

from ms_gradaccum.advice.loss_of_rows import LossOfRows, relative
from ms_gradaccum.advice.rows import Rows, RowsDiffer
from ms_gradaccum.backend.plain_state import assign_in_place
from ms_gradaccum.backend.snapshot import Array, as_array
from ms_gradaccum.gradients.buffer import GradientBuffer

# The relative difference of gradients that rounding explains.
GRADIENT_TOLERANCE = 1e-3
# A difference must exceed the noise so many times: that of the same gradient computed again, or of a random loss.
NUM_DEVIATIONS = 10
_LENGTH = 9973
_SIGNS = np.random.default_rng(0).choice(np.array([-1.0, 1.0], np.float32), (4, _LENGTH))

AddRows = Callable[[Rows], object]  # Adds the gradients of rows to the buffers.


class Program(NamedTuple):
    """The training program: its micro step, the same built anew, and the empty buffers of its window."""

    add: AddRows
    add_anew: AddRows
    buffers: list[GradientBuffer]


def gradient_error(losses: LossOfRows, program: Program, a: Rows, b: Rows) -> float:
    """Return how far the gradients of two micro batches move if these exchange rows; 0.0 if rounding explains it."""
    size = min(a.size, b.size)
    if size == 1 and not losses.is_eager:  # One row has no half to exchange, and joining takes a graph.
        return 0.0
    try:
        return _error(losses, program, a.take(range(size)), b.take(range(size)))
    except RowsDiffer:
        return 0.0
    finally:
        for buffer in program.buffers:
            for total in buffer.all_totals():
                assign_in_place(total, Tensor(np.zeros(total.shape), total.dtype))


def _error(losses: LossOfRows, program: Program, first: Rows, second: Rows) -> float:
    totals = [_totals(program.buffers)]

    def added(add: AddRows, *parts: Rows, seed: int = 0) -> Array:
        """Return what rows add to the loss and to the sums of the gradients."""
        for rows in parts:
            losses.state.put_back_random(seed)
            add(rows)
        totals.append(_totals(program.buffers))
        return totals[-1] - totals[-2]

    both = first.joined(second)
    own = added(program.add, first, second)
    error = math.inf
    if first.size > 1:
        error = _distance(own, added(program.add, first.exchanged(second), second.exchanged(first)))
        if not GRADIENT_TOLERANCE < error < math.inf:
            return 0.0
    # Rows may belong in groups, which an exchange breaks and joining does not.
    joined = added(program.add_anew, both)
    if relative(joined[0] - own[0], own[0]) > GRADIENT_TOLERANCE:
        # A number was changed after the program was compiled, or the random numbers are others.
        return 0.0
    noise = 0.0
    if losses.is_eager:
        noise = _distance(own, added(program.add, first, second, seed=1))
    error = min(error, _distance(own, joined))
    return error if error > max(GRADIENT_TOLERANCE, NUM_DEVIATIONS * noise) else 0.0


def _totals(buffers: Sequence[GradientBuffer]) -> Array:
    """Return the loss, and some sums of each gradient with random signs, which are enough to compare it."""
    sums = [np.array([buffers[0].loss.asnumpy()])]
    for buffer in buffers:
        for total in buffer.sums:
            grad = as_array(total).reshape(-1)
            end = grad.size - grad.size % _LENGTH
            of_blocks = grad[:end].reshape(-1, _LENGTH) @ _SIGNS.T
            sums.append(of_blocks.sum(0) + _SIGNS[:, : grad.size - end] @ grad[end:])
    return np.concatenate(sums)


def _distance(a: Array, b: Array) -> float:
    """Return how far two gradients are apart."""
    size = max(float(np.linalg.norm(a[1:])), float(np.linalg.norm(b[1:])))
    return float(np.linalg.norm(a[1:] - b[1:])) / size if size else 0.0
