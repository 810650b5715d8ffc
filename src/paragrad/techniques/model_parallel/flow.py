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
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from paragrad.datasets.loading import called
from paragrad.errors import StepFailed
from paragrad.techniques.untouched import set_values

Place = tuple[int, int]                 # which operation or unit of a forward made a value, and which of its outputs it is
READS = {"item", "__bool__", "__int__", "__float__", "__index__", "tolist", "numpy", "__contains__"}      # look at values
# what is replaced around a forward, and is itself inside of a unit
PLAIN = [(owner, name, getattr(owner, name)) for owner, name in (
    (nn.Module, "__call__"), (checkpoint, "_checkpoint_without_reentrant_generator"), (checkpoint, "CheckpointFunction"))]


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


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """What a forward does to buffers is undone."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            set_values(buffer, value)


class Ended(BaseException):
    """This rank's part is over: the rest of the model's Python is not its own."""


Unit = tuple[str, int]                  # a call of a module: its name, and which of its calls in a forward it is, from 0


class Flow:
    """A model's forward in parts. parts: the units of each, in order; other calls of modules belong to the part in which they
    come."""

    def __init__(self, model: nn.Module, parts: Sequence[Sequence[Unit]]) -> None:
        self.model, self.last = model, len(parts) - 1
        self.part_of = {unit: part for part, units in enumerate(parts) for unit in units}
        self.units = {model.get_submodule(name): name for name, _ in self.part_of}
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.plans: dict[Any, Plan] = {}

    def hollow(self, tensor: Tensor) -> Tensor:
        """The same without values; whole numbers, which Python may look at, keep those that they have now."""
        if not tensor.is_floating_point():
            return tensor.clone()
        made = self.fake.from_tensor(tensor.detach())
        return made.requires_grad_() if tensor.requires_grad else made

    def planned(self, inputs: Any) -> Plan:
        """What crosses where, for inputs such as these."""
        leaves, spec = tree_flatten(inputs)
        key = (str(spec), self.model.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), *(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves))
        if key not in self.plans:
            running = Planning(self)
            with unchanged(self.model), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)        # that tensors which are no leaves are copied without values
                out = running.run(inputs)
            for tensor in tensors_in(out):
                running.use(tensor, self.last)
            plan = running.plan()
            if not plan.steady:
                return plan
            self.plans[key] = plan
        return self.plans[key]

    def run(self, inputs: Any, part: int, plan: Plan, received: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """(what crosses the end of the part, the model's output where it is the last)."""
        running = Part(self, part, plan, received)
        out = None
        with contextlib.suppress(Ended):
            out = running.with_values(running.run(inputs))
        sends = plan.crossing[part] if part < self.last else []
        return [running.kept[each.place] for each in sends], out


@contextlib.contextmanager
def uncheckpointed() -> Iterator[None]:
    """What a model checkpoints by itself (torch.utils.checkpoint) is kept: what is computed again comes with values alone."""
    names = "_checkpoint_without_reentrant_generator", "CheckpointFunction"
    before = {name: getattr(checkpoint, name) for name in names}
    checkpoint._checkpoint_without_reentrant_generator = _kept                      # type: ignore[assignment]
    checkpoint.CheckpointFunction = _Kept                                           # type: ignore[misc]
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(checkpoint, name, value)


def _kept(*_: Any, **__: Any) -> Iterator[None]:
    yield


class _Kept:
    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


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
        with calls_watched(call), uncheckpointed(), self:
            yield

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside of a unit."""
        ours = [(owner, name, getattr(owner, name)) for owner, name, _ in PLAIN]
        self.__exit__(None, None, None)
        for owner, name, plain in PLAIN:
            setattr(owner, name, plain)
        try:
            yield
        finally:
            for owner, name, value in ours:
                setattr(owner, name, value)
            self.__enter__()

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
        """A unit is called: a part may begin with it."""
        number = self.counted[name] = self.counted.get(name, -1) + 1
        part = self.flow.part_of.get((name, number), self.part)
        if part < self.part:
            raise StepFailed(f"{name} comes after modules that it came before when the model was cut; a part is what follows "
                             "one another in every forward")
        self.part = part

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any: ...
    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any: ...


class Planning(Running):
    """Nothing has a value; noted is which part makes and which ones use what."""

    def __init__(self, flow: Flow) -> None:
        super().__init__(flow)
        self.crossing: list[dict[Place, Crossing]] = [{} for _ in range(flow.last)]
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
        out = func(*self.faked(args), **self.faked(kwargs))
        if tensors_in(out) or getattr(func, "__name__", "") == "__setitem__":
            for tensor in tensors_in((args, kwargs)):
                self.use(tensor, self.part)
        return out

    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begins(name)
        with self.unwatched():
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
        self.wanted = {each.place for each in plan.crossing[mine]} if mine < flow.last else set()
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
        made = next(self.places)
        for each, tensor in enumerate(tensors_in(out)):
            self.make(tensor, (made, each))
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
