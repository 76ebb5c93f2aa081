"""Find the images to train on: the folders for mindspore.dataset.MnistDataset.

Looked for in this order: the folder in DATA_PATH, the Debian package dataset-fashion-mnist, the small subset
of Fashion-MNIST beside this file. A folder may hold the IDX files itself or in train/ and test/, raw or .gz,
so MNIST as MindSpore's tutorials lay it out works unchanged.

Usage: python find_data.py      (prints the folders of the training and of the test images)
"""

import gzip
import hashlib
import os
import shutil
import sys
from pathlib import Path

import numpy as np

IMAGES = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}
LABELS = {"train": "train-labels-idx1-ubyte", "test": "t10k-labels-idx1-ubyte"}

DEBIAN_PACKAGE = Path("/usr/share/datasets/fashion-mnist")
SUBSET = Path(__file__).parent / "fashion_mnist"


def find_data(data_path=None, debian_package=DEBIAN_PACKAGE):
    """The two folders with the training and the test images, and a sentence that says which data they are."""
    if data_path:
        return *folders_in(Path(data_path).expanduser()), f"the data in DATA_PATH={data_path}"
    if debian_package.is_dir():
        return *folders_in(debian_package), f"Fashion-MNIST, 60,000 images, in {debian_package}"
    return *folders_in(SUBSET), "the Fashion-MNIST subset that ships with the sample, 6,000 images"


def folders_in(root):
    """The training and the test folder below ``root``, unpacked if they were packed."""
    return folder_in(root, "train"), folder_in(root, "test")


def folder_in(root, usage):
    # If DATA_PATH names MNIST's train/ folder itself, as in MindSpore's own scripts, test/ is beside it.
    candidates = [root, root / usage, *([root.parent / usage] if root.name == "train" else [])]
    for folder in candidates:
        if all((folder / name[usage]).is_file() for name in (IMAGES, LABELS)):
            return folder
        if all(packed(folder / name[usage]).is_file() for name in (IMAGES, LABELS)):
            return unpack(folder, usage)
    raise FileNotFoundError(
        f"No {usage} images in {root}: looked for {IMAGES[usage]} and {LABELS[usage]}, raw or .gz, in "
        f"{', '.join(map(str, candidates))}. Set DATA_PATH to a folder that holds them, or unset it."
    )


def packed(file):
    return file.with_name(file.name + ".gz")


def unpack(folder, usage):
    """Unpack the two files of ``usage`` into the user's cache, once, and return the cache folder."""
    sources = [packed(folder / name[usage]) for name in (IMAGES, LABELS)]
    facts = [(str(source.resolve()), source.stat().st_size, source.stat().st_mtime_ns) for source in sources]
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    cache = Path(os.getenv("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "ms_gradaccum" / f"{usage}-{key}"
    target.mkdir(parents=True, exist_ok=True)
    for source in sources:
        file = target / source.stem
        if not file.is_file():
            # Under another name first: a run that is stopped here, or another rank, never sees half a file.
            partial = target / f".{source.stem}.{os.getpid()}"
            with gzip.open(source) as packed_bytes, partial.open("wb") as raw_bytes:
                shutil.copyfileobj(packed_bytes, raw_bytes)
            partial.replace(file)
    return target


def read_idx(file):
    """The array of unsigned bytes in an IDX file, raw or .gz."""
    data = file.read_bytes() if file.is_file() else gzip.decompress(packed(file).read_bytes())
    num_axes = data[3]
    shape = np.frombuffer(data, ">u4", num_axes, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * num_axes).reshape(shape)


def write_idx(file, array):
    """Write an array of unsigned bytes as a raw IDX file."""
    unsigned_bytes = 0x08
    header = bytes([0, 0, unsigned_bytes, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    file.write_bytes(header + array.tobytes())


if __name__ == "__main__":
    try:
        print(*find_data(os.getenv("DATA_PATH"))[:2], sep="\n")
    except OSError as error:
        sys.exit(f"Error: {error}")
