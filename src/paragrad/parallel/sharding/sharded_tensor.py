"""A sharded tensor: this rank's pieces of a tensor, with the interface of the whole tensor.

The model's own Python works with it as with the whole tensor. Functions of torch reach it by
`__torch_function__`. It handles a function in the first of these ways that applies:

    1. a rule that is registered for the function's name (`RULES`)
    2. elementwise, if torch tags the function as pointwise
    3. the function's own Python, if the function is written in Python
    4. on the whole tensor, which is gathered: correct, and noted as a transfer
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from paragrad.engine.unwrap import VALUE_FREE_ATTRIBUTES, WrappedTensor, get_function_name
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.autograd_collectives import (
    AxisGather,
    AxisGroup,
    AxisScatter,
    ShardingDecider,
)
from paragrad.parallel.sharding.partition import DimPartition


class Sharding(NamedTuple):
    """How one dimension is divided, and over which ranks.

    Attributes:
        partition: How the dimension is divided.
        group: The ranks.
    """

    partition: DimPartition
    group: AxisGroup

    def is_same_sharding(self, other: Sharding | None) -> bool:
        """Return whether both have the same group, and each rank the same elements."""
        return (
            other is not None
            and self.group is other.group
            and (
                self.partition == other.partition or self.partition.ranges == other.partition.ranges
            )
        )


Shardings = Mapping[int, Sharding]
NO_RULE = object()  # returned by a rule that does not handle these arguments
# by the name of a function of torch: rule(function, *arguments), or NO_RULE
RULES: dict[str, Callable[..., Any]] = {}
DECIDING_RULES: set[str] = set()  # names of the rules that may shard tensors that are still whole

# attributes that are those of the local part
LOCAL_ATTRIBUTES = frozenset(
    ("requires_grad", "grad_fn", "is_leaf", "_version", "output_nr", "grad")
)
ARGUMENT_ALIASES = {"axis": "dim", "keepdims": "keepdim"}  # torch accepts both names
FIRST_ARGUMENT_NAMES = {"input", "self", "tensors"}  # names of the first argument
REFUSED_HOOKS = {
    "register_hook": "puts a hook on",
    "retain_grad": "keeps the gradient of",
    "register_post_accumulate_grad_hook": "puts a hook on",
}


def register_rule(
    *names: str, decides: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the rule of functions of torch.

    Args:
        *names: Names of the functions.
        decides: Whether the rule also applies to tensors that are not sharded yet, which it may
            shard.

    Returns:
        The decorator.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, function))
        DECIDING_RULES.update(names if decides else ())
        return function

    return register


class ShardedTensor(WrappedTensor):
    """This rank's pieces of a tensor.

    Attributes:
        local: The pieces of this rank, with their graph.

        shardings: The sharding of each divided dimension.

        serial_name: Name in the serial model, if it is a parameter or a buffer.

        decider: During planning, the object that decides how it is sharded. It may be whole then.

        sources: The parameters and buffers from which it is computed, during planning.
    """

    local: Tensor
    shardings: Shardings
    serial_name: str | None
    decider: ShardingDecider | None
    sources: tuple[ShardedTensor, ...]

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        shardings: Shardings,
        serial_name: str | None = None,
        decider: ShardingDecider | None = None,
        sources: tuple[ShardedTensor, ...] = (),
    ) -> ShardedTensor:
        shape = [
            shardings[dim].partition.size if dim in shardings else size
            for dim, size in enumerate(local.shape)
        ]
        tensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=local.dtype, device=local.device
        )
        tensor.__dict__.update(
            local=local,
            shardings=shardings,
            serial_name=serial_name,
            decider=decider,
            sources=sources,
            _is_param=isinstance(local, torch.nn.Parameter),
        )
        return tensor  # type: ignore[no-any-return]

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing; `__new__` sets all attributes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {ARGUMENT_ALIASES.get(key, key): value for key, value in (kwargs or {}).items()}
        name = get_function_name(func)
        if name in VALUE_FREE_ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return compute_sharded_gradients(*args, **kwargs)
        if name in LOCAL_ATTRIBUTES:
            return func(args[0].local, *args[1:])
        if name in REFUSED_HOOKS:
            raise StepFailed(
                f"the model {REFUSED_HOOKS[name]} a value that is divided over ranks; do so at the "
                "output of the model, or train it with data(n)"
            )
        # A Python method of torch._tensor calls the operation of the same name, which would come
        # back here.
        if (
            not (name in RULES and getattr(func, "__module__", "") == "torch._tensor")
            and (python_body := get_python_body(func)) is not None
        ):
            return python_body(*args, **kwargs)
        if name not in DECIDING_RULES and not any(
            leaf.shardings
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, ShardedTensor)
        ):
            return run_on_whole(func, args, kwargs)
        result = apply_rule(name, func, args, kwargs) if name in RULES else NO_RULE
        if result is NO_RULE and name not in RULES and is_pointwise(name):
            result = RULES["each element"](func, *args, **kwargs)
        return run_on_whole(func, args, kwargs) if result is NO_RULE else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise StepFailed(
            f"compiled or scripted code, or vmap, calls {func} on a tensor that is divided over "
            "ranks; train the model without it, or with data(n)"
        )

    def unwrap(self) -> Tensor:
        """Return the plain tensor. Collective over the ranks that hold the pieces."""
        return gather_whole(self)

    def replace_local(self, local: Tensor) -> None:
        """Keep other pieces from now on: the result of a change in place."""
        self.__dict__["local"] = local

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Divided({tuple(self.shape)}, here {tuple(self.local.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        return ShardedTensor(
            copy.deepcopy(self.local, memo),
            self.shardings,
            self.serial_name,
            self.decider,
            self.sources,
        )


def compute_sharded_gradients(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """Compute gradients as torch.autograd.grad does, for sharded values too.

    The gradient with respect to a sharded value is sharded in the same way.

    Args:
        outputs: As for torch.autograd.grad.
        inputs: As for torch.autograd.grad.
        grad_outputs: As for torch.autograd.grad.
        *args: Other arguments of torch.autograd.grad.
        **kwargs: Other arguments of torch.autograd.grad.

    Returns:
        The gradients, one for each input.
    """
    input_list = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    local = tree_map_only(ShardedTensor, lambda x: x.local, (outputs, input_list, grad_outputs))
    gradients = torch.autograd.grad(*local, *args, **kwargs)
    return tuple(
        wrap_local(gradient, x.shardings)
        if isinstance(x, ShardedTensor) and gradient is not None
        else gradient
        for gradient, x in zip(gradients, input_list, strict=True)
    )


def apply_rule(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply the rule of a function.

    Args:
        name: Name of the function.
        func: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The result of the rule, or NO_RULE if the rule does not take these arguments.
    """
    if not args and (
        first_name := next((each for each in kwargs if each in FIRST_ARGUMENT_NAMES), None)
    ):
        args = (kwargs[first_name],)
        kwargs = {key: value for key, value in kwargs.items() if key != first_name}
    try:
        if kwargs:
            _inspect_signature(RULES[name]).bind(func, *args, **kwargs)
    except TypeError:
        return NO_RULE
    return RULES[name](func, *args, **kwargs)


