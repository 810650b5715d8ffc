"""The momentum of an SGD, in other hands: deep gradient compression keeps it, and weight decay with it.

SGD makes of a gradient g and weights x:  b <- m b + (g + d x);  x <- x - lr b.  That is linear, so b is a sum of two: of
velocities of gradients, which each rank keeps of its own part and sends when they are large (`feedback.Corrected`), and of what
decay makes, which is dense, and the same on all ranks. While they are here the optimizer's own momentum and decay are 0, and a
step of it is x <- x - lr g. What a checkpoint holds is b, so that any strategy goes on from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.strategies.compressors import Compressor, Dgc

BUFFER = "momentum_buffer"              # by which name SGD keeps it
TAKEN = ("momentum", "weight_decay")


def momentum_of(compressor: Compressor, optimizer: torch.optim.Optimizer | None,
                named: Mapping[str, nn.Parameter]) -> Momentum | None:
    """What a compressor takes over of an optimizer, if it does."""
    if not isinstance(compressor, Dgc):
        return None
    assert optimizer is not None
    return Momentum(optimizer, named, None if compressor.momentum == "auto" else float(compressor.momentum))


class Momentum:
    """Of the groups of an SGD, whose own is 0 from here on. named: the parameters that are trained;  own: what there is where
    the groups have none."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], own: float | None) -> None:
        self.optimizer, self.named, self.own = optimizer, named, own
        self.asked: list[dict[str, float]] = []                 # of each group
        self.group_of: dict[Tensor, int] = {}
        self.follow()
        self.begun: dict[str, Tensor] = {}              # buffers that were there
        self.dense: dict[str, Tensor] = {}              # of small tensors b; of others, what decay made
        for name, parameter in named.items():
            state = optimizer.state.get(parameter, {})
            if isinstance(buffer := state.pop(BUFFER, None), Tensor):
                self.begun[name] = buffer

    def follow(self) -> None:
        """A scheduler may set them anew in every step, and a user add a group; what they set is taken over too."""
        groups = self.optimizer.param_groups
        if len(groups) > len(self.asked):
            self.asked += [{} for _ in groups[len(self.asked):]]
            self.group_of = {each: number for number, group in enumerate(groups) for each in group["params"]}
        for group, asked in zip(groups, self.asked, strict=True):
            for what in TAKEN:
                if what not in asked or group[what]:
                    asked[what], group[what] = float(group[what]), 0.0

    def of(self, name: str) -> tuple[float, bool]:
        """(momentum, is it Nesterov's?) of a parameter; of one that the optimizer does not hold, none."""
        number = self.group_of.get(self.named[name])
        if number is None:
            return 0.0, False
        group = self.optimizer.param_groups[number]
        return (self.asked[number]["momentum"] if self.own is None else self.own), bool(group.get("nesterov"))

    def decayed(self, name: str) -> Tensor | None:
        """What decay makes of the weights as they are now, before momentum; None where there is none."""
        number = self.group_of.get(parameter := self.named[name])
        decay = 0.0 if number is None else self.asked[number]["weight_decay"]
        return parameter.detach() * decay if decay else None

    def step(self, name: str, gradient: Tensor) -> Tensor:
        """b <- m b + g, dense; what the weights move by."""
        momentum, nesterov = self.of(name)
        if not momentum:
            return gradient
        if name not in self.dense:
            self.dense[name] = torch.zeros_like(gradient)
        buffer = self.dense[name].mul_(momentum).add_(gradient)
        return gradient.add(buffer, alpha=momentum) if nesterov else buffer.clone()

    def moved(self, name: str, mean: Tensor, small: bool) -> Tensor:
        """What the optimizer is to step by, of a mean gradient, or of what was sent of velocities."""
        decayed = self.decayed(name)
        if small:
            return self.step(name, mean if decayed is None else mean + decayed)
        return mean if decayed is None else mean + self.step(name, decayed)

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        """The groups as they were."""
        with_none = [{what: group[what] for what in TAKEN} for group in self.optimizer.param_groups]
        self.give_back()
        try:
            yield
        finally:
            for group, values in zip(self.optimizer.param_groups, with_none, strict=True):
                group.update(values)

    def give_back(self) -> None:
        for group, asked in zip(self.optimizer.param_groups, self.asked, strict=True):
            group.update({what: value for what, value in asked.items() if not group[what]})


def buffers(state: Any) -> dict[str, dict[str, Tensor]]:
    """As an optimizer's state."""
    return {name: {BUFFER: each} for name, each in state.items()}
