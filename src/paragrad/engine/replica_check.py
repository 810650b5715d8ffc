"""Copies: what several ranks of one replica hold of a model that is cut, kept equal to the
bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paragrad.engine.layout import Layout
from paragrad.engine.state.values import wide
from paragrad.planner.cost_formulas import computed_bytes

Key = tuple[str, str]  # a serial name, and which part of it


class Copies:
    """Of a layout and this rank's part of the model: which there are is found when they are
    first asked for, by all ranks of a replica.
    """

    def __init__(self, layout: Layout, part: nn.Module) -> None:
        self.layout = layout
        self.part = part
        # shape, and type on the way
        self.shared: dict[Key, tuple[tuple[int, ...], torch.dtype]] | None = None

    def alike(self, tensors: Mapping[str, Tensor]) -> None:
        """Every copy becomes, in place, the one that counts. tensors: some, by local name, and
        all copies of each. Collective of the ranks of a replica.
        """
        if not (shared := self._known()):
            return
        mine = {self._key(name): name for name in tensors}
        there = torch.tensor([float(key in mine) for key in shared])
        asked = [key for key, ranks in zip(shared, self._sum(there).tolist(), strict=True) if ranks]
        for dtype in dict.fromkeys(shared[key][1] for key in asked):  # a message for each
            keys = [key for key in asked if shared[key][1] == dtype]
            ones = [
                torch.zeros(shared[key][0], dtype=dtype, device=self.layout.world.device)
                for key in keys
            ]
            for one, name in zip(ones, map(mine.get, keys), strict=True):
                if name is not None and self.layout.held[name].counts:
                    one.copy_(tensors[name].detach())
            # of it and zeros
            sums = self._sum(torch.cat([one.view(-1) for one in ones]))
            for one, name in zip(
                sums.split([one.numel() for one in ones]), map(mine.get, keys), strict=True
            ):
                if name is not None:
                    tensors[name].detach().copy_(one.view_as(tensors[name]))

    def names(self) -> set[str]:
        """Local names of what other ranks of this replica hold too."""
        known = self._known()
        return {name for name in self.layout.held if self._key(name) in known}

    def _known(self) -> dict[Key, tuple[tuple[int, ...], torch.dtype]]:
        if self.shared is None:
            self.shared = self._found() if self.layout.cut else {}
        return self.shared

    def _found(self) -> dict[Key, tuple[tuple[int, ...], torch.dtype]]:
        """What more than one rank holds, in one order on all."""
        named = {**dict(self.part.named_parameters()), **dict(self.part.named_buffers())}
        own = {
            self._key(name): (tuple(each.shape), wide(each.dtype))
            for name, each in named.items()
            if name in self.layout.held
        }
        told = self.layout.world.agreed(self.layout.world.collected(own))
        holders = Counter(key for each in told for key in each)
        return {key: kind for each in told for key, kind in each.items() if holders[key] > 1}

    def _key(self, name: str) -> Key:
        held = self.layout.held[name]
        return held.name, str((held.where, held.dim))

    def _sum(self, tensor: Tensor) -> Tensor:
        self.layout.sent += computed_bytes("all_reduce", tensor.nbytes, self.layout.world.size)
        return self.layout.world.all_reduced(tensor)
