"""The two jobs on MNIST: a feed-forward network whose width sets the size of a message, and a small convolutional one."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from paragrad.datasets.mnist import mnist
from paragrad.errors import Refused
from paragrad.jobs.job import Job, accuracy
from paragrad.notation.choices import unknown

# with its learning rate: a sigmoid's slope is a quarter at most, and the gradient passes two of them
ACTIVATIONS: dict[str, tuple[type[nn.Module], float]] = {"relu": (nn.ReLU, 0.05), "sigmoid": (nn.Sigmoid, 0.2)}


def mnist_mlp(width: int = 256, activation: str = "relu") -> Job:
    """The four-layer feed-forward network 784-512-width-10 of the ring-versus-tree experiment, on MNIST.

    Its gradients are 4 x (401,930 + 523 x width) bytes, 2,143,272 at width 256. activation: relu, or sigmoid as in the
    original. Raises Refused.
    """
    if activation not in ACTIVATIONS:
        raise Refused("job mnist-mlp: " + unknown("activation", activation, ACTIVATIONS))
    if width < 1:
        raise Refused(f"job mnist-mlp: width must be a whole number from 1, got {width}")
    layer, rate = ACTIVATIONS[activation]
    return Job(
        name="mnist-mlp", arguments=(("width", width), ("activation", activation)),
        model=partial(_feed_forward, width, layer),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
        train=partial(mnist, train=True), test=partial(mnist, train=False), batch=128, epochs=5, metric=accuracy)


def mnist_cnn() -> Job:
    """Two convolutions with pooling and two linear layers on MNIST: LeNet with rectifiers.

    The learning rate falls by 0.05 % a step, to a tenth within the five epochs of 938 steps.
    """
    return Job(
        name="mnist-cnn", model=_convolutional, loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4),
        scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9995),
        train=partial(mnist, train=True), test=partial(mnist, train=False), batch=64, epochs=5, metric=accuracy)


def _feed_forward(width: int, activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), activation(), nn.Linear(512, width), activation(),
                         nn.Linear(width, 10))


def _convolutional() -> nn.Module:
    return nn.Sequential(                                               # [n, 1, 28, 28]
        nn.Conv2d(1, 8, 5), nn.MaxPool2d(2), nn.ReLU(),                 # [n, 8, 12, 12]
        nn.Conv2d(8, 32, 5), nn.MaxPool2d(2), nn.ReLU(),                # [n, 32, 4, 4]
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
