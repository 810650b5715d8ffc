"""The flow of a forward through parts of a model: what crosses each cut, and the forward of one part alone.

The model's own Python runs on every rank, unmodified, up to the end of the rank's part. Between the calls of some modules, the
*units*, its operations are watched: each belongs to the part in which it is reached, and a unit that another rank holds is not
run; its outputs are tensors without values (torch's FakeTensors), which go through the operations in between and stand for what
comes from that rank where this one's part begins. What is made of the inputs alone (a mask, positions) every rank makes itself.

A plan says what crosses: one forward without values, made anew for inputs of other shapes.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from paragrad.errors import StepFailed, told
from paragrad.techniques.model_parallel.tape import Tape
from paragrad.techniques.model_parallel.watch import InUnits, Place, Running, Unit, tensors_in
from paragrad.techniques.untouched import set_values

SHAPES, WAYS = 64, 4            # of inputs, and ways through the model for one, of which plans are kept


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
    and their places;  tape: by which inputs of these shapes are known to go the same way."""
    crossing: list[list[Crossing]]
    stand_ins: list[tuple[Any, list[tuple[Tensor, Place]]]]
    tape: Tape


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """What torch has to say where there are no values: that tensors which are no leaves are copied, and of every error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        log.disabled = before


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


class Flow(InUnits):
    """A model's forward in parts."""

    def __init__(self, model: nn.Module, parts: Sequence[Sequence[Unit]]) -> None:
        super().__init__(model, parts)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.plans: dict[Any, list[Plan]] = {}

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
        known = self.plans.pop(key, [])
        found = next((plan for plan in known if plan.tape.same(inputs)), None) or self._plan(inputs)
        self.plans[key] = [found, *(plan for plan in known if plan is not found)][:WAYS]
        if len(self.plans) > SHAPES:
            del self.plans[next(iter(self.plans))]          # of what came longest ago
        return found

    def _plan(self, inputs: Any) -> Plan:
        running = Planning(self, inputs)
        with unchanged(self.model), silent():
            try:
                out = running.run(inputs)
            except StepFailed:
                raise
            except Exception as error:
                raise StepFailed(f"a forward without values, by which every rank knows what the others' modules give, raised "
                                 f"{told(error)}; let Python look at values of the inputs alone, and modules at none that "
                                 "decide a shape, or train it without cutting it") from error
        for tensor in tensors_in(out):
            running.use(tensor, self.last)
        return running.plan()

    def run(self, inputs: Any, part: int, plan: Plan, received: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """(what crosses the end of the part, the model's output where it is the last)."""
        running = OfPart(self, part, plan, received)
        out = None
        with contextlib.suppress(Ended):
            out = running.with_values(running.run(inputs))
        sends = plan.crossing[part] if part < self.last else []
        return [running.kept[each.place] for each in sends], out


class Planning(Running):
    """Nothing has a value; noted is which part makes and which ones use what."""

    flow: Flow

    def __init__(self, flow: Flow, inputs: Any) -> None:
        super().__init__(flow)
        self.crossing: list[dict[Place, Crossing]] = [{} for _ in range(flow.last)]
        self.stand_ins: list[tuple[Any, list[tuple[Tensor, Place]]]] = []
        self.tape = Tape(inputs)

    def plan(self) -> Plan:
        return Plan([sorted(each.values(), key=lambda crossing: crossing.place) for each in self.crossing], self.stand_ins,
                    self.tape.cut())

    def of_inputs(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.tape.note(func, args, kwargs, out)

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


class OfPart(Running):
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
                return self.kept.get(self.made[tensor][0], tensor)      # of what does not cross Python wants the shape alone
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
        made = Entered.apply(torch.zeros(0, requires_grad=True), gradients, *(leaves[place].detach() for place in places))
        for place, tensor in zip(places, made, strict=True):
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