@functools.cache
def _inspect_signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def wrap_local(local: Tensor, shardings: Shardings) -> Tensor:
    """Return a tensor with this local part: a plain one, if no dimension is divided."""
    return ShardedTensor(local, shardings) if shardings else local


def is_in_place(name: str) -> bool:
    """Return whether the function of this name changes its first argument."""
    if not name.endswith("__"):
        return name.endswith("_")
    return name == "__setitem__" or (
        name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    )


@functools.cache
def is_pointwise(name: str) -> bool:
    """Return whether torch tags the function of this name as pointwise, and it returns tensors."""
    if name == "copy_":  # copy_ has no such tag
        return True
    plain = name.strip("_")
    plain = {
        "truediv": "div",
        "rtruediv": "div",
        "radd": "add",
        "rmul": "mul",
        "rdiv": "div",
        "iadd": "add",
        "isub": "sub",
        "imul": "mul",
        "itruediv": "div",
        "and": "bitwise_and",
        "or": "bitwise_or",
        "xor": "bitwise_xor",
        "iand": "bitwise_and",
        "ior": "bitwise_or",
        "ixor": "bitwise_xor",
        "invert": "bitwise_not",
        "rpow": "pow",
        "ipow": "pow",
        "mod": "remainder",
        "rmod": "remainder",
        "imod": "remainder",
        "floordiv": "floor_divide",
        "rfloordiv": "floor_divide",
        "ifloordiv": "floor_divide",
    }.get(plain, plain)
    packet = getattr(torch.ops.aten, plain, None)
    return isinstance(packet, torch._ops.OpOverloadPacket) and any(
        torch.Tag.pointwise in overload.tags
        and all(str(output.type) == "Tensor" for output in overload._schema.returns)
        for overload in (getattr(packet, name) for name in packet.overloads())
    )


# ---- functions of torch that are written in Python -------------------------------------------
class _GlobalsWithoutOverrides(dict[str, Any]):
    """The globals of a module, in which no argument has a `__torch_function__`."""

    def __init__(self, source: dict[str, Any]) -> None:
        super().__init__(
            {name: lambda *_: False for name in source if name.startswith("has_torch_function")}
        )
        self.source = source

    def __missing__(self, name: str) -> Any:
        return self.source[name]


RUNNING_BODIES: set[Any] = set()


def get_python_body(func: Any) -> Any:
    """Return a function of torch that is written in Python, without its check for overrides.

    The result is None for other functions. It is also None for a function that is running, so that
    a helper that it calls is checked for overrides again.
    """
    return None if func in RUNNING_BODIES else _build_python_body(func)


