"""Vectors in shared memory: a message has their location, and the receiver reads them there.

On one host, a worker writes a gradient once and the server reads it in place; parameters go the
other way in the same manner. A socket would copy every byte twice each way. The vectors are in
anonymous memory (`shm/region.py`), which the kernel opens to processes of the same user.

A worker does not change a vector until its push is answered. A server does not change its
parameters until the next update, and the update needs all workers that may be reading them. If
workers do not wait for each other, this does not hold, and a copy is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paragrad.parallel.server.message_header import Header, InvalidMessage, view_bytes, view_vector
from paragrad.shm.region import (
    TOKEN_BYTES,
    CreatedRegion,
    compute_offsets,
    find_missing_features,
    open_region,
)


class SharedBuffer:
    """Vectors of this process, in shared memory if possible.

    Args:
        wanted: (dtype, number of elements) of each vector.

        obstacle: The reason why other processes must not read them, or "".

    Attributes:
        offsets: Offset of each vector in the region, in bytes.

        obstacle: The reason why other processes cannot read the vectors, or "".

        region: The shared region, or None.

        is_shared: Whether other processes can read the vectors.

        vectors: The vectors.
    """

    def __init__(self, wanted: Sequence[tuple[torch.dtype, int]], obstacle: str = "") -> None:
        *self.offsets, end = compute_offsets(
            TOKEN_BYTES, [dtype.itemsize * elements for dtype, elements in wanted]
        )
        self.obstacle = obstacle or find_missing_features() or ""
        self.region = None
        if not self.obstacle:
            try:
                self.region = CreatedRegion(end, repair="start fewer workers")
            except RuntimeError as error:
                self.obstacle = str(error)
        self.is_shared = self.region is not None
        self.vectors = [
            self._make_vector(offset, *each)
            for offset, each in zip(self.offsets, wanted, strict=True)
        ]

    def _make_vector(self, offset: int, dtype: torch.dtype, elements: int) -> Tensor:
        if self.region is None or not elements:
            return torch.empty(elements, dtype=dtype)
        return torch.frombuffer(self.region.map, dtype=dtype, count=elements, offset=offset)

    def get_location(self, number: int) -> bytes:
        """Return the location of a vector for other processes; empty if it is not shared.

        Args:
            number: Number of the vector.
        """
        return (
            b"" if self.region is None else f"{self.offsets[number]} {self.region.address}".encode()
        )

    def make_frame(self, number: int, is_shared: bool) -> Any:
        """Make the last frame of a message with a vector.

        Args:
            number: Number of the vector.
            is_shared: Whether the frame has the location instead of the bytes.
        """
        return self.get_location(number) if is_shared else view_bytes(self.vectors[number])

    def close(self) -> None:
        """Close the region; no other process can open it after this."""
        if self.region is not None:
            self.region.close_descriptor()


class BufferReader:
    """Reads vectors of other processes, from messages or from shared memory.

    Args:
        capacity: Number of regions that stay open.

    Attributes:
        open_region: Opens a region, with a cache.
    """

    def __init__(self, capacity: int) -> None:
        self.open_region = lru_cache(capacity)(open_region)

    def read_vector(self, header: Header, frame: Any) -> Tensor:
        """Return the vector of a message.

        Args:
            header: The header of the message.
            frame: Its last frame.

        Raises:
            InvalidMessage: The vector cannot be read, or has another length.
        """
        return view_vector(
            header,
            self.view_location(frame, header.elements * header.dtype.itemsize)
            if header.is_shared
            else frame,
        )

    def view_location(self, location: Any, size: int) -> memoryview:
        """Return bytes in the shared memory of another process.

        Args:
            location: The location.
            size: Number of bytes.

        Raises:
            InvalidMessage: They cannot be read.
        """
        try:
            offset, address = bytes(location).decode().split(" ", 1)
            start = int(offset)
            # a private mapping: what this process writes does not reach the other one
            region = memoryview(self.open_region(address, private=True).map)
        except (ValueError, RuntimeError) as error:
            raise InvalidMessage(
                "it lies where it cannot be read", f"it lies where it cannot be read: {error}"
            ) from error
        if not TOKEN_BYTES <= start <= len(region) - size:
            raise InvalidMessage("it lies beyond the end of what can be read")
        return region[start : start + size]

    def find_obstacle(self, location: Any) -> str:
        """Return the reason why a location cannot be read, or "".

        Args:
            location: The location.
        """
        try:
            self.view_location(location, 0)
        except InvalidMessage as error:
            return error.sender_text
        return ""

    def forget_regions(self) -> None:
        """Close all regions, because their processes are gone."""
        self.open_region.cache_clear()
