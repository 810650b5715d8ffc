"""A divided tensor: this rank's pieces of one, which the model's own Python takes for the
whole.

It has the whole tensor's shape and a local tensor with the pieces. Torch's functions ask it
what they make of it (`__torch_function__`): a rule for the function's name (`RULES`), the
elements one by one where torch says that it works so, its own Python where it is written in
Python, and otherwise on the whole tensor, gathered: right, and said.
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

from paragrad.engine.unwrap import GLOBAL_ATTRIBUTES, WrappedTensor, get_function_name
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.autograd_collectives import (
    AxisGather,
    AxisGroup,
    AxisScatter,
    ShardingDecider,
)
from paragrad.parallel.sharding.partition import DimPartition


class Sharding(NamedTuple):
    """How one dimension is divided, and over which ranks."""

    partition: DimPartition
    group: AxisGroup

    def is_same_sharding(self, other: Sharding | None) -> bool:
        return (
            other is not None
            and self.group is other.group
            and self.partition.has_same_ranges(other.partition)
        )


Shardings = Mapping[int, Sharding]
NO_RULE = object()  # a rule has none for these arguments
# by the name of a function of torch: rule(function, *arguments), or UNKNOWN
RULES: dict[str, Callable[..., Any]] = {}
DECIDING_RULES: set[str] = set()  # of those that may divide what is whole as yet

# what is asked of a tensor, and answered for the whole one
LOCAL_ATTRIBUTES = frozenset(
    ("requires_grad", "grad_fn", "is_leaf", "_version", "output_nr", "grad")
)
ARGUMENT_ALIASES = {"axis": "dim", "keepdims": "keepdim"}  # torch takes both
FIRST_ARGUMENT_NAMES = {"input", "self", "tensors"}  # what a function's first argument is called
REFUSED_HOOKS = {
    "register_hook": "puts a hook on",
    "retain_grad": "keeps the gradient of",
    "register_post_accumulate_grad_hook": "puts a hook on",
}


def register_rule(
    *names: str, decides: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorated function is the rule of the functions of these names. decides: also where
    nothing is divided yet.
    """

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, function))
        DECIDING_RULES.update(names if decides else ())
        return function

    return named


class ShardedTensor(WrappedTensor):
    """Pieces of a tensor. local: those of this rank, with their graph;  cuts: by dimension, how
    it is divided.

    serial: its name where it is a parameter or buffer;  asking: while it is found out how to
    divide those, who decides: then it may be whole as yet;  sources: where it is made of such
    ones, these.
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
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=local.dtype, device=local.device
        )
        made.__dict__.update(
            local=local,
            shardings=shardings,
            serial_name=serial_name,
            decider=decider,
            sources=sources,
            _is_param=isinstance(local, torch.nn.Parameter),
        )
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is said in __new__."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {ARGUMENT_ALIASES.get(key, key): value for key, value in (kwargs or {}).items()}
        name = get_function_name(func)
        if name in GLOBAL_ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return compute_sharded_gradients(*args, **kwargs)
        if name in LOCAL_ATTRIBUTES:
            return func(args[0].local, *args[1:])
        if name in REFUSED_HOOKS:
            raise StepFailed(
                f"the model {REFUSED_HOOKS[name]} a value that is divided over ranks; do so at the "
                f"output of the model, "
                "or train it with data(n)"
            )
        # a method in Python calls what it is a method of, which is itself here
        if (
            not (name in RULES and getattr(func, "__module__", "") == "torch._tensor")
            and (own := get_python_body(func)) is not None
        ):
            return own(*args, **kwargs)
        if name not in DECIDING_RULES and not any(
            each.shardings
            for each in tree_leaves((args, kwargs))
            if isinstance(each, ShardedTensor)
        ):
            return run_on_whole(func, args, kwargs)
        found = apply_rule(name, func, args, kwargs) if name in RULES else NO_RULE
        if found is NO_RULE and name not in RULES and is_pointwise(name):
            found = RULES["each element"](func, *args, **kwargs)
        return run_on_whole(func, args, kwargs) if found is NO_RULE else found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise StepFailed(
            f"{func} is asked below torch's functions of a tensor that is divided over ranks, by "
            f"compiled or "
            "scripted code or by vmap; train the model without it, or with data(n)"
        )

    def unwrap(self) -> Tensor:
        return gather_whole(self)

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
    """As torch.autograd.grad: with respect to a divided value they are divided as it is."""
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    plain = tree_map_only(ShardedTensor, lambda x: x.local, (outputs, given, grad_outputs))
    found = torch.autograd.grad(*plain, *args, **kwargs)
    return tuple(
        wrap_local(each, x.shardings) if isinstance(x, ShardedTensor) and each is not None else each
        for each, x in zip(found, given, strict=True)
    )


def apply_rule(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """What the rule of that name makes of it; UNKNOWN where it does not take these
    arguments.
    """
    if not args and (
        named := next((each for each in kwargs if each in FIRST_ARGUMENT_NAMES), None)
    ):
        args = (kwargs[named],)
        kwargs = {key: value for key, value in kwargs.items() if key != named}
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
    """A tensor of which this is here; a plain one where nothing is divided."""
    return ShardedTensor(local, shardings) if shardings else local


def is_in_place(name: str) -> bool:
    """Does the function of this name change its first argument?"""
    if not name.endswith("__"):
        return name.endswith("_")
    return name == "__setitem__" or (
        name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    )


@functools.cache
def is_pointwise(name: str) -> bool:
    """Does torch say that the function of this name works element by element, and gives
    tensors?
    """
    if name == "copy_":  # which has no such tag
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
    found = getattr(torch.ops.aten, plain, None)
    return isinstance(found, torch._ops.OpOverloadPacket) and any(
        torch.Tag.pointwise in each.tags
        and all(str(one.type) == "Tensor" for one in each._schema.returns)
        for each in (getattr(found, name) for name in found.overloads())
    )


# ---- functions of torch that are written in Python -------------------------------------------
class _GlobalsWithoutOverrides(dict[str, Any]):
    """The names of a module, in which nobody has a word of its own in torch's functions."""

    def __init__(self, source: dict[str, Any]) -> None:
        super().__init__(
            {name: lambda *_: False for name in source if name.startswith("has_torch_function")}
        )
        self.source = source

    def __missing__(self, name: str) -> Any:
        return self.source[name]


