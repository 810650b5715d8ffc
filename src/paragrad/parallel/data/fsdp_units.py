"""Which modules of a model are groups of their own under fully sharded states: those whose
parameters are used inside of one call of theirs alone, as one forward shows. A group's
parameters are whole from its call on until it returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# a module with at most an eighth of all parameters is one group; a larger one is looked into
MAX_UNIT_DIVISOR = 8
# of one with less than a 64th messages cost more than its memory: it is in the rest, up to an
# eighth
MIN_UNIT_DIVISOR = 64
PLAIN_TYPES = (Tensor, int, float, bool, str, type(None))


class ParameterUseMode(TorchDispatchMode):
    """A forward that notes inside of which calls each parameter is used.

    calls: the modules that are called, in order;  unfit: a parameter of it was used while it
    was not being called, or FSDP2's hooks around its call would go wrong: its output is a view
    (whose hook an in-place operation loses), no tree of tensors, or without a gradient; it
    changes what comes in, which is a view there; it is called without a graph, to be called
    again.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.open_calls: list[nn.Module] = []
        self.calls: list[nn.Module] = []
        self.unfit_modules: set[nn.Module] = set()
        self.owners: dict[int, list[nn.Module]] = {}  # by storage
        for module in model.modules():
            for parameter in module.parameters():
                self.owners.setdefault(_get_storage_id(parameter), []).append(module)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], Tensor):
            # autograd keeps numbers as tensors, and a mode is given the number
            return args[0]
        # else somebody keeps values beside
        for tensor in tree_leaves((args, kwargs or {})) if self.open_calls else ():
            if isinstance(tensor, Tensor):
                self.unfit_modules.update(
                    owner
                    for owner in self.owners.get(_get_storage_id(tensor), ())
                    if owner not in self.open_calls
                )
        return func(*args, **(kwargs or {}))

    @contextmanager
    def record_calls(self) -> Iterator[None]:
        plain: Callable[..., Any] = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(module)
            self.open_calls.append(module)
            given = [
                (each, each._version)
                for each in tree_leaves((args, kwargs))
                if isinstance(each, Tensor)
            ]
            try:
                found = plain(module, *args, **kwargs)
            finally:
                self.open_calls.pop()
            trained = any(parameter.requires_grad for parameter in module.parameters())
            if any(each._version != version for each, version in given) or (
                trained and not _can_hook_output(tree_leaves(found))
            ):
                self.unfit_modules.add(module)
            return found

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            nn.Module.__call__ = plain  # type: ignore[method-assign]


def _can_hook_output(output: list[Any]) -> bool:
    tensors = [each for each in output if isinstance(each, Tensor)]
    return (
        all(isinstance(each, PLAIN_TYPES) for each in output)
        and any(each.requires_grad for each in tensors)
        and not any(each._base is not None for each in tensors)
    )


def find_fsdp_units(model: nn.Module, forward: Callable[..., Any]) -> list[str]:
    """The names of modules that can be groups, in the order in which one forward calls them;
    none holds another.

    forward(without_autocast=True): as the first step is rehearsed, without autocast, which uses a
    parameter in a copy.
    """
    uses = ParameterUseMode(model)
    with uses.record_calls():
        forward()
        calls = list(uses.calls)
        forward(without_autocast=True)
    times = Counter(calls)
    total = sum(each.numel() for each in model.parameters())
    found: dict[nn.Module, str] = {}

    def look(name: str, module: nn.Module) -> None:
        count = sum(each.numel() for each in module.parameters())
        children = [
            (f"{name}.{each}" if name else each, child)
            for each, child in module.named_children()
            if any(True for _ in child.parameters())
        ]
        if (
            count
            and name
            and times[module] == 1
            and module not in uses.unfit_modules
            and (count * MAX_UNIT_DIVISOR <= total or not children)
        ):
            found.setdefault(module, name)
            return
        for each in children:
            look(*each)

    look("", model)
    sizes = {module: sum(each.numel() for each in module.parameters()) for module in found}
    rest = total - sum(sizes.values())
    for module, size in sorted(sizes.items(), key=lambda item: item[1]):
        if size * MIN_UNIT_DIVISOR < total and (rest + size) * MAX_UNIT_DIVISOR <= total:
            rest += size
            del found[module]
    return [found[module] for module in calls if module in found]


def select_common_units(unit_lists: list[list[str]]) -> list[str]:
    """Of what each rank found, the groups of all; none where they are called in another order
    on some rank.
    """
    names = [name for name in unit_lists[0] if all(name in each for each in unit_lists)]
    return (
        names
        if all([name for name in each if name in names] == names for each in unit_lists)
        else []
    )


def can_shard_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Can it be divided? FSDP2 divides no scalars, and its groups are of one real type; what it
    gathers lies in rows.
    """
    return (
        parameter.dim() > 0
        and parameter.numel() > 0
        and parameter.dtype == dtype
        and parameter.is_floating_point()
        and parameter.is_contiguous()
        and type(parameter) is nn.Parameter
    )


def _get_storage_id(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    # torch's, of sparse tensors and those of torch.func: there is none
    except (RuntimeError, NotImplementedError):
        return 0
