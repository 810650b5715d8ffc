"""The flow of a forward through parts of a model: what crosses each cut, and the forward of one
part alone.

The model's own Python runs on every rank, unmodified, up to the end of the rank's part. Between
the calls of some modules, the *units*, its operations are watched: each belongs to the part in
which it is reached, and a unit that another rank holds is not run; its outputs are tensors
without values (torch's FakeTensors), which go through the operations in between and stand for
what comes from that rank where this one's part begins. What is made of the inputs alone (a
mask, positions) every rank makes itself.

A plan says what crosses: one forward without values, made anew for inputs of other shapes. Of a
Sequential all this is known (`straight.py`).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from paragrad.datasets.loading import called, copied
from paragrad.engine.probe import evaluating
from paragrad.engine.rng.draws import Recording
from paragrad.engine.rng.random_kernels import drawing
from paragrad.engine.state.preserve_state import unchanged
from paragrad.engine.state.values import differentiable
from paragrad.errors import StepFailed, told
from paragrad.parallel.sharding.sharded_tensor import whole
from paragrad.parallel.tracing.crossing_plan import ANOTHER_WAY, HIDDEN, Crossing, Plan, StandIn
from paragrad.parallel.tracing.plan_builder import Hollow, Planning, Standing, anew
from paragrad.parallel.tracing.receive_boundary import entered
from paragrad.parallel.tracing.sequential_stage import straight, through
from paragrad.parallel.tracing.tracer import Place, Running, Unit, noted, tensors_in, tensors_within
from paragrad.runtime.generators import generators_kept

# of inputs, and ways through the model for one, of which plans are kept
SHAPES = 64
WAYS = 4


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """What torch has to say where there are no values: that tensors which are no leaves are
    copied, and of every error.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        log.disabled = before


class Unplanned(StepFailed):
    """A forward without values failed. module: in which one, the innermost."""

    module: nn.Module | None = None


class Ended(BaseException):
    """This rank's part is over: the rest of the model's Python is not its own."""


def close(one: Tensor, other: Tensor) -> bool:
    """The same, but for rounding."""
    if one.shape != other.shape or one.dtype != other.dtype or not differentiable(one):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    # not what a mask filled
    bound = min(1e-2, 1e4 * torch.finfo(one.dtype).eps)
    unlike = one.isfinite() & (one != other)
    most = float(one[unlike].abs().max()) if unlike.any() else 0.0
    return torch.allclose(one, other, rtol=bound, atol=bound * most, equal_nan=True)


