"""The flow of a forward through parts of a model: what crosses each cut, and the forward of one part alone.

The model's own Python runs on every rank, unmodified, up to the end of the rank's part. Between the calls of some modules, the
*units*, its operations are watched: each belongs to the part in which it is reached, and a unit that another rank holds is not
run; its outputs are tensors without values (torch's FakeTensors), which go through the operations in between and stand for what
comes from that rank where this one's part begins. What is made of the inputs alone (a mask, positions) every rank makes itself.

A plan says what crosses: one forward without values, made anew for inputs of other shapes. Of a Sequential all this is known
(`straight.py`).
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only

from paragrad.datasets.loading import copied
from paragrad.errors import StepFailed, told
from paragrad.techniques.model_parallel.entering import entered
from paragrad.techniques.model_parallel.plan import ANOTHER_WAY, HIDDEN, Crossing, Plan
from paragrad.techniques.model_parallel.straight import straight, through
from paragrad.techniques.model_parallel.tape import Tape
from paragrad.techniques.model_parallel.watch import InUnits, Place, Running, Unit, noted, tensors_in, tensors_within
from paragrad.techniques.untouched import differentiable, set_values

SHAPES, WAYS = 64, 4            # of inputs, and ways through the model for one, of which plans are kept


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
    """What a forward does to buffers is undone: to their values, and where it puts others in their place (`self.seen += 1`)."""
    before = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, buffers in before:
            if any(module._buffers.get(name) is not buffer for name, buffer in buffers.items()):
                module._buffers.update(buffers)
        for buffer, value in values:
            set_values(buffer, value)


@dataclass(frozen=True)
class Like:
    """Stands for a tensor of the shape and type of one that a module is called with: of that number."""
    number: int


Standing = Mapping[str, Any]            # what modules give, by name, tensors as Like


class Unplanned(StepFailed):
    """A forward without values failed. module: in which one, the innermost."""
    module: nn.Module | None = None


class Ended(BaseException):
    """This rank's part is over: the rest of the model's Python is not its own."""


class Flow(InUnits):
    """A model's forward in parts. standing: what those units give of which nobody knows it without values."""

    def __init__(self, model: nn.Module, parts: Sequence[Sequence[Unit]], standing: Standing | None = None) -> None:
        super().__init__(model, parts)
        self.standing = standing or {}
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.plans: dict[Any, list[Plan]] = {}
        self.whole = True                   # the model has all its values

    def emptied(self, tensor: Tensor) -> Tensor:
        """The same without values; whole numbers, which Python may look at, keep those that they have now."""
        if not differentiable(tensor):
            return tensor.clone()
        made = self.fake.from_tensor(tensor.detach())
        self.whole = False
        return made.requires_grad_() if tensor.requires_grad else made

    def planned(self, inputs: Any) -> Plan:
        """What crosses where, for inputs such as these."""
        leaves, spec = tree_flatten(inputs)
        key = (str(spec), self.model.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), *(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves),
            *((name, tuple(each.shape)) for name, each in self.model.named_buffers()))
        known = self.plans.pop(key, [])
        found = next((plan for plan in known if plan.tape.same(inputs)), None) or self._plan(inputs)
        self.plans[key] = [found, *(plan for plan in known if plan is not found)][:WAYS]
        if len(self.plans) > SHAPES:
            del self.plans[next(iter(self.plans))]          # of what came longest ago
        return found

    def _plan(self, inputs: Any) -> Plan:
        inputs = copied(inputs)
        before = [(each, each._version) for each in tensors_in(inputs)]
        running = Planning(self, inputs)
        with unchanged(self.model), silent():
            try:
                out = running.run(inputs)
            except StepFailed:
                raise
            except Exception as error:
                failed = Unplanned(f"a forward without values, by which every rank knows what the others' modules give, raised "
                                   f"{told(error)}; let Python look at values of the inputs alone, and modules at none that "
                                   "decide a shape, or train it without cutting it")
                failed.module = running.failed
                raise failed from error
        for tensor in tensors_in(out):
            running.use(tensor, self.last)
        plan, chain = running.plan(), None
        if isinstance(inputs, Tensor):
            chain = straight(self.model, self.parts, [out for _, out, _ in plan.stand_ins])
        return replace(plan, changes=any(each._version != version for each, version in before), straight=chain)

    def tried(self, inputs: Any) -> None:
        """Every part of the whole model, one after another, as ranks will run them; what it does to buffers is undone. Raises
        StepFailed where a part gets from another one what does not cross."""
        received, out = list[Tensor](), None
        for part in range(self.last + 1):
            plan = self._plan(inputs)               # anew: what modules keep in attributes has no values then
            try:
                with unchanged(self.model), silent():
                    received, out = self.run(copied(inputs), part, plan, entered(received)[0])
            except StepFailed:
                raise
            except Exception as error:
                raise StepFailed(f"part {part} of the model, run by itself, raised {told(error)}; train it without cutting "
                                 "it") from error
            if any(isinstance(each, FakeTensor) for each in tensors_within([received, out])):
                raise StepFailed(HIDDEN)

    def run(self, inputs: Any, part: int, plan: Plan, received: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """(what crosses the end of the part, the model's output where it is the last)."""
        if plan.straight is not None:
            given, shape = received[0] if part else inputs, plan.crossing[part][0].shape if part < self.last else None
            made = through(plan.straight[part], given, shape)
            return ([], made) if shape is None else ([made], None)
        running = OfPart(self, part, plan, received)
        out = None
        with contextlib.suppress(Ended):
            out = running.with_values(running.run(inputs))
        return [running.sent(each) for each in (plan.crossing[part] if part < self.last else [])], out


class Planning(Running):
    """Nothing has a value; noted is which part makes and which ones use what."""

    flow: Flow

    def __init__(self, flow: Flow, inputs: Any) -> None:
        super().__init__(flow)
        self.crossing: list[dict[Place, Crossing]] = [{} for _ in range(flow.last)]
        self.stand_ins: list[tuple[str, Any, list[tuple[Tensor, Place]]]] = []
        self.tape = Tape(inputs)
        self.failed: nn.Module | None = None            # the first module that raised

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
        """The same without values. Raises StepFailed, while the model is whole, of what nobody was seen to make."""
        if self.flow.whole and any(isinstance(each, FakeTensor) and each not in self.made for each in tensors_in(tree)):
            raise StepFailed(HIDDEN)
        return tree_map_only(
            Tensor, lambda each: each if isinstance(each, FakeTensor) else self.flow.fake.from_tensor(each), tree)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*self.faked(args), **self.faked(kwargs))
        if tensors_in(out) or getattr(func, "__name__", "") == "__setitem__":
            for tensor in tensors_in((args, kwargs)):
                self.use(tensor, self.part)
        return out

    def around(self, module: nn.Module, call: Any) -> Any:
        try:
            return call()
        except Exception:
            self.failed = self.failed or module
            raise

    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begins(name)
        with self.unwatched():
            hollow, named = self.faked(args), self.faked(kwargs)
            if (gives := self.flow.standing.get(name)) is None:
                out = self.around(self.flow.model.get_submodule(name), lambda: call(*hollow, **named))
            else:
                given, trained = tensors_in((hollow, named)), torch.is_grad_enabled()
                out = tree_map_only(Like, lambda each: torch.empty_like(given[each.number]).requires_grad_(
                    trained and differentiable(given[each.number])), gives)
                noted(self.flow.model.get_submodule(name), hollow, named, out)
        for tensor in tensors_in((args, kwargs)):
            self.use(tensor, self.part)
        place = next(self.places)
        found = [(tensor, (place, number)) for number, tensor in enumerate(tensors_in(out))]
        for tensor, each in found:
            self.make(tensor, each)
        self.stand_ins.append((name, out, found))
        return out


