"""The flow of a forward through parts of a model: what crosses each cut, and the forward of one part alone.

The model's own Python runs on every rank, unmodified, up to the end of the rank's part. Between the calls of some modules, the
*units*, its operations are watched: each belongs to the part in which it is reached, and a unit that another rank holds is not
run; its outputs are tensors without values (torch's FakeTensors), which go through the operations in between and stand for what
comes from that rank where this one's part begins. What is made of the inputs alone (a mask, positions) every rank makes itself.

A plan says what crosses: one forward without values, made anew for inputs of other shapes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from paragrad.datasets.loading import called
from paragrad.errors import StepFailed

Place = tuple[int, int]                 # which operation or unit of a forward made a value, and which of its outputs it is
READS = {"item", "__bool__", "__int__", "__float__", "__index__", "tolist", "numpy", "__contains__"}      # look at values
PLAIN = nn.Module.__call__


@dataclass(frozen=True)
class Crossing:
    """A tensor that goes from one part to the next. grad: its gradient comes back."""
    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


@dataclass
class Plan:
    """Of inputs of some shapes. crossing: at the end of each part;  stand_ins: outputs of each call of a unit, without values,
    and their places;  steady: it depends on shapes alone."""
    crossing: list[list[Crossing]]
    stand_ins: list[tuple[Any, list[tuple[Tensor, Place]]]] = field(default_factory=list)
    steady: bool = True


class Ended(BaseException):
    """This rank's part is over: the rest of the model's Python is not its own."""


class Flow:
    """A model's forward in parts. units: names of modules that are called as a whole;  cuts: (unit, which of its calls) with
    which each part but the first begins."""

    def __init__(self, model: nn.Module, units: Sequence[str], cuts: Sequence[tuple[str, int]]) -> None:
        self.model, self.cuts = model, list(cuts)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.plans: dict[Any, Plan] = {}
        self.starts = {cut: part for part, cut in enumerate(self.cuts, 1)}
        self.units = {model.get_submodule(name): name for name in units}

    def hollow(self, tensor: Tensor) -> Tensor:
        """The same without values."""
        made = self.fake.from_tensor(tensor.detach())
        return made.requires_grad_() if tensor.requires_grad else made

    def planned(self, inputs: Any) -> Plan:
        """What crosses where, for inputs such as these."""
        leaves, spec = tree_flatten(inputs)
        key = (str(spec), self.model.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), *(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves))
        if key not in self.plans:
            running = Planning(self)
            out = running.run(inputs)
            for tensor in tensors_in(out):
                running.use(tensor, len(self.cuts))
            plan = running.plan()
            if not plan.steady:
                return plan
            self.plans[key] = plan
        return self.plans[key]

    def run(self, inputs: Any, part: int, plan: Plan, received: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """(what crosses the end of the part, the model's output where it is the last)."""
        running = Part(self, part, plan, received)
        try:
            out = running.run(inputs)
        except Ended:
            out = None
        else:
            if part < len(self.cuts):
                raise StepFailed("the forward ended before its next part began")
            out = running.with_values(out)
        sends = plan.crossing[part] if part < len(self.cuts) else []
        return [running.kept[each.place] for each in sends], out


@contextlib.contextmanager
def calls_watched(call: Callable[..., Any]) -> Iterator[None]:
    """call(plain, module, *arguments) is asked for every call of a module."""
    plain = nn.Module.__call__
    nn.Module.__call__ = lambda module, *args, **kwargs: call(plain, module, *args, **kwargs)   # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain          # type: ignore[method-assign]


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


class Running(TorchFunctionMode):
    """One forward, watched between its units."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow, self.part, self.places, self.calls = flow, 0, itertools.count(), itertools.count()
        self.made: Any = WeakIdKeyDictionary()           # tensor -> (place, part)
        self.held = {id(each) for each in itertools.chain(flow.model.parameters(), flow.model.buffers())}
        self.counted: dict[str, int] = {}

    def run(self, inputs: Any) -> Any:
        with self.watched():
            return called(self.flow.model, inputs)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Operations come to `operation`, and calls of units to `unit`."""
        def call(plain: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self.flow.units.get(module)
            if name is None:
                return plain(module, *args, **kwargs)
            return self.unit(name, functools.partial(plain, module), args, kwargs)
        with calls_watched(call), self:
            yield

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside of a unit."""
        ours, nn.Module.__call__ = nn.Module.__call__, PLAIN            # type: ignore[method-assign]
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()
            nn.Module.__call__ = ours           # type: ignore[method-assign]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        name = getattr(func, "__name__", "")
        if not any(each in self.made or id(each) in self.held or isinstance(each, FakeTensor) for each in tensors):
            if name in READS and tensors:
                self.read()
            return func(*args, **kwargs)
        out = self.operation(func, args, kwargs)
        found = tensors_in(out)
        if name == "__setitem__":
            found = [args[0]]
        if found:
            place = next(self.places)
            for number, tensor in enumerate(found):
                self.make(tensor, (place, number))
        return out

    def make(self, tensor: Tensor, place: Place) -> None:
        self.made[tensor] = place, self.part

    def read(self) -> None:
        """Python has looked at a value of the inputs: another batch may go another way."""

    def begins(self, name: str) -> None:
        """A unit is called: the next part may begin with it."""
        number = self.counted[name] = self.counted.get(name, -1) + 1
        self.part = self.flow.starts.get((name, number), self.part)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any: ...
    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any: ...


class Planning(Running):
    """Nothing has a value; noted is which part makes and which ones use what."""

    def __init__(self, flow: Flow) -> None:
        super().__init__(flow)
        self.crossing: list[dict[Place, Crossing]] = [{} for _ in flow.cuts]
        self.stand_ins: list[tuple[Any, list[tuple[Tensor, Place]]]] = []
        self.steady = True

    def plan(self) -> Plan:
        return Plan([sorted(each.values(), key=lambda crossing: crossing.place) for each in self.crossing], self.stand_ins,
                    self.steady)

    def read(self) -> None:
        self.steady = False

    def use(self, tensor: Tensor, part: int) -> None:
        if tensor in self.made:
            place, made = self.made[tensor]
            for cut in range(made, part):
                self.crossing[cut][place] = Crossing(place, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def faked(self, tree: Any) -> Any:
        """The same without values."""
        return tree_map_only(
            Tensor, lambda each: each if isinstance(each, FakeTensor) else self.flow.fake.from_tensor(each), tree)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self.flow.fake:
            out = func(*self.faked(args), **self.faked(kwargs))
        if tensors_in(out) or getattr(func, "__name__", "") == "__setitem__":
            for tensor in tensors_in((args, kwargs)):
                self.use(tensor, self.part)
        return out

    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begins(name)
        with self.unwatched(), self.flow.fake:
            out = call(*self.faked(args), **self.faked(kwargs))
        for tensor in tensors_in((args, kwargs)):
            self.use(tensor, self.part)
        place = next(self.places)
        found = [(tensor, (place, number)) for number, tensor in enumerate(tensors_in(out))]
        for tensor, each in found:
            self.make(tensor, each)
        self.stand_ins.append((out, found))
        return out


class Part(Running):
    """The forward of one part: before it nothing has a value, with the first thing after it all is over."""

    def __init__(self, flow: Flow, mine: int, plan: Plan, received: Sequence[Tensor]) -> None:
        super().__init__(flow)
        self.mine, self.plan = mine, plan
        self.kept: dict[Place, Tensor] = {}
        self.wanted = {each.place for each in plan.crossing[mine]} if mine < len(flow.cuts) else set()
        if mine:
            self.kept = {each.place: tensor for each, tensor in zip(plan.crossing[mine - 1], received, strict=True)}

    def with_values(self, tree: Any) -> Any:
        def valued(tensor: Tensor) -> Tensor:
            if tensor in self.made and self.made[tensor][1] < self.mine:
                return self.kept[self.made[tensor][0]]
            return tensor
        return tree_map_only(Tensor, valued, tree)

    def make(self, tensor: Tensor, place: Place) -> None:
        super().make(tensor, place)
        if place in self.wanted and self.part == self.mine:
            self.kept[place] = tensor

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.part < self.mine:
            name = getattr(func, "__name__", "")
            if name == "__setitem__" and not isinstance(args[0], FakeTensor):
                return None
            return func(*args, **kwargs)
        return func(*self.with_values(args), **self.with_values(kwargs))

    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begins(name)
        number = next(self.calls)
        if self.part > self.mine:
            raise Ended
        if self.part < self.mine:
            next(self.places)
            out, found = self.plan.stand_ins[number]
            for tensor, place in found:
                self.make(tensor, place)
            return out
        args, kwargs = self.with_values(args), self.with_values(kwargs)
        with self.unwatched():
            out = call(*args, **kwargs)
        place = next(self.places)
        for each, tensor in enumerate(tensors_in(out)):
            self.make(tensor, (place, each))
        return out


def entered(tree: Any) -> tuple[Any, list[Tensor | None]]:
    """(the same tensors as if they had been made here, their gradients once backward has come to them)."""
    gradients: list[Tensor | None] = []
    leaves, spec = tree_flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if places:
        anchor = torch.zeros(0, requires_grad=True)
        for place, tensor in zip(places, Entered.apply(anchor, gradients, *(leaves[place] for place in places)), strict=True):
            leaves[place] = tensor
    return tree_unflatten(leaves, spec), gradients


class Entered(torch.autograd.Function):
    """What came from the part before, as if it had been made here: it may be changed in place, and its gradient is kept."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, into: list[Tensor | None], *received: Tensor) -> tuple[Tensor, ...]:
        ctx.into = into
        ctx.set_materialize_grads(False)
        entered = tuple(each.detach() for each in received)
        ctx.mark_non_differentiable(*(each for each in entered if not each.is_floating_point()))
        return entered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.into[:] = gradients
        return (None, None, *(None for _ in gradients))
