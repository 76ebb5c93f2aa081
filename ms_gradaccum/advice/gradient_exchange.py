"""The gradients of two micro batches, which must stay when these exchange rows: what hides from the loss shows here."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ms_gradaccum.advice.loss_of_rows import Loss, Passes, error_of
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
    """The training program: its micro step, the same built anew, and the empty buffers of its window."""

    add: AddMicroBatch
    add_anew: AddMicroBatch
    buffers: list[GradientBuffer]


def gradient_error(passes: Passes, program: Program, a: Rows, b: Rows) -> float:
    """Return how far the gradients of two micro batches move if these exchange rows; 0.0 if rounding explains it."""
    size = min(a.size, b.size)
    if size == 1 and not passes.is_eager:  # One row has no half to exchange, and joining takes a graph.
        return 0.0
    first = a.take(range(size))
    second = b.take(range(size))
    try:
        both = first.joined(second)
    except RowsDiffer:
        return 0.0

    def run(add: AddMicroBatch, rows: Rows, seed: int = 0) -> tuple[Loss, Array]:
        try:
            passes.state.put_back_random(seed)
            add(rows)
            total = float(program.buffers[0].loss.asnumpy())
            return Loss(total, 0.0, total), _signed_sums(program.buffers)
        finally:
            for buffer in program.buffers:
                buffer.clear()

    loss_of_first, of_first = run(program.add, first)
    loss_of_second, of_second = run(program.add, second)
    own = of_first + of_second
    error = math.inf
    if size > 1:
        exchanged = run(program.add, first.exchanged(second))[1] + run(program.add, second.exchanged(first))[1]
        error = _distance(own, exchanged)
        if not GRADIENT_TOLERANCE < error < math.inf:
            return 0.0
    # Rows may belong in groups, which an exchange breaks and joining does not.
    loss, joined = run(program.add_anew, both)
    losses = (loss, loss_of_first, loss_of_second)
    if error_of(*losses) > passes.losses.rounding(*losses):
        # A number was changed after the program was compiled, or the random numbers are others.
        return 0.0
    noise = _distance(of_first, run(program.add, first, seed=1)[1])
    error = min(error, _distance(own, joined))
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
