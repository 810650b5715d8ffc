"""What replicas go on from when their weights are averaged, and what the run stands for in between.

mean       all go on from the mean.
nesterov   a centre steps by what the mean moved away from it, as by a gradient, with Nesterov's momentum, and all go on from
           it (DiLoCo: Douillard et al. 2023, arXiv 2311.08105, algorithm 1).
elastic    replicas are pulled to a centre, and it by the same to them: x_i -= a (x_i - c), c += a sum (x_i - c)
           (EASGD: Zhang, Choromanska & LeCun 2015, arXiv 1412.6651, equations 5 and 6).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from paragrad.strategies.local import Elastic, Local, Nesterov

MOMENTUM = "outer momentum"             # by which name a checkpoint holds it


class Outer(ABC):
    """Of some tensors, all replicas' alike. momentum: what a checkpoint has to hold beside them."""
    momentum: Sequence[Tensor] = ()

    def begun(self, own: Sequence[Tensor]) -> None:     # noqa: B027        # the mean has no centre
        """From here on replicas, which are equal, step alone."""

    @abstractmethod
    def met(self, own: Sequence[Tensor], means: Sequence[Tensor]) -> None:
        """Replicas meet: this one's tensors become, in place, what it goes on from."""

    @abstractmethod
    def stands(self, means: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the run would stand for if they met now; nothing is changed."""

    def kept(self, means: Sequence[Tensor]) -> Sequence[Tensor]:
        """And the momentum that they would have then."""
        return ()

    def stood(self) -> Sequence[Tensor]:
        """What it stood for when they met last, where that is not what they went on from."""
        return ()


def outer_of(strategy: Local, tensors: Sequence[Tensor], momentum: Sequence[Tensor]) -> Outer:
    """The one of a resolved strategy. momentum: of a checkpoint, or none."""
    if isinstance(strategy.outer, Nesterov):
        return OfNesterov(strategy.outer, tensors, momentum)
    if isinstance(strategy.outer, Elastic):
        assert isinstance(strategy.workers, int)
        return OfElastic(strategy.pull, strategy.workers, tensors)
    return OfMean()


class OfMean(Outer):
    """The mean itself."""

    def met(self, own: Sequence[Tensor], means: Sequence[Tensor]) -> None:
        torch._foreach_copy_([*own], [*means])

    def stands(self, means: Sequence[Tensor]) -> Sequence[Tensor]:
        return means


class OfNesterov(Outer):
    """A centre that steps."""

    def __init__(self, outer: Nesterov, tensors: Sequence[Tensor], momentum: Sequence[Tensor]) -> None:
        self.outer = outer
        self.begun(tensors)
        self.momentum = [each.clone() for each in momentum] or [torch.zeros_like(each) for each in self.centre]

    def begun(self, own: Sequence[Tensor]) -> None:
        self.centre = _wide(own)

    def met(self, own: Sequence[Tensor], means: Sequence[Tensor]) -> None:
        self.momentum, self.centre = self.kept(means), [*self.stands(means)]
        torch._foreach_copy_([*own], self.centre)

    def kept(self, means: Sequence[Tensor]) -> list[Tensor]:
        moved = torch._foreach_sub(self.centre, [*means])
        return [gradient.add_(momentum, alpha=self.outer.momentum)
                for gradient, momentum in zip(moved, self.momentum, strict=True)]

    def stands(self, means: Sequence[Tensor]) -> Sequence[Tensor]:
        moved = torch._foreach_sub(self.centre, [*means])
        torch._foreach_add_(moved, self.kept(means), alpha=self.outer.momentum)
        return [centre.sub(step, alpha=self.outer.lr) for centre, step in zip(self.centre, moved, strict=True)]


class OfElastic(Outer):
    """A centre that replicas are pulled to, and do not become."""

    def __init__(self, pull: float, replicas: int, tensors: Sequence[Tensor]) -> None:
        self.pull, self.replicas = pull, replicas
        self.begun(tensors)

    def begun(self, own: Sequence[Tensor]) -> None:
        self.centre = _wide(own)

    def stood(self) -> Sequence[Tensor]:
        return self.centre

    def met(self, own: Sequence[Tensor], means: Sequence[Tensor]) -> None:
        centre = [*self.stands(means)]
        for mine, old in zip(own, self.centre, strict=True):
            mine.sub_((mine - old).mul_(self.pull))
        self.centre = centre

    def stands(self, means: Sequence[Tensor]) -> Sequence[Tensor]:
        return [centre.lerp(mean, self.pull * self.replicas) for centre, mean in zip(self.centre, means, strict=True)]


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, in float32 where they are coarser, in which the steps of many meetings would be lost."""
    return [each.detach().to(torch.promote_types(each.dtype, torch.float32), copy=True) for each in tensors]
