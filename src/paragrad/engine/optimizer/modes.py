"""Optimizers with modes (schedule-free): their parameters differ in training and in evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a training mode and an evaluation mode.

    Args:
        optimizer: The optimizer.
    """
    return callable(getattr(optimizer, "train", None)) and callable(
        getattr(optimizer, "eval", None)
    )


def set_optimizer_mode(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """Call optimizer.train() or optimizer.eval(), if the optimizer has both.

    Args:
        optimizer: The optimizer.
        mode: "train" or "eval".
    """
    if has_modes(optimizer):
        getattr(optimizer, mode)()


@contextmanager
def use_optimizer_eval_mode(
    optimizer: torch.optim.Optimizer, parameters: list[Tensor]
) -> Iterator[None]:
    """Set the parameters to their values for evaluation; afterwards restore them bit for bit.

    Args:
        optimizer: The optimizer.
        parameters: The parameters to restore.
    """
    if not has_modes(optimizer):
        yield
        return
    set_optimizer_mode(optimizer, "train")
    saved_values = [parameter.detach().clone() for parameter in parameters]
    set_optimizer_mode(optimizer, "eval")
    try:
        yield
    finally:
        set_optimizer_mode(optimizer, "train")
        for parameter, values in zip(parameters, saved_values, strict=True):
            parameter.detach().copy_(values)
