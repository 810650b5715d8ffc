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

from paragrad.datasets.loading import call_model, clone_batch
from paragrad.engine.probe import use_model_eval_mode
from paragrad.engine.rng.draws import DrawRecorder
from paragrad.engine.rng.random_kernels import use_draw_source
from paragrad.engine.state.preserve_state import undo_forward_effects
from paragrad.engine.state.values import is_differentiable
from paragrad.errors import StepFailed, describe_error
from paragrad.parallel.sharding.sharded_tensor import gather_whole
from paragrad.parallel.tracing.crossing_plan import (
    DIFFERENT_PATH,
    HIDDEN_TENSOR,
    Crossing,
    CrossingPlan,
    StandIn,
)
from paragrad.parallel.tracing.plan_builder import (
    FixedOutputs,
    PlanRecorder,
    ValuelessModel,
    copy_containers,
)
from paragrad.parallel.tracing.receive_boundary import attach_received
from paragrad.parallel.tracing.sequential_stage import find_sequential_stages, run_modules
from paragrad.parallel.tracing.tracer import (
    TracedForward,
    Unit,
    ValueId,
    call_forward_hooks,
    find_attribute_tensors,
    find_tensors,
)
from paragrad.runtime.generators import keep_generators

# of inputs, and ways through the model for one, of which plans are kept
MAX_INPUT_SHAPES = 64
MAX_PATHS = 4


@contextlib.contextmanager
def silence_fake_tensors() -> Iterator[None]:
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


class PlanFailed(StepFailed):
    """A forward without values failed. module: in which one, the innermost."""

    module: nn.Module | None = None


class StageEnded(BaseException):
    """This rank's part is over: the rest of the model's Python is not its own."""


def is_close(one: Tensor, other: Tensor) -> bool:
    """The same, but for rounding."""
    if one.shape != other.shape or one.dtype != other.dtype or not is_differentiable(one):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    # not what a mask filled
    bound = min(1e-2, 1e4 * torch.finfo(one.dtype).eps)
    unlike = one.isfinite() & (one != other)
    most = float(one[unlike].abs().max()) if unlike.any() else 0.0
    return torch.allclose(one, other, rtol=bound, atol=bound * most, equal_nan=True)


