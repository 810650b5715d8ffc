"""The forward by which a plan is made: nothing in it has a value, and it is noted what each
part makes and uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from paragrad.engine.state.preserve_state import kept_by
from paragrad.engine.state.values import differentiable, same
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.sharded_tensor import Divided, divided, whole
from paragrad.parallel.tracing.crossing_plan import HIDDEN, NESTED, Crossing, Plan, StandIn
from paragrad.parallel.tracing.input_guards import Tape, bounds
from paragrad.parallel.tracing.tracer import InUnits, Place, Running, Unit, noted, tensors_in


@dataclass(frozen=True)
class Like:
    """Stands for a tensor of the shape and type of one that a module is called with: of that
    number.
    """

    number: int


Standing = Mapping[str, Any]  # what modules give, by name, tensors as Like


class Hollow(InUnits):
    """A model that is run without values. standing: what those units give of which nobody knows
    it so.
    """

    def __init__(
        self, model: nn.Module, parts: Sequence[Sequence[Unit]], standing: Standing | None = None
    ) -> None:
        super().__init__(model, parts)
        self.standing = standing or {}
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.whole = True  # the model has all its values
        # Python attributes that calls of a unit set
        self.changing: dict[str, set[tuple[nn.Module, str]]] = {}


class Planning(Running):
    """Nothing has a value; noted is which part makes and which ones use what."""

    flow: Hollow

    def __init__(self, flow: Hollow, inputs: Any) -> None:
        super().__init__(flow)
        self.crossing: list[dict[Place, Crossing]] = [{} for _ in range(flow.last)]
        self.stand_ins: list[StandIn] = []
        # of a tensor with values, what stands for it without
        self.hollow: Any = WeakIdKeyDictionary()
        self.copies: Any = WeakIdKeyDictionary()  # of what units gave
        self.writes = False
        self.tape = Tape(inputs)
        self.failed: nn.Module | None = None  # the first module that raised

    def plan(self) -> Plan:
        return Plan(
            [sorted(each.values(), key=lambda crossing: crossing.place) for each in self.crossing],
            self.stand_ins,
            self.tape.cut(),
            self.writes,
        )

    def operated(self, func: Any, args: Any, kwargs: Any) -> Any:
        for bound in bounds(func, args, kwargs):
            if bound not in self.made and not isinstance(bound, FakeTensor):
                self.of_inputs(Tensor.__index__, (bound,), {}, bound.__index__())
        return super().operated(func, args, kwargs)

    def of_inputs(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.tape.note(func, args, kwargs, out)

    def use(self, tensor: Tensor, part: int) -> None:
        if tensor in self.made:
            place, made = self.made[tensor]
            if made < part:
                with self.unwatched():
                    crossing = Crossing.of(place, whole(self.emptied(tensor)))
                for cut in range(made, part):
                    self.crossing[cut][place] = crossing

    def faked(self, tree: Any) -> Any:
        """The same without values. Raises StepFailed, while the model is whole, of what nobody
        was seen to make.
        """
        if self.flow.whole and any(
            isinstance(each, FakeTensor) and each not in self.made for each in tensors_in(tree)
        ):
            raise StepFailed(HIDDEN)
        return tree_map_only(Tensor, self.emptied, tree)

    def emptied(self, tensor: Tensor) -> Tensor:
        """The same every time: what is written into it stays in it."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if isinstance(tensor, Divided):
            return divided(self.emptied(tensor.local), tensor.cuts)
        if tensor not in self.hollow:
            self.hollow[tensor] = self.flow.fake.from_tensor(tensor)
        return self.hollow[tensor]  # type: ignore[no-any-return]

    def operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        out = func(*self.faked(args), **self.faked(kwargs))
        if tensors_in(out) or written:
            for tensor in tensors_in((args, kwargs)):
                self.use(tensor, self.part)
        if written or getattr(func, "__name__", "") == "register_hook":
            self.writes = True
        # a view into something else has made that, too, to have a gradient
        for tensor in written:
            hollow = self.emptied(tensor)
            if hollow._base is not None and tensor._base is not None:
                self.hollow[tensor._base] = hollow._base
        return out

    def around(self, module: nn.Module, call: Any) -> Any:
        if nested(module, call):
            raise StepFailed(NESTED)
        with self.noting(module):
            return call()

    @contextlib.contextmanager
    def noting(self, module: nn.Module) -> Iterator[None]:
        """Whether it is the first, and so the innermost, that raises."""
        try:
            yield
        except Exception:
            self.failed = self.failed or module
            raise

    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begins(name)
        module = self.flow.model.get_submodule(name)
        with self.unwatched():
            before = kept_by(module)
            hollow = self.faked(args)
            named = self.faked(kwargs)
            if (gives := self.flow.standing.get(name)) is None:
                with self.noting(module):
                    out = call(*hollow, **named)
            else:
                given = tensors_in((hollow, named))
                trained = torch.is_grad_enabled()
                out = tree_map_only(
                    Like,
                    lambda each: (
                        torch.empty_like(given[each.number])
                        .requires_grad_(trained and differentiable(given[each.number]))
                        .clone()
                    ),
                    gives,
                )
                noted(module, hollow, named, out)
            kept = kept_by(module)
            self.flow.changing.setdefault(name, set()).update(
                each
                for each, value in kept.items()
                if each not in before or not same(before[each], value)
            )
        for tensor in tensors_in((args, kwargs)):
            self.use(tensor, self.part)
        place = next(self.places)
        found = [(tensor, (place, number)) for number, tensor in enumerate(tensors_in(out))]
        for tensor, each in found:
            self.make(tensor, each)
        with self.unwatched():
            gave = self.fresh(out)  # which what follows does not change
            # a hook may write
            self.writes = self.writes or any(each._forward_hooks for each in module.modules())
        self.stand_ins.append(
            StandIn(
                name,
                gave,
                list(zip(tensors_in(gave), (each for _, each in found), strict=True)),
                kept,
            )
        )
        return out

    def fresh(self, tree: Any) -> Any:
        """The same tensors without values, of no graph; of one tensor one, whoever gives it (a
        dropout that does nothing).
        """

        def copy(tensor: Tensor) -> Tensor:
            if tensor not in self.copies or self.copies[tensor].shape != tensor.shape:
                self.copies[tensor] = tensor.detach().requires_grad_(tensor.requires_grad)
            return self.copies[tensor]  # type: ignore[no-any-return]

        return anew(tree, copy)


def nested(module: nn.Module, call: Any) -> bool:
    """Is it an encoder of torch's that would make nested tensors of what is padded, but while
    its layers are watched?
    """
    if not isinstance(module, nn.TransformerEncoder) or module.training or torch.is_grad_enabled():
        return False
    given = dict(zip(("mask", "src_key_padding_mask"), call.args[2:], strict=False)) | call.keywords
    padded = given.get("src_key_padding_mask")
    if (
        not module.use_nested_tensor
        or given.get("mask") is not None
        or not isinstance(padded, Tensor)
        or isinstance(padded, FakeTensor)
        or padded.dim() != 2
        or not torch.backends.mha.get_fastpath_enabled()
    ):
        return False
    padded = padded != 0  # of floats -inf
    # at the end of every sample
    return bool(padded.any()) and not bool((padded[:, :-1] & ~padded[:, 1:]).any())


def anew(tree: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    """The same in containers of their own, with copies of tensors."""
    if isinstance(tree, Tensor):
        return copy(tree)
    try:
        return tree_map_only(Tensor, copy, tree)
    # a tuple that looks at what it holds, such as a PackedSequence
    except Exception:
        return tree
