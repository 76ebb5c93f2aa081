"""Make the small balanced subset of Fashion-MNIST beside this file from the full data set.

Usage: python make_subset.py FULL_SET [TARGET]

FULL_SET holds the four IDX files of Fashion-MNIST, raw or .gz. The subset is the first 600 training and the
first 100 test images of each of the ten classes, in their original order, so that everyone who runs this gets
the same bytes.
"""

import sys
from pathlib import Path

import numpy as np
from find_data import IMAGES, LABELS, read_idx, write_idx

PER_CLASS = {"train": 600, "test": 100}
DEFAULT_TARGET = Path(__file__).parent / "fashion_mnist"


def first_of_each_class(labels, count):
    """Indices, in rising order, of the first ``count`` rows of every class."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in np.unique(labels)]))


def make_subset(full_set, target=DEFAULT_TARGET):
    """Write the subset of ``full_set`` to ``target``/train and ``target``/test."""
    for usage, count in PER_CLASS.items():
        labels = read_idx(full_set / LABELS[usage])
        chosen = first_of_each_class(labels, count)
        folder = target / usage
        folder.mkdir(parents=True, exist_ok=True)
        write_idx(folder / LABELS[usage], labels[chosen])
        write_idx(folder / IMAGES[usage], read_idx(full_set / IMAGES[usage])[chosen])
        print(f"{folder}: {len(chosen)} images")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    make_subset(*map(Path, sys.argv[1:]))
