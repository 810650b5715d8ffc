"""What comes from another part, as a part's own forward takes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from paragrad.engine.state.values import is_differentiable


def attach_received(
    received: Sequence[Tensor], wants_gradients: Iterable[bool]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """(the same tensors as if they had been made here, their gradients once backward has come
    to them). wants: of each, whether there is one.
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
    """What came from the part before, as if it had been made here: it may be changed in place,
    and its gradient is kept.
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
        # not detach(), by which all tensors of a message would count as changed once one of
        # them is changed in place
        entered = tuple(each.data for each in received)
        ctx.mark_non_differentiable(
            *(
                each
                for each, wanted in zip(entered, wants_gradients, strict=True)
                if not wanted or not is_differentiable(each)
            )
        )
        return entered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.into[:] = gradients
        return (None, None, None, *(None for _ in gradients))
