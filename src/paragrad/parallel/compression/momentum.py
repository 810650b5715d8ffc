"""The momentum of an SGD, in other hands: deep gradient compression keeps it, and weight decay
with it.

SGD makes of a gradient g and weights x:  b <- m b + (g + d x);  x <- x - lr b.  That is linear,
so b is a sum of two: of velocities of gradients, which each rank keeps of its own part and
sends when they are large (`feedback.Corrected`), and of what decay makes, which is dense, and
the same on all ranks. Within a step of the optimizer its own momentum and decay are 0, so that
it makes x <- x - lr g; outside of it they are what the user and schedulers made them. What a
checkpoint holds is b, so that any strategy goes on from it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.engine.state.values import wide
from paragrad.errors import Refused, StepFailed
from paragrad.parallel.compression.feedback import Corrected, real
from paragrad.strategies.compressors import Compressor, Dgc

BUFFER = "momentum_buffer"  # by which name SGD keeps it
TAKEN = ("momentum", "weight_decay")
OWNED = weakref.WeakSet[torch.optim.Optimizer]()  # whose momentum is in other hands


def momentum_of(
    compressor: Compressor,
    optimizer: torch.optim.Optimizer | None,
    named: Mapping[str, nn.Parameter],
) -> Momentum | None:
    """What a compressor takes over of an optimizer, if it does. Raises Refused where it was
    taken over already.
    """
    if not isinstance(compressor, Dgc):
        return None
    assert optimizer is not None
    if optimizer in OWNED:
        raise Refused(
            "another dgc keeps the momentum of this optimizer already; give each model an "
            "optimizer of its own, and "
            "a new DistributedDataParallel a new one (its momentum begins anew)"
        )
    return Momentum(optimizer, named, compressor)


class Momentum:
    """Of the groups of an SGD, which does without in its steps from here on, until `give_back`.
    named: the parameters that are trained, which may become more.  own: what there is in the
    place of the groups'.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], dgc: Dgc
    ) -> None:
        self.optimizer = optimizer
        self.named = named
        self.dgc = dgc
        self.own = None if dgc.momentum == "auto" else float(dgc.momentum)
        self.groups = list[dict[str, Any]]()
        self.place = dict[Tensor, int]()
        self.aside: list[dict[str, Any]] = []  # of each group, within a step
        self.steps = 0  # of the optimizer, begun
        # parameters whose gradients come here: before which step, last
        self.given = dict[Tensor, int]()
        OWNED.add(optimizer)
        self.hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._set_aside()),
            optimizer.register_step_post_hook(lambda *_: self._stepped()),
        ]
        # of small tensors b; of others, what decay made
        self.dense: dict[str, Tensor] = {}
        self.begun = {
            name: buffer
            for name, parameter in named.items()
            if isinstance(buffer := optimizer.state.get(parameter, {}).pop(BUFFER, None), Tensor)
        }

    def _set_aside(self) -> None:
        self._put_back()  # the last step may have failed
        # schedulers, and who adds groups, may change them
        for number, group in enumerate(self.optimizer.param_groups):
            try:
                self.dgc.refuse_group(number, group, self.dgc)
            except Refused as error:
                raise StepFailed(str(error)) from None
        if any(BUFFER in self.optimizer.state.get(each, ()) for each in self.named.values()):
            raise StepFailed(
                "the optimizer was loaded after dgc had taken over its momentum; load it before "
                "the hook is made"
            )
        self.steps += 1
        self.aside = [dict(group) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group.update(dict.fromkeys(TAKEN, 0.0))

    def _stepped(self) -> None:
        """The step is done. Raises StepFailed where it moved what it should not have: in a
        closure nobody knows before.
        """
        self._put_back()
        for number, group in enumerate(self.optimizer.param_groups):
            missed = any(
                each.grad is not None and self.given.get(each, -1) < self.steps - 1
                for each in group["params"]
            )
            if missed and (self.own or any(group[what] for what in TAKEN)):
                raise StepFailed(
                    f"group {number} of the optimizer has gradients that dgc was not given, so "
                    f"this step was "
                    "without momentum and decay; give parameters of another model an optimizer of "
                    "their own, step "
                    "after a backward that exchanges (none under no_sync() alone), and before "
                    "steps without the "
                    "hook call close() on its state"
                )

    def _put_back(self) -> None:
        for group, values in zip(self.optimizer.param_groups, self.aside, strict=False):
            group.update({what: values[what] for what in TAKEN})
        self.aside = []

    def give_back(self) -> None:
        """The optimizer is the user's again, also where a step of it failed."""
        self._put_back()
        OWNED.discard(self.optimizer)
        for each in self.hooks:
            each.remove()

    def corrected(self) -> Corrected:
        """Where velocities are kept."""
        return Corrected(self.of, self.dgc.masking)

    def goes_on(
        self, feedback: Corrected, small: set[str], ranks: int, sent: Mapping[str, Tensor]
    ) -> None:
        """From the buffers that were there, of all ranks: each has an equal part of what is a
        velocity. sent: of tensors whose velocities are known already, what decay made.
        """
        for name, buffer in self.begun.items():
            if name in small:
                self.dense[name] = buffer
            elif name not in feedback.velocity:
                feedback.velocity[name] = real(buffer).to(wide(real(buffer).dtype)) / ranks
            elif name in sent:
                self.dense[name] = sent[name].to(buffer)
        self.begun = {}

    # ---- of a parameter ----------------------------------------------------------------------
    def holds(self, name: str) -> bool:
        return self._group(name) is not None

    def _group(self, name: str) -> dict[str, Any] | None:
        """As schedulers made it, also where a step calls a closure, which runs backward; None
        of a parameter that the optimizer does not hold.
        """
        groups = self.optimizer.param_groups
        # added, or loaded
        if len(groups) != len(self.groups) or any(map(operator.is_not, groups, self.groups)):
            self.groups = [*groups]
            self.place = {
                each: number for number, group in enumerate(groups) for each in group["params"]
            }
        parameter = self.named.get(name)
        number = None if parameter is None else self.place.get(parameter)
        return None if number is None else (self.aside or groups)[number]

    def of(self, name: str) -> tuple[float, bool]:
        """(momentum, is it Nesterov's?); of one that the optimizer does not hold, none."""
        if (group := self._group(name)) is None:
            return 0.0, False
        return float(group["momentum"]) if self.own is None else self.own, bool(
            group.get("nesterov")
        )

    def moved(self, name: str, mean: Tensor, small: bool) -> Tensor:
        """What the optimizer is to step by, of a mean gradient, or of what was sent of
        velocities.
        """
        group = self._group(name)
        decayed = (
            self.named[name].detach() * group["weight_decay"]
            if group and group["weight_decay"]
            else None
        )
        if small:
            return self._step(name, mean if decayed is None else mean + decayed)
        return mean if decayed is None else mean + self._step(name, decayed)

    def _step(self, name: str, gradient: Tensor) -> Tensor:
        """b <- m b + g, dense; what the weights move by."""
        momentum, nesterov = self.of(name)
        if not momentum:
            return gradient
        if name not in self.dense:
            self.dense[name] = torch.zeros_like(gradient)
        buffer = self.dense[name].mul_(momentum).add_(gradient)
        return gradient.add(buffer, alpha=momentum) if nesterov else buffer.clone()


def buffers(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """As an optimizer's state."""
    return {name: {BUFFER: each} for name, each in state.items()}
