"""MNIST, and data sets with the same file names and shapes: 28x28 grey images in ten classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import TensorDataset

from paragrad.datasets.dataset_files import locate_files
from paragrad.datasets.idx import read_labelled_images
from paragrad.errors import Refused

# mean and standard deviation of the pixels of the 60,000 training images, scaled to [0, 1]
MEAN = 0.1307
STANDARD_DEVIATION = 0.3081


class MnistImages(TensorDataset):
    """Images and labels: dataset[indices] is normalised pixels [n, 1, 28, 28] and labels [n].

    Pixels are float32, labels int64. Images are stored as bytes, 47 MB for the training set. Only
    the batch is converted to floating point.
    """

    # `Samples` (loading.py) then asks for a whole batch at once, by a list of indices
    whole_batches = True

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        pixels, labels = super().__getitem__(index)
        return (pixels.unsqueeze(-3).float() / 255 - MEAN) / STANDARD_DEVIATION, labels


def load_mnist(data: Path | None, train: bool) -> MnistImages:
    """Load the 60,000 training images or the 10,000 test images.

    Args:
        data: The data folder, as in `dataset_files.locate_files`.
        train: Whether to load the training images.

    Returns:
        The dataset.

    Raises:
        Refused: The files cannot be found or downloaded, or hold other images.
    """
    files = locate_files("mnist", data)
    prefix = "train" if train else "t10k"
    images = files[f"{prefix}-images-idx3-ubyte"]
    pixels, labels = read_labelled_images(images, files[f"{prefix}-labels-idx1-ubyte"])
    if pixels.shape[1:] != (28, 28):
        raise Refused(
            f"{images} holds images of {pixels.shape[1]}x{pixels.shape[2]} pixels; give images of "
            "28x28"
        )
    return MnistImages(pixels, labels)
