"""Tensor files in the safetensors format, for trained models and checkpoints.

safetensors has no complex128, which a complex model in float64 holds. Such a tensor is saved as
pairs of float64 (torch.view_as_real). Its name is listed in the file's metadata, and loading
restores complex128.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

# the metadata key; its value is the list of names, as JSON
COMPLEX_KEY = "complex128 as pairs of float64"


def save_weights(model: nn.Module, path: Path) -> None:
    """Save a model's parameters and buffers; a tensor with several names is saved once.

    Args:
        model: The model.
        path: The file to write.
    """
    state = model.state_dict()
    with _use_default_mode(path):
        adapter: Any = _ComplexModelAdapter(model)
        save_model(adapter, str(path), _make_metadata(state))


def load_weights(model: nn.Module, path: Path, device: str = "cpu") -> None:
    """Load saved weights into a model.

    Args:
        model: The model.
        path: The file to read.
        device: The device on which the tensors are loaded.

    Raises:
        RuntimeError: If the names in the file are not the model's.
    """
    adapter: Any = _ComplexModelAdapter(model, _read_pair_names(path))
    load_model(adapter, str(path), device=device)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Save tensors by name."""
    with _use_default_mode(path):
        save_file(
            {name: _encode_complex(tensor) for name, tensor in tensors.items()},
            str(path),
            _make_metadata(tensors),
        )


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a file by name."""
    return _decode_complex(load_file(str(path)), _read_pair_names(path))


def read_tensor_types(path: Path) -> dict[str, list[Any]]:
    """Read what a file holds: name -> [type, *shape]."""
    with safe_open(str(path), "pt") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: [part.get_dtype(), *part.get_shape()] for name, part in found.items()}


@contextmanager
def _use_default_mode(path: Path) -> Iterator[None]:
    """Give the file that is written inside the mode that any new file gets (umask).

    safetensors itself writes files that only their owner can read. It reports operating system
    errors as text; these are raised as OSError with the file's name.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        yield
    except SafetensorError as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    path.chmod(stat.S_IMODE(mode))


class _ComplexModelAdapter:
    """A model in the form that safetensors takes.

    Attributes:
        model: The model.
        pair_names: The names in the file that were saved as pairs.
    """

    def __init__(self, model: nn.Module, pair_names: frozenset[str] = frozenset()) -> None:
        self.model = model
        self.pair_names = pair_names

    def state_dict(self) -> dict[str, Tensor]:
        return {name: _encode_complex(tensor) for name, tensor in self.model.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor], strict: bool) -> Any:
        decoded: Any = OrderedDict(_decode_complex(state, self.pair_names))
        # Without versions torch takes it for an old file, and fills in counts of batch norms, also
        # under a second name of a shared one.
        decoded._metadata = self.model.state_dict()._metadata
        return self.model.load_state_dict(decoded, strict=strict)


def _encode_complex(tensor: Tensor) -> Tensor:
    """Return complex128 as a view of pairs, so that safetensors still sees shared storage."""
    return (
        torch.view_as_real(tensor.detach().resolve_conj())
        if tensor.dtype == torch.complex128
        else tensor
    )


def _decode_complex(tensors: dict[str, Tensor], pair_names: frozenset[str]) -> dict[str, Tensor]:
    return {
        name: torch.view_as_complex(tensor) if name in pair_names else tensor
        for name, tensor in tensors.items()
    }


def _make_metadata(tensors: Mapping[str, Tensor]) -> dict[str, str] | None:
    pairs = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    return {COMPLEX_KEY: json.dumps(pairs)} if pairs else None


def _read_pair_names(path: Path) -> frozenset[str]:
    with safe_open(str(path), "pt") as file:
        return frozenset(json.loads((file.metadata() or {}).get(COMPLEX_KEY, "[]")))
