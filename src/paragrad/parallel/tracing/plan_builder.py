"""The forward by which a crossing plan is made.

Nothing in it has values. It notes what each stage makes and uses.
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
from paragrad.parallel.tracing.packed_sequences import (
    find_packed_sequences,
    is_packing,
    run_packing,
)
from paragrad.parallel.tracing.tracer import (
    StagedModel,
    TracedForward,
    Unit,
    ValueId,
    call_forward_hooks,
    find_tensors,
)

MADE_LENGTHS = (
    "the model makes the lengths by which it packs sequences, so no other rank knows the shape; "
    "compute them from the inputs alone, or train it without cutting it"
)


@dataclass(frozen=True)
class InputLike:
    """Stands for a tensor with the shape and type of a tensor that a module gets.

    Attributes:
        number: Number of that tensor among the module's arguments.
    """

    number: int


FixedOutputs = Mapping[str, Any]  # outputs of modules, by name, with InputLike in place of tensors


class ValuelessModel(StagedModel):
    """A model that runs without values.

    Attributes:
        fixed_outputs: What some units return, which cannot be found without values.

        fake_mode: Makes tensors without values.

        has_all_values: Whether all parameters and buffers have values on this rank.

        changed_attributes: Python attributes that calls of a unit set.
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
        self.has_all_values = True
        self.changed_attributes: dict[str, set[tuple[nn.Module, str]]] = {}


