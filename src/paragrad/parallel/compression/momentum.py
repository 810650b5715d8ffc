"""Take over the momentum of an SGD optimizer, and its weight decay, for deep gradient compression.

From a gradient g and weights x, SGD computes b <- m b + (g + d x); x <- x - lr b. That is linear,
so b is a sum of two parts. The first is the velocities of gradients. Each rank keeps those of its
own part, and sends them when they are large (`feedback.MomentumCorrection`). The second comes from
weight decay. It is dense, and the same on all ranks.

Within an optimizer step, momentum and decay of the optimizer are 0, so that it computes x <- x - lr
g. Outside of a step they have the values of the user and of schedulers. A checkpoint holds b, so
any strategy can continue from it.
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

MOMENTUM_BUFFER = "momentum_buffer"  # the name that SGD uses in its state
GROUP_OPTIONS = ("momentum", "weight_decay")
OWNED_OPTIMIZERS = weakref.WeakSet[torch.optim.Optimizer]()  # their momentum was taken over


def take_over_momentum(
    compressor: Compressor,
    optimizer: torch.optim.Optimizer | None,
    parameters: Mapping[str, nn.Parameter],
) -> DgcMomentum | None:
    """Take over the momentum of an optimizer, if the compressor needs that.

    Args:
        compressor: The compressor.
        optimizer: The optimizer; it must be given for dgc.
        parameters: The trained parameters by name.

    Returns:
        What replaces the momentum, or None.

    Raises:
        Refused: The momentum of this optimizer was taken over already.
    """
    if not isinstance(compressor, Dgc):
        return None
    assert optimizer is not None
    if optimizer in OWNED_OPTIMIZERS:
        raise Refused(
            "another dgc keeps the momentum of this optimizer already; give each model an "
            "optimizer of its own, and a new DistributedDataParallel a new one (its momentum "
            "begins at zero)"
        )
    return DgcMomentum(optimizer, parameters, compressor)


class DgcMomentum:
    """Replaces the momentum and the weight decay of an SGD until `release_optimizer`.

    Args:
        optimizer: The optimizer. Its steps run without momentum and decay from now on.

        parameters: The trained parameters by name; more may be added later.

        dgc: The compressor.

    Attributes:
        fixed_momentum: Momentum that replaces that of the groups; None: use that of the groups.

        groups: The groups of the optimizer for which `group_numbers` is valid.

        group_numbers: The number of the group of each parameter.

        saved_groups: The options of each group during a step; empty outside of a step.

        started_steps: Number of optimizer steps that have started.

        last_given_steps: For each parameter, the number of steps started when its gradient last
            came here.

        hooks: The hooks on the optimizer.

        dense_buffers: The dense part of b: the whole of it for small tensors, for others the part
            from weight decay.

        initial_buffers: Momentum buffers that the optimizer had at the start.
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
        self.saved_groups: list[dict[str, Any]] = []
        self.started_steps = 0
        self.last_given_steps = dict[Tensor, int]()
        OWNED_OPTIMIZERS.add(optimizer)
        self.hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._zero_group_options()),
            optimizer.register_step_post_hook(lambda *_: self._finish_step()),
        ]
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
        # schedulers, and code that adds groups, may have changed them
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
        """Check a step of the optimizer, after it ran.

        Raises StepFailed if it updated a parameter that it should not. A closure may compute
        gradients, so this cannot be checked before the step.
        """
        self._restore_group_options()
        for number, group in enumerate(self.optimizer.param_groups):
            has_missed_gradient = any(
                each.grad is not None
                and self.last_given_steps.get(each, -1) < self.started_steps - 1
                for each in group["params"]
            )
            if has_missed_gradient and (
                self.fixed_momentum or any(group[option] for option in GROUP_OPTIONS)
            ):
                raise StepFailed(
                    f"group {number} of the optimizer has gradients that dgc was not given, so "
                    "this step was without momentum and decay. Give parameters of another model "
                    "an optimizer of their own. Step only after a backward outside no_sync(). "
                    "Before steps without the hook, call close() on its state"
                )

    def _restore_group_options(self) -> None:
        for group, values in zip(self.optimizer.param_groups, self.saved_groups, strict=False):
            group.update({option: values[option] for option in GROUP_OPTIONS})
        self.saved_groups = []

    def release_optimizer(self) -> None:
        """Give momentum and decay back to the optimizer, also if a step of it failed."""
        self._restore_group_options()
        OWNED_OPTIMIZERS.discard(self.optimizer)
        for each in self.hooks:
            each.remove()

    def build_feedback(self) -> MomentumCorrection:
        """Build the feedback that keeps the velocities."""
        return MomentumCorrection(self.get_momentum, self.dgc.masking)

    def adopt_buffers(
        self,
        feedback: MomentumCorrection,
        small_names: set[str],
        ranks: int,
        decay_buffers: Mapping[str, Tensor],
    ) -> None:
        """Continue from the momentum buffers that the optimizer had, on all ranks.

        Args:
            feedback: Keeps the velocities. Each rank gets an equal part of a buffer that is a
                velocity.

            small_names: Names of small tensors, which are not compressed.

            ranks: Number of ranks.

            decay_buffers: For tensors with velocities that are known already: the part of b that
                comes from decay.
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

    # ---- for each parameter ------------------------------------------------------------------
    def has_parameter(self, name: str) -> bool:
        """Return whether the optimizer holds a parameter.

        Args:
            name: Name of the parameter.
        """
        return self._find_group(name) is not None

    def _find_group(self, name: str) -> dict[str, Any] | None:
        """Return the group of a parameter with the options of the user and of schedulers.

        This also holds within a step that calls a closure, which runs backward. Returns None if the
        optimizer does not hold the parameter.
        """
        groups = self.optimizer.param_groups
        # groups were added, or the state was loaded
        if len(groups) != len(self.groups) or any(map(operator.is_not, groups, self.groups)):
            self.groups = [*groups]
            self.group_numbers = {
                each: number for number, group in enumerate(groups) for each in group["params"]
            }
        parameter = self.parameters.get(name)
        number = None if parameter is None else self.group_numbers.get(parameter)
        return None if number is None else (self.saved_groups or groups)[number]

    def get_momentum(self, name: str) -> tuple[float, bool]:
        """Return (momentum, whether it is Nesterov's) of a parameter.

        Args:
            name: Name of the parameter. If the optimizer does not hold it, the momentum is 0.
        """
        if (group := self._find_group(name)) is None:
            return 0.0, False
        return float(
            group["momentum"]
        ) if self.fixed_momentum is None else self.fixed_momentum, bool(group.get("nesterov"))

    def compute_update(self, name: str, mean: Tensor, is_small: bool) -> Tensor:
        """Compute the gradient that the optimizer applies.

        Args:
            name: Name of the parameter.

            mean: The mean gradient of a small tensor; of others, the sum of the velocities that
                were sent.

            is_small: The tensor is small, so it is not compressed.
        """
        group = self._find_group(name)
        decay = (
            self.parameters[name].detach() * group["weight_decay"]
            if group and group["weight_decay"]
            else None
        )
        if is_small:
            return self._apply_momentum(name, mean if decay is None else mean + decay)
        return mean if decay is None else mean + self._apply_momentum(name, decay)

    def _apply_momentum(self, name: str, gradient: Tensor) -> Tensor:
        """Compute b <- m b + g, dense; return what the weights move by."""
        momentum, nesterov = self.get_momentum(name)
        if not momentum:
            return gradient
        if name not in self.dense_buffers:
            self.dense_buffers[name] = torch.zeros_like(gradient)
        buffer = self.dense_buffers[name].mul_(momentum).add_(gradient)
        return gradient.add(buffer, alpha=momentum) if nesterov else buffer.clone()


def make_momentum_state(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return momentum buffers in the form of an optimizer state.

    Args:
        state: The buffers by parameter name.
    """
    return {name: {MOMENTUM_BUFFER: each} for name, each in state.items()}
