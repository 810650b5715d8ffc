"""Copies: what several ranks of one replica hold of a model that is cut, kept equal to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from paragrad.planner.price import computed_bytes
from paragrad.techniques.layout import Layout

Key = tuple[str, str]                   # a serial name, and which part of it


class Copies:
    """Of a layout: found when they are first asked for."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.shapes: dict[Key, tuple[tuple[int, ...], torch.dtype]] | None = None

    def _key(self, name: str) -> Key:
        held = self.layout.held[name]
        return held.name, str((held.where, held.dim))

    def alike(self, tensors: Mapping[str, Tensor]) -> None:
        """Every copy becomes, in place, the one that counts. tensors: by local name, of the same parts in every call.
        Collective of the ranks of a replica."""
        layout = self.layout
        if not layout.cut or not layout.world.agreed(any(layout.world.collected(bool(tensors)))):
            return
        mine = {self._key(name): name for name in tensors}
        if self.shapes is None:
            told = layout.world.agreed(layout.world.collected(
                {key: (tuple(tensors[name].shape), tensors[name].dtype) for key, name in mine.items()}))
            holders = Counter(key for each in told for key in each)
            self.shapes = {key: shape for each in told for key, shape in each.items() if holders[key] > 1}
        for key, (shape, dtype) in self.shapes.items():         # the one that counts, and zeros
            name = mine.get(key)
            counts = name is not None and layout.held[name].counts
            one = tensors[name].detach().clone() if name is not None and counts else torch.zeros(
                shape, dtype=dtype, device=layout.world.device)
            layout.sent += computed_bytes("all_reduce", one.nbytes, layout.world.size)
            one = layout.world.all_reduced(one)
            if name is not None:
                tensors[name].detach().copy_(one)
