"""Copies: what several ranks of one replica hold of a model that is cut, kept equal to the
bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paragrad.engine.layout import Layout
from paragrad.engine.state.values import get_accumulation_dtype
from paragrad.planner.cost_formulas import count_collective_bytes

TensorKey = tuple[str, str]  # a serial name, and which part of it


class DuplicateTensors:
    """Of a layout and this rank's part of the model: which there are is found when they are
    first asked for, by all ranks of a replica.
    """

    def __init__(self, layout: Layout, model_part: nn.Module) -> None:
        self.layout = layout
        self.model_part = model_part
        # shape, and type on the way
        self.duplicates: dict[TensorKey, tuple[tuple[int, ...], torch.dtype]] | None = None

    def synchronize_copies(self, tensors: Mapping[str, Tensor]) -> None:
        """Every copy becomes, in place, the one that counts. tensors: some, by local name, and
        all copies of each. Collective of the ranks of a replica.
        """
        if not (shared := self._get_duplicates()):
            return
        mine = {self._make_tensor_key(name): name for name in tensors}
        there = torch.tensor([float(key in mine) for key in shared])
        asked = [
            key
            for key, ranks in zip(shared, self._sum_over_ranks(there).tolist(), strict=True)
            if ranks
        ]
        for dtype in dict.fromkeys(shared[key][1] for key in asked):  # a message for each
            keys = [key for key in asked if shared[key][1] == dtype]
            ones = [
                torch.zeros(shared[key][0], dtype=dtype, device=self.layout.world.device)
                for key in keys
            ]
            for one, name in zip(ones, map(mine.get, keys), strict=True):
                if name is not None and self.layout.specs[name].is_primary:
                    one.copy_(tensors[name].detach())
            # of it and zeros
            sums = self._sum_over_ranks(torch.cat([one.view(-1) for one in ones]))
            for one, name in zip(
                sums.split([one.numel() for one in ones]), map(mine.get, keys), strict=True
            ):
                if name is not None:
                    tensors[name].detach().copy_(one.view_as(tensors[name]))

    def list_duplicate_names(self) -> set[str]:
        """Local names of what other ranks of this replica hold too."""
        known = self._get_duplicates()
        return {name for name in self.layout.specs if self._make_tensor_key(name) in known}

    def _get_duplicates(self) -> dict[TensorKey, tuple[tuple[int, ...], torch.dtype]]:
        if self.duplicates is None:
            self.duplicates = self._find_duplicates() if self.layout.is_partitioned else {}
        return self.duplicates

    def _find_duplicates(self) -> dict[TensorKey, tuple[tuple[int, ...], torch.dtype]]:
        """What more than one rank holds, in one order on all."""
        named = {
            **dict(self.model_part.named_parameters()),
            **dict(self.model_part.named_buffers()),
        }
        own = {
            self._make_tensor_key(name): (tuple(each.shape), get_accumulation_dtype(each.dtype))
            for name, each in named.items()
            if name in self.layout.specs
        }
        told = self.layout.world.broadcast_object(self.layout.world.gather_objects(own))
        holders = Counter(key for each in told for key in each)
        return {key: kind for each in told for key, kind in each.items() if holders[key] > 1}

    def _make_tensor_key(self, name: str) -> TensorKey:
        held = self.layout.specs[name]
        return held.name, str((held.where, held.dim))

    def _sum_over_ranks(self, tensor: Tensor) -> Tensor:
        self.layout.sent_bytes += count_collective_bytes(
            "all_reduce", tensor.nbytes, self.layout.world.size
        )
        return self.layout.world.all_reduce(tensor)