class Flow(Hollow):
    """A model's forward in parts. mine: those that are run here."""

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Sequence[Unit]],
        standing: Standing | None = None,
        mine: Collection[int] = (),
    ) -> None:
        super().__init__(model, parts, standing)
        self.mine = mine
        self.plans: dict[Any, list[Plan]] = {}

    def emptied(self, module: nn.Module, name: str, tensor: Tensor) -> Tensor:
        """What stands for a parameter or buffer of a module: the same without values; whole
        numbers, which Python may look at, keep those that they have now.
        """
        self.elsewhere.append((module, name))
        if not differentiable(tensor):
            return tensor.clone()
        made = self.fake.from_tensor(tensor.detach())
        self.whole = False
        return made.requires_grad_() if tensor.requires_grad else made

    def planned(self, inputs: Any) -> Plan:
        """What crosses where, for inputs such as these."""
        leaves, spec = tree_flatten(inputs)
        key = (
            str(spec),
            self.model.training,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            *(
                (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
                for leaf in leaves
            ),
            *((name, tuple(each.shape)) for name, each in self.model.named_buffers()),
        )
        known = self.plans.pop(key, [])
        found = next((plan for plan in known if plan.tape.same(inputs)), None) or self._plan(inputs)
        self.plans[key] = [found, *(plan for plan in known if plan is not found)][:WAYS]
        if len(self.plans) > SHAPES:
            del self.plans[next(iter(self.plans))]  # of what came longest ago
        return found

    def _plan(self, inputs: Any) -> Plan:
        inputs = copied(inputs)
        before = [(each, each._version) for each in tensors_in(inputs)]
        running = Planning(self, inputs)
        with unchanged(self.model, self.others()), silent():
            try:
                out = running.run(inputs)
            except StepFailed:
                raise
            except Exception as error:
                failed = Unplanned(
                    f"a forward without values, by which every rank knows what the others' modules "
                    f"give, raised "
                    f"{told(error)}; let Python look at values of the inputs alone, and modules at "
                    f"none that "
                    "decide a shape, or train it without cutting it"
                )
                failed.module = running.failed
                raise failed from error
        for tensor in tensors_in(out):
            running.use(tensor, self.last)
        plan = running.plan()
        chain = None
        if isinstance(inputs, Tensor):
            chain = straight(self.model, self.parts, [each.out for each in plan.stand_ins])
        return replace(
            plan, changes=any(each._version != version for each, version in before), straight=chain
        )

    def others(self) -> set[nn.Module]:
        """Modules of other parts alone: what they keep has no values here, by which it is seen
        where something reads it.
        """
        own = {name for (name, _), part in self.part_of.items() if part in self.mine}
        run = {
            each for module, name in self.units.items() if name in own for each in module.modules()
        }
        return {
            each
            for module, name in self.units.items()
            if name not in own
            for each in module.modules()
        } - run

    def keep(self, planned: StandIn) -> None:
        """What a call of another part's unit leaves in Python attributes."""
        if changing := self.changing.get(planned.name, set()) & planned.kept.keys():
            others = self.others()
            for module, attribute in changing:
                if module in others:
                    # a list may be appended to, and the plan's stays
                    value = planned.kept[module, attribute]
                    vars(module)[attribute] = (
                        value if isinstance(value, Tensor) else copy.copy(value)
                    )

    def tried(self, inputs: Any) -> Any:
        """The output of every part of the whole model, one after another, as ranks will run
        them; what it changes is undone. Raises StepFailed where a part gets from another one
        what does not cross.
        """
        received = list[Tensor]()
        out = None
        for part in range(self.last + 1):
            try:
                with unchanged(self.model), silent():
                    self.mine = [part]
                    # anew: what modules keep in attributes has no values then
                    plan = self._plan(inputs)
                    wants = [each.grad for each in plan.crossing[part - 1]] if part else []
                    received, out = self.run(
                        copied(inputs),
                        part,
                        plan,
                        entered([each.clone() for each in received], wants)[0],
                    )
            except StepFailed:
                raise
            except Exception as error:
                raise StepFailed(
                    f"part {part} of the model, run by itself, raised {told(error)}; train it "
                    f"without cutting "
                    "it"
                ) from error
            if any(isinstance(each, FakeTensor) for each in tensors_within([received, out])):
                raise StepFailed(HIDDEN)
        return out

    def tried_in_test(self, inputs: Any) -> None:
        """The same in eval mode without gradients, in which modules may take other ways. Raises
        StepFailed also where the output is not that of the whole model; where that fails, or
        draws, nothing is known.
        """
        with evaluating(self.model), torch.no_grad():
            try:
                with unchanged(self.model), generators_kept():
                    whole, again = (
                        tensors_in(called(self.model, copied(inputs))) for _ in range(2)
                    )
            except Exception:
                return
            if not all(map(close, whole, again)):
                return
            out = tensors_in(self.tried(inputs))
        if len(out) != len(whole) or not all(map(close, whole, out)):
            raise StepFailed(
                "in eval mode the model gives another output in parts than whole; let modules do "
                "the same however "
                "they are called, or train it without cutting it"
            )

    def run(
        self, inputs: Any, part: int, plan: Plan, received: Sequence[Tensor]
    ) -> tuple[list[Tensor], Any]:
        """(what crosses the end of the part, the model's output where it is the last)."""
        if plan.straight is not None:
            for each in plan.stand_ins if any(self.changing.values()) else ():
                self.keep(each)
            crossing = plan.crossing[part][0] if part < self.last else None
            made = through(
                plan.straight[part],
                received[0] if part else inputs,
                (crossing.shape, crossing.dtype) if crossing else None,
            )
            return ([made], None) if crossing else ([], made)
        running = OfPart(self, part, plan, received)
        out = None
        with contextlib.suppress(Ended):
            out = running.with_values(running.run(inputs))
        return [
            running.sent(each) for each in (plan.crossing[part] if part < self.last else [])
        ], out


NOWHERE = (-1, -1), 1 << 30  # the place and part of what was not made between units


class OfPart(Running):
    """The forward of one part: before it nothing has a value, with the first thing after it all
    is over.
    """

    flow: Flow

    def __init__(self, flow: Flow, mine: int, plan: Plan, received: Sequence[Tensor]) -> None:
        super().__init__(flow)
        self.mine = mine
        self.plan = plan
        self.kept: dict[Place, Tensor] = {}
        # of the plan's stand-ins, where something is written
        self.clones: Any = WeakIdKeyDictionary()
        self.wanted = {each.place for each in plan.crossing[mine]} if mine < flow.last else set()
        if mine:
            self.kept = {
                each.place: tensor
                for each, tensor in zip(plan.crossing[mine - 1], received, strict=True)
            }

    def with_values(self, tree: Any) -> Any:
        if type(tree) is tuple and all(
            type(each) is Tensor or isinstance(each, FakeTensor) for each in tree
        ):
            # quicker, and what most modules are given
            return tuple(map(self.valued, tree))
        return (
            tree
            if isinstance(tree, dict) and not tree
            else tree_map_only(Tensor, self.valued, tree)
        )

    def valued(self, tensor: Tensor) -> Tensor:
        place, part = self.made.get(tensor, NOWHERE)
        # of what does not cross Python wants the shape
        return self.kept.get(place, tensor) if part < self.mine else tensor

    def sent(self, crossing: Crossing) -> Tensor:
        """What crosses the end of the part. Raises StepFailed where another way was gone than
        was planned.
        """
        made = self.kept.get(crossing.place)
        made = None if made is None else whole(made)
        if (
            made is None
            or isinstance(made, FakeTensor)
            or (tuple(made.shape), made.dtype) != (crossing.shape, crossing.dtype)
        ):
            raise StepFailed(ANOTHER_WAY)
        return made

    def make(self, tensor: Tensor, place: Place) -> None:
        mine = self.part == self.mine
        real = self.valued(tensor) if mine else tensor
        if mine and place in self.wanted:
            self.kept[place] = real
        # what came from another part stays that: so its values are found
        if real is tensor:
            super().make(tensor, place)

    def operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        if self.part < self.mine:
            if any(not isinstance(each, FakeTensor) for each in written) and any(
                # into something with values here
                isinstance(each, FakeTensor)
                for each in tensors_in((args, kwargs))
            ):
                return (
                    None
                    if getattr(func, "__name__", "") == "__setitem__"
                    else kwargs.get("out", args[0])
                )
            # of a parameter that this part has too: another part's draw is not made here
            with drawing(Recording()):
                return func(*args, **kwargs)
        args = self.with_values(args)
        kwargs = self.with_values(kwargs)
        # which would be left out where something else has no values
        if written:
            self.with_all((args, kwargs), "an operation between modules")
        return self.with_all(func(*args, **kwargs), "an operation between modules")

    def with_all(self, out: Any, name: str) -> Any:
        """What was made here. Raises StepFailed where something had no values here."""
        if any(isinstance(each, FakeTensor) for each in tensors_in(out)):
            raise StepFailed(
                HIDDEN
                if self.flow.whole
                else f"{name} of this part uses a parameter, a buffer or a value that is on "
                f"another rank, which it did "
                "not when the model was cut; call in the first forward what later ones call, or "
                "train it with "
                "data(n)"
            )
        return out

    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begins(name)
        number = next(self.calls)
        if self.part > self.mine:
            raise Ended
        planned = self.plan.stand_ins[number] if number < len(self.plan.stand_ins) else None
        if planned is None or name != planned.name:
            raise StepFailed(ANOTHER_WAY, tensor=name)
        if self.part < self.mine:
            return self.stand_in(planned, args, kwargs)
        args = self.with_values(args)
        kwargs = self.with_values(kwargs)
        with self.unwatched():
            out = self.with_all(call(*args, **kwargs), name)
            same = [each.shape for each in tensors_in(out)] == [
                each.shape for each, _ in planned.found
            ]
        if not same:
            raise StepFailed(
                f"{name} gave tensors of other shapes than without values, or than it was called "
                f"with; let "
                "modules look at no values that decide a shape, or train it without cutting it"
            )
        made = next(self.places)
        for each, tensor in enumerate(tensors_in(out)):
            self.make(tensor, (made, each))
        return out

    def stand_in(self, planned: StandIn, args: Any, kwargs: Any) -> Any:
        """What another rank's unit gives, as it is without values, and what it then keeps in
        attributes.
        """
        next(self.places)
        # the plan's own stays what it is, its lists and dicts, and what is written to
        with self.unwatched():
            out = anew(planned.out, self.cloned if self.plan.writes else lambda tensor: tensor)
            noted(self.flow.model.get_submodule(planned.name), args, kwargs, out)
        for tensor, (_, place) in zip(tensors_in(out), planned.found, strict=True):
            self.make(tensor, place)
        self.flow.keep(planned)
        return out

    def cloned(self, tensor: Tensor) -> Tensor:
        """Of one tensor one."""
        if tensor not in self.clones:
            self.clones[tensor] = tensor.detach().requires_grad_(tensor.requires_grad).clone()
        return self.clones[tensor]  # type: ignore[no-any-return]
