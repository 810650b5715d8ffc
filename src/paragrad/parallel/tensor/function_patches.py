"""What asks nobody about its tensors, brought to ask: autograd functions in Python, and torch's
own checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import _named_member_accessor
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map_only

from paragrad.engine.probe import use_model_eval_mode
from paragrad.errors import StepFailed, describe_error
from paragrad.parallel.sharding.autograd_collectives import (
    AxisCopy,
    AxisGather,
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
    """Around a forward at the door. what: of the model, which raises something. Raises
    StepFailed.
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
    """Around a forward: as in a test, if it is one."""
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
    if compiled := [
        name
        for name, module in model.named_modules()
        if getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
    ]:
        raise StepFailed(
            f"{compiled[0] or 'the model'} is compiled, and compiled code asks nobody what it "
            f"makes of a tensor "
            "that is divided; train it without torch.compile, or with data(n)"
        )


@contextlib.contextmanager
def substitute_tensors(model: nn.Module, substitutes: Mapping[int, Tensor]) -> Iterator[None]:
    """Where modules find their parameters and buffers stand these meanwhile, by the ids of
    those.
    """
    put = [
        (module, own, substitutes[id(tensor)])
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for own, tensor in tensors.items()
        if tensor is not None and id(tensor) in substitutes and own not in module.__dict__
    ]
    for module, own, tensor in put:
        module.__dict__[own] = tensor
    try:
        yield
    finally:
        for module, own, _ in put:
            module.__dict__.pop(own, None)


def find_assigned_buffers(
    model: nn.Module, previous: Mapping[str, Tensor], substitutes: Mapping[int, Tensor]
) -> list[str]:
    """Buffers that a forward assigned other tensors to, by all their names. held: what stood
    for those before, by their ids: what was changed in place may be assigned as that.
    """
    now = dict(model.named_buffers(remove_duplicate=False))
    other = {
        id(each)
        for name, each in previous.items()
        if now.get(name) is not each and now.get(name) is not substitutes.get(id(each))
    }
    return [name for name, each in previous.items() if id(each) in other]


@contextlib.contextmanager
def substitute_named_members(substitutes: Mapping[int, Tensor]) -> Iterator[None]:
    """Who asks a module for its parameters and buffers meanwhile (a penalty of all weights)
    gets the divided ones.
    """
    plain = nn.Module._named_members

    def named_members(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return (
            (name, substitutes.get(id(each), each)) for name, each in plain(module, *args, **kwargs)
        )

    nn.Module._named_members = named_members  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._named_members = plain  # type: ignore[method-assign]


@contextlib.contextmanager
def patch_torch_functions() -> Iterator[None]:
    """Around forwards and backwards in which tensors are divided; whoever else watches
    functions does so inside.
    """
    before = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(before.__func__, cls)
        if cls in COLLECTIVE_FUNCTIONS:
            return plain(*args, **kwargs)
        # which is an autograd function around others
        if cls is REENTRANT_CHECKPOINT:
            function, preserve, *given = args
            return checkpoint.checkpoint(
                function, *given, use_reentrant=False, preserve_rng_state=preserve
            )
        # lists stay what they are
        if any(
            isinstance(each, ShardedTensor | SingleRankTensor)
            for each in tree_leaves((args, kwargs))
        ):
            args, kwargs = tree_map_only(
                SingleRankTensor,
                share_value,
                tree_map_only(ShardedTensor, gather_whole, (args, kwargs)),
            )
        out = plain(*args, **kwargs)
        if any(isinstance(each, ShardedTensor) for each in tree_leaves(out)):
            raise StepFailed(
                f"{cls.__name__}, an autograd function in Python, uses parameters that are divided "
                f"over ranks and "
                "not among its arguments; give them to it, or train the model with data(n)"
            )
        return out

    plain_swap = _named_member_accessor.swap_tensor

    def swap(module: nn.Module, name: str, tensor: Tensor, allow_missing: bool = False) -> Tensor:
        """By torch.func.functional_call: where a module finds it is before its parameters."""
        if name in module.__dict__ and (name in module._parameters or name in module._buffers):
            found = module.__dict__[name]
            module.__dict__[name] = tensor
            return found  # type: ignore[no-any-return]
        return plain_swap(module, name, tensor, allow_missing)

    by_hooks = checkpoint._checkpoint_without_reentrant_generator
    _named_member_accessor.swap_tensor = swap
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    checkpoint._checkpoint_without_reentrant_generator = checkpoint_sharded
    try:
        yield
    finally:
        _named_member_accessor.swap_tensor = plain_swap
        torch.autograd.Function.apply = before  # type: ignore[method-assign]
        checkpoint._checkpoint_without_reentrant_generator = by_hooks
