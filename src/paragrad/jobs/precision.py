"""The type of a model's numbers: real ones, and complex ones of their precision."""

from __future__ import annotations

import torch
from torch import nn

from paragrad.datasets.loading import choose_dtype


def convert_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with real numbers in dtype and complex ones in the complex type of its
    precision.
    """
    # Module.to(dtype) would drop the imaginary parts of complex buffers
    return model._apply(lambda tensor: tensor.to(choose_dtype(tensor, dtype)))


def find_shared_dtype(model: nn.Module) -> torch.dtype | None:
    """The type of all real parameters of a model; None where they have several, or there are
    none.
    """
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return types.pop() if len(types) == 1 else None


def find_coarsest_dtype(model: nn.Module) -> torch.dtype:
    """Of the types of its parameters that are trained."""
    return max(
        (each.dtype for each in model.parameters() if each.requires_grad),
        key=lambda dtype: torch.finfo(dtype).eps,
    )


@torch.no_grad()
def perturb_parameters(model: nn.Module, signs: torch.Generator) -> None:
    """Every parameter up or down by about one unit in its last place."""
    for parameter in model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            up = torch.randint(2, parameter.shape, generator=signs).to(
                parameter.device, parameter.dtype
            )
            parameter.mul_(1.0 + (2.0 * up - 1.0) * torch.finfo(parameter.dtype).eps)