RUNNING_BODIES: set[Any] = set()


def get_python_body(func: Any) -> Any:
    """A function of torch that is written in Python, as it is without asking who its arguments
    are; None for any other, and for one that is running: a helper of it asks again.
    """
    return None if func in RUNNING_BODIES else _build_python_body(func)


@functools.cache
def _build_python_body(func: Any) -> Any:
    if not isinstance(func, types.FunctionType) or not (func.__module__ or "").startswith("torch."):
        return None
    names = _GlobalsWithoutOverrides(func.__globals__)
    if not len(names):
        return None
    made = types.FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    made.__kwdefaults__ = func.__kwdefaults__

    def once(*args: Any, **kwargs: Any) -> Any:
        RUNNING_BODIES.add(func)
        try:
            return made(*args, **kwargs)
        finally:
            RUNNING_BODIES.discard(func)

    return once


# ---- views of what was gathered --------------------------------------------------------------
class GatheredView(WrappedTensor):
    """Of a gathered copy, where torch has a view of the value that is divided: what is changed
    in it would change the copy.
    """

    def unwrap(self) -> Tensor:
        return strip_subclass(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = get_function_name(func)
        # hooks are its own, which another one's would not be
        if name in REFUSED_HOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (
            args
            and isinstance(args[0], GatheredView)
            and (kwargs.get("inplace") or (is_in_place(name) and name != "requires_grad_"))
        ):
            raise StepFailed(
                f"{name} changes in place a view of a value that is divided over ranks, whose "
                f"pieces would not "
                "follow; make it another value (torch.where, torch.cat, x * mask), or train it "
                "with data(n)"
            )
        given = list[Tensor]()

        def plain(x: GatheredView) -> Tensor:
            given.append(strip_subclass(x))
            return given[-1]

        args, kwargs = tree_map_only(GatheredView, plain, (args, kwargs))
        return mark_views(func(*args, **kwargs), given)


def strip_subclass(x: Tensor) -> Tensor:
    """The same as torch's own."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)  # type: ignore[arg-type]


def mark_views(out: Any, gathered: list[Tensor]) -> Any:
    """What a function made; a View where it is a part of the memory of one of these."""
    places = {
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
            and (x.untyped_storage()._cdata in places)
            else x
        ),
        out,
    )


# ---- from divided to plain and back ----------------------------------------------------------
def gather_whole(x: Tensor, dims: Any = None) -> Tensor:
    """The plain tensor; or with these dimensions whole."""
    if not isinstance(x, ShardedTensor):
        return strip_subclass(x) if isinstance(x, GatheredView) else x
    cuts = dict(x.shardings)
    local = x.local
    for dim, cut in x.shardings.items():
        if dims is None or dim in dims:
            if cut.group.decider is not None:
                cut.group.decider.note_gather(x, dim)
            local = AxisGather.apply(local, dim, cut.partition, cut.group)
            del cuts[dim]
    return wrap_local(local, cuts)


def slice_local(x: Tensor, dim: int, sharding: Sharding) -> Tensor:
    """Of a plain tensor what this rank has."""
    if x.requires_grad and torch.is_grad_enabled():
        sharding.group.note_transfer("sliced", -(-x.nbytes // sharding.group.size))
        return AxisScatter.apply(x, dim, sharding.partition, sharding.group)  # type: ignore[no-any-return]
    return sharding.group.take_piece(x, dim, sharding.partition)


def run_on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """On the whole tensors. What is changed in place is put back into its pieces."""
    first = args[0] if args and isinstance(args[0], ShardedTensor) and args[0].shardings else None
    name = get_function_name(func)
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    asking = [
        each
        for each in given
        if isinstance(each, ShardedTensor) and each.decider is not None and not each.shardings
    ]
    for each in asking:
        if each.serial_name is not None and each.decider is not None:
            each.decider.note_whole_use(each, name.strip("_"))
    gathered = list[Tensor]()

    def plain(x: ShardedTensor) -> Tensor:
        found = gather_whole(x)
        # another plan may divide it elsewhere
        if x.shardings and not any(cut.group.decider for cut in x.shardings.values()):
            gathered.append(found)
        return found

    args, kwargs = tree_map_only(ShardedTensor, plain, (args, kwargs))
    out = func(*args, **kwargs)
    others = [each for each in given if not any(each is one for one in asking)]
    if asking and not any(each.requires_grad for each in others) and isinstance(out, Tensor):
        sources = {id(source): source for each in asking for source in (each.sources or (each,))}
        return ShardedTensor(out, {}, asking=asking[0].decider, sources=tuple(sources.values()))
    if first is not None and is_in_place(name):
        local = args[0]
        if local.shape != first.shape:
            raise StepFailed(
                f"{name} changes the shape of a value that is divided over ranks; make it another "
                f"value, or train "
                "the model with data(n)"
            )
        for dim, cut in first.shardings.items():
            local = slice_local(local, dim, cut)
        # in its memory: views of it, or a module, have it too
        first.local.copy_(local)
        return first
    return mark_views(out, gathered) if gathered else out
