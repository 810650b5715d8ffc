"""Optimizers with modes (schedule-free), whose parameters differ in training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(
        getattr(optimizer, "eval", None)
    )


def set_optimizer_mode(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """optimizer.train() or optimizer.eval(), where it has both."""
    if has_modes(optimizer):
        getattr(optimizer, mode)()


@contextmanager
def use_optimizer_eval_mode(
    optimizer: torch.optim.Optimizer, parameters: list[Tensor]
) -> Iterator[None]:
    """Parameters as they are to be evaluated; afterwards as they were, to the bit."""
    if not has_modes(optimizer):
        yield
        return
    set_optimizer_mode(optimizer, "train")
    before = [parameter.detach().clone() for parameter in parameters]
    set_optimizer_mode(optimizer, "eval")
    try:
        yield
    finally:
        set_optimizer_mode(optimizer, "train")
        for parameter, values in zip(parameters, before, strict=True):
            parameter.detach().copy_(values)
