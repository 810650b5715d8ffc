"""The number types of a model: real numbers, and complex numbers of the same precision."""

from __future__ import annotations

import torch
from torch import nn

from paragrad.datasets.loading import choose_dtype


def convert_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a model to a precision.

    Args:
        model: The model; it is changed in place.
        dtype: The type of real numbers; complex ones get the complex type of its precision.

    Returns:
        The model.
    """
    # Module.to(dtype) would drop the imaginary parts of complex buffers
    return model._apply(lambda tensor: tensor.to(choose_dtype(tensor, dtype)))


def find_shared_dtype(model: nn.Module) -> torch.dtype | None:
    """Find the type that all real parameters of a model share.

    Args:
        model: The model.

    Returns:
        The type, or None if there are several types or no real parameters.
    """
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return types.pop() if len(types) == 1 else None


def find_coarsest_dtype(model: nn.Module) -> torch.dtype:
    """Find the coarsest type among the trained parameters of a model.

    Args:
        model: The model.

    Returns:
        The type with the largest rounding error.
    """
    return max(
        (each.dtype for each in model.parameters() if each.requires_grad),
        key=lambda dtype: torch.finfo(dtype).eps,
    )


@torch.no_grad()
def perturb_parameters(model: nn.Module, signs: torch.Generator) -> None:
    """Move each parameter up or down by about one unit in its last place.

    Args:
        model: The model; it is changed in place.
        signs: The generator that draws the directions.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            up = torch.randint(2, parameter.shape, generator=signs).to(
                parameter.device, parameter.dtype
            )
            parameter.mul_(1.0 + (2.0 * up - 1.0) * torch.finfo(parameter.dtype).eps)
