"""Values that an optimizer or a scheduler keeps, as JSON can hold them, and back."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paragrad.errors import StepFailed

MARK = "a Python"
OF_TENSOR = "tensor"
MAPPINGS: dict[str, Any] = {
    "dict": dict,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "defaultdict": dict,
}


def plain(value: Any) -> Any:
    """A value as JSON can hold it: what is no list and no mapping of texts is marked, to come
    back as it was.
    """
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Mapping) and type(value).__name__ in MAPPINGS:
        return {
            MARK: type(value).__name__,
            "items": [[plain(key), plain(each)] for key, each in value.items()],
        }
    if isinstance(value, tuple):
        return {MARK: "tuple", "items": [plain(each) for each in value]}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, Tensor):
        return {
            MARK: OF_TENSOR,
            "dtype": str(value.dtype).removeprefix("torch."),
            "items": value.tolist(),
        }
    if value is None or isinstance(value, str | int | float):
        return value
    raise StepFailed(
        f"a checkpoint cannot hold a {type(value).__name__}, which the optimizer or scheduler "
        f"keeps; "
        "only tensors, numbers, texts, and lists and mappings of them are saved"
    )


def restored(value: Any) -> Any:
    """What `plain` was given."""
    if isinstance(value, list):
        return [restored(each) for each in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: restored(each) for key, each in value.items()}
    if value[MARK] == OF_TENSOR:
        return torch.tensor(value["items"], dtype=getattr(torch, value["dtype"]))
    items = restored(value["items"])
    return tuple(items) if value[MARK] == "tuple" else MAPPINGS[value[MARK]](dict(items))