@functools.cache
def _build_python_body(func: Any) -> Any:
    if not isinstance(func, types.FunctionType) or not (func.__module__ or "").startswith("torch."):
        return None
    scope = _GlobalsWithoutOverrides(func.__globals__)
    if not len(scope):
        return None
    body = types.FunctionType(
        func.__code__, scope, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__

    def run_once(*args: Any, **kwargs: Any) -> Any:
        RUNNING_BODIES.add(func)
        try:
            return body(*args, **kwargs)
        finally:
            RUNNING_BODIES.discard(func)

    return run_once


# ---- views of gathered values ----------------------------------------------------------------
class GatheredView(WrappedTensor):
    """A part of a gathered copy, where the serial model has a view of the value itself.

    A change in place would change only the copy, so it is refused.
    """

    def unwrap(self) -> Tensor:
        """Return the same tensor as a plain one."""
        return strip_subclass(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = get_function_name(func)
        # A hook belongs to this tensor object; a hook on another object would be lost.
        if name in REFUSED_HOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (
            args
            and isinstance(args[0], GatheredView)
            and (kwargs.get("inplace") or (is_in_place(name) and name != "requires_grad_"))
        ):
            raise StepFailed(
                f"{name} changes in place a view of a value that is divided over ranks, and its "
                "pieces would not change; make a new value (torch.where, torch.cat, x * mask), or "
                "train it with data(n)"
            )
        gathered = list[Tensor]()

        def strip(x: GatheredView) -> Tensor:
            gathered.append(strip_subclass(x))
            return gathered[-1]

        args, kwargs = tree_map_only(GatheredView, strip, (args, kwargs))
        return mark_views(func(*args, **kwargs), gathered)


def strip_subclass(x: Tensor) -> Tensor:
    """Return the tensor as a plain torch.Tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)  # type: ignore[arg-type]


def mark_views(out: Any, gathered: list[Tensor]) -> Any:
    """Turn tensors that share memory with a gathered tensor into `GatheredView`."""
    storages = {
        each.untyped_storage()._cdata
        for each in gathered
        if type(each) is Tensor and each.layout == torch.strided
    }
    return tree_map_only(
        Tensor,
        lambda x: (
            x.as_subclass(GatheredView)
            if type(x) is Tensor
            and x.layout == torch.strided
            and (x.untyped_storage()._cdata in storages)
            else x
        ),
        out,
    )


# ---- between sharded and plain ---------------------------------------------------------------
def gather_whole(x: Tensor, dims: Any = None) -> Tensor:
    """Gather the divided dimensions of a tensor.

    Args:
        x: A tensor, sharded or not.
        dims: The dimensions to gather; None: all.

    Returns:
        The tensor, which is plain if no dimension is left divided.
    """
    if not isinstance(x, ShardedTensor):
        return strip_subclass(x) if isinstance(x, GatheredView) else x
    shardings = dict(x.shardings)
    local = x.local
    for dim, sharding in x.shardings.items():
        if dims is None or dim in dims:
            if sharding.group.decider is not None:
                sharding.group.decider.note_gather(x, dim)
            local = AxisGather.apply(local, dim, sharding.partition, sharding.group)
            del shardings[dim]
    return wrap_local(local, shardings)


def slice_local(x: Tensor, dim: int, sharding: Sharding) -> Tensor:
    """Take this rank's piece of a plain tensor.

    Args:
        x: The plain tensor.
        dim: The dimension to divide.
        sharding: How it is divided.

    Returns:
        The piece, as a plain tensor.
    """
    if x.requires_grad and torch.is_grad_enabled():
        sharding.group.note_transfer("sliced", -(-x.nbytes // sharding.group.size))
        local: Tensor = AxisScatter.apply(x, dim, sharding.partition, sharding.group)
        return local
    return sharding.group.take_piece(x, dim, sharding.partition)


def run_on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function on whole tensors.

    If the function changes its first argument in place, the result is put back into the pieces.

    Args:
        func: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        Its result.
    """
    first = args[0] if args and isinstance(args[0], ShardedTensor) and args[0].shardings else None
    name = get_function_name(func)
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    undecided = [
        each
        for each in tensors
        if isinstance(each, ShardedTensor) and each.decider is not None and not each.shardings
    ]
    for each in undecided:
        if each.serial_name is not None and each.decider is not None:
            each.decider.note_whole_use(each, name.strip("_"))
    gathered = list[Tensor]()

    def gather(x: ShardedTensor) -> Tensor:
        whole = gather_whole(x)
        # During planning no copy is marked: the next plan may not gather it.
        if x.shardings and not any(sharding.group.decider for sharding in x.shardings.values()):
            gathered.append(whole)
        return whole

    args, kwargs = tree_map_only(ShardedTensor, gather, (args, kwargs))
    out = func(*args, **kwargs)
    others = [each for each in tensors if not any(each is one for one in undecided)]
    if undecided and not any(each.requires_grad for each in others) and isinstance(out, Tensor):
        sources = {id(source): source for each in undecided for source in (each.sources or (each,))}
        return ShardedTensor(out, {}, decider=undecided[0].decider, sources=tuple(sources.values()))
    if first is not None and is_in_place(name):
        local = args[0]
        if local.shape != first.shape:
            raise StepFailed(
                f"{name} changes the shape of a value that is divided over ranks; make a new "
                "value, or train the model with data(n)"
            )
        for dim, sharding in first.shardings.items():
            local = slice_local(local, dim, sharding)
        # The values are copied into its memory, which views and modules share.
        first.local.copy_(local)
        return first
    return mark_views(out, gathered) if gathered else out
