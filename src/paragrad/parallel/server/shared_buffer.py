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

from paragrad.parallel.server.message_header import Header, Unfit, bytes_of, vector_of
from paragrad.shm.region import TOKEN, OwnRegion, begins, lacking, opened


class Shelf:
    """Vectors of this process, of these types and lengths. against: why others are not to read
    them, or "";  then `lies` tells whether they can, and `against` why not.
    """

    def __init__(self, wanted: Sequence[tuple[torch.dtype, int]], against: str = "") -> None:
        *self.begins, end = begins(TOKEN, [dtype.itemsize * elements for dtype, elements in wanted])
        self.against = against or lacking() or ""
        self.region = None
        if not self.against:
            try:
                self.region = OwnRegion(end, repair="start fewer workers")
            except RuntimeError as error:
                self.against = str(error)
        self.lies = self.region is not None
        self.vectors = [
            self._vector(begin, *each) for begin, each in zip(self.begins, wanted, strict=True)
        ]

    def _vector(self, begin: int, dtype: torch.dtype, elements: int) -> Tensor:
        if self.region is None or not elements:
            return torch.empty(elements, dtype=dtype)
        return torch.frombuffer(self.region.map, dtype=dtype, count=elements, offset=begin)

    def place(self, number: int) -> bytes:
        """Where others find one of them; nothing where they do not."""
        return (
            b"" if self.region is None else f"{self.begins[number]} {self.region.address}".encode()
        )

    def sent(self, number: int, lies: bool) -> Any:
        """The last frame of a message that brings one of them."""
        return self.place(number) if lies else bytes_of(self.vectors[number])

    def close(self) -> None:
        """Nobody opens it any more."""
        if self.region is not None:
            self.region.opened_by_all()


class Reader:
    """What others send, wherever it lies. most: so many others are remembered."""

    def __init__(self, most: int) -> None:
        self.opened = lru_cache(most)(opened)

    def vector(self, header: Header, frame: Any) -> Tensor:
        """Raises Unfit."""
        return vector_of(
            header,
            self.found(frame, header.elements * header.dtype.itemsize) if header.lies else frame,
        )

    def found(self, place: Any, size: int) -> memoryview:
        """So many bytes of another process's shelf. Raises Unfit."""
        try:
            begin, address = bytes(place).decode().split(" ", 1)
            start = int(begin)
            # what is written here is not written there
            whole = memoryview(self.opened(address, private=True).map)
        except (ValueError, RuntimeError) as error:
            raise Unfit(
                "it lies where it cannot be read", f"it lies where it cannot be read: {error}"
            ) from error
        if not TOKEN <= start <= len(whole) - size:
            raise Unfit("it lies beyond the end of what can be read")
        return whole[start : start + size]

    def against(self, place: Any) -> str:
        """Why nothing can be read there, or ""."""
        try:
            self.found(place, 0)
        except Unfit as error:
            return error.told
        return ""

    def forget(self) -> None:
        """Those others are gone."""
        self.opened.cache_clear()
