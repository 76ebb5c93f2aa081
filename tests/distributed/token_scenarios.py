"""Rows with other numbers of tokens on each rank, and their mean gradient in NumPy."""

import numpy as np

PADDING, CLASSES, LENGTH = -100, 4, 5
LEARNING_RATE = 0.3
# The tokens of each row, by rank and batch. A batch of rank 0 has none.
TOKENS = [[[5, 1, 3], [0, 0, 0]], [[2, 4, 1], [5, 2, 3]]]
# The rows of each batch, by rank, for gradients that a loop gives.
ROWS = [[3, 1], [2, 5]]
START = np.random.default_rng(1).normal(size=(CLASSES, 3)).astype(np.float32)


def token_batch(rank, number):
    """The inputs and labels of a batch of a rank."""
    rng = np.random.default_rng(10 * rank + number)
    lengths = TOKENS[rank][number]
    inputs = rng.normal(size=(len(lengths), LENGTH, 3)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=(len(lengths), LENGTH)).astype(np.int32)
    for row, length in enumerate(lengths):
        labels[row, length:] = PADDING
    return inputs, labels


def token_gradients(rank, number):
    """The gradient of each token of a batch, in float64."""
    inputs, labels = token_batch(rank, number)
    counts = labels.reshape(-1) != PADDING
    x = inputs.reshape(-1, 3)[counts].astype(np.float64)
    exponents = np.exp(x @ START.T.astype(np.float64))
    errors = exponents / exponents.sum(1, keepdims=True) - np.eye(CLASSES)[labels.reshape(-1)[counts]]
    return errors[:, :, None] * x[:, None, :]


def row_batch(rank, number):
    """The rows of a batch, for the loss (weight * x - 2 * x)^2 with the weight 0, whose gradient is -4 x^2."""
    begin = 1 + sum(ROWS[0]) * rank + sum(ROWS[rank][:number])
    return np.arange(begin, begin + ROWS[rank][number], dtype=np.float32) / 10


def row_gradients(rank, number):
    """The gradient of each row of a batch."""
    return -4 * np.square(row_batch(rank, number).astype(np.float64))
