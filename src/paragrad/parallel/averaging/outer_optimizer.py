"""Outer optimizers: the weights with which replicas continue after an averaging.

They also define the effective weights of the run between two averagings.

    mean       All replicas continue with the mean.
    nesterov   A centre steps by its distance from the mean, as by a gradient, with Nesterov's
               momentum. All replicas continue with the centre.
               (DiLoCo: Douillard et al. 2023, arXiv 2311.08105, algorithm 1)
    elastic    Replicas are pulled to a centre, and the centre to their plain mean:
               x_i -= a (x_i - c), c += a sum (x_i - c)
               (EASGD: Zhang, Choromanska & LeCun 2015, arXiv 1412.6651)

In the paper of EASGD a gradient and the pull are taken at the same weights. Here replicas are
pulled after their step, as if the pull of each step came before its gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from paragrad.engine.state.values import get_accumulation_dtype
from paragrad.strategies.local import Elastic, Local, Nesterov

Tensors = Sequence[Tensor]


class OuterOptimizer(ABC):
    """Base class of outer optimizers.

    Its tensors are equal on all replicas.

    Attributes:
        momentum: Tensors that a checkpoint must hold in addition to the weights.

        counts_equally: Whether the mean counts all replicas equally, not by their samples.

        centre: The centre, if there is one.
    """

    momentum: Tensors = ()
    counts_equally = False
    centre: Tensors = ()

    # empty by default, because the mean has no centre
    def start_local_phase(self, weights: Tensors) -> None:  # noqa: B027
        """Begin a phase in which replicas step alone. They are equal now.

        Args:
            weights: The weights of this replica.
        """

    def compute_effective_weights(self, means: Tensors) -> Tensors:
        """Return the effective weights of the run while replicas differ. Nothing is changed.

        Args:
            means: The means of the weights over replicas.
        """
        return means

    @abstractmethod
    def update_replica(self, weights: Tensors, means: Tensors) -> None:
        """Set the weights with which this replica continues after an averaging.

        Args:
            weights: The weights of this replica, changed in place.
            means: The means of the weights over replicas.
        """


def build_outer_optimizer(strategy: Local, tensors: Tensors, momentum: Tensors) -> OuterOptimizer:
    """Build the outer optimizer of a resolved strategy.

    Args:
        strategy: The strategy.
        tensors: The weights of this replica.
        momentum: The momentum from a checkpoint; empty if there is none.

    Returns:
        The outer optimizer.
    """
    if isinstance(strategy.outer, Nesterov):
        return NesterovOuterOptimizer(strategy.outer, tensors, momentum)
    if isinstance(strategy.outer, Elastic):
        assert isinstance(strategy.workers, int)
        return ElasticOuterOptimizer(float(strategy.outer.pull), strategy.workers, tensors)
    return MeanOuterOptimizer()


class MeanOuterOptimizer(OuterOptimizer):
    """All replicas continue with the mean."""

    def update_replica(self, weights: Tensors, means: Tensors) -> None:
        for mine, mean in zip(weights, means, strict=True):
            mine.copy_(mean)


class CentredOuterOptimizer(OuterOptimizer, ABC):
    """Base class of outer optimizers with a centre.

    The centre is at least float32. In a coarser dtype, the small steps of many averagings would be
    lost.
    """

    def start_local_phase(self, weights: Tensors) -> None:
        self.centre = [
            each.detach().to(get_accumulation_dtype(each.dtype), copy=True) for each in weights
        ]


class NesterovOuterOptimizer(CentredOuterOptimizer):
    """A centre that steps with Nesterov's momentum. All replicas continue with it.

    Its step belongs to a whole round. In the middle of a round the effective weights are the mean.
    A step would go beyond the mean, because it uses all of the momentum for a part of the round.

    Args:
        outer: The momentum and the learning rate.
        tensors: The weights of this replica.
        momentum: The momentum from a checkpoint; empty if there is none.
    """

    def __init__(self, outer: Nesterov, tensors: Tensors, momentum: Tensors) -> None:
        self.outer = outer
        self.start_local_phase(tensors)
        self.momentum = (
            [kept.to(each, copy=True) for kept, each in zip(momentum, self.centre, strict=True)]
            if momentum
            else [torch.zeros_like(each) for each in self.centre]
        )

    def update_replica(self, weights: Tensors, means: Tensors) -> None:
        moved = [centre - mean for centre, mean in zip(self.centre, means, strict=True)]
        self.momentum = [
            gradient.add(before, alpha=self.outer.momentum)
            for gradient, before in zip(moved, self.momentum, strict=True)
        ]
        self.centre = [
            centre.sub(gradient.add_(each, alpha=self.outer.momentum), alpha=self.outer.lr)
            for centre, gradient, each in zip(self.centre, moved, self.momentum, strict=True)
        ]
        for mine, centre in zip(weights, self.centre, strict=True):
            mine.copy_(centre)


class ElasticOuterOptimizer(CentredOuterOptimizer):
    """A centre to which replicas are pulled, without becoming equal to it.

    Args:
        pull: The factor a of the pull.
        replicas: Number of replicas.
        tensors: The weights of this replica.
    """

    counts_equally = True

    def __init__(self, pull: float, replicas: int, tensors: Tensors) -> None:
        self.pull = pull
        self.replicas = replicas
        self.start_local_phase(tensors)

    def compute_effective_weights(self, means: Tensors) -> Tensors:
        return [
            centre.lerp(mean, self.pull * self.replicas)
            for centre, mean in zip(self.centre, means, strict=True)
        ]

    def update_replica(self, weights: Tensors, means: Tensors) -> None:
        for mine, centre in zip(weights, self.centre, strict=True):
            mine.sub_((mine - centre).mul_(self.pull))
        self.centre = self.compute_effective_weights(means)