class StageForward(ValuelessModel):
    """A model's forward in parts. mine: those that are run here."""

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Sequence[Unit]],
        fixed_outputs: FixedOutputs | None = None,
        own_stages: Collection[int] = (),
    ) -> None:
        super().__init__(model, stages, fixed_outputs)
        self.own_stages = own_stages
        self.plans: dict[Any, list[CrossingPlan]] = {}

    def make_remote_tensor(self, module: nn.Module, name: str, tensor: Tensor) -> Tensor:
        """What stands for a parameter or buffer of a module: the same without values; whole
        numbers, which Python may look at, keep those that they have now.
        """
        self.remote_tensors.append((module, name))
        if not is_differentiable(tensor):
            return tensor.clone()
        made = self.fake_mode.from_tensor(tensor.detach())
        self.has_all_values = False
        return made.requires_grad_() if tensor.requires_grad else made

    def find_plan(self, inputs: Any) -> CrossingPlan:
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
        found = next(
            (plan for plan in known if plan.guards.is_same_path(inputs)), None
        ) or self._make_plan(inputs)
        self.plans[key] = [found, *(plan for plan in known if plan is not found)][:MAX_PATHS]
        if len(self.plans) > MAX_INPUT_SHAPES:
            del self.plans[next(iter(self.plans))]  # of what came longest ago
        return found

    def _make_plan(self, inputs: Any) -> CrossingPlan:
        inputs = clone_batch(inputs)
        before = [(each, each._version) for each in find_tensors(inputs)]
        running = PlanRecorder(self, inputs)
        with undo_forward_effects(self.model, self.find_remote_modules()), silence_fake_tensors():
            try:
                out = running.run_forward(inputs)
            except StepFailed:
                raise
            except Exception as error:
                failed = PlanFailed(
                    f"a forward without values, by which every rank knows what the others' modules "
                    f"give, raised "
                    f"{describe_error(error)}; let Python look at values of the inputs alone, and "
                    f"modules at "
                    f"none that "
                    "decide a shape, or train it without cutting it"
                )
                failed.module = running.failed_module
                raise failed from error
        for tensor in find_tensors(out):
            running.note_use(tensor, self.last_stage)
        plan = running.build_plan()
        chain = None
        if isinstance(inputs, Tensor):
            chain = find_sequential_stages(
                self.model, self.stages, [each.output for each in plan.stand_ins]
            )
        return replace(
            plan,
            changes_inputs=any(each._version != version for each, version in before),
            sequential_stages=chain,
        )

    def find_remote_modules(self) -> set[nn.Module]:
        """Modules of other parts alone: what they keep has no values here, by which it is seen
        where something reads it.
        """
        own = {name for (name, _), part in self.stage_of_unit.items() if part in self.own_stages}
        run = {
            each for module, name in self.units.items() if name in own for each in module.modules()
        }
        return {
            each
            for module, name in self.units.items()
            if name not in own
            for each in module.modules()
        } - run

    def set_remote_attributes(self, stand_in: StandIn) -> None:
        """What a call of another part's unit leaves in Python attributes."""
        if (
            changing := self.changed_attributes.get(stand_in.name, set())
            & stand_in.attributes.keys()
        ):
            others = self.find_remote_modules()
            for module, attribute in changing:
                if module in others:
                    # a list may be appended to, and the plan's stays
                    value = stand_in.attributes[module, attribute]
                    vars(module)[attribute] = (
                        value if isinstance(value, Tensor) else copy.copy(value)
                    )

    def try_all_stages(self, inputs: Any) -> Any:
        """The output of every part of the whole model, one after another, as ranks will run
        them; what it changes is undone. Raises StepFailed where a part gets from another one
        what does not cross.
        """
        received = list[Tensor]()
        out = None
        for part in range(self.last_stage + 1):
            try:
                with undo_forward_effects(self.model), silence_fake_tensors():
                    self.own_stages = [part]
                    # anew: what modules keep in attributes has no values then
                    plan = self._make_plan(inputs)
                    wants = [each.has_gradient for each in plan.crossing[part - 1]] if part else []
                    received, out = self.run_stage(
                        clone_batch(inputs),
                        part,
                        plan,
                        attach_received([each.clone() for each in received], wants)[0],
                    )
            except StepFailed:
                raise
            except Exception as error:
                raise StepFailed(
                    f"part {part} of the model, run by itself, raised {describe_error(error)}; "
                    f"train it "
                    f"without cutting "
                    "it"
                ) from error
            if any(
                isinstance(each, FakeTensor) for each in find_attribute_tensors([received, out])
            ):
                raise StepFailed(HIDDEN_TENSOR)
        return out

    def try_in_eval_mode(self, inputs: Any) -> None:
        """The same in eval mode without gradients, in which modules may take other ways. Raises
        StepFailed also where the output is not that of the whole model; where that fails, or
        draws, nothing is known.
        """
        with use_model_eval_mode(self.model), torch.no_grad():
            try:
                with undo_forward_effects(self.model), keep_generators():
                    whole, again = (
                        find_tensors(call_model(self.model, clone_batch(inputs))) for _ in range(2)
                    )
            except Exception:
                return
            if not all(map(is_close, whole, again)):
                return
            out = find_tensors(self.try_all_stages(inputs))
        if len(out) != len(whole) or not all(map(is_close, whole, out)):
            raise StepFailed(
                "in eval mode the model gives another output in parts than whole; let modules do "
                "the same however "
                "they are called, or train it without cutting it"
            )

    def run_stage(
        self, inputs: Any, stage: int, plan: CrossingPlan, received: Sequence[Tensor]
    ) -> tuple[list[Tensor], Any]:
        """(what crosses the end of the part, the model's output where it is the last)."""
        if plan.sequential_stages is not None:
            for each in plan.stand_ins if any(self.changed_attributes.values()) else ():
                self.set_remote_attributes(each)
            crossing = plan.crossing[stage][0] if stage < self.last_stage else None
            made = run_modules(
                plan.sequential_stages[stage],
                received[0] if stage else inputs,
                (crossing.shape, crossing.dtype) if crossing else None,
            )
            return ([made], None) if crossing else ([], made)
        running = OneStageForward(self, stage, plan, received)
        out = None
        with contextlib.suppress(StageEnded):
            out = running.substitute_values(running.run_forward(inputs))
        return [
            running.read_crossing_tensor(each)
            for each in (plan.crossing[stage] if stage < self.last_stage else [])
        ], out


UNKNOWN_ORIGIN = (-1, -1), 1 << 30  # the place and part of what was not made between units


