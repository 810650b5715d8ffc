"""The default job, on scikit-learn's handwritten digits, and a net with branches on them."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paragrad.errors import Refused
from paragrad.jobs.job import Job, accuracy


def digits(width: int = 64) -> Job:
    """Train an MLP 64-width-10 on the 1,797 real 8x8 handwritten digits that scikit-learn bundles.

    The optimizer is SGD with momentum.

    Args:
        width: The size of the hidden layer.

    Returns:
        The job.
    """
    train, test = _load_halves()
    return Job(
        name="digits",
        arguments=(("width", width),),
        model=lambda: nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        train=train,
        test=test,
        batch=64,
        epochs=20,
        metric=accuracy,
    )


def inception_digits(width: int = 8) -> Job:
    """Train a small net of Inception blocks on the same digits as images (Szegedy et al. 2015).

    Each of two blocks has four branches that do not depend on each other. Their channels are
    concatenated.

    Args:
        width: The channels of a branch.

    Returns:
        The job.

    Raises:
        Refused: The width is below 1.
    """
    if width < 1:
        raise Refused(f"job inception-digits: width must be a whole number from 1, got {width}")
    train, test = (
        TensorDataset(images.view(-1, 1, 8, 8), labels)
        for images, labels in (half.tensors for half in _load_halves())
    )
    return Job(
        name="inception-digits",
        arguments=(("width", width),),
        model=partial(_inception, width),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        train=train,
        test=test,
        batch=64,
        epochs=10,
        metric=accuracy,
    )


class Inception(nn.Module):
    """Convolutions of 1, 3 and 5 pixels and a pool, side by side.

    The shape changes from [n, channels, h, w] to [n, 4 x width, h, w].
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, width, 1)
        self.three = nn.Sequential(
            nn.Conv2d(channels, width, 1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )
        self.five = nn.Sequential(
            nn.Conv2d(channels, width, 1), nn.ReLU(), nn.Conv2d(width, width, 5, padding=2)
        )
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(channels, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1).relu()


def _inception(width: int) -> nn.Module:
    return nn.Sequential(  # input [n, 1, 8, 8]; other shapes are outputs
        nn.Conv2d(1, 2 * width, 3, padding=1),
        nn.ReLU(),
        Inception(2 * width, width),
        nn.MaxPool2d(2),  # [n, 4 x width, 4, 4]
        Inception(4 * width, width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def _load_halves() -> tuple[TensorDataset, TensorDataset]:
    """The digits to train on (1,437) and to test (360): every fifth digit is for testing."""
    images, labels = _load_digits()
    images = torch.tensor(images / 16, dtype=torch.float32)
    labels = torch.tensor(labels)
    testing = torch.arange(len(labels)) % 5 == 4
    # 1,797 is not a multiple of five; the last digit is for testing too
    testing[-1] = True
    return TensorDataset(images[~testing], labels[~testing]), TensorDataset(
        images[testing], labels[testing]
    )


def _load_digits() -> tuple[Any, Any]:
    """Return what sklearn.datasets.load_digits does: images (1797, 64) of 0 to 16, and labels.

    The file is read directly if it is found, because scikit-learn takes as long to import as torch.
    """
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        if (file := Path(folder, "datasets", "data", "digits.csv.gz")).exists():
            table = numpy.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1].astype(int)
    from sklearn.datasets import load_digits

    digits: tuple[Any, Any] = load_digits(return_X_y=True)
    return digits
