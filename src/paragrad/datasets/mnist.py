"""MNIST, and whatever shares its files' names and shapes: 28x28 grey images in ten classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import TensorDataset

from paragrad.datasets.dataset_files import locate_files
from paragrad.datasets.idx import read_labelled_images
from paragrad.errors import Refused

# of the 60,000 training images, pixels in [0, 1]
MEAN = 0.1307
DEVIATION = 0.3081


class MnistImages(TensorDataset):
    """dataset[indices] -> (pixels [n, 1, 28, 28] of float32, normalised; labels [n] of int64).

    Kept as bytes, 47 MB for the training set; floating point numbers are made of the batch
    alone.
    """

    whole_batches = True

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        pixels, labels = super().__getitem__(index)
        return (pixels.unsqueeze(-3).float() / 255 - MEAN) / DEVIATION, labels


def load_mnist(data: Path | None, train: bool) -> MnistImages:
    """The 60,000 training or the 10,000 test images. data: see files.located. Raises
    Refused.
    """
    files = locate_files("mnist", data)
    part = "train" if train else "t10k"
    images = files[f"{part}-images-idx3-ubyte"]
    pixels, labels = read_labelled_images(images, files[f"{part}-labels-idx1-ubyte"])
    if pixels.shape[1:] != (28, 28):
        raise Refused(
            f"{images} holds images of {pixels.shape[1]}x{pixels.shape[2]} pixels; give images of "
            f"28x28"
        )
    return MnistImages(pixels, labels)