class OneStageForward(TracedForward):
    """The forward of one part: before it nothing has a value, with the first thing after it all
    is over.
    """

    staged_model: StageForward

    def __init__(
        self,
        stage_forward: StageForward,
        own_stage: int,
        plan: CrossingPlan,
        received: Sequence[Tensor],
    ) -> None:
        super().__init__(stage_forward)
        self.own_stage = own_stage
        self.plan = plan
        self.local_values: dict[ValueId, Tensor] = {}
        # of the plan's stand-ins, where something is written
        self.clones: Any = WeakIdKeyDictionary()
        self.sent_values = (
            {each.value_id for each in plan.crossing[own_stage]}
            if own_stage < stage_forward.last_stage
            else set()
        )
        if own_stage:
            self.local_values = {
                each.value_id: tensor
                for each, tensor in zip(plan.crossing[own_stage - 1], received, strict=True)
            }

    def substitute_values(self, tree: Any) -> Any:
        if type(tree) is tuple and all(
            type(each) is Tensor or isinstance(each, FakeTensor) for each in tree
        ):
            # quicker, and what most modules are given
            return tuple(map(self.find_local_value, tree))
        return (
            tree
            if isinstance(tree, dict) and not tree
            else tree_map_only(Tensor, self.find_local_value, tree)
        )

    def find_local_value(self, tensor: Tensor) -> Tensor:
        place, part = self.origins.get(tensor, UNKNOWN_ORIGIN)
        # of what does not cross Python wants the shape
        return self.local_values.get(place, tensor) if part < self.own_stage else tensor

    def read_crossing_tensor(self, crossing: Crossing) -> Tensor:
        """What crosses the end of the part. Raises StepFailed where another way was gone than
        was planned.
        """
        made = self.local_values.get(crossing.value_id)
        made = None if made is None else gather_whole(made)
        if (
            made is None
            or isinstance(made, FakeTensor)
            or (tuple(made.shape), made.dtype) != (crossing.shape, crossing.dtype)
        ):
            raise StepFailed(DIFFERENT_PATH)
        return made

    def mark_made(self, tensor: Tensor, value_id: ValueId) -> None:
        mine = self.stage == self.own_stage
        real = self.find_local_value(tensor) if mine else tensor
        if mine and value_id in self.sent_values:
            self.local_values[value_id] = real
        # what came from another part stays that: so its values are found
        if real is tensor:
            super().mark_made(tensor, value_id)

    def run_operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        if self.stage < self.own_stage:
            if any(not isinstance(each, FakeTensor) for each in written) and any(
                # into something with values here
                isinstance(each, FakeTensor)
                for each in find_tensors((args, kwargs))
            ):
                return (
                    None
                    if getattr(func, "__name__", "") == "__setitem__"
                    else kwargs.get("out", args[0])
                )
            # of a parameter that this part has too: another part's draw is not made here
            with use_draw_source(DrawRecorder()):
                return func(*args, **kwargs)
        args = self.substitute_values(args)
        kwargs = self.substitute_values(kwargs)
        # which would be left out where something else has no values
        if written:
            self.require_values((args, kwargs), "an operation between modules")
        return self.require_values(func(*args, **kwargs), "an operation between modules")

    def require_values(self, out: Any, name: str) -> Any:
        """What was made here. Raises StepFailed where something had no values here."""
        if any(isinstance(each, FakeTensor) for each in find_tensors(out)):
            raise StepFailed(
                HIDDEN_TENSOR
                if self.staged_model.has_all_values
                else f"{name} of this part uses a parameter, a buffer or a value that is on "
                f"another rank, which it did "
                "not when the model was cut; call in the first forward what later ones call, or "
                "train it with "
                "data(n)"
            )
        return out

    def run_unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begin_unit(name)
        number = next(self.unit_numbers)
        if self.stage > self.own_stage:
            raise StageEnded
        planned = self.plan.stand_ins[number] if number < len(self.plan.stand_ins) else None
        if planned is None or name != planned.name:
            raise StepFailed(DIFFERENT_PATH, tensor=name)
        if self.stage < self.own_stage:
            return self.apply_stand_in(planned, args, kwargs)
        args = self.substitute_values(args)
        kwargs = self.substitute_values(kwargs)
        with self.pause_tracing():
            out = self.require_values(call(*args, **kwargs), name)
            same = [each.shape for each in find_tensors(out)] == [
                each.shape for each, _ in planned.output_tensors
            ]
        if not same:
            raise StepFailed(
                f"{name} gave tensors of other shapes than without values, or than it was called "
                f"with; let "
                "modules look at no values that decide a shape, or train it without cutting it"
            )
        made = next(self.operation_ids)
        for each, tensor in enumerate(find_tensors(out)):
            self.mark_made(tensor, (made, each))
        return out

    def apply_stand_in(self, stand_in: StandIn, args: Any, kwargs: Any) -> Any:
        """What another rank's unit gives, as it is without values, and what it then keeps in
        attributes.
        """
        next(self.operation_ids)
        # the plan's own stays what it is, its lists and dicts, and what is written to
        with self.pause_tracing():
            out = copy_containers(
                stand_in.output,
                self.clone_once if self.plan.writes_in_place else lambda tensor: tensor,
            )
            call_forward_hooks(
                self.staged_model.model.get_submodule(stand_in.name), args, kwargs, out
            )
        for tensor, (_, place) in zip(find_tensors(out), stand_in.output_tensors, strict=True):
            self.mark_made(tensor, place)
        self.staged_model.set_remote_attributes(stand_in)
        return out

    def clone_once(self, tensor: Tensor) -> Tensor:
        """Of one tensor one."""
        if tensor not in self.clones:
            self.clones[tensor] = tensor.detach().requires_grad_(tensor.requires_grad).clone()
        return self.clones[tensor]  # type: ignore[no-any-return]
