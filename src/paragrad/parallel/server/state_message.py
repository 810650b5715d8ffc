"""The optimizer state of a server in a message: a description as JSON, and the bytes of tensors."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SEQUENCE_TYPES: dict[str, Any] = {"list": list, "tuple": tuple, "deque": deque}


def write_state_message(
    states: Sequence[dict[str, Any]], settings: Sequence[dict[str, Any]]
) -> tuple[str, Tensor]:
    """Write the state of the parameters, and settings of the groups.

    Args:
        states: The state of each range.
        settings: The settings of each group that steps change.

    Returns:
        A description as JSON, and the bytes of the tensors in the same order.

    Raises:
        TypeError: There are values for which JSON has no place.
    """
    parts: list[Tensor] = []
    description = {
        "states": [_describe_value(state, parts) for state in states],
        "settings": [_describe_value(each, parts) for each in settings],
    }
    return json.dumps(description), torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def read_state_message(
    text: bytes, vector: Tensor
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read what `write_state_message` wrote.

    Args:
        text: The description.
        vector: The bytes of the tensors.

    Returns:
        (the state of each range, settings of each group).
    """
    description = json.loads(text)
    reader = _Reader(vector)
    return (
        [reader.read_value(each) for each in description["states"]],
        [reader.read_value(each) for each in description["settings"]],
    )


def _describe_value(value: Any, parts: list[Tensor]) -> Any:
    """Describe a value: numbers and texts by themselves, all else as {kind: contents}."""
    if isinstance(value, Tensor):
        parts.append(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8))
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict):
        return {
            "dict": [
                [_describe_value(key, parts), _describe_value(each, parts)]
                for key, each in value.items()
            ]
        }
    name = type(value).__name__
    if SEQUENCE_TYPES.get(name) is type(value):
        return {
            name: [_describe_value(each, parts) for each in value],
            "maxlen": getattr(value, "maxlen", None),
        }
    return value


class _Reader:
    """Reads values in the order in which they were described.

    Args:
        vector: The bytes of the tensors.

    Attributes:
        vector: The bytes of the tensors.
        start: The first byte that was not read.
    """

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector
        self.start = 0

    def read_value(self, description: Any) -> Any:
        """Return the value of a description.

        Args:
            description: The description, as parsed.
        """
        if not isinstance(description, dict):
            return description
        (kind, contents), *more = description.items()
        if kind == "tensor":
            name, shape = contents
            dtype = getattr(torch, name)
            stop = self.start + math.prod(shape) * dtype.itemsize
            values = self.vector[self.start : stop].clone().view(dtype).reshape(shape)
            self.start = stop
            return values
        if kind == "dict":
            return {self.read_value(key): self.read_value(each) for key, each in contents}
        values = [self.read_value(each) for each in contents]
        return (
            deque(values, *(limit for _, limit in more))
            if kind == "deque"
            else SEQUENCE_TYPES[kind](values)
        )
