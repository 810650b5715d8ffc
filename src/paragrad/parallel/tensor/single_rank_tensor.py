"""A value that one rank of a line has: its branch of a model.

It is made of parameters that this rank alone has, and of plain values. Everybody runs the
model's own Python: where a value is another rank's, there stands one of its shape. What two
ranks have is put together on all, and is plain from there on.

    Copied    a plain value that branches are made of: the same forward, its gradient is the sum
    over ranks Shown     a branch's value to all ranks: its gradient, the same on all, goes back
    to whose it is
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from paragrad.engine.rng.random_kernels import calls, skipped
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.autograd_collectives import Line
from paragrad.parallel.sharding.sharded_tensor import (
    OF_THE_LOCAL,
    OF_THE_WHOLE,
    REFUSED,
    body,
    changes,
    name_of,
)
from paragrad.parallel.tensor.einsum_rules import RANDOM

# what depends on values, and not on shapes alone: every rank asks for these; and for a loss:
# all read what it divides by
OF_VALUES = frozenset(
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
CASTS = frozenset(("to", "cpu", "cuda", "type"))
NORMS = "batch_norm", "instance_norm"
META = torch.device("meta")


class Lone(Tensor):
    """local: the value with its graph, on rank `owner` of the line; on others one without
    values.  ties: there, the plain values that it is made of: what comes back for them is
    nothing, and all ranks have to ask;  standing: it is a parameter or buffer, which other
    steps see with other values;  shown: on all ranks, and which version of the value that
    is.
    """

    local: Tensor
    owner: int
    line: Line
    ties: tuple[Tensor, ...]
    standing: bool
    shown: tuple[Tensor, int] | None

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        owner: int,
        line: Line,
        ties: tuple[Tensor, ...] = (),
        standing: bool = False,
    ) -> Lone:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            local.shape,
            dtype=local.dtype,
            device=line.world.device if local.is_meta else local.device,
        )
        made.__dict__.update(
            local=local,
            owner=owner,
            line=line,
            ties=ties,
            standing=standing,
            shown=None,
            _is_param=isinstance(local, nn.Parameter),
        )
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is said in __new__."""

    @property
    def mine(self) -> bool:
        """While it is found out what travels, everything is here."""
        return self.line.planning is not None or self.line.rank == self.owner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in OF_THE_WHOLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in OF_THE_LOCAL:
            return func(args[0].local, *args[1:])
        if name in REFUSED:
            raise StepFailed(
                f"the model {REFUSED[name]} a value of a branch that one rank has; do so at the "
                f"output of the "
                "model, or train it with data(n)"
            )
        # a method in Python calls what it is a method of, which is itself here
        if getattr(func, "__module__", "") != "torch._tensor" and (own := body(func)) is not None:
            return own(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        lone = [each for each in given if isinstance(each, Lone)]
        plain = [each for each in given if not isinstance(each, Lone)]
        first = args[0] if args else kwargs.get("input")
        out = kwargs.get("out", first if changes(name) else None)
        written = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if len(written) > 1:
            raise StepFailed(
                f"{name} writes to several values at once, of a branch that one rank has; let it "
                f"make others, or "
                "train the model with data(n)"
            )
        changed = written[0] if written else None
        if (
            len({each.owner for each in lone}) > 1
            or name in OF_VALUES
            or name in lone[0].line.manner.shows
            or "loss" in name
            # the trunk goes on
            or any(isinstance(each, nn.Parameter) for each in plain)
            # a loss made by hand, perhaps
            or (name in ("mean", "sum") and len(args) == 1 and not kwargs)
            or (changed is not None and not isinstance(changed, Lone))
            # it writes to a buffer of the trunk
            or (name in NORMS and any(each is not first for each in plain))
        ):
            # which writes to its statistics
            if isinstance(changed, Lone) or (
                name in NORMS
                and any(each.standing and not isinstance(each.local, nn.Parameter) for each in lone)
            ):
                raise StepFailed(
                    f"{name} changes a value of a branch that one rank has by what it does not "
                    f"have; make it "
                    "another value, or train the model with data(n)"
                )
            return _now(func, name)(
                *tree_map_only(Lone, shown, args), **tree_map_only(Lone, shown, kwargs)
            )
        return alone(func, name, args, kwargs, lone, plain, changed)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise StepFailed(
            f"{func} is asked below torch's functions of a value that one rank has, by compiled or "
            f"scripted "
            "code or by vmap; train the model without it, or with data(n)"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Lone({tuple(self.shape)}, of rank {self.owner})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Lone:
        return Lone(copy.deepcopy(self.local, memo), self.owner, self.line, self.ties)


def alone(
    func: Any,
    name: str,
    args: Any,
    kwargs: Any,
    lone: list[Lone],
    plain: list[Tensor],
    changed: Any,
) -> Any:
    """What the owner of some values makes of them and of plain ones. changed: the one that is
    changed in place.
    """
    owner = lone[0].owner
    line = lone[0].line
    if torch.is_autocast_enabled(line.world.device.type if line.planning is None else "cpu"):
        raise StepFailed(
            "under autocast the ranks without a branch do not know the types of its values; train "
            "the model in "
            "float32 or float64, or with data(n)"
        )
    copies = {id(each): line.copied(each) for each in plain}
    if lone[0].mine:
        ties: tuple[Tensor, ...] = ()
        before = calls()
        out = _now(func, name)(*_mapped(args, copies), **_mapped(kwargs, copies))
        draws = calls() != before and name not in RANDOM  # which other ranks do not count
        if line.planning is not None:
            line.planning.tried(func, name, args, kwargs, draws)
        elif draws:
            raise StepFailed(
                f"{name} draws in a branch, and did not when the model was looked at; draw by "
                f"dropout or a "
                "tensor's own methods (x.normal_()), draw in every step, or train the model with "
                "data(n)"
            )
    else:
        made = [each for each in copies.values() if each.requires_grad and torch.is_grad_enabled()]
        ties = tuple(
            {
                id(each): each
                for each in (
                    *made,
                    *(tie for each in lone if each.local.requires_grad for tie in each.ties),
                )
            }.values()
        )
        if name in RANDOM:
            with torch.no_grad():
                skipped(
                    lambda: func(
                        *tree_map_only(Tensor, _small, args),
                        **tree_map_only(Tensor, _small, kwargs),
                    )
                )
        out = of_shapes(func, name, args, kwargs)
    if changed is not None:
        changed.__dict__.update(
            ties=tuple({id(each): each for each in (*changed.ties, *ties)}.values()), shown=None
        )
        if isinstance(out, Tensor) and out.shape == changed.shape:
            changed.__dict__["local"] = out
        return changed if isinstance(out, Tensor) else out
    return tree_map_only(Tensor, lambda each: Lone(each, owner, line, ties), out)


def _now(func: Any, name: str) -> Any:
    """What is called in the place of a function: a norm asks other replicas."""
    return getattr(torch, name) if name in NORMS else func


def _mapped(tree: Any, copies: dict[int, Tensor]) -> Any:
    return tree_map_only(
        Tensor, lambda each: each.local if isinstance(each, Lone) else copies[id(each)], tree
    )


def of_shapes(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What a function makes of values that are not there."""
    # to a device: what is not there goes nowhere
    if name in CASTS and isinstance(args[0], Lone):
        kind = func(
            *tree_map_only(Tensor, _small, args), **tree_map_only(Tensor, _small, kwargs)
        ).dtype
        return _shape_of(args[0]).to(kind)
    return func(*tree_map_only(Tensor, _shape_of, args), **tree_map_only(Tensor, _shape_of, kwargs))


def _shape_of(x: Tensor) -> Tensor:
    x = x.local if isinstance(x, Lone) else x
    if x.is_meta:
        return x
    return torch.empty_strided(
        x.shape, x.stride(), dtype=x.dtype, device=META, requires_grad=x.requires_grad
    )


def _small(x: Tensor) -> Tensor:
    return torch.ones((1,) * x.dim(), dtype=x.dtype, device=x.device)


def shown(x: Any) -> Any:
    """A value of one rank, on all; a plain one as it is."""
    if not isinstance(x, Lone):
        return x
    asks = x.local.requires_grad and torch.is_grad_enabled()
    version = x.local._version  # which a change by a view moves too
    if x.shown is not None and x.shown[1] == version and (x.shown[0].requires_grad or not asks):
        return x.shown[0]
    x.line.note("shown", x.numel() * x.element_size())
    inputs = (
        [x.local] if x.mine else [*(x.ties if asks else ()), torch.zeros((), requires_grad=asks)]
    )
    made = Shown.apply(x.mine, x.owner, x.line, tuple(x.shape), x.dtype, *inputs)
    x.__dict__["shown"] = None if x.standing else (made, version)
    return made


class Shown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mine: bool,
        owner: int,
        line: Line,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.mine = mine
        ctx.count = len(inputs)
        return line.shown(inputs[0].detach() if mine else None, owner, shape, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled() and gradients[0].requires_grad:
            raise StepFailed(
                "a gradient through branches is to have a gradient (forces, a penalty of "
                "gradients), of which one "
                "rank would have all; train the model with data(n)"
            )
        found = (gradients[0],) if ctx.mine else (None,) * ctx.count
        return None, None, None, None, None, *found
