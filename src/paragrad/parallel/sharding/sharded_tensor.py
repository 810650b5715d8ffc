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

from paragrad.engine.unwrap import OF_THE_WHOLE, WrappedTensor, name_of
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.autograd_collectives import Deciding, Gathered, Line, Sliced
from paragrad.parallel.sharding.partition import Pieces


class Cut(NamedTuple):
    """How one dimension is divided, and over which ranks."""

    pieces: Pieces
    line: Line

    def alike(self, other: Cut | None) -> bool:
        return other is not None and self.line is other.line and self.pieces.alike(other.pieces)


Cuts = Mapping[int, Cut]
UNKNOWN = object()  # a rule has none for these arguments
# by the name of a function of torch: rule(function, *arguments), or UNKNOWN
RULES: dict[str, Callable[..., Any]] = {}
DECIDING: set[str] = set()  # of those that may divide what is whole as yet

# what is asked of a tensor, and answered for the whole one
OF_THE_LOCAL = frozenset(("requires_grad", "grad_fn", "is_leaf", "_version", "output_nr", "grad"))
OTHERWISE = {"axis": "dim", "keepdims": "keepdim"}  # torch takes both
FIRST = {"input", "self", "tensors"}  # what a function's first argument is called
REFUSED = {
    "register_hook": "puts a hook on",
    "retain_grad": "keeps the gradient of",
    "register_post_accumulate_grad_hook": "puts a hook on",
}


