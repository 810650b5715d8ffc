"""What replicas go on from when their weights are averaged, and what the run stands for in
between.

mean       all go on from the mean. nesterov   a centre steps by what the mean moved away from
it, as by a gradient, with Nesterov's momentum, and all go on from
           it (DiLoCo: Douillard et al. 2023, arXiv 2311.08105, algorithm 1).
elastic    replicas are pulled to a centre, and the centre to their plain mean: x_i -= a (x_i -
c), c += a sum (x_i - c) (EASGD:
           Zhang, Choromanska & LeCun 2015, arXiv 1412.6651). There a gradient and the pull are
           taken at the same weights; here replicas are pulled when they have stepped, as if the
           pull of each step came before its gradient.
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
    """Of some tensors, all replicas' alike. momentum: what a checkpoint has to hold beside
    them;  even: the mean counts all replicas alike, not by their samples;  centre: what they do
    not become when they meet.
    """

    momentum: Tensors = ()
    counts_equally = False
    centre: Tensors = ()

    # the mean has no centre
    def start_local_phase(self, weights: Tensors) -> None:  # noqa: B027
        """From here on replicas, which are equal, step alone."""

    def compute_effective_weights(self, means: Tensors) -> Tensors:
        """What the run stands for while replicas are apart; nothing is changed."""
        return means

    @abstractmethod
    def update_replica(self, weights: Tensors, means: Tensors) -> None:
        """Replicas meet: this one's tensors become, in place, what it goes on from."""


def build_outer_optimizer(strategy: Local, tensors: Tensors, momentum: Tensors) -> OuterOptimizer:
    """The one of a resolved strategy. momentum: of a checkpoint, or none."""
    if isinstance(strategy.outer, Nesterov):
        return NesterovOuterOptimizer(strategy.outer, tensors, momentum)
    if isinstance(strategy.outer, Elastic):
        assert isinstance(strategy.workers, int)
        return ElasticOuterOptimizer(float(strategy.outer.pull), strategy.workers, tensors)
    return MeanOuterOptimizer()


class MeanOuterOptimizer(OuterOptimizer):
    """The mean itself."""

    def update_replica(self, weights: Tensors, means: Tensors) -> None:
        for mine, mean in zip(weights, means, strict=True):
            mine.copy_(mean)


class CentredOuterOptimizer(OuterOptimizer, ABC):
    """With a centre, in float32 where tensors are coarser: in these the steps of many meetings
    would be lost.
    """

    def start_local_phase(self, weights: Tensors) -> None:
        self.centre = [
            each.detach().to(get_accumulation_dtype(each.dtype), copy=True) for each in weights
        ]


class NesterovOuterOptimizer(CentredOuterOptimizer):
    """A centre that steps, and that all become. Its step is of a whole round: in the middle of
    one the run stands for the mean, which a step would carry beyond it, with all of the
    momentum for a part of the way.
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
    """A centre that replicas are pulled to, and do not become."""

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
