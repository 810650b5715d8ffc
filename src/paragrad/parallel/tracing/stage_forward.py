"""The forward of one stage of a model, and what crosses from stage to stage.

The model's own Python runs on every rank, unmodified, up to the end of the rank's stage. Between
the calls of some modules, the *units*, its operations are traced. Each belongs to the stage in
which it is reached. (Messages to users call a stage a part.)

A unit of another rank does not run. Its outputs are tensors without values (torch's FakeTensor).
They pass through the operations before this rank's stage. Where the stage begins, they stand for
the tensors that the other rank sends. What is computed from the inputs alone (a mask, positions) is
computed on every rank.

A plan says what crosses. It comes from one forward without values, which is repeated for inputs of
other shapes. A Sequential is not traced: its Python is known, so a stage runs its modules in turn.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from paragrad.datasets.loading import clone_batch
from paragrad.engine.rng.draws import DrawRecorder, use_draw_source
from paragrad.engine.state.preserve_state import undo_forward_effects
from paragrad.engine.state.values import is_differentiable
from paragrad.engine.unwrap import WrappedTensor
from paragrad.errors import StepFailed, describe_error
from paragrad.parallel.sharding.sharded_tensor import ShardedTensor, gather_whole
from paragrad.parallel.tracing.crossing_plan import (
    DIFFERENT_PATH,
    HIDDEN_TENSOR,
    Crossing,
    CrossingPlan,
    StageModules,
    StandIn,
)
from paragrad.parallel.tracing.packed_sequences import is_packing, run_packing
from paragrad.parallel.tracing.plan_builder import (
    FixedOutputs,
    PlanRecorder,
    ValuelessModel,
    copy_containers,
)
from paragrad.parallel.tracing.tracer import (
    TracedForward,
    Unit,
    ValueId,
    call_forward_hooks,
    find_tensors,
)

# number of input shapes, and of paths for one shape, of which plans are kept
MAX_INPUT_SHAPES = 64
MAX_PATHS = 4


@contextlib.contextmanager
def silence_fake_tensors() -> Iterator[None]:
    """Silence what torch reports where there are no values.

    It warns that tensors that are no leaves are copied, and logs every error.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled = log.disabled
    log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        log.disabled = was_disabled


class PlanFailed(StepFailed):
    """A forward without values failed.

    Attributes:
        module: The innermost module that raised the error.
    """

    def __init__(self, message: str, module: nn.Module | None = None) -> None:
        super().__init__(message)
        self.module = module


class StageEnded(BaseException):
    """This rank's stage is over; the rest of the model's Python does not run here."""


