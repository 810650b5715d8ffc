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

from paragrad.engine.state.values import wide
from paragrad.strategies.local import Elastic, Local, Nesterov

Tensors = Sequence[Tensor]


class Outer(ABC):
    """Of some tensors, all replicas' alike. momentum: what a checkpoint has to hold beside
    them;  even: the mean counts all replicas alike, not by their samples;  centre: what they do
    not become when they meet.
    """

    momentum: Tensors = ()
    even = False
    centre: Tensors = ()

    # the mean has no centre
    def begun(self, own: Tensors) -> None:  # noqa: B027
        """From here on replicas, which are equal, step alone."""

    def stands(self, means: Tensors) -> Tensors:
        """What the run stands for while replicas are apart; nothing is changed."""
        return means

    @abstractmethod
    def met(self, own: Tensors, means: Tensors) -> None:
        """Replicas meet: this one's tensors become, in place, what it goes on from."""


def outer_of(strategy: Local, tensors: Tensors, momentum: Tensors) -> Outer:
    """The one of a resolved strategy. momentum: of a checkpoint, or none."""
    if isinstance(strategy.outer, Nesterov):
        return OfNesterov(strategy.outer, tensors, momentum)
    if isinstance(strategy.outer, Elastic):
        assert isinstance(strategy.workers, int)
        return OfElastic(float(strategy.outer.pull), strategy.workers, tensors)
    return OfMean()


class OfMean(Outer):
    """The mean itself."""

    def met(self, own: Tensors, means: Tensors) -> None:
        for mine, mean in zip(own, means, strict=True):
            mine.copy_(mean)


class Centred(Outer, ABC):
    """With a centre, in float32 where tensors are coarser: in these the steps of many meetings
    would be lost.
    """

    def begun(self, own: Tensors) -> None:
        self.centre = [each.detach().to(wide(each.dtype), copy=True) for each in own]


class OfNesterov(Centred):
    """A centre that steps, and that all become. Its step is of a whole round: in the middle of
    one the run stands for the mean, which a step would carry beyond it, with all of the
    momentum for a part of the way.
    """

    def __init__(self, outer: Nesterov, tensors: Tensors, momentum: Tensors) -> None:
        self.outer = outer
        self.begun(tensors)
        self.momentum = (
            [kept.to(each, copy=True) for kept, each in zip(momentum, self.centre, strict=True)]
            if momentum
            else [torch.zeros_like(each) for each in self.centre]
        )

    def met(self, own: Tensors, means: Tensors) -> None:
        moved = [centre - mean for centre, mean in zip(self.centre, means, strict=True)]
        self.momentum = [
            gradient.add(before, alpha=self.outer.momentum)
            for gradient, before in zip(moved, self.momentum, strict=True)
        ]
        self.centre = [
            centre.sub(gradient.add_(each, alpha=self.outer.momentum), alpha=self.outer.lr)
            for centre, gradient, each in zip(self.centre, moved, self.momentum, strict=True)
        ]
        for mine, centre in zip(own, self.centre, strict=True):
            mine.copy_(centre)


class OfElastic(Centred):
    """A centre that replicas are pulled to, and do not become."""

    even = True

    def __init__(self, pull: float, replicas: int, tensors: Tensors) -> None:
        self.pull = pull
        self.replicas = replicas
        self.begun(tensors)

    def stands(self, means: Tensors) -> Tensors:
        return [
            centre.lerp(mean, self.pull * self.replicas)
            for centre, mean in zip(self.centre, means, strict=True)
        ]

    def met(self, own: Tensors, means: Tensors) -> None:
        for mine, centre in zip(own, self.centre, strict=True):
            mine.sub_((mine - centre).mul_(self.pull))
        self.centre = self.stands(means)
