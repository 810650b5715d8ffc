"""What comes from another part, as a part's own forward takes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from paragrad.techniques.untouched import differentiable


def entered(tree: Any) -> tuple[Any, list[Tensor | None]]:
    """(the same tensors as if they had been made here, their gradients once backward has come to them)."""
    gradients: list[Tensor | None] = []
    leaves, spec = tree_flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if places:
        made = Entered.apply(torch.zeros(0, requires_grad=True), gradients, *(leaves[place].detach() for place in places))
        for place, tensor in zip(places, made, strict=True):
            leaves[place] = tensor
    return tree_unflatten(leaves, spec), gradients


class Entered(torch.autograd.Function):
    """What came from the part before, as if it had been made here: it may be changed in place, and its gradient is kept."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, into: list[Tensor | None], *received: Tensor) -> tuple[Tensor, ...]:
        ctx.into = into
        ctx.set_materialize_grads(False)
        # not detach(), by which all tensors of a message would count as changed once one of them is changed in place
        entered = tuple(each.data for each in received)
        ctx.mark_non_differentiable(*(each for each in entered if not differentiable(each)))
        return entered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.into[:] = gradients
        return (None, None, *(None for _ in gradients))
