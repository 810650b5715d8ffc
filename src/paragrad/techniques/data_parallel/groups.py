"""Which modules of a model are groups of their own under fully sharded states: those whose parameters are used inside of their
own calls alone, as one forward shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHARE = 8               # a module with at most an eighth of all parameters is one group; a larger one is looked into


class Uses(TorchDispatchMode):
    """A forward that notes inside of which calls each parameter is used. outside: of a module, that a parameter of it was used
    when it was not being called, or that its output is a view (whose hook an in-place operation would lose)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stack: list[nn.Module] = []
        self.called: set[nn.Module] = set()
        self.outside: set[nn.Module] = set()
        self.owners: dict[int, list[nn.Module]] = {}            # by storage
        for module in model.modules():
            for parameter in module.parameters():
                self.owners.setdefault(_storage(parameter), []).append(module)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs or {})):
            if isinstance(tensor, Tensor):
                for owner in self.owners.get(_storage(tensor), ()):
                    if owner not in self.stack:
                        self.outside.add(owner)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watched(self) -> Iterator[None]:
        plain: Callable[..., Any] = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.stack.append(module)
            try:
                found = plain(module, *args, **kwargs)
            finally:
                self.stack.pop()
            self.called.add(module)
            if any(isinstance(each, Tensor) and each._base is not None for each in tree_leaves(found)):
                self.outside.add(module)
            return found
        nn.Module.__call__ = call               # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            nn.Module.__call__ = plain          # type: ignore[method-assign]


def groups(model: nn.Module, forward: Callable[[], Any]) -> list[str]:
    """The names of modules that can be groups, as one forward shows; none holds another."""
    uses = Uses(model)
    with uses.watched():
        forward()
    most = sum(each.numel() for each in model.parameters()) / SHARE
    found: list[str] = []

    def look(name: str, module: nn.Module) -> None:
        count = sum(each.numel() for each in module.parameters())
        children = [(f"{name}.{each}" if name else each, child) for each, child in module.named_children()
                    if any(True for _ in child.parameters())]
        fits = module in uses.called and module not in uses.outside and name != ""
        if count and fits and (count <= most or not children):
            found.append(name)
            return
        for each in children:
            look(*each)
    look("", model)
    return found


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return 0


def shardable(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Can FSDP2 divide it? No scalar, nothing empty, nothing that lies otherwise in memory, one type in a group."""
    return parameter.dim() > 0 and parameter.numel() > 0 and parameter.is_contiguous() and parameter.dtype == dtype
