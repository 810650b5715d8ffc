"""Pickle values without the data of their tensors: a tensor's storage is replaced by a number."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

from paragrad.launch.job_files import JobPickler


def dump_tensorless(
    value: Any, storages: list[UntypedStorage], compact_views: bool = False
) -> tuple[bytes, list[UntypedStorage]]:
    """Pickle a value, with a number in the place of each tensor's storage.

    Args:
        value: The value.

        storages: Storages that have their numbers already: their positions in this list.

        compact_views: If a tensor is a part of a larger storage, take only this part.

    Returns:
        The pickled value, and all storages by number: the given ones first.
    """
    with io.BytesIO() as out:
        pickler = _TensorlessPickler(out, storages, compact_views)
        pickler.dump(value)
        return out.getvalue(), pickler.storages


class _TensorlessPickler(JobPickler):
    def __init__(
        self, out: io.BytesIO, storages: list[UntypedStorage], compact_views: bool
    ) -> None:
        super().__init__(out)
        self.storages = list(storages)
        self.compact_views = compact_views
        self.storage_numbers = {storage._cdata: number for number, storage in enumerate(storages)}

    def persistent_id(self, value: Any) -> tuple[int, torch.dtype] | None:
        if not isinstance(value, TypedStorage) or value._untyped_storage.device.type != "cpu":
            return None
        storage = value._untyped_storage
        # the storage of a tensor that is neither a parameter nor a buffer
        if storage._cdata not in self.storage_numbers:
            self.storage_numbers[storage._cdata] = len(self.storages)
            self.storages.append(storage)
        return self.storage_numbers[storage._cdata], value.dtype

    def reducer_override(self, value: Any) -> Any:
        # What a launched script defines exists on every rank under its name. cloudpickle would
        # create a second class.
        if isinstance(value, type | FunctionType) and _is_defined_in_script(value):
            return NotImplemented
        if (
            self.compact_views
            and type(value) is torch.Tensor
            and value.layout == torch.strided
            and (value.untyped_storage().nbytes() > value.nbytes)
        ):
            return value.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)


def _is_defined_in_script(value: type | FunctionType) -> bool:
    attribute: Any = sys.modules.get("__main__") if value.__module__ == "__main__" else None
    for name in value.__qualname__.split("."):
        attribute = getattr(attribute, name, None)
    return attribute is value


class _TensorlessUnpickler(pickle.Unpickler):
    def __init__(self, text: io.BytesIO, storages: Sequence[UntypedStorage]) -> None:
        super().__init__(text)
        self.storages = storages

    def persistent_load(self, found: tuple[int, torch.dtype]) -> TypedStorage:
        number, dtype = found
        return TypedStorage(wrap_storage=self.storages[number], dtype=dtype, _internal=True)


def load_tensorless(text: bytes, storages: Sequence[UntypedStorage]) -> Any:
    """Unpickle a value over given storages.

    Args:
        text: The pickled value.
        storages: The storages by number.

    Returns:
        The value.
    """
    return _TensorlessUnpickler(io.BytesIO(text), storages).load()
