"""Payloads in one message: tensors of several types in a row of bytes.

Each tensor starts at an address that its type allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from paragrad.parallel.compression.codec import Payload

PayloadLayout = Sequence[tuple[torch.dtype, tuple[int, ...]]]  # types and shapes of a payload
ALIGNMENT = 8  # bytes


def pack_payloads(payloads: Iterable[Payload], device: torch.device) -> Tensor:
    """Join payloads into one message.

    Args:
        payloads: The payloads.
        device: Device of the message.

    Returns:
        The bytes of the payloads, one after another.
    """
    pieces = []
    for payload in payloads:
        for each in filter(torch.numel, payload):  # torch cannot view an empty tensor as bytes
            pieces += [
                each.contiguous().view(-1).view(torch.uint8),
                torch.zeros(-each.nbytes % ALIGNMENT, dtype=torch.uint8, device=device),
            ]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)


def unpack_payloads(message: Tensor, layouts: Iterable[PayloadLayout]) -> Iterator[Payload]:
    """Split a message into its payloads, which are views of it.

    Args:
        message: The bytes.
        layouts: The layout of each payload.

    Yields:
        The payloads.
    """
    start = 0
    for layout in layouts:
        payload = []
        for dtype, shape in layout:
            length = torch.Size(shape).numel() * dtype.itemsize
            payload.append(message[start : start + length].view(dtype).view(shape))
            start += length + -length % ALIGNMENT
        yield tuple(payload)


def count_message_bytes(layouts: Iterable[PayloadLayout]) -> int:
    """Count the bytes of a message.

    Args:
        layouts: The layout of each payload.
    """
    return sum(
        length + -length % ALIGNMENT
        for layout in layouts
        for length in (torch.Size(shape).numel() * dtype.itemsize for dtype, shape in layout)
    )