def rule(*names: str, decides: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorated function is the rule of the functions of these names. decides: also where
    nothing is divided yet.
    """

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, function))
        DECIDING.update(names if decides else ())
        return function

    return named


class Divided(WrappedTensor):
    """Pieces of a tensor. local: those of this rank, with their graph;  cuts: by dimension, how
    it is divided.

    serial: its name where it is a parameter or buffer;  asking: while it is found out how to
    divide those, who decides: then it may be whole as yet;  sources: where it is made of such
    ones, these.
    """

    local: Tensor
    cuts: Cuts
    serial: str | None
    asking: Deciding | None
    sources: tuple[Divided, ...]

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        cuts: Cuts,
        serial: str | None = None,
        asking: Deciding | None = None,
        sources: tuple[Divided, ...] = (),
    ) -> Divided:
        shape = [
            cuts[dim].pieces.size if dim in cuts else size for dim, size in enumerate(local.shape)
        ]
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=local.dtype, device=local.device
        )
        made.__dict__.update(
            local=local,
            cuts=cuts,
            serial=serial,
            asking=asking,
            sources=sources,
            _is_param=isinstance(local, torch.nn.Parameter),
        )
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is said in __new__."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {OTHERWISE.get(key, key): value for key, value in (kwargs or {}).items()}
        name = name_of(func)
        if name in OF_THE_WHOLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return gradients(*args, **kwargs)
        if name in OF_THE_LOCAL:
            return func(args[0].local, *args[1:])
        if name in REFUSED:
            raise StepFailed(
                f"the model {REFUSED[name]} a value that is divided over ranks; do so at the "
                f"output of the model, "
                "or train it with data(n)"
            )
        # a method in Python calls what it is a method of, which is itself here
        if (
            not (name in RULES and getattr(func, "__module__", "") == "torch._tensor")
            and (own := body(func)) is not None
        ):
            return own(*args, **kwargs)
        if name not in DECIDING and not any(
            each.cuts for each in tree_leaves((args, kwargs)) if isinstance(each, Divided)
        ):
            return wholly(func, args, kwargs)
        found = by_rule(name, func, args, kwargs) if name in RULES else UNKNOWN
        if found is UNKNOWN and name not in RULES and pointwise(name):
            found = RULES["each element"](func, *args, **kwargs)
        return wholly(func, args, kwargs) if found is UNKNOWN else found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise StepFailed(
            f"{func} is asked below torch's functions of a tensor that is divided over ranks, by "
            f"compiled or "
            "scripted code or by vmap; train the model without it, or with data(n)"
        )

    def unwrap(self) -> Tensor:
        return whole(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Divided({tuple(self.shape)}, here {tuple(self.local.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Divided:
        return Divided(
            copy.deepcopy(self.local, memo), self.cuts, self.serial, self.asking, self.sources
        )


def gradients(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """As torch.autograd.grad: with respect to a divided value they are divided as it is."""
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    plain = tree_map_only(Divided, lambda x: x.local, (outputs, given, grad_outputs))
    found = torch.autograd.grad(*plain, *args, **kwargs)
    return tuple(
        divided(each, x.cuts) if isinstance(x, Divided) and each is not None else each
        for each, x in zip(found, given, strict=True)
    )


def by_rule(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """What the rule of that name makes of it; UNKNOWN where it does not take these
    arguments.
    """
    if not args and (named := next((each for each in kwargs if each in FIRST), None)):
        args = (kwargs[named],)
        kwargs = {key: value for key, value in kwargs.items() if key != named}
    try:
        if kwargs:
            _signature(RULES[name]).bind(func, *args, **kwargs)
    except TypeError:
        return UNKNOWN
    return RULES[name](func, *args, **kwargs)


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def divided(local: Tensor, cuts: Cuts) -> Tensor:
    """A tensor of which this is here; a plain one where nothing is divided."""
    return Divided(local, cuts) if cuts else local


def changes(name: str) -> bool:
    """Does the function of this name change its first argument?"""
    if not name.endswith("__"):
        return name.endswith("_")
    return name == "__setitem__" or (
        name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    )


@functools.cache
def pointwise(name: str) -> bool:
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
class _Unasked(dict[str, Any]):
    """The names of a module, in which nobody has a word of its own in torch's functions."""

    def __init__(self, source: dict[str, Any]) -> None:
        super().__init__(
            {name: lambda *_: False for name in source if name.startswith("has_torch_function")}
        )
        self.source = source

    def __missing__(self, name: str) -> Any:
        return self.source[name]


RUNNING: set[Any] = set()


def body(func: Any) -> Any:
    """A function of torch that is written in Python, as it is without asking who its arguments
    are; None for any other, and for one that is running: a helper of it asks again.
    """
    return None if func in RUNNING else _body(func)


@functools.cache
def _body(func: Any) -> Any:
    if not isinstance(func, types.FunctionType) or not (func.__module__ or "").startswith("torch."):
        return None
    names = _Unasked(func.__globals__)
    if not len(names):
        return None
    made = types.FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    made.__kwdefaults__ = func.__kwdefaults__

    def once(*args: Any, **kwargs: Any) -> Any:
        RUNNING.add(func)
        try:
            return made(*args, **kwargs)
        finally:
            RUNNING.discard(func)

    return once


# ---- views of what was gathered --------------------------------------------------------------
class View(WrappedTensor):
    """Of a gathered copy, where torch has a view of the value that is divided: what is changed
    in it would change the copy.
    """

    def unwrap(self) -> Tensor:
        return unmarked(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        # hooks are its own, which another one's would not be
        if name in REFUSED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (
            args
            and isinstance(args[0], View)
            and (kwargs.get("inplace") or (changes(name) and name != "requires_grad_"))
        ):
            raise StepFailed(
                f"{name} changes in place a view of a value that is divided over ranks, whose "
                f"pieces would not "
                "follow; make it another value (torch.where, torch.cat, x * mask), or train it "
                "with data(n)"
            )
        given = list[Tensor]()

        def plain(x: View) -> Tensor:
            given.append(unmarked(x))
            return given[-1]

        args, kwargs = tree_map_only(View, plain, (args, kwargs))
        return viewed(func(*args, **kwargs), given)


def unmarked(x: Tensor) -> Tensor:
    """The same as torch's own."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)  # type: ignore[arg-type]


def viewed(out: Any, given: list[Tensor]) -> Any:
    """What a function made; a View where it is a part of the memory of one of these."""
    places = {
        each.untyped_storage()._cdata
        for each in given
        if type(each) is Tensor and each.layout == torch.strided
    }
    return tree_map_only(
        Tensor,
        lambda x: (
            x.as_subclass(View)
            if type(x) is Tensor
            and x.layout == torch.strided
            and (x.untyped_storage()._cdata in places)
            else x
        ),
        out,
    )


# ---- from divided to plain and back ----------------------------------------------------------
def whole(x: Tensor, dims: Any = None) -> Tensor:
    """The plain tensor; or with these dimensions whole."""
    if not isinstance(x, Divided):
        return unmarked(x) if isinstance(x, View) else x
    cuts = dict(x.cuts)
    local = x.local
    for dim, cut in x.cuts.items():
        if dims is None or dim in dims:
            if cut.line.planning is not None:
                cut.line.planning.gathered(x, dim)
            local = Gathered.apply(local, dim, cut.pieces, cut.line)
            del cuts[dim]
    return divided(local, cuts)


def piece(x: Tensor, dim: int, cut: Cut) -> Tensor:
    """Of a plain tensor what this rank has."""
    if x.requires_grad and torch.is_grad_enabled():
        cut.line.note("sliced", -(-x.nbytes // cut.line.size))
        return Sliced.apply(x, dim, cut.pieces, cut.line)  # type: ignore[no-any-return]
    return cut.line.piece(x, dim, cut.pieces)


def wholly(func: Any, args: Any, kwargs: Any) -> Any:
    """On the whole tensors. What is changed in place is put back into its pieces."""
    first = args[0] if args and isinstance(args[0], Divided) and args[0].cuts else None
    name = name_of(func)
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    asking = [
        each
        for each in given
        if isinstance(each, Divided) and each.asking is not None and not each.cuts
    ]
    for each in asking:
        if each.serial is not None and each.asking is not None:
            each.asking.used(each, name.strip("_"))
    gathered = list[Tensor]()

    def plain(x: Divided) -> Tensor:
        found = whole(x)
        # another plan may divide it elsewhere
        if x.cuts and not any(cut.line.planning for cut in x.cuts.values()):
            gathered.append(found)
        return found

    args, kwargs = tree_map_only(Divided, plain, (args, kwargs))
    out = func(*args, **kwargs)
    others = [each for each in given if not any(each is one for one in asking)]
    if asking and not any(each.requires_grad for each in others) and isinstance(out, Tensor):
        sources = {id(source): source for each in asking for source in (each.sources or (each,))}
        return Divided(out, {}, asking=asking[0].asking, sources=tuple(sources.values()))
    if first is not None and changes(name):
        local = args[0]
        if local.shape != first.shape:
            raise StepFailed(
                f"{name} changes the shape of a value that is divided over ranks; make it another "
                f"value, or train "
                "the model with data(n)"
            )
        for dim, cut in first.cuts.items():
            local = piece(local, dim, cut)
        # in its memory: views of it, or a module, have it too
        first.local.copy_(local)
        return first
    return viewed(out, gathered) if gathered else out
