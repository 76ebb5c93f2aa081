"""The images to train on: CIFAR-10 from a folder, or Fashion-MNIST made to look like it."""

import sys
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))
from find_data import find_data


def create_dataset(batch_size, cifar10=None):
    """Batches of images (rows, 3, 32, 32), float32, and labels (rows,), int32, of full size.

    ``cifar10`` is a folder with CIFAR-10 in its binary version. Without it, the images are those of the other samples.
    """
    if cifar10:
        dataset = ds.Cifar10Dataset(str(Path(cifar10).expanduser()), "train")
    else:
        dataset = ds.MnistDataset(str(find_data()[0]), "train")
        # From 28 x 28 and grey to 32 x 32 in three equal colours.
        dataset = dataset.map([ds.vision.Pad(2), lambda image: np.repeat(image, 3, axis=2)], "image")
    image_transforms = [
        ds.vision.RandomCrop(32, padding=4),
        ds.vision.RandomHorizontalFlip(),
        ds.vision.Rescale(1.0 / 255.0, 0),
        ds.vision.Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)),
        ds.vision.HWC2CHW(),
    ]
    dataset = dataset.map(image_transforms, "image")
    dataset = dataset.map(ds.transforms.TypeCast(ms.int32), "label")
    return dataset.batch(batch_size, drop_remainder=True)
