"""Make the copies of a tensor on several ranks of one replica equal, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paragrad.engine.layout import Layout
from paragrad.engine.state.values import get_accumulation_dtype

TensorKey = tuple[str, str]  # name of a serial tensor, and which part of it


class TensorCopies:
    """The tensors that several ranks of one replica hold.

    They are found at the first request. All ranks of the replica must make that request together.

    Args:
        layout: Which part of the serial model this rank holds.
        model_part: The part of the model on this rank.

    Attributes:
        copied_tensors: For each tensor that several ranks hold, its shape and the dtype in which it
            is sent; None before the first request.
    """

    def __init__(self, layout: Layout, model_part: nn.Module) -> None:
        self.layout = layout
        self.model_part = model_part
        self.copied_tensors: dict[TensorKey, tuple[tuple[int, ...], torch.dtype]] | None = None

    def synchronize_copies(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite every copy in place with the primary copy.

        Collective over the ranks of a replica.

        Args:
            tensors: Some tensors by local name. For each of them, all ranks that hold a copy must
                pass it.
        """
        if not (copied_tensors := self._get_copied_tensors()):
            return
        local_names = {self._make_tensor_key(name): name for name in tensors}
        is_present = torch.tensor([float(key in local_names) for key in copied_tensors])
        requested = [
            key
            for key, ranks in zip(
                copied_tensors, self._sum_over_ranks(is_present).tolist(), strict=True
            )
            if ranks
        ]
        for dtype in dict.fromkeys(copied_tensors[key][1] for key in requested):
            # one message for each dtype
            keys = [key for key in requested if copied_tensors[key][1] == dtype]
            primaries = [
                torch.zeros(copied_tensors[key][0], dtype=dtype, device=self.layout.world.device)
                for key in keys
            ]
            for primary, name in zip(primaries, map(local_names.get, keys), strict=True):
                if name is not None and self.layout.specs[name].is_primary:
                    primary.copy_(tensors[name].detach())
            # one rank sends the primary copy and the others send zeros, so the sum is the copy
            sums = self._sum_over_ranks(torch.cat([primary.view(-1) for primary in primaries]))
            for primary, name in zip(
                sums.split([primary.numel() for primary in primaries]),
                map(local_names.get, keys),
                strict=True,
            ):
                if name is not None:
                    tensors[name].detach().copy_(primary.view_as(tensors[name]))

    def list_copied_names(self) -> set[str]:
        """Return the local names of tensors that other ranks of this replica hold too.

        Collective over the ranks of a replica, at the first request.
        """
        copied_tensors = self._get_copied_tensors()
        return {name for name in self.layout.specs if self._make_tensor_key(name) in copied_tensors}

    def _get_copied_tensors(self) -> dict[TensorKey, tuple[tuple[int, ...], torch.dtype]]:
        if self.copied_tensors is None:
            self.copied_tensors = self._find_copied_tensors() if self.layout.is_partitioned else {}
        return self.copied_tensors

    def _find_copied_tensors(self) -> dict[TensorKey, tuple[tuple[int, ...], torch.dtype]]:
        """Find the tensors that more than one rank holds, in the same order on all ranks."""
        named = {
            **dict(self.model_part.named_parameters()),
            **dict(self.model_part.named_buffers()),
        }
        local_kinds = {
            self._make_tensor_key(name): (tuple(each.shape), get_accumulation_dtype(each.dtype))
            for name, each in named.items()
            if name in self.layout.specs
        }
        gathered = self.layout.world.broadcast_object(self.layout.world.gather_objects(local_kinds))
        holders = Counter(key for each in gathered for key in each)
        return {key: kind for each in gathered for key, kind in each.items() if holders[key] > 1}

    def _make_tensor_key(self, name: str) -> TensorKey:
        spec = self.layout.specs[name]
        return spec.name, str((spec.where, spec.dim))

    def _sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return self.layout.all_reduce(tensor)
