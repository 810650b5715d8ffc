"""The boundary where a stage's own forward takes the tensors of the stage before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from paragrad.engine.state.values import is_differentiable


def attach_received(
    received: Sequence[Tensor], wants_gradients: Iterable[bool]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Attach received tensors to this rank's graph.

    Args:
        received: The tensors.
        wants_gradients: Whether each needs a gradient.

    Returns:
        (the tensors as results of an operation of this rank, a list that the backward fills with
        their gradients).
    """
    gradients: list[Tensor | None] = []
    if not received:
        return [], gradients
    anchor = torch.zeros(0, requires_grad=True)
    return list(
        ReceivedTensors.apply(
            anchor, gradients, tuple(wants_gradients), *(each.detach() for each in received)
        )
    ), gradients


class ReceivedTensors(torch.autograd.Function):
    """Makes received tensors results of an operation of this rank.

    They may be changed in place, and the backward keeps their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        gradients: list[Tensor | None],
        wants_gradients: tuple[bool, ...],
        *received: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.into = gradients
        ctx.set_materialize_grads(False)
        # Not detach(): then a change in place of one tensor of a message would count as a change of
        # all.
        attached = tuple(each.data for each in received)
        ctx.mark_non_differentiable(
            *(
                each
                for each, wanted in zip(attached, wants_gradients, strict=True)
                if not wanted or not is_differentiable(each)
            )
        )
        return attached

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.into[:] = gradients
        return (None, None, None, *(None for _ in gradients))