NOWHERE = (-1, -1), 1 << 30         # the place and part of what was not made between units


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
        if type(tree) is tuple and all(type(each) is Tensor or isinstance(each, FakeTensor) for each in tree):
            return tuple(map(self.valued, tree))        # quicker, and what most modules are given
        return tree if isinstance(tree, dict) and not tree else tree_map_only(Tensor, self.valued, tree)

    def valued(self, tensor: Tensor) -> Tensor:
        place, part = self.made.get(tensor, NOWHERE)
        return self.kept.get(place, tensor) if part < self.mine else tensor     # of what does not cross Python wants the shape

    def sent(self, crossing: Crossing) -> Tensor:
        """What crosses the end of the part. Raises StepFailed where another way was gone than was planned."""
        made = self.kept.get(crossing.place)
        if made is None or isinstance(made, FakeTensor) or (tuple(made.shape), made.dtype) != (crossing.shape, crossing.dtype):
            raise StepFailed(ANOTHER_WAY)
        return made

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
        planned, out, found = self.plan.stand_ins[number] if number < len(self.plan.stand_ins) else ("", None, [])
        if name != planned:
            raise StepFailed(ANOTHER_WAY, tensor=name)
        if self.part < self.mine:
            next(self.places)
            for tensor, place in found:
                self.make(tensor, place)
            with self.unwatched():
                noted(self.flow.model.get_submodule(name), args, kwargs, out)
            return out
        args, kwargs = self.with_values(args), self.with_values(kwargs)
        with self.unwatched():
            out = call(*args, **kwargs)
            same = [each.shape for each in tensors_in(out)] == [each.shape for each, _ in found]
        if not same:
            raise StepFailed(f"{name} gave tensors of other shapes than without values, or than it was called with; let "
                             "modules look at no values that decide a shape, or train it without cutting it")
        made = next(self.places)
        for each, tensor in enumerate(tensors_in(out)):
            self.make(tensor, (made, each))
        return out
