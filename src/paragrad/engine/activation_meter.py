"""Count the bytes that are kept from a forward pass to its backward pass, while a step runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from paragrad.engine.compiled_modules import exclude_from_compile


class ActivationMeter:
    """Counts the bytes of storages while they are in use; each storage is counted once.

    It counts tensors that autograd saves for a backward pass, and messages between stages. It also
    counts gradients of outputs from which a zero bubble schedule computes weight gradients later.
    Parameters, buffers and the batch are in memory all the time, so they are excluded.

    The meter does not see the temporary memory of an operation. Nor does it see what a model with
    gradient checkpointing recomputes in its backward pass.

    Args:
        excluded: Tensors that are not counted.

    Attributes:
        excluded_addresses: Addresses of the storages that are not counted.

        reference_counts: For each storage address, how many tracked tensors use it.

        current_bytes: Bytes in use now.

        peak_bytes: The most bytes in use at once, so far.
    """

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        self.excluded_addresses: set[int] = set()
        self.reference_counts: dict[int, int] = {}
        self.current_bytes = 0
        self.peak_bytes = 0
        self.exclude_tensors(excluded)

    def forget_peak(self) -> None:
        """Set the peak to 0."""
        self.peak_bytes = 0

    def exclude_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of these tensors from now on.

        Args:
            tensors: Tensors to exclude. A tensor that is counted already stays counted.
        """
        self.excluded_addresses.update(
            address for address, _ in filter(None, map(find_storage, tensors))
        )

    def count_saved_tensors(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for a forward pass that counts its saved tensors.

        A tensor is counted until backward frees it.
        """
        context: contextlib.AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
            exclude_from_compile(self.track_tensor),
            exclude_from_compile(TrackedTensor.unpack_tensor),
        )
        return context

    def track_tensor(self, tensor: Tensor) -> TrackedTensor:
        """Count a tensor for as long as the returned object exists.

        Args:
            tensor: The tensor to count.

        Returns:
            The tracked tensor. The bytes are subtracted when it is deleted.
        """
        return TrackedTensor(self, tensor)

    def is_tracked(self, tensor: Tensor) -> bool:
        """Return whether the storage of a tensor is counted now.

        Args:
            tensor: The tensor to look up.
        """
        key = find_storage(tensor)
        return key is not None and key[0] in self.reference_counts

    def add_reference(self, address: int, size: int) -> None:
        """Add one use of a storage, and count its bytes if it is the first use.

        Args:
            address: Address of the storage.
            size: Size of the storage in bytes.
        """
        self.reference_counts[address] = self.reference_counts.get(address, 0) + 1
        if self.reference_counts[address] == 1:
            self.current_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def drop_reference(self, address: int, size: int) -> None:
        """Remove one use of a storage, and subtract its bytes if it was the last use.

        Args:
            address: Address of the storage.
            size: Size of the storage in bytes.
        """
        self.reference_counts[address] -= 1
        if not self.reference_counts[address]:
            del self.reference_counts[address]
            self.current_bytes -= size


class TrackedTensor:
    """A tensor that an `ActivationMeter` counts until this object is deleted.

    Attributes:
        tensor: The tensor.

        version: Its version when it was saved. With saved-tensor hooks, autograd does not check
            itself whether the tensor has changed.

        meter: The meter that counts it.

        storage_key: (address, bytes) of the counted storage, or None if it is not counted.
    """

    __slots__ = ("meter", "storage_key", "tensor", "version")

    def __init__(self, meter: ActivationMeter, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version
        key = find_storage(tensor)
        self.meter = meter
        self.storage_key = None if key is None or key[0] in meter.excluded_addresses else key
        if self.storage_key:
            meter.add_reference(*self.storage_key)

    def __del__(self) -> None:
        if self.storage_key:
            self.meter.drop_reference(*self.storage_key)

    def unpack_tensor(self) -> Tensor:
        """Return the tensor for backward.

        Raises:
            RuntimeError: The tensor has changed since it was saved.
        """
        return check_tensor_version(self.tensor, self.version)


def check_tensor_version(tensor: Tensor, version: int) -> Tensor:
    """Return a tensor that was saved for backward, if it has not changed since.

    Args:
        tensor: The saved tensor.
        version: Its version when it was saved.

    Returns:
        The same tensor.

    Raises:
        RuntimeError: The tensor was changed in place after it was saved. Autograd raises the same
            type.
    """
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of the shape {list(tensor.shape)}, after a forward had saved it "
            "for the backward"
        )
    return tensor


def find_storage(tensor: Tensor) -> tuple[int, int] | None:
    """Return (address, bytes) of the storage of a tensor.

    Args:
        tensor: Any tensor.

    Returns:
        None if the tensor has no storage: it is sparse, has no values, or is empty.
    """
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return None
    try:
        data = tensor.untyped_storage()
        return (data.data_ptr(), data.nbytes()) if data.nbytes() else None
    except RuntimeError:
        return None
