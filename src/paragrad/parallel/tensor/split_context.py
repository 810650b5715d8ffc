"""The context in which a model with sharded tensors runs.

In it, functions that ignore `__torch_function__` are patched, so that they accept sharded tensors.
These are autograd functions that are written in Python, and torch's own checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import _named_member_accessor
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map_only

from paragrad.engine.compiled_modules import is_compiled
from paragrad.engine.probe import use_model_eval_mode
from paragrad.errors import StepFailed, describe_error
from paragrad.parallel.sharding.autograd_collectives import (
    AxisCopy,
    AxisGather,
    AxisGroup,
    AxisReduce,
    AxisScatter,
    HaloFetch,
    HaloReturn,
)
from paragrad.parallel.sharding.checkpointing import checkpoint_sharded
from paragrad.parallel.sharding.sharded_tensor import ShardedTensor, gather_whole
from paragrad.parallel.tensor.halo_exchange import EdgeAddition, HaloLink, InnerRows, ReceivedRows
from paragrad.parallel.tensor.single_rank_tensor import (
    SingleRankTensor,
    ValueBroadcast,
    share_value,
)

COLLECTIVE_FUNCTIONS = (
    AxisCopy,
    AxisReduce,
    AxisScatter,
    AxisGather,
    HaloFetch,
    HaloReturn,
    InnerRows,
    ReceivedRows,
    HaloLink,
    EdgeAddition,
    ValueBroadcast,
)
REENTRANT_CHECKPOINT = checkpoint.CheckpointFunction


@contextlib.contextmanager
def explain_model_errors(condition: str) -> Iterator[None]:
    """Turn errors of a forward during validation into StepFailed.

    Args:
        condition: The condition under which the model runs, for the message.

    Raises:
        StepFailed: The model raised an error.
    """
    try:
        yield
    except StepFailed:
        raise
    except Exception as error:
        raise StepFailed(
            f"the model, {condition}, raised {describe_error(error)}; train it with data(n)"
        ) from error


@contextlib.contextmanager
def use_test_mode(model: nn.Module, tested: bool) -> Iterator[None]:
    """Run a forward in eval mode without gradients, if `tested` is true."""
    if not tested:
        yield
        return
    with (
        use_model_eval_mode(model),
        torch.no_grad(),
        explain_model_errors("in a test (eval mode, without gradients)"),
    ):
        yield


def refuse_compiled_model(model: nn.Module) -> None:
    """Refuse a model with compiled modules.

    Raises:
        StepFailed: A module is compiled.
    """
    if compiled := [name for name, module in model.named_modules() if is_compiled(module)]:
        raise StepFailed(
            f"{compiled[0] or 'the model'} is compiled, and compiled code cannot compute with a "
            "tensor that is divided; train it without torch.compile, or with data(n)"
        )


@contextlib.contextmanager
def substitute_tensors(model: nn.Module, substitutes: Mapping[int, Tensor]) -> Iterator[None]:
    """Substitute parameters and buffers where modules look them up, temporarily.

    Args:
        model: The model.
        substitutes: The substitutes, by the ids of the tensors.
    """
    placed = [
        (module, name, substitutes[id(tensor)])
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and id(tensor) in substitutes and name not in module.__dict__
    ]
    for module, name, tensor in placed:
        module.__dict__[name] = tensor
    try:
        yield
    finally:
        for module, name, _ in placed:
            module.__dict__.pop(name, None)


def find_assigned_buffers(
    model: nn.Module, previous: Mapping[str, Tensor], substitutes: Mapping[int, Tensor]
) -> list[str]:
    """Find buffers to which a forward assigned other tensors.

    Args:
        model: The model after the forward.
        previous: Its buffers before the forward, by all their names.
        substitutes: The substitutes in the forward, by ids. A buffer that is changed in place may
            be assigned its substitute.

    Returns:
        All names of these buffers.
    """
    current = dict(model.named_buffers(remove_duplicate=False))
    assigned = {
        id(each)
        for name, each in previous.items()
        if current.get(name) is not each and current.get(name) is not substitutes.get(id(each))
    }
    return [name for name, each in previous.items() if id(each) in assigned]


@contextlib.contextmanager
def substitute_named_members(substitutes: Mapping[int, Tensor]) -> Iterator[None]:
    """Substitute tensors in what modules list as parameters and buffers, temporarily.

    A penalty of all weights then gets the sharded ones.

    Args:
        substitutes: The substitutes, by the ids of the tensors.
    """
    original = nn.Module._named_members

    def named_members(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return (
            (name, substitutes.get(id(each), each))
            for name, each in original(module, *args, **kwargs)
        )

    nn.Module._named_members = named_members  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._named_members = original  # type: ignore[method-assign]


@contextlib.contextmanager
def patch_torch_functions() -> Iterator[None]:
    """Patch functions for forwards and backwards with sharded tensors.

    A context that also patches or watches functions must be entered inside of this one.
    """
    original_apply = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call_original = functools.partial(original_apply.__func__, cls)
        if cls in COLLECTIVE_FUNCTIONS:
            return call_original(*args, **kwargs)
        # this checkpoint is an autograd function around other functions
        if cls is REENTRANT_CHECKPOINT:
            function, preserve, *arguments = args
            return checkpoint.checkpoint(
                function, *arguments, use_reentrant=False, preserve_rng_state=preserve
            )
        # without such tensors, the lists in the arguments stay the same objects
        if any(
            isinstance(each, ShardedTensor | SingleRankTensor)
            for each in tree_leaves((args, kwargs))
        ):
            args, kwargs = tree_map_only(
                SingleRankTensor,
                share_value,
                tree_map_only(ShardedTensor, gather_whole, (args, kwargs)),
            )
        out = call_original(*args, **kwargs)
        if any(isinstance(each, ShardedTensor) for each in tree_leaves(out)):
            raise StepFailed(
                f"{cls.__name__}, an autograd function in Python, uses parameters that are divided "
                "over ranks and not among its arguments; pass them as arguments, or train the "
                "model with data(n)"
            )
        return out

    original_swap = _named_member_accessor.swap_tensor

    def swap(module: nn.Module, name: str, tensor: Tensor, allow_missing: bool = False) -> Tensor:
        """Swap a tensor for torch.func.functional_call.

        A substitute in the module's own attributes comes before its parameters.
        """
        if name in module.__dict__ and (name in module._parameters or name in module._buffers):
            previous = module.__dict__[name]
            module.__dict__[name] = tensor
            return previous  # type: ignore[no-any-return]
        return original_swap(module, name, tensor, allow_missing)

    original_checkpoint = checkpoint._checkpoint_without_reentrant_generator
    _named_member_accessor.swap_tensor = swap
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    checkpoint._checkpoint_without_reentrant_generator = checkpoint_sharded
    try:
        yield
    finally:
        _named_member_accessor.swap_tensor = original_swap
        torch.autograd.Function.apply = original_apply  # type: ignore[method-assign]
        checkpoint._checkpoint_without_reentrant_generator = original_checkpoint


class SplitContext:
    """The context of passes of a model with sharded tensors.

    Attributes:
        name: Name of the strategy, for the record.

        groups: The axis groups.

        substitutes: The sharded tensors, by the ids of what this rank holds.

        absent_tensors: Tensors of other ranks: (dict of a module's parameters or buffers, name in
            it, substitute). During passes, a module lists the substitute.

        sent_bytes: Bytes that this rank sent in the last passes.

        initial_buffers: All buffers before a forward: (dict of buffers, name in it, buffer).
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        groups: Sequence[AxisGroup],
        substitutes: Mapping[int, Tensor],
        absent_tensors: Sequence[tuple[dict[str, Any], str, Tensor]] = (),
    ) -> None:
        self.name = name
        self.groups = groups
        self.substitutes = substitutes
        self.absent_tensors = absent_tensors
        self.sent_bytes = 0
        self.initial_buffers = [
            (module._buffers, attribute, each)
            for module in model.modules()
            for attribute, each in module._buffers.items()
        ]

    @contextlib.contextmanager
    def enter_passes(self) -> Iterator[None]:
        """Enter the context of the forwards and backwards of a step, or of a test."""
        for group in self.groups:
            group.begin_passes()
        for tensors, attribute, local in self.absent_tensors:
            tensors[attribute] = local
        try:
            with patch_torch_functions(), substitute_named_members(self.substitutes):
                yield
                self._restore_buffers()
        finally:
            for tensors, attribute, _ in self.absent_tensors:
                tensors[attribute] = None
            for group in self.groups:
                group.clear_copies()
            self.sent_bytes = sum(group.sent_bytes for group in self.groups)

    def _restore_buffers(self) -> None:
        """Make buffers whole, on every rank, to which a forward assigned something."""
        for tensors, name, initial in self.initial_buffers:
            if (current := tensors.get(name)) is initial:
                continue
            # The buffer was changed in place and assigned to itself. `initial` is None if it is on
            # another rank.
            if current is self.substitutes.get(id(initial)) or (
                initial is None and isinstance(current, SingleRankTensor) and current.is_persistent
            ):
                tensors[name] = initial
            else:
                if id(initial) in self.substitutes:
                    raise StepFailed(
                        f"a forward replaces the buffer {name}, which is divided over ranks, and "
                        "did not when the model was looked at; change it in place "
                        "(self.name.copy_(...))",
                        tensor=name,
                    )
                tensors[name] = (
                    share_value(current)
                    if isinstance(current, SingleRankTensor)
                    else gather_whole(current)
                )
