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

from paragrad.engine.state.preserve_state import copy_python_attributes
from paragrad.engine.state.values import is_differentiable, is_same_value
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.sharded_tensor import ShardedTensor, gather_whole, wrap_local
from paragrad.parallel.tracing.crossing_plan import (
    HIDDEN_TENSOR,
    NESTED_TENSORS,
    Crossing,
    CrossingPlan,
    StandIn,
)
from paragrad.parallel.tracing.input_guards import InputGuards, find_size_tensors
from paragrad.parallel.tracing.tracer import (
    StagedModel,
    TracedForward,
    Unit,
    ValueId,
    call_forward_hooks,
    find_tensors,
)


@dataclass(frozen=True)
class InputLike:
    """Stands for a tensor of the shape and type of one that a module is called with: of that
    number.
    """

    number: int


FixedOutputs = Mapping[str, Any]  # what modules give, by name, tensors as Like


class ValuelessModel(StagedModel):
    """A model that is run without values. standing: what those units give of which nobody knows
    it so.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Sequence[Unit]],
        fixed_outputs: FixedOutputs | None = None,
    ) -> None:
        super().__init__(model, stages)
        self.fixed_outputs = fixed_outputs or {}
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.has_all_values = True  # the model has all its values
        # Python attributes that calls of a unit set
        self.changed_attributes: dict[str, set[tuple[nn.Module, str]]] = {}


class PlanRecorder(TracedForward):
    """Nothing has a value; noted is which part makes and which ones use what."""

    staged_model: ValuelessModel

    def __init__(self, stage_forward: ValuelessModel, inputs: Any) -> None:
        super().__init__(stage_forward)
        self.crossing: list[dict[ValueId, Crossing]] = [{} for _ in range(stage_forward.last_stage)]
        self.stand_ins: list[StandIn] = []
        # of a tensor with values, what stands for it without
        self.fake_tensors: Any = WeakIdKeyDictionary()
        self.output_copies: Any = WeakIdKeyDictionary()  # of what units gave
        self.writes_in_place = False
        self.guards = InputGuards(inputs)
        self.failed_module: nn.Module | None = None  # the first module that raised

    def build_plan(self) -> CrossingPlan:
        return CrossingPlan(
            [
                sorted(each.values(), key=lambda crossing: crossing.value_id)
                for each in self.crossing
            ],
            self.stand_ins,
            self.guards.drop_unread_steps(),
            self.writes_in_place,
        )

    def trace_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        for bound in find_size_tensors(func, args, kwargs):
            if bound not in self.origins and not isinstance(bound, FakeTensor):
                self.note_input_operation(Tensor.__index__, (bound,), {}, bound.__index__())
        return super().trace_operation(func, args, kwargs)

    def note_input_operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.guards.note_operation(func, args, kwargs, out)

    def note_use(self, tensor: Tensor, stage: int) -> None:
        if tensor in self.origins:
            place, made = self.origins[tensor]
            if made < stage:
                with self.pause_tracing():
                    crossing = Crossing.build_from_tensor(
                        place, gather_whole(self.make_fake_tensor(tensor))
                    )
                for cut in range(made, stage):
                    self.crossing[cut][place] = crossing

    def make_fake_tree(self, tree: Any) -> Any:
        """The same without values. Raises StepFailed, while the model is whole, of what nobody
        was seen to make.
        """
        if self.staged_model.has_all_values and any(
            isinstance(each, FakeTensor) and each not in self.origins for each in find_tensors(tree)
        ):
            raise StepFailed(HIDDEN_TENSOR)
        return tree_map_only(Tensor, self.make_fake_tensor, tree)

    def make_fake_tensor(self, tensor: Tensor) -> Tensor:
        """The same every time: what is written into it stays in it."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if isinstance(tensor, ShardedTensor):
            return wrap_local(self.make_fake_tensor(tensor.local), tensor.shardings)
        if tensor not in self.fake_tensors:
            self.fake_tensors[tensor] = self.staged_model.fake_mode.from_tensor(tensor)
        return self.fake_tensors[tensor]  # type: ignore[no-any-return]

    def run_operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        out = func(*self.make_fake_tree(args), **self.make_fake_tree(kwargs))
        if find_tensors(out) or written:
            for tensor in find_tensors((args, kwargs)):
                self.note_use(tensor, self.stage)
        if written or getattr(func, "__name__", "") == "register_hook":
            self.writes_in_place = True
        # a view into something else has made that, too, to have a gradient
        for tensor in written:
            hollow = self.make_fake_tensor(tensor)
            if hollow._base is not None and tensor._base is not None:
                self.fake_tensors[tensor._base] = hollow._base
        return out

    def run_module(self, module: nn.Module, call: Any) -> Any:
        if uses_nested_tensors(module, call):
            raise StepFailed(NESTED_TENSORS)
        with self.note_failed_module(module):
            return call()

    @contextlib.contextmanager
    def note_failed_module(self, module: nn.Module) -> Iterator[None]:
        """Whether it is the first, and so the innermost, that raises."""
        try:
            yield
        except Exception:
            self.failed_module = self.failed_module or module
            raise

    def run_unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begin_unit(name)
        module = self.staged_model.model.get_submodule(name)
        with self.pause_tracing():
            before = copy_python_attributes(module)
            hollow = self.make_fake_tree(args)
            named = self.make_fake_tree(kwargs)
            if (gives := self.staged_model.fixed_outputs.get(name)) is None:
                with self.note_failed_module(module):
                    out = call(*hollow, **named)
            else:
                given = find_tensors((hollow, named))
                trained = torch.is_grad_enabled()
                out = tree_map_only(
                    InputLike,
                    lambda each: (
                        torch.empty_like(given[each.number])
                        .requires_grad_(trained and is_differentiable(given[each.number]))
                        .clone()
                    ),
                    gives,
                )
                call_forward_hooks(module, hollow, named, out)
            kept = copy_python_attributes(module)
            self.staged_model.changed_attributes.setdefault(name, set()).update(
                each
                for each, value in kept.items()
                if each not in before or not is_same_value(before[each], value)
            )
        for tensor in find_tensors((args, kwargs)):
            self.note_use(tensor, self.stage)
        place = next(self.operation_ids)
        found = [(tensor, (place, number)) for number, tensor in enumerate(find_tensors(out))]
        for tensor, each in found:
            self.mark_made(tensor, each)
        with self.pause_tracing():
            gave = self.copy_outputs(out)  # which what follows does not change
            # a hook may write
            self.writes_in_place = self.writes_in_place or any(
                each._forward_hooks for each in module.modules()
            )
        self.stand_ins.append(
            StandIn(
                name,
                gave,
                list(zip(find_tensors(gave), (each for _, each in found), strict=True)),
                kept,
            )
        )
        return out

    def copy_outputs(self, tree: Any) -> Any:
        """The same tensors without values, of no graph; of one tensor one, whoever gives it (a
        dropout that does nothing).
        """

        def copy(tensor: Tensor) -> Tensor:
            if tensor not in self.output_copies or self.output_copies[tensor].shape != tensor.shape:
                self.output_copies[tensor] = tensor.detach().requires_grad_(tensor.requires_grad)
            return self.output_copies[tensor]  # type: ignore[no-any-return]

        return copy_containers(tree, copy)


def uses_nested_tensors(module: nn.Module, call: Any) -> bool:
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


def copy_containers(tree: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    """The same in containers of their own, with copies of tensors."""
    if isinstance(tree, Tensor):
        return copy(tree)
    try:
        return tree_map_only(Tensor, copy, tree)
    # a tuple that looks at what it holds, such as a PackedSequence
    except Exception:
        return tree
