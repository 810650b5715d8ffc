"""Payloads in one message: tensors of several types in a row of bytes, each where its type may
begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from paragrad.parallel.compression.codec import Payload

PayloadLayout = Sequence[tuple[torch.dtype, tuple[int, ...]]]  # types and shapes of a payload
ALIGNMENT = 8  # bytes


def pack_payloads(payloads: Iterable[Payload], device: torch.device) -> Tensor:
    """The bytes of payloads, one after another."""
    pieces = []
    for payload in payloads:
        for each in filter(torch.numel, payload):  # of nothing torch makes no bytes
            pieces += [
                each.contiguous().view(-1).view(torch.uint8),
                torch.zeros(-each.nbytes % ALIGNMENT, dtype=torch.uint8, device=device),
            ]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)


def unpack_payloads(message: Tensor, layouts: Iterable[PayloadLayout]) -> Iterator[Payload]:
    """The payloads that a message holds, as views of it."""
    start = 0
    for kinds in layouts:
        found = []
        for dtype, shape in kinds:
            length = torch.Size(shape).numel() * dtype.itemsize
            found.append(message[start : start + length].view(dtype).view(shape))
            start += length + -length % ALIGNMENT
        yield tuple(found)


def count_message_bytes(layouts: Iterable[PayloadLayout]) -> int:
    """Bytes of a message."""
    return sum(
        length + -length % ALIGNMENT
        for kinds in layouts
        for length in (torch.Size(shape).numel() * dtype.itemsize for dtype, shape in kinds)
    )
