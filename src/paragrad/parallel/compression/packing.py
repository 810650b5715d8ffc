"""Payloads in one message: tensors of several types in a row of bytes, each where its type may
begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from paragrad.parallel.compression.codec import Payload

Kinds = Sequence[tuple[torch.dtype, tuple[int, ...]]]  # types and shapes of a payload
ALIGNED = 8  # bytes


def packed(payloads: Iterable[Payload], device: torch.device) -> Tensor:
    """The bytes of payloads, one after another."""
    pieces = []
    for payload in payloads:
        for each in filter(torch.numel, payload):  # of nothing torch makes no bytes
            pieces += [
                each.contiguous().view(-1).view(torch.uint8),
                torch.zeros(-each.nbytes % ALIGNED, dtype=torch.uint8, device=device),
            ]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)


def unpacked(message: Tensor, payloads: Iterable[Kinds]) -> Iterator[Payload]:
    """The payloads that a message holds, as views of it."""
    start = 0
    for kinds in payloads:
        found = []
        for dtype, shape in kinds:
            length = torch.Size(shape).numel() * dtype.itemsize
            found.append(message[start : start + length].view(dtype).view(shape))
            start += length + -length % ALIGNED
        yield tuple(found)


def length_of(payloads: Iterable[Kinds]) -> int:
    """Bytes of a message."""
    return sum(
        length + -length % ALIGNED
        for kinds in payloads
        for length in (torch.Size(shape).numel() * dtype.itemsize for dtype, shape in kinds)
    )
