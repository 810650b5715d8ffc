"""Looking at a model without touching it: one backward on a copy, and the search for a value that is not finite."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.datasets.loading import called, copied
from paragrad.dropout import Watch
from paragrad.errors import StepFailed
from paragrad.loss import Summed


@dataclass(frozen=True)
class Probe:
    """What one forward and backward showed."""
    some_unused: bool               # a trainable parameter got no gradient
    activations: int                # bytes that backward keeps besides parameters
    dropout: bool
    other_draws: tuple[str, ...]    # random functions whose numbers depend on the layout


def probed(module: Summed, inputs: Any, target: Any, samples: int) -> Probe:
    """Run a copy of the module once forward and backward, on copies; module, batch and torch's generators stay as they are."""
    try:
        twin = copy.deepcopy(module)
    except RuntimeError as error:       # tensors that are results, such as those of the old weight_norm
        raise StepFailed(f"the model cannot be copied ({error}); keep no tensor with a history as an attribute "
                         "(torch.nn.utils.parametrizations.weight_norm instead of torch.nn.utils.weight_norm)") from error
    own = {parameter.data_ptr() for parameter in twin.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.random.fork_rng(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with Watch() as watch:
            total, _ = twin(copied(inputs), copied(target), samples)
        trainable = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        for parameter in trainable:
            parameter.grad = None
        total.backward()                # not autograd.grad, which reentrant checkpoints refuse
    unused = any(parameter.grad is None for parameter in trainable)
    return Probe(unused, sum(kept.values()), watch.dropout, tuple(sorted(watch.others)))


@torch.no_grad()
def first_not_finite(model: nn.Module, inputs: Any, target: Any) -> str:
    """The first tensor with a value that is not finite: inputs, target, parameters, buffers, then outputs in forward order."""
    named = {"inputs": inputs, "target": target, **dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in named.items():
        if not _finite(value):
            return name
    bad: list[str] = []
    hooks = [module.register_forward_hook(lambda _module, _inputs, output, name=name: (
        None if _finite(output) else bad.append(f"output of {name or type(model).__name__}")))
        for name, module in model.named_modules()]
    try:
        called(model.eval(), inputs)        # eval: batch norm in training would wait for the other ranks
    finally:
        for hook in hooks:
            hook.remove()
        model.train()
    return bad[0] if bad else "loss"


def _finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return all(map(_finite, value))
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(torch.isfinite(value).all())
