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

from paragrad.engine.state.values import get_accumulation_dtype
from paragrad.errors import Refused, StepFailed
from paragrad.parallel.compression.feedback import MomentumCorrection, flatten_real
from paragrad.strategies.compressors import Compressor, Dgc

MOMENTUM_BUFFER = "momentum_buffer"  # by which name SGD keeps it
GROUP_OPTIONS = ("momentum", "weight_decay")
OWNED_OPTIMIZERS = weakref.WeakSet[torch.optim.Optimizer]()  # whose momentum is in other hands


def take_over_momentum(
    compressor: Compressor,
    optimizer: torch.optim.Optimizer | None,
    parameters: Mapping[str, nn.Parameter],
) -> DgcMomentum | None:
    """What a compressor takes over of an optimizer, if it does. Raises Refused where it was
    taken over already.
    """
    if not isinstance(compressor, Dgc):
        return None
    assert optimizer is not None
    if optimizer in OWNED_OPTIMIZERS:
        raise Refused(
            "another dgc keeps the momentum of this optimizer already; give each model an "
            "optimizer of its own, and "
            "a new DistributedDataParallel a new one (its momentum begins anew)"
        )
    return DgcMomentum(optimizer, parameters, compressor)


class DgcMomentum:
    """Of the groups of an SGD, which does without in its steps from here on, until `give_back`.
    named: the parameters that are trained, which may become more.  own: what there is in the
    place of the groups'.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], dgc: Dgc
    ) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.dgc = dgc
        self.fixed_momentum = None if dgc.momentum == "auto" else float(dgc.momentum)
        self.groups = list[dict[str, Any]]()
        self.group_numbers = dict[Tensor, int]()
        self.saved_groups: list[dict[str, Any]] = []  # of each group, within a step
        self.started_steps = 0  # of the optimizer, begun
        # parameters whose gradients come here: before which step, last
        self.last_given_steps = dict[Tensor, int]()
        OWNED_OPTIMIZERS.add(optimizer)
        self.hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._zero_group_options()),
            optimizer.register_step_post_hook(lambda *_: self._finish_step()),
        ]
        # of small tensors b; of others, what decay made
        self.dense_buffers: dict[str, Tensor] = {}
        self.initial_buffers = {
            name: buffer
            for name, parameter in parameters.items()
            if isinstance(
                buffer := optimizer.state.get(parameter, {}).pop(MOMENTUM_BUFFER, None), Tensor
            )
        }

    def _zero_group_options(self) -> None:
        self._restore_group_options()  # the last step may have failed
        # schedulers, and who adds groups, may change them
        for number, group in enumerate(self.optimizer.param_groups):
            try:
                self.dgc.refuse_parameter_group(number, group, self.dgc)
            except Refused as error:
                raise StepFailed(str(error)) from None
        if any(
            MOMENTUM_BUFFER in self.optimizer.state.get(each, ())
            for each in self.parameters.values()
        ):
            raise StepFailed(
                "the optimizer was loaded after dgc had taken over its momentum; load it before "
                "the hook is made"
            )
        self.started_steps += 1
        self.saved_groups = [dict(group) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group.update(dict.fromkeys(GROUP_OPTIONS, 0.0))

    def _finish_step(self) -> None:
        """The step is done. Raises StepFailed where it moved what it should not have: in a
        closure nobody knows before.
        """
        self._restore_group_options()
        for number, group in enumerate(self.optimizer.param_groups):
            missed = any(
                each.grad is not None
                and self.last_given_steps.get(each, -1) < self.started_steps - 1
                for each in group["params"]
            )
            if missed and (self.fixed_momentum or any(group[what] for what in GROUP_OPTIONS)):
                raise StepFailed(
                    f"group {number} of the optimizer has gradients that dgc was not given, so "
                    f"this step was "
                    "without momentum and decay; give parameters of another model an optimizer of "
                    "their own, step "
                    "after a backward that exchanges (none under no_sync() alone), and before "
                    "steps without the "
                    "hook call close() on its state"
                )

    def _restore_group_options(self) -> None:
        for group, values in zip(self.optimizer.param_groups, self.saved_groups, strict=False):
            group.update({what: values[what] for what in GROUP_OPTIONS})
        self.saved_groups = []

    def release_optimizer(self) -> None:
        """The optimizer is the user's again, also where a step of it failed."""
        self._restore_group_options()
        OWNED_OPTIMIZERS.discard(self.optimizer)
        for each in self.hooks:
            each.remove()

    def build_feedback(self) -> MomentumCorrection:
        """Where velocities are kept."""
        return MomentumCorrection(self.get_momentum, self.dgc.masking)

    def adopt_buffers(
        self,
        feedback: MomentumCorrection,
        small_names: set[str],
        ranks: int,
        decay_buffers: Mapping[str, Tensor],
    ) -> None:
        """From the buffers that were there, of all ranks: each has an equal part of what is a
        velocity. sent: of tensors whose velocities are known already, what decay made.
        """
        for name, buffer in self.initial_buffers.items():
            if name in small_names:
                self.dense_buffers[name] = buffer
            elif name not in feedback.velocity:
                feedback.velocity[name] = (
                    flatten_real(buffer).to(get_accumulation_dtype(flatten_real(buffer).dtype))
                    / ranks
                )
            elif name in decay_buffers:
                self.dense_buffers[name] = decay_buffers[name].to(buffer)
        self.initial_buffers = {}

    # ---- of a parameter ----------------------------------------------------------------------
    def has_parameter(self, name: str) -> bool:
        return self._find_group(name) is not None

    def _find_group(self, name: str) -> dict[str, Any] | None:
        """As schedulers made it, also where a step calls a closure, which runs backward; None
        of a parameter that the optimizer does not hold.
        """
        groups = self.optimizer.param_groups
        # added, or loaded
        if len(groups) != len(self.groups) or any(map(operator.is_not, groups, self.groups)):
            self.groups = [*groups]
            self.group_numbers = {
                each: number for number, group in enumerate(groups) for each in group["params"]
            }
        parameter = self.parameters.get(name)
        number = None if parameter is None else self.group_numbers.get(parameter)
        return None if number is None else (self.saved_groups or groups)[number]

    def get_momentum(self, name: str) -> tuple[float, bool]:
        """(momentum, is it Nesterov's?); of one that the optimizer does not hold, none."""
        if (group := self._find_group(name)) is None:
            return 0.0, False
        return float(
            group["momentum"]
        ) if self.fixed_momentum is None else self.fixed_momentum, bool(group.get("nesterov"))

    def compute_update(self, name: str, mean: Tensor, is_small: bool) -> Tensor:
        """What the optimizer is to step by, of a mean gradient, or of what was sent of
        velocities.
        """
        group = self._find_group(name)
        decayed = (
            self.parameters[name].detach() * group["weight_decay"]
            if group and group["weight_decay"]
            else None
        )
        if is_small:
            return self._apply_momentum(name, mean if decayed is None else mean + decayed)
        return mean if decayed is None else mean + self._apply_momentum(name, decayed)

    def _apply_momentum(self, name: str, gradient: Tensor) -> Tensor:
        """b <- m b + g, dense; what the weights move by."""
        momentum, nesterov = self.get_momentum(name)
        if not momentum:
            return gradient
        if name not in self.dense_buffers:
            self.dense_buffers[name] = torch.zeros_like(gradient)
        buffer = self.dense_buffers[name].mul_(momentum).add_(gradient)
        return gradient.add(buffer, alpha=momentum) if nesterov else buffer.clone()


def make_momentum_state(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """As an optimizer's state."""
    return {name: {MOMENTUM_BUFFER: each} for name, each in state.items()}
