"""Alive: bytes that are held from a forward to its backward, counted while a step is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class ActivationMeter:
    """Counts storages while somebody holds them, each once: what autograd saves for a backward,
    messages, gradients that wait.

    Parameters, buffers and the batch, which are there all along, are left out (`beside`). now:
    bytes;  most: at once, so far. What an operation takes for itself while it runs is not seen,
    nor what a model that checkpoints makes again in a backward.
    """

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        self.excluded_addresses: set[int] = set()
        self.reference_counts: dict[int, int] = {}  # address of a storage -> how many hold it
        self.current_bytes = 0
        self.peak_bytes = 0
        self.exclude_tensors(excluded)

    def exclude_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Leave these out, from now on."""
        self.excluded_addresses.update(
            address for address, _ in filter(None, map(find_storage, tensors))
        )

    def count_saved_tensors(self) -> contextlib.AbstractContextManager[Any]:
        """Around a forward: what is saved in it is counted until its backward lets it go."""
        return torch.autograd.graph.saved_tensors_hooks(
            self.track_tensor, TrackedTensor.unpack_tensor
        )

    def track_tensor(self, tensor: Tensor) -> TrackedTensor:
        """Counted for as long as what this returns is there."""
        return TrackedTensor(self, tensor)

    def is_tracked(self, tensor: Tensor) -> bool:
        found = find_storage(tensor)
        return found is not None and found[0] in self.reference_counts

    def add_reference(self, address: int, size: int) -> None:
        self.reference_counts[address] = self.reference_counts.get(address, 0) + 1
        if self.reference_counts[address] == 1:
            self.current_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def drop_reference(self, address: int, size: int) -> None:
        self.reference_counts[address] -= 1
        if not self.reference_counts[address]:
            del self.reference_counts[address]
            self.current_bytes -= size


class TrackedTensor:
    """A tensor that is held. version: what it was then; with hooks, autograd itself does not
    look whether it was changed.
    """

    __slots__ = ("meter", "storage_key", "tensor", "version")

    def __init__(self, meter: ActivationMeter, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version
        found = find_storage(tensor)
        self.meter = meter
        self.storage_key = None if found is None or found[0] in meter.excluded_addresses else found
        if self.storage_key:
            meter.add_reference(*self.storage_key)

    def __del__(self) -> None:
        if self.storage_key:
            self.meter.drop_reference(*self.storage_key)

    def unpack_tensor(self) -> Tensor:
        return check_tensor_version(self.tensor, self.version)


def check_tensor_version(tensor: Tensor, version: int) -> Tensor:
    """The tensor. Raises RuntimeError, as autograd does, where it was changed after it was
    saved for a backward.
    """
    if tensor._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a "
            f"tensor of the shape {list(tensor.shape)}, after a forward had saved it for the "
            f"backward"
        )
    return tensor


def find_storage(tensor: Tensor) -> tuple[int, int] | None:
    """(address, bytes) of a tensor's storage; None where it has none: a sparse one, one without
    values.
    """
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return None
    try:
        found = tensor.untyped_storage()
        return (found.data_ptr(), found.nbytes()) if found.nbytes() else None
    except RuntimeError:
        return None
