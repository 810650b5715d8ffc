"""Jobs on MNIST: a feed-forward, a convolutional and a residual network.

The width of the feed-forward network sets the size of a message.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from paragrad.datasets.mnist import load_mnist
from paragrad.errors import Refused
from paragrad.jobs.job import Job, accuracy
from paragrad.notation.choices import describe_unknown_name

# activation and learning rate: the slope of a sigmoid is at most a quarter, and the gradient passes
# two sigmoids
ACTIVATIONS: dict[str, tuple[type[nn.Module], float]] = {
    "relu": (nn.ReLU, 0.05),
    "sigmoid": (nn.Sigmoid, 0.2),
}

NORMS = ("none", "batch", "weight")


def mnist_mlp(width: int = 256, activation: str = "relu") -> Job:
    """Train the feed-forward network 784-512-width-10 of the ring-versus-tree experiment on MNIST.

    Its gradients take 4 x (401,930 + 523 x width) bytes, 2,143,272 at width 256.

    Args:
        width: The size of the second hidden layer.
        activation: relu, or sigmoid as in the original.

    Returns:
        The job.

    Raises:
        Refused: The activation is unknown, or the width is below 1.
    """
    if activation not in ACTIVATIONS:
        raise Refused(
            "job mnist-mlp: " + describe_unknown_name("activation", activation, ACTIVATIONS)
        )
    if width < 1:
        raise Refused(f"job mnist-mlp: width must be a whole number from 1, got {width}")
    layer, rate = ACTIVATIONS[activation]
    return Job(
        name="mnist-mlp",
        arguments=(("width", width), ("activation", activation)),
        model=partial(_feed_forward, width, layer),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
        train=partial(load_mnist, train=True),
        test=partial(load_mnist, train=False),
        batch=128,
        epochs=5,
        metric=accuracy,
    )


def mnist_cnn(norm: str = "none") -> Job:
    """Train two convolutions with pooling and two linear layers on MNIST: LeNet with rectifiers.

    The learning rate falls by 0.05 % per step, to a tenth within the five epochs of 938 steps.

    Args:
        norm: `batch` (after each layer but the last), `weight` (of each layer but the last:
            Salimans and Kingma 2016), or `none`.

    Returns:
        The job.

    Raises:
        Refused: The norm is unknown.
    """
    if norm not in NORMS:
        raise Refused("job mnist-cnn: " + describe_unknown_name("norm", norm, NORMS))
    return Job(
        name="mnist-cnn",
        arguments=(("norm", norm),),
        model=partial(_convolutional, norm),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=0.05, momentum=0.9, weight_decay=5e-4
        ),
        scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9995),
        scheduler_every="step",
        train=partial(load_mnist, train=True),
        test=partial(load_mnist, train=False),
        batch=64,
        epochs=5,
        metric=accuracy,
    )


def mnist_resnet(width: int = 8) -> Job:
    """Train a residual network of three blocks with batch norm on MNIST.

    Args:
        width: The channels of the first block; each block has twice the channels of the one before.

    Returns:
        The job.

    Raises:
        Refused: The width is below 1.
    """
    if width < 1:
        raise Refused(f"job mnist-resnet: width must be a whole number from 1, got {width}")
    return Job(
        name="mnist-resnet",
        arguments=(("width", width),),
        model=partial(_residual, width),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=0.05, momentum=0.9, weight_decay=5e-4
        ),
        train=partial(load_mnist, train=True),
        test=partial(load_mnist, train=False),
        batch=128,
        epochs=3,
        metric=accuracy,
    )


def _feed_forward(width: int, activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 512),
        activation(),
        nn.Linear(512, width),
        activation(),
        nn.Linear(width, 10),
    )


def _convolutional(norm: str) -> nn.Module:
    def add_norm(layer: nn.Module, after: nn.Module) -> list[nn.Module]:
        return (
            [weight_norm(layer)]
            if norm == "weight"
            else [layer, after]
            if norm == "batch"
            else [layer]
        )

    # input [n, 1, 28, 28]; other shapes are outputs
    return nn.Sequential(
        *add_norm(nn.Conv2d(1, 8, 5), nn.BatchNorm2d(8)),
        nn.MaxPool2d(2),
        nn.ReLU(),  # [n, 8, 12, 12]
        *add_norm(nn.Conv2d(8, 32, 5), nn.BatchNorm2d(32)),
        nn.MaxPool2d(2),
        nn.ReLU(),  # [n, 32, 4, 4]
        nn.Flatten(),
        *add_norm(nn.Linear(512, 64), nn.BatchNorm1d(64)),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Block(nn.Module):
    """Two convolutions with batch norm and a skip connection (He et al. 2016)."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.around = (
            nn.Identity()
            if channels == out and stride == 1
            else nn.Conv2d(channels, out, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        return (inside + self.around(x)).relu()  # type: ignore[no-any-return]


def _residual(width: int) -> nn.Module:
    # input [n, 1, 28, 28]; other shapes are outputs
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),  # [n, 4 x width, 7, 7]
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )
