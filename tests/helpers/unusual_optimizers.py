"""Optimizers with a step or a state of an unusual kind."""

from __future__ import annotations

import random

import numpy
import torch


class NormedSgd(torch.optim.SGD):
    """A subclass of an elementwise optimizer that uses whole tensors: it must not be divided."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + 1e-3)
        super().step()


class Averaging(torch.optim.Optimizer):
    """SGD whose eval mode replaces parameters by their mean so far: schedule-free in ten lines."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0, "training": True})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["training"], "step in eval mode"
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    parameter.sub_(group["lr"] * parameter.grad)
                    mean.lerp_(parameter, 1 / group["count"])

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def _swap(self, training: bool) -> None:
        for group in self.param_groups:
            swapped = group["training"] != training
            group["training"] = training
            for parameter in group["params"]:
                if swapped and "mean" in self.state[parameter]:
                    kept = parameter.clone()
                    parameter.copy_(self.state[parameter]["mean"])
                    self.state[parameter]["mean"].copy_(kept)


class Langevin(torch.optim.SGD):
    """SGD with noise from the generators of torch, Python and NumPy, to sample a posterior."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.randn_like(parameter) * random.random() + torch.from_numpy(
                    numpy.random.randn(*parameter.shape)
                )
                parameter.add_(0.01 * noise)


class DistanceSgd(torch.optim.Optimizer):
    """Prodigy in ten lines: the rate is an estimate of the distance to the solution.

    The estimate is a number of the group. It is a ratio of sums over all parameters, and it grows
    only if gradients keep their direction.
    """

    def __init__(self, parameters: object, lr: float = 1.0) -> None:
        defaults = {"lr": lr, "distance": 1e-3, "numerator": 0.0}
        super().__init__(parameters, defaults)  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            total = 0.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    start = state.setdefault("start", parameter.clone())
                    gradients = state.setdefault("sum", torch.zeros_like(parameter))
                    gradients.add_(parameter.grad)
                    group["numerator"] += float((parameter.grad * (start - parameter)).sum())
                    total += float(gradients.abs().sum())
            if total:
                group["distance"] = max(group["distance"], group["numerator"] / total)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * group["distance"] * parameter.grad)


class Unrated(torch.optim.Optimizer):
    """An optimizer with a `width` in its groups, and no lr; it applies tanh to gradients."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"width": 1e-3})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["width"] * torch.tanh(parameter.grad))


class Harmonic(torch.optim.Optimizer):
    """SGD whose rate falls with a count in its group, and whose momenta are in a dictionary."""

    def __init__(self, parameters: object, lr: float = 0.1) -> None:
        defaults = {"lr": lr, "count": torch.tensor(0.0), "rates": []}
        super().__init__(parameters, defaults)  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["rates"] = [*group["rates"][-1:], group["lr"] / float(group["count"])]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momenta = self.state[parameter].setdefault("momenta", {})
                    for decay in (0.0, 0.9):
                        momentum = momenta.setdefault(decay, torch.zeros_like(parameter))
                        momentum.mul_(decay).add_(parameter.grad)
                        parameter.sub_(group["rates"][-1] * momentum)
