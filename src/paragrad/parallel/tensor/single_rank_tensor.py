"""A value that one rank of a group has: a value of its branch of a model.

It is computed from parameters that only this rank has, and from plain values. All ranks run the
model's own Python. For values of another rank, a rank has tensors of the same shape without values.
A value that is computed from the values of two ranks is plain: all ranks have it.

    AxisCopy         a plain value from which branches are computed: the same tensor in the
                     forward; its gradient is the sum over ranks
    ValueBroadcast   a branch's value to all ranks; its gradient, the same on all ranks, goes
                     back to the owner
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from paragrad.engine.rng.draws import skip_random_calls
from paragrad.engine.rng.random_kernels import count_random_calls
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.autograd_collectives import AxisGroup
from paragrad.parallel.sharding.sharded_tensor import (
    LOCAL_ATTRIBUTES,
    REFUSED_HOOKS,
    VALUE_FREE_ATTRIBUTES,
    get_function_name,
    get_python_body,
    is_in_place,
)
from paragrad.parallel.tensor.einsum_rules import RANDOM_FUNCTIONS

# Functions that depend on values, not only on shapes: they need the value on every rank. Some of
# them are used by losses: all ranks read the divisor.
VALUE_FUNCTIONS = frozenset(
    (
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "nonzero",
        "unique",
        "where",
        "masked_select",
        "is_nonzero",
        "equal",
        "allclose",
        "__repr__",
        "__format__",
        "__contains__",
        "data_ptr",
        "bincount",
        "argwhere",
        "backward",
        "__array__",
        "__dlpack__",
        "__iter__",
    )
)
CAST_FUNCTIONS = frozenset(("to", "cpu", "cuda", "type"))
NORM_FUNCTIONS = "batch_norm", "instance_norm"
META_DEVICE = torch.device("meta")


class SingleRankTensor(Tensor):
    """A value that only one rank has.

    Attributes:
        local: On the owner, the value with its graph; on other ranks, a tensor without values.

        owner: The rank that has the value.

        group: The ranks.

        source_values: On other ranks, the plain values from which it is computed. Their gradient
            from here is zero, but all ranks must take part in its sum.

        is_persistent: Whether it is a parameter or a buffer; its values then change between steps.

        shared_copy: The value on all ranks, with the version of the value that was broadcast.
    """

    local: Tensor
    owner: int
    group: AxisGroup
    source_values: tuple[Tensor, ...]
    is_persistent: bool
    shared_copy: tuple[Tensor, int] | None

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        owner: int,
        group: AxisGroup,
        source_values: tuple[Tensor, ...] = (),
        is_persistent: bool = False,
    ) -> SingleRankTensor:
        tensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            local.shape,
            dtype=local.dtype,
            device=group.world.device if local.is_meta else local.device,
        )
        tensor.__dict__.update(
            local=local,
            owner=owner,
            group=group,
            source_values=source_values,
            is_persistent=is_persistent,
            shared_copy=None,
            _is_param=isinstance(local, nn.Parameter),
        )
        return tensor  # type: ignore[no-any-return]

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing; `__new__` sets all attributes."""

    @property
    def is_local(self) -> bool:
        """Whether this rank has the value; during planning every value is local."""
        return self.group.decider is not None or self.group.rank == self.owner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = get_function_name(func)
        if name in VALUE_FREE_ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in LOCAL_ATTRIBUTES:
            return func(args[0].local, *args[1:])
        if name in REFUSED_HOOKS:
            raise StepFailed(
                f"the model {REFUSED_HOOKS[name]} a value of a branch that one rank has; do so at "
                "the output of the model, or train it with data(n)"
            )
        # A Python method of torch._tensor calls the operation of the same name, which would come
        # back here.
        if (
            getattr(func, "__module__", "") != "torch._tensor"
            and (python_body := get_python_body(func)) is not None
        ):
            return python_body(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        branch_values = [each for each in tensors if isinstance(each, SingleRankTensor)]
        plain_values = [each for each in tensors if not isinstance(each, SingleRankTensor)]
        first = args[0] if args else kwargs.get("input")
        out = kwargs.get("out", first if is_in_place(name) else None)
        written = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if len(written) > 1:
            raise StepFailed(
                f"{name} writes to several values at once, of a branch that one rank has; let it "
                "make new values, or train the model with data(n)"
            )
        changed = written[0] if written else None
        if (
            len({each.owner for each in branch_values}) > 1
            or name in VALUE_FUNCTIONS
            or name in branch_values[0].group.options.value_functions
            or "loss" in name
            # a parameter that all ranks have: the trunk continues here
            or any(isinstance(each, nn.Parameter) for each in plain_values)
            # possibly a handwritten loss
            or (name in ("mean", "sum") and len(args) == 1 and not kwargs)
            or (changed is not None and not isinstance(changed, SingleRankTensor))
            # it writes to a buffer that all ranks have
            or (name in NORM_FUNCTIONS and any(each is not first for each in plain_values))
        ):
            # a norm writes to its running statistics
            if isinstance(changed, SingleRankTensor) or (
                name in NORM_FUNCTIONS
                and any(
                    each.is_persistent and not isinstance(each.local, nn.Parameter)
                    for each in branch_values
                )
            ):
                raise StepFailed(
                    f"{name} changes a value of a branch that one rank has by values of other "
                    "ranks; make a new value, or train the model with data(n)"
                )
            return _find_current_function(func, name)(
                *tree_map_only(SingleRankTensor, share_value, args),
                **tree_map_only(SingleRankTensor, share_value, kwargs),
            )
        return run_on_owner(func, name, args, kwargs, branch_values, plain_values, changed)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise StepFailed(
            f"compiled or scripted code, or vmap, calls {func} on a value that one rank has; train "
            "the model without it, or with data(n)"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Lone({tuple(self.shape)}, of rank {self.owner})"

    def __deepcopy__(self, memo: dict[int, Any]) -> SingleRankTensor:
        return SingleRankTensor(
            copy.deepcopy(self.local, memo), self.owner, self.group, self.source_values
        )


def run_on_owner(
    func: Any,
    name: str,
    args: Any,
    kwargs: Any,
    branch_values: list[SingleRankTensor],
    plain_values: list[Tensor],
    changed: Any,
) -> Any:
    """Run a function on the owner of its values; other ranks compute the shape.

    Args:
        func: The function.

        name: Its name.

        args: Its arguments.

        kwargs: Its keyword arguments.

        branch_values: The arguments that one rank has.

        plain_values: The arguments that all ranks have.

        changed: The argument that is changed in place, or None.

    Returns:
        The result, as values of the owner.
    """
    owner = branch_values[0].owner
    group = branch_values[0].group
    if torch.is_autocast_enabled(group.world.device.type if group.decider is None else "cpu"):
        raise StepFailed(
            "under autocast the ranks without a branch do not know the types of its values; train "
            "the model in float32 or float64, or with data(n)"
        )
    copies = {id(each): group.copy_to_ranks(each) for each in plain_values}
    if branch_values[0].is_local:
        source_values: tuple[Tensor, ...] = ()
        calls_before = count_random_calls()
        out = _find_current_function(func, name)(
            *_replace_by_locals(args, copies), **_replace_by_locals(kwargs, copies)
        )
        # other ranks would not count these random calls
        draws = count_random_calls() != calls_before and name not in RANDOM_FUNCTIONS
        if group.decider is not None:
            group.decider.check_meta_call(func, name, args, kwargs, draws)
        elif draws:
            raise StepFailed(
                f"{name} draws random numbers in a branch, and did not when the model was looked "
                "at; draw by dropout or a tensor's own methods (x.normal_()), draw in every step, "
                "or train the model with data(n)"
            )
    else:
        trained_copies = [
            each for each in copies.values() if each.requires_grad and torch.is_grad_enabled()
        ]
        source_values = tuple(
            {
                id(each): each
                for each in (
                    *trained_copies,
                    *(
                        source_value
                        for each in branch_values
                        if each.local.requires_grad
                        for source_value in each.source_values
                    ),
                )
            }.values()
        )
        if name in RANDOM_FUNCTIONS:
            with torch.no_grad():
                skip_random_calls(
                    lambda: func(
                        *tree_map_only(Tensor, _make_one_element, args),
                        **tree_map_only(Tensor, _make_one_element, kwargs),
                    )
                )
        out = run_on_meta(func, name, args, kwargs)
    if changed is not None:
        changed.__dict__.update(
            source_values=tuple(
                {id(each): each for each in (*changed.source_values, *source_values)}.values()
            ),
            shared_copy=None,
        )
        if isinstance(out, Tensor) and out.shape == changed.shape:
            changed.__dict__["local"] = out
        return changed if isinstance(out, Tensor) else out
    return tree_map_only(
        Tensor, lambda each: SingleRankTensor(each, owner, group, source_values), out
    )


def _find_current_function(func: Any, name: str) -> Any:
    """Return the function that is called; a norm may be replaced to ask other replicas."""
    return getattr(torch, name) if name in NORM_FUNCTIONS else func


def _replace_by_locals(tree: Any, copies: dict[int, Tensor]) -> Any:
    return tree_map_only(
        Tensor,
        lambda each: each.local if isinstance(each, SingleRankTensor) else copies[id(each)],
        tree,
    )


def run_on_meta(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run a function on tensors without values.

    Args:
        func: The function.
        name: Its name.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        Its result, without values.
    """
    # a tensor without values is not moved to a device
    if name in CAST_FUNCTIONS and isinstance(args[0], SingleRankTensor):
        dtype = func(
            *tree_map_only(Tensor, _make_one_element, args),
            **tree_map_only(Tensor, _make_one_element, kwargs),
        ).dtype
        return _make_meta(args[0]).to(dtype)
    return func(
        *tree_map_only(Tensor, _make_meta, args), **tree_map_only(Tensor, _make_meta, kwargs)
    )


def _make_meta(x: Tensor) -> Tensor:
    x = x.local if isinstance(x, SingleRankTensor) else x
    if x.is_meta:
        return x
    return torch.empty_strided(
        x.shape, x.stride(), dtype=x.dtype, device=META_DEVICE, requires_grad=x.requires_grad
    )


def _make_one_element(x: Tensor) -> Tensor:
    return torch.ones((1,) * x.dim(), dtype=x.dtype, device=x.device)


def share_value(x: Any) -> Any:
    """Return a value of one rank on all ranks; a plain value stays as it is."""
    if not isinstance(x, SingleRankTensor):
        return x
    needs_gradient = x.local.requires_grad and torch.is_grad_enabled()
    version = x.local._version  # a change by a view increases the version too
    if (
        x.shared_copy is not None
        and x.shared_copy[1] == version
        and (x.shared_copy[0].requires_grad or not needs_gradient)
    ):
        return x.shared_copy[0]
    x.group.note_transfer("shown", x.numel() * x.element_size())
    inputs = (
        [x.local]
        if x.is_local
        else [
            *(x.source_values if needs_gradient else ()),
            torch.zeros((), requires_grad=needs_gradient),
        ]
    )
    shared = ValueBroadcast.apply(x.is_local, x.owner, x.group, tuple(x.shape), x.dtype, *inputs)
    x.__dict__["shared_copy"] = None if x.is_persistent else (shared, version)
    return shared


class ValueBroadcast(torch.autograd.Function):
    """Broadcasts a value of one rank; the gradient goes back to its owner."""

    @staticmethod
    def forward(
        ctx: Any,
        is_local: bool,
        owner: int,
        group: AxisGroup,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.mine = is_local
        ctx.count = len(inputs)
        return group.broadcast_value(inputs[0].detach() if is_local else None, owner, shape, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled() and gradients[0].requires_grad:
            raise StepFailed(
                "a gradient through branches needs a gradient of its own (forces, a gradient "
                "penalty), and one rank would have all of it; train the model with data(n)"
            )
        input_gradients = (gradients[0],) if ctx.mine else (None,) * ctx.count
        return None, None, None, None, None, *input_gradients
