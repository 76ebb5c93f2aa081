"""Rows of other lengths on each rank, and the mean gradient over all their tokens in NumPy."""

import numpy as np

PADDING, CLASSES, LONGEST, LIMIT, RATE = -100, 4, 40, 48, 0.3
# The tokens of each row, by rank: 3 and 5 micro batches.
LENGTHS = [[16, 9, 33, 20], [40, 33, 24, 17, 8, 2]]
# A row of rank 1 is above the limit.
LONG = [[5, 6], [60, 7]]
START = np.random.default_rng(1).normal(size=(CLASSES, 3)).astype(np.float32)


def rows_of(rank, lengths=LENGTHS):
    """The inputs and labels of a rank."""
    rng = np.random.default_rng(rank)
    longest = max(LONGEST, *lengths[rank])
    x = rng.normal(size=(len(lengths[rank]), longest, 3)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=x.shape[:2]).astype(np.int32)
    labels[np.arange(longest) >= np.array(lengths[rank])[:, None]] = PADDING
    return x, labels


def mean_of(ranks):
    """The mean gradient and the mean loss over the tokens of these ranks, and their number, in float64."""
    pairs = [rows_of(rank) for rank in ranks]
    x = np.concatenate([x[labels != PADDING] for x, labels in pairs]).astype(np.float64)
    labels = np.concatenate([labels[labels != PADDING] for _, labels in pairs])
    exponents = np.exp(x @ START.T.astype(np.float64))
    shares = exponents / exponents.sum(1, keepdims=True)
    one_hot = np.eye(CLASSES)[labels]
    return (shares - one_hot).T @ x / len(x), -np.log((shares * one_hot).sum(1)).mean(), len(x)
