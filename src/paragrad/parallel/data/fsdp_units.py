"""Which modules of a model are units of their own under fully sharded states.

A module can be a unit if its parameters are used only inside one call of it, as observed in one
forward. The parameters of a unit are whole from its call until it returns.
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

# A module with at most an eighth of all parameters is one unit. The children of a larger one are
# examined.
MAX_UNIT_DIVISOR = 8
# For a module with less than a 64th of all parameters, messages cost more than its memory. It joins
# the rest, which grows up to an eighth.
MIN_UNIT_DIVISOR = 64
PLAIN_TYPES = (Tensor, int, float, bool, str, type(None))


class ParameterUseMode(TorchDispatchMode):
    """Observes a forward and records inside which calls each parameter is used.

    A module is unfit to be a unit in these cases:

    * One of its parameters is used while the module is not being called.
    * Its output is a view, because an in-place operation removes the hook of a view.
    * Its output is not a tree of tensors and plain values, or has no gradient.
    * It changes its input, which is a view under FSDP2.
    * It is called without a graph, to be called again.

    In all cases but the first, the hooks of FSDP2 around the call would fail.

    Args:
        model: The model.

    Attributes:
        open_calls: The modules that are being called, from outer to inner.

        calls: The modules that were called, in order.

        unfit_modules: The modules that cannot be units.

        owners: The modules that hold a parameter, by the id of its storage.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.open_calls: list[nn.Module] = []
        self.calls: list[nn.Module] = []
        self.unfit_modules: set[nn.Module] = set()
        self.owners: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            for parameter in module.parameters():
                self.owners.setdefault(_get_storage_id(parameter), []).append(module)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], Tensor):
            # autograd keeps numbers as tensors, but a mode receives the number
            return args[0]
        # outside of all calls a use does not count: it may be code that keeps copies of values
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
        """Record calls of modules and uses of parameters during the context."""
        original_call: Callable[..., Any] = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(module)
            self.open_calls.append(module)
            input_versions = [
                (each, each._version)
                for each in tree_leaves((args, kwargs))
                if isinstance(each, Tensor)
            ]
            try:
                output = original_call(module, *args, **kwargs)
            finally:
                self.open_calls.pop()
            trained = any(parameter.requires_grad for parameter in module.parameters())
            if any(each._version != version for each, version in input_versions) or (
                trained and not _can_hook_output(tree_leaves(output))
            ):
                self.unfit_modules.add(module)
            return output

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            nn.Module.__call__ = original_call  # type: ignore[method-assign]


def _can_hook_output(output: list[Any]) -> bool:
    """Return whether hooks of FSDP2 work on the output of a module."""
    tensors = [each for each in output if isinstance(each, Tensor)]
    return (
        all(isinstance(each, PLAIN_TYPES) for each in output)
        and any(each.requires_grad for each in tensors)
        and not any(each._base is not None for each in tensors)
    )


def find_fsdp_units(model: nn.Module, forward: Callable[..., Any]) -> list[str]:
    """Find the modules that can be units of FSDP2.

    No unit contains another one.

    Args:
        model: The model.
        forward: Runs one forward. With without_autocast=True it runs as in the rehearsal of the
            first step; autocast would use a copy of a parameter.

    Returns:
        The names of the units, in the order in which one forward calls them.
    """
    uses = ParameterUseMode(model)
    with uses.record_calls():
        forward()
        calls = list(uses.calls)
        forward(without_autocast=True)
    unfit_modules = uses.unfit_modules | _find_divided_ties(model)
    call_counts = Counter(calls)
    total = sum(each.numel() for each in model.parameters())
    units: dict[nn.Module, str] = {}

    def search(name: str, module: nn.Module) -> None:
        count = sum(each.numel() for each in module.parameters())
        children = [
            (f"{name}.{each}" if name else each, child)
            for each, child in module.named_children()
            if any(True for _ in child.parameters())
        ]
        if (
            count
            and name
            and call_counts[module] == 1
            and module not in unfit_modules
            and (count * MAX_UNIT_DIVISOR <= total or not children)
        ):
            units.setdefault(module, name)
            return
        for each in children:
            search(*each)

    search("", model)
    sizes = {module: sum(each.numel() for each in module.parameters()) for module in units}
    rest = total - sum(sizes.values())
    for module, size in sorted(sizes.items(), key=lambda item: item[1]):
        if size * MIN_UNIT_DIVISOR < total and (rest + size) * MAX_UNIT_DIVISOR <= total:
            rest += size
            del units[module]
    return [units[module] for module in calls if module in units]


def _find_divided_ties(model: nn.Module) -> set[nn.Module]:
    """Find the modules that hold a tied parameter and not all modules that it belongs to.

    As a unit, such a module would break the tie, also if the others are never called.

    Args:
        model: The model.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    ties = [modules for modules in owners.values() if len(modules) > 1]
    divided = set()
    for module in model.modules() if ties else ():
        inside = set(module.modules())
        if any(modules & inside and modules - inside for modules in ties):
            divided.add(module)
    return divided


def select_common_units(unit_lists: list[list[str]]) -> list[str]:
    """Select the units that all ranks found.

    Args:
        unit_lists: The names that each rank found, in the order of its calls.

    Returns:
        The common names, in the order of calls; empty if some rank calls them in another order.
    """
    names = [name for name in unit_lists[0] if all(name in each for each in unit_lists)]
    return (
        names
        if all([name for name in each if name in names] == names for each in unit_lists)
        else []
    )


def can_shard_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Return whether FSDP2 can divide a parameter.

    FSDP2 divides no scalars, a unit has one real dtype, and it gathers contiguous rows.

    Args:
        parameter: The parameter.
        dtype: The dtype of the units.
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
    """Return an id of the storage of a tensor, or 0 if it has none."""
    try:
        return tensor.untyped_storage()._cdata
    # torch raises these for sparse tensors and tensors of torch.func, which have no storage
    except (RuntimeError, NotImplementedError):
        return 0