class StageForward(ValuelessModel):
    """The forward of a model in stages.

    Attributes:
        own_stages: The stages that run here.
        plans: The plans for inputs of some shapes, the last used first.
        buffers_of_modules: The buffers of each module, by name.
    """

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
        self.buffers_of_modules = [module._buffers for module in model.modules()]

    def forget_plans(self) -> None:
        """Forget the plans, because the user has changed the model."""
        self.plans.clear()
        self.buffers_of_modules = [module._buffers for module in self.model.modules()]

    def make_remote_tensor(self, module: nn.Module, name: str, tensor: Tensor) -> Tensor:
        """Make what stands for a parameter or a buffer that another rank has.

        It has no values, except for whole numbers: Python may read them, so they keep their current
        values.

        Args:
            module: The module.
            name: Name of the tensor in the module.
            tensor: The tensor.

        Returns:
            The tensor that stands for it.
        """
        self.remote_tensors.append((module, name))
        if not is_differentiable(tensor):
            return tensor.clone()
        fake = self.fake_mode.from_tensor(tensor.detach())
        self.has_all_values = False
        return fake.requires_grad_() if tensor.requires_grad else fake

    def find_plan(
        self,
        inputs: Any,
        surround: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> CrossingPlan:
        """Return the plan for inputs such as these; make it if there is none.

        Args:
            inputs: The inputs of a micro-batch.
            surround: Returns the context in which a plan is made.
        """
        leaves, spec = ([inputs], None) if type(inputs) is Tensor else tree_flatten(inputs)
        key = (
            str(spec),
            self.model.training,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            *(
                (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
                for leaf in leaves
            ),
            *(
                (name, each.shape)
                for buffers in self.buffers_of_modules
                for name, each in buffers.items()
                if each is not None
            ),
        )
        known_plans = self.plans.pop(key, [])
        match = next(
            (
                plan
                for plan in known_plans
                if not plan.guards.steps or plan.guards.is_same_path(inputs)
            ),
            None,
        )
        if match is None:
            with surround():
                match = self._make_plan(inputs)
        self.plans[key] = [match, *(plan for plan in known_plans if plan is not match)][:MAX_PATHS]
        if len(self.plans) > MAX_INPUT_SHAPES:
            del self.plans[next(iter(self.plans))]  # the least recently used
        return match

    def find_plans(
        self,
        batches: Sequence[Any],
        surround: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> list[CrossingPlan]:
        """Return the plan for each of the micro-batches of a step.

        Micro-batches that are tensors of one shape share a plan, unless the model reads values.

        Args:
            batches: The inputs of each micro-batch.
            surround: As in `find_plan`.
        """
        plans: list[CrossingPlan] = []
        previous: Any = None
        for inputs in batches:
            if (
                type(inputs) is Tensor
                and type(previous) is Tensor
                and inputs.shape == previous.shape
                and inputs.dtype == previous.dtype
                and not plans[-1].guards.steps
            ):
                plans.append(plans[-1])
            else:
                plans.append(self.find_plan(inputs, surround))
            previous = inputs
        return plans

    def _make_plan(self, inputs: Any) -> CrossingPlan:
        inputs = clone_batch(inputs)
        versions = [(each, each._version) for each in find_tensors(inputs)]
        recorder = PlanRecorder(self, inputs)
        with undo_forward_effects(self.model, self.find_remote_modules()), silence_fake_tensors():
            try:
                out = recorder.run_forward(inputs)
            except StepFailed:
                raise
            except Exception as error:
                raise PlanFailed(
                    "a forward without values, from which every rank knows what the others' "
                    f"modules give, raised {describe_error(error)}; let Python look only at values "
                    "of the inputs, and modules at no value that decides a shape, or train it "
                    "without cutting it",
                    recorder.failed_module,
                ) from error
        for tensor in find_tensors(out):
            recorder.note_use(tensor, self.last_stage)
        plan = recorder.build_plan()
        sequential = None
        if isinstance(inputs, Tensor):
            sequential = find_sequential_stages(
                self.model, self.stages, [each.output for each in plan.stand_ins]
            )
        return replace(
            plan,
            changes_inputs=any(each._version != version for each, version in versions),
            sequential_stages=sequential,
        )

    def find_remote_modules(self) -> set[nn.Module]:
        """Return modules that only other stages use.

        Their attributes have no values here, so a use of such a value can be found.
        """
        own_units = {
            name for (name, _), stage in self.stage_of_unit.items() if stage in self.own_stages
        }
        own_modules = {
            each
            for module, name in self.units.items()
            if name in own_units
            for each in module.modules()
        }
        return {
            each
            for module, name in self.units.items()
            if name not in own_units
            for each in module.modules()
        } - own_modules

    def set_remote_attributes(self, stand_in: StandIn) -> None:
        """Set the Python attributes that a call of another stage's unit sets."""
        if (
            changed := self.changed_attributes.get(stand_in.name, set())
            & stand_in.attributes.keys()
        ):
            remote = self.find_remote_modules()
            for module, attribute in changed:
                if module in remote:
                    # a list is copied: it may be appended to, and the plan keeps its own
                    value = stand_in.attributes[module, attribute]
                    vars(module)[attribute] = (
                        value if isinstance(value, Tensor) else copy.copy(value)
                    )

    def run_alone(
        self, inputs: Any, stage: int, received: Sequence[Tensor]
    ) -> tuple[list[Tensor], Any]:
        """Run one stage as on a rank that has no other stage.

        Args:
            inputs: The model's inputs.
            stage: Number of the stage.
            received: The tensors that cross from the stage before.

        Returns:
            As of `run_stage`.
        """
        self.own_stages = [stage]
        # a new plan, because attributes of modules have no values then
        plan = self._make_plan(inputs)
        wants_gradients = [each.has_gradient for each in plan.crossing[stage - 1]] if stage else []
        return self.run_stage(
            clone_batch(inputs),
            stage,
            plan,
            attach_received([each.clone() for each in received], wants_gradients)[0],
        )

    def run_stage(
        self, inputs: Any, stage: int, plan: CrossingPlan, received: Sequence[Tensor]
    ) -> tuple[list[Tensor], Any]:
        """Run one stage.

        Args:
            inputs: The model's inputs.
            stage: Number of the stage.
            plan: The plan for these inputs.
            received: The tensors that cross from the stage before.

        Returns:
            (the tensors that cross to the next stage, the model's output if the stage is the last).
        """
        if plan.sequential_stages is not None:
            for each in plan.stand_ins if any(self.changed_attributes.values()) else ():
                self.set_remote_attributes(each)
            crossing = plan.crossing[stage][0] if stage < self.last_stage else None
            result = run_modules(
                plan.sequential_stages[stage],
                received[0] if stage else inputs,
                (crossing.shape, crossing.dtype) if crossing else None,
            )
            return ([result], None) if crossing else ([], result)
        forward = OneStageForward(self, stage, plan, received)
        out = None
        with contextlib.suppress(StageEnded):
            out = forward.substitute_values(forward.run_forward(inputs))
        return [
            forward.read_crossing_tensor(each)
            for each in (plan.crossing[stage] if stage < self.last_stage else [])
        ], out


# ---- the stages of a Sequential -------------------------------------------------------------
def find_sequential_stages(
    model: nn.Module, stages: Sequence[Sequence[Unit]], outputs: Sequence[Any]
) -> StageModules | None:
    """Find the modules of each stage of a Sequential.

    Nested Sequentials count too. The model must call only the units of the stages. Each unit
    returns one tensor, and there are no hooks.

    Args:
        model: The model.
        stages: The units of each stage.
        outputs: The output of each unit.

    Returns:
        The modules of each stage, or None if the model must be traced.
    """
    units = [unit for stage in stages for unit in stage]
    if list(_iterate_called_units(model, "")) != units or not all(
        isinstance(each, FakeTensor | ShardedTensor) for each in outputs
    ):
        return None
    if any(
        each._forward_hooks
        or each._forward_pre_hooks
        or each._backward_hooks
        or each._backward_pre_hooks
        for each in model.modules()
    ):
        return None
    return [[model.get_submodule(name) for name, _ in stage] for stage in stages]


def _iterate_called_units(module: nn.Module, name: str) -> Iterator[Unit]:
    """Yield what a Sequential calls; nested ones are opened, other modules are called whole."""
    if type(module).forward is not nn.Sequential.forward or "forward" in vars(module):
        yield name, 0
        return
    for child, each in module._modules.items():
        assert each is not None
        yield from _iterate_called_units(each, f"{name}.{child}" if name else child)


def run_modules(
    modules: Sequence[nn.Module],
    given: Tensor,
    expected: tuple[tuple[int, ...], torch.dtype] | None,
) -> Tensor:
    """Run modules one after another.

    Args:
        modules: The modules.
        given: The input of the first.
        expected: (shape, type) that the result must have to cross to another stage; None: any.

    Returns:
        The output of the last.

    Raises:
        StepFailed: The result is not as expected.
    """
    for module in modules:
        given = module(given)
    if expected is not None and isinstance(given, WrappedTensor):
        given = gather_whole(given)
    if expected is not None and (tuple(given.shape), given.dtype) != expected:
        raise StepFailed(
            f"a part of the model gave a tensor of {tuple(given.shape)}, {given.dtype}, and in the "
            f"forward without values one of {expected[0]}, {expected[1]}; let modules look at no "
            "values that decide these, or train it with data(n)"
        )
    return given


# ---- the tensors of the stage before --------------------------------------------------------
def attach_received(
    received: Sequence[Tensor], wants_gradients: Iterable[bool]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Attach received tensors to this rank's graph.

    Args:
        received: The tensors.
        wants_gradients: Whether each needs a gradient.

    Returns:
        (the tensors as results of an operation of this rank, a list that the backward fills with
        their gradients).
    """
    gradients: list[Tensor | None] = []
    if not received:
        return [], gradients
    anchor = torch.zeros(0, requires_grad=True)
    return list(
        ReceivedTensors.apply(
            anchor, gradients, tuple(wants_gradients), *(each.detach() for each in received)
        )
    ), gradients


class ReceivedTensors(torch.autograd.Function):
    """Makes received tensors results of an operation of this rank.

    They may be changed in place, and the backward keeps their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        gradients: list[Tensor | None],
        wants_gradients: tuple[bool, ...],
        *received: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.into = gradients
        ctx.set_materialize_grads(False)
        # Not detach(): then a change in place of one tensor of a message would count as a change of
        # all.
        attached = tuple(each.data for each in received)
        ctx.mark_non_differentiable(
            *(
                each
                for each, wanted in zip(attached, wants_gradients, strict=True)
                if not wanted or not (each.is_floating_point() or each.is_complex())
            )
        )
        return attached

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.into[:] = gradients
        return (None, None, None, *(None for _ in gradients))


# ---- the traced forward of one stage --------------------------------------------------------
UNKNOWN_ORIGIN = (-1, -1), 1 << 30  # (value id, stage) of what no operation between units made


class OneStageForward(TracedForward):
    """The forward of one stage: before it nothing has values, and behind it the forward ends.

    Attributes:
        own_stage: Number of the stage.

        plan: The plan for these inputs.

        local_values: Received tensors, and tensors that cross from this stage, by their value ids.

        clones: Copies of the plan's stand-ins, if operations change something in place.

        sent_values: Value ids of the tensors that cross from this stage.
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
        """Replace tensors of a tree that other stages made by the received ones."""
        if type(tree) is tuple and all(
            type(each) is Tensor or isinstance(each, FakeTensor) for each in tree
        ):
            # a fast path: most modules get a tuple of tensors
            return tuple(map(self.find_local_value, tree))
        return (
            tree
            if isinstance(tree, dict) and not tree
            else tree_map_only(Tensor, self.find_local_value, tree)
        )

    def find_local_value(self, tensor: Tensor) -> Tensor:
        """Return the received tensor for a tensor that another stage made."""
        value_id, stage = self.origins.get(tensor, UNKNOWN_ORIGIN)
        # of a tensor that does not cross, Python needs only the shape
        return self.local_values.get(value_id, tensor) if stage < self.own_stage else tensor

    def read_crossing_tensor(self, crossing: Crossing) -> Tensor:
        """Return a tensor that crosses to the next stage.

        Args:
            crossing: Its description in the plan.

        Returns:
            The tensor.

        Raises:
            StepFailed: The forward took another path than planned.
        """
        tensor = self.local_values.get(crossing.value_id)
        tensor = gather_whole(tensor) if isinstance(tensor, WrappedTensor) else tensor
        if (
            tensor is None
            or isinstance(tensor, FakeTensor)
            or (tuple(tensor.shape), tensor.dtype) != (crossing.shape, crossing.dtype)
        ):
            raise StepFailed(DIFFERENT_PATH)
        return tensor

    def mark_made(self, tensor: Tensor, value_id: ValueId) -> None:
        is_own = self.stage == self.own_stage
        value = self.find_local_value(tensor) if is_own else tensor
        if is_own and value_id in self.sent_values:
            self.local_values[value_id] = value
        # a received tensor keeps its origin, so that its values are found
        if value is tensor:
            super().mark_made(tensor, value_id)

    def run_operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        if self.stage < self.own_stage:
            # A tensor without values is not written into one that has values here.
            if any(not isinstance(each, FakeTensor) for each in written) and any(
                isinstance(each, FakeTensor) for each in find_tensors((args, kwargs))
            ):
                return (
                    None
                    if getattr(func, "__name__", "") == "__setitem__"
                    else kwargs.get("out", args[0])
                )
            # a draw into a parameter that this stage also has belongs to another stage: it is not
            # made here
            with use_draw_source(DrawRecorder()):
                if is_packing(func) and isinstance(args[0], FakeTensor):
                    return run_packing(func, *args)
                return func(*args, **kwargs)
        args = self.substitute_values(args)
        kwargs = self.substitute_values(kwargs)
        # if another argument had no values, the write would be lost
        if written:
            self.require_values((args, kwargs), "an operation between modules")
        return self.require_values(func(*args, **kwargs), "an operation between modules")

    def require_values(self, out: Any, name: str) -> Any:
        """Check that a result has values.

        Args:
            out: The result of an operation or a unit.
            name: Its name, for the message.

        Returns:
            The same result.

        Raises:
            StepFailed: Something in it has no values on this rank.
        """
        if any(isinstance(each, FakeTensor) for each in find_tensors(out)):
            raise StepFailed(
                HIDDEN_TENSOR
                if self.staged_model.has_all_values
                else f"{name} of this part uses a parameter, a buffer or a value that is on "
                "another rank, which it did not when the model was cut; make the same calls in the "
                "first forward as later, or train it with data(n)"
            )
        return out

    def run_unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begin_unit(name)
        number = next(self.unit_numbers)
        if self.stage > self.own_stage:
            raise StageEnded
        stand_in = self.plan.stand_ins[number] if number < len(self.plan.stand_ins) else None
        if stand_in is None or name != stand_in.name:
            raise StepFailed(DIFFERENT_PATH, tensor=name)
        if self.stage < self.own_stage:
            return self.apply_stand_in(stand_in, args, kwargs)
        args = self.substitute_values(args)
        kwargs = self.substitute_values(kwargs)
        with self.pause_tracing():
            out = self.require_values(call(*args, **kwargs), name)
            same_shapes = [each.shape for each in find_tensors(out)] == [
                each.shape for each, _ in stand_in.output_tensors
            ]
        if not same_shapes:
            raise StepFailed(
                f"{name} gave tensors of other shapes than in the forward without values, or than "
                "it was called with; let modules look at no values that decide a shape, or train "
                "it without cutting it"
            )
        operation_id = next(self.operation_ids)
        for each, tensor in enumerate(find_tensors(out)):
            self.mark_made(tensor, (operation_id, each))
        return out

    def apply_stand_in(self, stand_in: StandIn, args: Any, kwargs: Any) -> Any:
        """Return what another rank's unit returns, without values, and set its attributes.

        Args:
            stand_in: The stand-in.
            args: The unit's arguments.
            kwargs: The unit's keyword arguments.

        Returns:
            The output of the unit.
        """
        next(self.operation_ids)
        # the plan's lists, dicts and tensors must not be changed
        with self.pause_tracing():
            out = copy_containers(
                stand_in.output,
                self.clone_once if self.plan.writes_in_place else lambda tensor: tensor,
            )
            call_forward_hooks(
                self.staged_model.model.get_submodule(stand_in.name), args, kwargs, out
            )
        for tensor, (_, value_id) in zip(find_tensors(out), stand_in.output_tensors, strict=True):
            self.mark_made(tensor, value_id)
        self.staged_model.set_remote_attributes(stand_in)
        return out

    def clone_once(self, tensor: Tensor) -> Tensor:
        """Clone a tensor; one tensor has one clone."""
        if tensor not in self.clones:
            self.clones[tensor] = tensor.detach().requires_grad_(tensor.requires_grad).clone()
        return self.clones[tensor]  # type: ignore[no-any-return]
