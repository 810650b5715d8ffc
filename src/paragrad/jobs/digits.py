"""The default job: scikit-learn's bundled handwritten digits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paragrad.jobs.job import Job, accuracy


def digits(width: int = 64) -> Job:
    """The 1,797 real 8x8 handwritten digits that scikit-learn bundles; MLP 64-width-10, SGD with momentum."""
    train, test = _halves()
    return Job(
        name="digits", arguments=(("width", width),),
        model=lambda: nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        train=train, test=test, batch=64, epochs=20, metric=accuracy)


def _halves() -> tuple[TensorDataset, TensorDataset]:
    """Every fifth digit is for testing: 1,437 to train on, 360 to test."""
    images, labels = _digits()
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    testing = torch.arange(len(labels)) % 5 == 4
    testing[-1] = True                                  # 1,797 is no multiple of five; the last one is for testing too
    return TensorDataset(images[~testing], labels[~testing]), TensorDataset(images[testing], labels[testing])


def _digits() -> tuple[Any, Any]:
    """sklearn.datasets.load_digits: images (1797, 64) of 0 to 16, and labels. Read from its file where that is: scikit-learn
    takes as long to import as torch."""
    found = find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or ():
        if (file := Path(folder, "datasets", "data", "digits.csv.gz")).exists():
            table = numpy.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1].astype(int)
    from sklearn.datasets import load_digits
    digits: tuple[Any, Any] = load_digits(return_X_y=True)
    return digits
