"""Alive: bytes that are held from a forward to its backward, counted while a step is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Alive:
    """Counts storages while somebody holds them, each once: what autograd saves for a backward,
    messages, gradients that wait.

    Parameters, buffers and the batch, which are there all along, are left out (`beside`). now:
    bytes;  most: at once, so far. What an operation takes for itself while it runs is not seen,
    nor what a model that checkpoints makes again in a backward.
    """

    def __init__(self, beside: Iterable[Tensor] = ()) -> None:
        self.apart: set[int] = set()
        self.holders: dict[int, int] = {}  # address of a storage -> how many hold it
        self.now = 0
        self.most = 0
        self.beside(beside)

    def beside(self, tensors: Iterable[Tensor]) -> None:
        """Leave these out, from now on."""
        self.apart.update(address for address, _ in filter(None, map(storage, tensors)))

    def noting(self) -> contextlib.AbstractContextManager[Any]:
        """Around a forward: what is saved in it is counted until its backward lets it go."""
        return torch.autograd.graph.saved_tensors_hooks(self.hold, Hold.back)

    def hold(self, tensor: Tensor) -> Hold:
        """Counted for as long as what this returns is there."""
        return Hold(self, tensor)

    def holds(self, tensor: Tensor) -> bool:
        found = storage(tensor)
        return found is not None and found[0] in self.holders

    def take(self, address: int, size: int) -> None:
        self.holders[address] = self.holders.get(address, 0) + 1
        if self.holders[address] == 1:
            self.now += size
            self.most = max(self.most, self.now)

    def let(self, address: int, size: int) -> None:
        self.holders[address] -= 1
        if not self.holders[address]:
            del self.holders[address]
            self.now -= size


class Hold:
    """A tensor that is held. version: what it was then; with hooks, autograd itself does not
    look whether it was changed.
    """

    __slots__ = ("alive", "found", "tensor", "version")

    def __init__(self, alive: Alive, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version
        found = storage(tensor)
        self.alive = alive
        self.found = None if found is None or found[0] in alive.apart else found
        if self.found:
            alive.take(*self.found)

    def __del__(self) -> None:
        if self.found:
            self.alive.let(*self.found)

    def back(self) -> Tensor:
        return unchanged_since(self.tensor, self.version)


def unchanged_since(tensor: Tensor, version: int) -> Tensor:
    """The tensor. Raises RuntimeError, as autograd does, where it was changed after it was
    saved for a backward.
    """
    if tensor._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a "
            f"tensor of the shape {list(tensor.shape)}, after a forward had saved it for the "
            f"backward"
        )
    return tensor


def storage(tensor: Tensor) -> tuple[int, int] | None:
    """(address, bytes) of a tensor's storage; None where it has none: a sparse one, one without
    values.
    """
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return None
    try:
        found = tensor.untyped_storage()
        return (found.data_ptr(), found.nbytes()) if found.nbytes() else None
    except RuntimeError:
        return None
