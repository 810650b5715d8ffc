"""Vectors that do not travel: a message says where they lie, and who reads it reads them there.

On one host a gradient is written once, by its worker, and read where it is, by its server, and
parameters the other way round; a socket copies every byte twice each way. They lie in memory
without a name (`region.py`), which the kernel opens to processes of the same user. A worker
leaves a vector as it is until it is answered; a server its parameters until the next update,
for which it needs everybody who may be reading them. Where that is not so (who waits for
nobody), a copy travels.
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
    """Vectors of this process, of these types and lengths. against: why others are not to read
    them, or "";  then `lies` tells whether they can, and `against` why not.
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
            self._make_vector(begin, *each)
            for begin, each in zip(self.offsets, wanted, strict=True)
        ]

    def _make_vector(self, offset: int, dtype: torch.dtype, elements: int) -> Tensor:
        if self.region is None or not elements:
            return torch.empty(elements, dtype=dtype)
        return torch.frombuffer(self.region.map, dtype=dtype, count=elements, offset=offset)

    def get_location(self, number: int) -> bytes:
        """Where others find one of them; nothing where they do not."""
        return (
            b"" if self.region is None else f"{self.offsets[number]} {self.region.address}".encode()
        )

    def make_frame(self, number: int, is_shared: bool) -> Any:
        """The last frame of a message that brings one of them."""
        return self.get_location(number) if is_shared else view_bytes(self.vectors[number])

    def close(self) -> None:
        """Nobody opens it any more."""
        if self.region is not None:
            self.region.close_descriptor()


class BufferReader:
    """What others send, wherever it lies. most: so many others are remembered."""

    def __init__(self, capacity: int) -> None:
        self.open_region = lru_cache(capacity)(open_region)

    def read_vector(self, header: Header, frame: Any) -> Tensor:
        """Raises Unfit."""
        return view_vector(
            header,
            self.view_location(frame, header.elements * header.dtype.itemsize)
            if header.is_shared
            else frame,
        )

    def view_location(self, location: Any, size: int) -> memoryview:
        """So many bytes of another process's shelf. Raises Unfit."""
        try:
            begin, address = bytes(location).decode().split(" ", 1)
            start = int(begin)
            # what is written here is not written there
            whole = memoryview(self.open_region(address, private=True).map)
        except (ValueError, RuntimeError) as error:
            raise InvalidMessage(
                "it lies where it cannot be read", f"it lies where it cannot be read: {error}"
            ) from error
        if not TOKEN_BYTES <= start <= len(whole) - size:
            raise InvalidMessage("it lies beyond the end of what can be read")
        return whole[start : start + size]

    def find_obstacle(self, location: Any) -> str:
        """Why nothing can be read there, or ""."""
        try:
            self.view_location(location, 0)
        except InvalidMessage as error:
            return error.sender_text
        return ""

    def forget_regions(self) -> None:
        """Those others are gone."""
        self.open_region.cache_clear()
