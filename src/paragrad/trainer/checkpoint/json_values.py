"""Encode values of optimizers and schedulers for JSON, and decode them again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paragrad.errors import StepFailed

TYPE_KEY = "a Python"
TENSOR_TYPE = "tensor"
MAPPING_TYPES: dict[str, Any] = {
    "dict": dict,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "defaultdict": dict,
}


def encode_json_value(value: Any) -> Any:
    """Encode a value for JSON.

    Values that are no list and no mapping of texts are marked with their type, so that they can be
    restored.

    Args:
        value: The value.

    Raises:
        StepFailed: If the value has a type that a checkpoint cannot hold.
    """
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: encode_json_value(each) for key, each in value.items()}
    if isinstance(value, Mapping) and type(value).__name__ in MAPPING_TYPES:
        return {
            TYPE_KEY: type(value).__name__,
            "items": [
                [encode_json_value(key), encode_json_value(each)] for key, each in value.items()
            ],
        }
    if isinstance(value, tuple):
        return {TYPE_KEY: "tuple", "items": [encode_json_value(each) for each in value]}
    if isinstance(value, list):
        return [encode_json_value(each) for each in value]
    if isinstance(value, Tensor):
        return {
            TYPE_KEY: TENSOR_TYPE,
            "dtype": str(value.dtype).removeprefix("torch."),
            "items": value.tolist(),
        }
    if value is None or isinstance(value, str | int | float):
        return value
    raise StepFailed(
        f"a checkpoint cannot hold a {type(value).__name__}, which the optimizer or scheduler "
        "keeps; only tensors, numbers, texts, and lists and mappings of them are saved"
    )


def decode_json_value(value: Any) -> Any:
    """Return the value that `encode_json_value` encoded."""
    if isinstance(value, list):
        return [decode_json_value(each) for each in value]
    if not isinstance(value, dict):
        return value
    if TYPE_KEY not in value:
        return {key: decode_json_value(each) for key, each in value.items()}
    if value[TYPE_KEY] == TENSOR_TYPE:
        return torch.tensor(value["items"], dtype=getattr(torch, value["dtype"]))
    items = decode_json_value(value["items"])
    return (
        tuple(items) if value[TYPE_KEY] == "tuple" else MAPPING_TYPES[value[TYPE_KEY]](dict(items))
    )