class PlanRecorder(TracedForward):
    """A forward without values that records which stage makes a value, and which stages use it.

    Attributes:
        crossing: The tensors at the end of each stage so far.

        stand_ins: The stand-in of each call of a unit so far.

        fake_tensors: For a tensor with values, the tensor without values that stands for it.

        output_copies: Copies of what units returned.

        known_tensors: Tensors that keep their values, because these come from the inputs alone: the
            sizes of packed sequences.

        writes_in_place: Whether an operation between units changed something in place.

        guards: Operations on the inputs alone.

        failed_module: The innermost module that raised an error.
    """

    staged_model: ValuelessModel

    def __init__(self, stage_forward: ValuelessModel, inputs: Any) -> None:
        super().__init__(stage_forward)
        self.crossing: list[dict[ValueId, Crossing]] = [{} for _ in range(stage_forward.last_stage)]
        self.stand_ins: list[StandIn] = []
        self.fake_tensors: Any = WeakIdKeyDictionary()
        self.output_copies: Any = WeakIdKeyDictionary()
        self.known_tensors: Any = WeakIdKeyDictionary()
        self.writes_in_place = False
        self.guards = InputGuards(inputs)
        self.failed_module: nn.Module | None = None

    def build_plan(self) -> CrossingPlan:
        """Build the plan after the forward."""
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
        if is_packing(func):
            self.note_known_tensor(out[1])

    def note_use(self, tensor: Tensor, stage: int) -> None:
        """Note that a stage uses a tensor; it crosses from the stage that made it."""
        if tensor in self.origins:
            value_id, made_in = self.origins[tensor]
            if made_in < stage:
                with self.pause_tracing():
                    crossing = Crossing.build_from_tensor(
                        value_id, gather_whole(self.make_fake_tensor(tensor))
                    )
                for end in range(made_in, stage):
                    self.crossing[end][value_id] = crossing

    def make_fake_tree(self, tree: Any) -> Any:
        """Replace the tensors of a tree by tensors without values.

        Raises:
            StepFailed: The model has all values, and a tensor without values comes from no known
                operation.
        """
        if self.staged_model.has_all_values and any(
            isinstance(each, FakeTensor) and each not in self.origins for each in find_tensors(tree)
        ):
            raise StepFailed(HIDDEN_TENSOR)
        for each in find_packed_sequences(tree):
            for numbers in each[1:]:  # sizes and orders
                if isinstance(numbers, Tensor) and numbers not in self.origins:
                    self.note_known_tensor(numbers)
        return tree_map_only(Tensor, self.make_fake_tensor, tree)

    def make_fake_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor without values; always the same, so that changes in place stay in it."""
        if isinstance(tensor, FakeTensor) or tensor in self.known_tensors:
            return tensor
        if isinstance(tensor, ShardedTensor):
            return wrap_local(self.make_fake_tensor(tensor.local), tensor.shardings)
        if tensor not in self.fake_tensors:
            self.fake_tensors[tensor] = self.staged_model.fake_mode.from_tensor(tensor)
        return self.fake_tensors[tensor]  # type: ignore[no-any-return]

    def run_operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        tensors = find_tensors((args, kwargs))
        if all(map(self.is_known, tensors)):
            # values that come from the inputs alone stay known
            out = func(*args, **kwargs)
            self.known_tensors.update(dict.fromkeys(find_tensors(out), True))
            return out
        out = (
            self.run_packing(func, *args)
            if is_packing(func)
            else func(*self.make_fake_tree(args), **self.make_fake_tree(kwargs))
        )
        if find_tensors(out) or written:
            for tensor in tensors:
                self.note_use(tensor, self.stage)
        if written or getattr(func, "__name__", "") == "register_hook":
            self.writes_in_place = True
        # a change of a view also gave its base a graph
        for tensor in written:
            fake = self.make_fake_tensor(tensor)
            if fake._base is not None and tensor._base is not None:
                self.fake_tensors[tensor._base] = fake._base
        return out

    def run_packing(self, func: Any, data: Tensor, lengths: Tensor, *rest: Any) -> Any:
        """Pack or unpack sequences; the lengths must come from the inputs alone.

        Raises:
            StepFailed: The model makes the lengths.
        """
        if not self.is_known(lengths):
            raise StepFailed(MADE_LENGTHS)
        self.note_known_tensor(lengths)
        packed, sizes = run_packing(func, self.make_fake_tensor(data), lengths, *rest)
        self.known_tensors[sizes] = True
        return packed, sizes

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether the values of a tensor come from the inputs alone."""
        return tensor in self.known_tensors or not (
            tensor in self.origins
            or id(tensor) in self.model_tensors
            or isinstance(tensor, FakeTensor)
        )

    def note_known_tensor(self, tensor: Tensor) -> None:
        """Note a tensor that comes from the inputs alone; other values of it want another plan."""
        if tensor in self.known_tensors or isinstance(tensor, FakeTensor):
            return
        self.known_tensors[tensor] = True
        self.note_input_operation(Tensor.tolist, (tensor,), {}, tensor.tolist())

    def run_module(self, module: nn.Module, call: Any) -> Any:
        if uses_nested_tensors(module, call):
            raise StepFailed(NESTED_TENSORS)
        with self.note_failed_module(module):
            return call()

    @contextlib.contextmanager
    def note_failed_module(self, module: nn.Module) -> Iterator[None]:
        """Note the module if an error comes from it: the first one noted is the innermost."""
        try:
            yield
        except Exception:
            self.failed_module = self.failed_module or module
            raise

    def run_unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begin_unit(name)
        module = self.staged_model.model.get_submodule(name)
        with self.pause_tracing():
            attributes_before = copy_python_attributes(module)
            fake_args = self.make_fake_tree(args)
            fake_kwargs = self.make_fake_tree(kwargs)
            if (fixed_output := self.staged_model.fixed_outputs.get(name)) is None:
                with self.note_failed_module(module):
                    out = call(*fake_args, **fake_kwargs)
            else:
                fake_inputs = find_tensors((fake_args, fake_kwargs))
                has_graph = torch.is_grad_enabled()
                out = tree_map_only(
                    InputLike,
                    lambda each: (
                        torch.empty_like(fake_inputs[each.number])
                        .requires_grad_(has_graph and is_differentiable(fake_inputs[each.number]))
                        .clone()
                    ),
                    fixed_output,
                )
                call_forward_hooks(module, fake_args, fake_kwargs, out)
            attributes = copy_python_attributes(module)
            self.staged_model.changed_attributes.setdefault(name, set()).update(
                each
                for each, value in attributes.items()
                if each not in attributes_before
                or not is_same_value(attributes_before[each], value)
            )
        for tensor in find_tensors((args, kwargs)):
            self.note_use(tensor, self.stage)
        operation_id = next(self.operation_ids)
        placed = [
            (tensor, (operation_id, number)) for number, tensor in enumerate(find_tensors(out))
        ]
        for tensor, each in placed:
            self.mark_made(tensor, each)
        with self.pause_tracing():
            copied_output = self.copy_outputs(out)  # later changes in place do not reach this copy
            # a hook may change something in place
            self.writes_in_place = self.writes_in_place or any(
                each._forward_hooks for each in module.modules()
            )
        self.stand_ins.append(
            StandIn(
                name,
                copied_output,
                list(zip(find_tensors(copied_output), (each for _, each in placed), strict=True)),
                attributes,
            )
        )
        return out

    def copy_outputs(self, tree: Any) -> Any:
        """Copy a unit's output: tensors without values and without a graph.

        A tensor that several units return (a dropout that does nothing) has one copy.
        """

        def copy(tensor: Tensor) -> Tensor:
            if tensor not in self.output_copies or self.output_copies[tensor].shape != tensor.shape:
                self.output_copies[tensor] = tensor.detach().requires_grad_(tensor.requires_grad)
            return self.output_copies[tensor]  # type: ignore[no-any-return]

        return copy_containers(tree, copy)


def uses_nested_tensors(module: nn.Module, call: Any) -> bool:
    """Return whether a call of torch's TransformerEncoder would use nested tensors for padding.

    It does not use them while its layers are traced.
    """
    if not isinstance(module, nn.TransformerEncoder) or module.training or torch.is_grad_enabled():
        return False
    arguments = (
        dict(zip(("mask", "src_key_padding_mask"), call.args[2:], strict=False)) | call.keywords
    )
    padding = arguments.get("src_key_padding_mask")
    if (
        not module.use_nested_tensor
        or arguments.get("mask") is not None
        or not isinstance(padding, Tensor)
        or isinstance(padding, FakeTensor)
        or padding.dim() != 2
        or not torch.backends.mha.get_fastpath_enabled()
    ):
        return False
    padding = padding != 0  # a mask of floats has -inf where it is padded
    # nested tensors need the padding at the end of every sample
    return bool(padding.any()) and not bool((padding[:, :-1] & ~padding[:, 1:]).any())


def copy_containers(tree: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    """Copy the containers of a tree, and its tensors by a function."""
    if isinstance(tree, Tensor):
        return copy(tree)
    try:
        return tree_map_only(Tensor, copy, tree)
    # a tuple that checks its items, such as a PackedSequence
    except Exception:
        return tree
