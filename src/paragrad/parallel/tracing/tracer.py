"""Tracing of a forward between the calls of some modules, the *units*.

Each operation between units, and each call of a unit, belongs to the stage of the model in which it
is reached.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from paragrad.errors import StepFailed
from paragrad.jobs.loss import call_model
from paragrad.parallel.sharding.checkpointing import checkpoint_sharded

# (operation or unit of a forward that made a value, number of the output)
ValueId = tuple[int, int]
# (module name, number of its call in a forward from 0)
Unit = tuple[str, int]
CallHook = Callable[..., Any] | None  # for calls of modules: call_hook(call, module, *arguments)
# for calls of autograd functions: apply_hook(apply, args, kwargs)
ApplyHook = Callable[[Any, Any, Any], Any] | None


class StagedModel:
    """A model and its units, by stage.

    A call of a module that is not a unit belongs to the stage in which it comes.

    Attributes:
        model: The model.

        stages: The units of each stage, in order.

        last_stage: Number of the last stage.

        stage_of_unit: The stage of each unit.

        units: Names of the modules that are units.

        step_parameters: The model's parameters during a step; None outside of one.

        step_buffers: Names of the buffers at the beginning of a step; None outside of one.

        remote_tensors: Parameters and buffers of other ranks, which are attributes here.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Sequence[Unit]]) -> None:
        self.model = model
        self.stages = stages
        self.last_stage = len(stages) - 1
        self.stage_of_unit = {unit: stage for stage, units in enumerate(stages) for unit in units}
        self.units = {model.get_submodule(name): name for name, _ in self.stage_of_unit}
        self.step_parameters: list[nn.Parameter] | None = None
        self.step_buffers: set[str] | None = None
        self.remote_tensors: list[tuple[nn.Module, str]] = []

    def collect_model_tensors(self) -> dict[int, Any]:
        """Collect the current parameters and buffers by their ids.

        A forward may replace a buffer by another one. An id stays valid as long as the result keeps
        the tensor alive.
        """
        parameters = (
            list(self.model.parameters()) if self.step_parameters is None else self.step_parameters
        )
        return {
            id(each): each
            for each in (
                *parameters,
                *(
                    each
                    for name, each in self.model.named_buffers()
                    if self.step_buffers is None or name in self.step_buffers
                ),
                *(getattr(module, name, None) for module, name in self.remote_tensors),
            )
        }

    @contextlib.contextmanager
    def fix_model_tensors(self) -> Iterator[None]:
        """Fix the set of parameters and buffers during a step.

        What is a parameter or a buffer now counts as one until the end of the context.
        """
        self.step_parameters = list(self.model.parameters())
        self.step_buffers = {name for name, _ in self.model.named_buffers()}
        try:
            yield
        finally:
            self.step_parameters = None
            self.step_buffers = None


def find_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree."""
    if isinstance(tree, Tensor):  # the most frequent case
        return [tree]
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def find_attribute_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree, and in attributes of the objects in it."""
    leaves = tree_flatten(tree)[0]
    return [
        *find_tensors(leaves),
        *(
            tensor
            for leaf in leaves
            if not isinstance(leaf, Tensor)
            for tensor in find_tensors(getattr(leaf, "__dict__", {}))
        ),
    ]


IN_PLACE_OPERATORS = {
    f"__{name}__"
    for name in (
        "setitem",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "iand",
        "ior",
        "ixor",
        "ilshift",
        "irshift",
    )
}


def call_forward_hooks(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    """Call the forward hooks of a module that does not run here.

    A hook may keep the output for later. What hooks return is already in the output.

    Args:
        module: The module.
        args: Its arguments.
        kwargs: Its keyword arguments.
        out: Its output.
    """
    for number, hook in module._forward_hooks.items():
        hook(module, args, kwargs, out) if number in module._forward_hooks_with_kwargs else hook(
            module, args, out
        )


class TracedForward(TorchFunctionMode):
    """One forward, traced between its units.

    Subclasses define `run_operation` for an operation between units, and `run_unit` for a unit.
    `written` are the tensors that an operation changes in place.

    Attributes:
        staged_model: The model and its units.

        stage: The current stage.

        operation_ids: Numbers for operations and units that make values.

        unit_numbers: Numbers for calls of units.

        origins: For each tensor that the forward made: (value id, stage).

        model_tensors: The parameters and buffers, by their ids.

        call_counts: Number of the last call of each unit.

        untraced_depth: Positive inside of a unit or an operation, where nothing is traced.
    """

    def __init__(self, staged_model: StagedModel) -> None:
        super().__init__()
        self.staged_model = staged_model
        self.stage = 0
        self.operation_ids = itertools.count()
        self.unit_numbers = itertools.count()
        self.origins: Any = WeakIdKeyDictionary()
        self.model_tensors = staged_model.collect_model_tensors()
        self.call_counts: dict[str, int] = {}
        self.untraced_depth = 0

    def run_forward(self, inputs: Any) -> Any:
        """Run the model, traced, and return its output."""
        with self.trace_calls():
            return call_model(self.staged_model.model, inputs)

    @contextlib.contextmanager
    def trace_calls(self) -> Iterator[None]:
        """Send operations to `run_operation`, and calls of units to `run_unit`."""

        def trace_call(
            original_call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
        ) -> Any:
            name = self.staged_model.units.get(module)
            if name is None:
                return self.run_module(
                    module, functools.partial(original_call, module, *args, **kwargs)
                )
            return self.run_unit(name, functools.partial(original_call, module), args, kwargs)

        with (
            hook_module_calls(trace_call, self.trace_autograd_function),
            replace_checkpoint(*NO_CHECKPOINT),
            self,
        ):
            yield

    @contextlib.contextmanager
    def pause_tracing(self) -> Iterator[None]:
        """Pause tracing inside of a unit.

        Below another mode (`with torch.device(...)`), this mode stays active but lets everything
        pass.
        """
        last = _get_current_function_mode() is self
        if last:
            self.__exit__(None, None, None)
        self.untraced_depth += 1
        try:
            with hook_module_calls(None), replace_checkpoint(*SHARDED_CHECKPOINT):
                yield
        finally:
            self.untraced_depth -= 1
            if last:
                self.__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.untraced_depth:
            return func(*args, **(kwargs or {}))
        self.untraced_depth += 1
        try:
            return self.trace_operation(func, args, kwargs or {})
        finally:
            self.untraced_depth -= 1

    def trace_autograd_function(self, apply: Any, args: Any, kwargs: Any) -> Any:
        """Trace a call of an autograd function that is written in Python.

        Args:
            apply: Its `apply`.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            Its result.
        """
        if self.untraced_depth:
            return apply(*args, **kwargs)
        with self.pause_tracing():
            return self.trace_operation(apply, args, kwargs)

    def trace_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Trace an operation.

        Args:
            func: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            Its result.
        """
        tensors = find_tensors((args, kwargs))
        if not any(
            each in self.origins or id(each) in self.model_tensors or isinstance(each, FakeTensor)
            for each in tensors
        ):
            out = func(*args, **kwargs)
            self.note_input_operation(func, args, kwargs, out)
            return out
        written = self.find_written_tensors(func, args, kwargs)
        out = self.run_operation(func, args, kwargs, written)
        made = find_tensors(out)
        if made or written:
            operation_id = next(self.operation_ids)
            # `made` and `written` are the same tensors where there are values
            for tensors in (made, written):
                for number, tensor in enumerate(tensors):
                    self.mark_made(tensor, (operation_id, number))
        return out

    def find_written_tensors(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Find the tensors that an operation changes in place.

        If such a tensor is a view, its base is changed too. A view that came from another stage has
        memory of its own, so its base does not count.

        Args:
            func: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            The tensors.
        """
        name = getattr(func, "__name__", "")
        written = (
            find_tensors(kwargs.get("out"))
            if "out" in kwargs
            else find_tensors(args[0])
            if args
            and (
                name in IN_PLACE_OPERATORS
                or kwargs.get("inplace") is True
                or (name.endswith("_") and not name.endswith("__"))
            )
            else []
        )
        local_views = [
            each
            for each in written
            if each._base is not None
            and self.origins.get(each, (None, self.stage))[1] == self.stage
        ]
        return [*written, *(each._base for each in local_views)]  # type: ignore[misc]

    def mark_made(self, tensor: Tensor, value_id: ValueId) -> None:
        """Mark that the current stage made a tensor."""
        self.origins[tensor] = value_id, self.stage

    def note_input_operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note an operation on the inputs alone, after it ran.

        Args:
            func: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            out: Its result.
        """

    def begin_unit(self, name: str) -> None:
        """Begin a call of a unit; a stage may begin with it.

        Raises:
            StepFailed: The unit belongs to an earlier stage.
        """
        number = self.call_counts.get(name, -1) + 1
        self.call_counts[name] = number
        stage = self.staged_model.stage_of_unit.get((name, number), self.stage)
        if stage < self.stage:
            raise StepFailed(
                f"{name} comes after modules that it came before when the model was cut; call all "
                "modules in the same order in every forward"
            )
        self.stage = stage

    def run_module(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """Run a module that is not a unit."""
        return call()

    def run_operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any: ...
    def run_unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any: ...


_call_hooks: list[tuple[CallHook, ApplyHook]] = []


@contextlib.contextmanager
def track_modules(model: nn.Module) -> Iterator[list[str]]:
    """Track the module that is being called.

    Yields:
        A list. Its last entry is the name of that module, or of its type if it is not in the model.
    """
    names = {module: name for name, module in model.named_modules()}
    module_stack = [""]

    def track_call(original_call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module_stack.append(names.get(module, type(module).__name__))
        try:
            return original_call(module, *args, **kwargs)
        finally:
            module_stack.pop()

    with hook_module_calls(track_call):
        yield module_stack


@contextlib.contextmanager
def hook_module_calls(call_hook: CallHook, apply_hook: ApplyHook = None) -> Iterator[None]:
    """Replace every call of a module by call_hook(call, module, *arguments).

    Contexts may be nested: then the innermost hooks are used. Only the outermost context changes
    nn.Module and Function, because after a change Python looks up every method of all modules and
    functions again.

    Args:
        call_hook: Called in place of a module's call; None: modules are called as usual.
        apply_hook: apply_hook(apply, args, kwargs) is called in place of every Function.apply. No
            TorchFunctionMode sees that call. Autograd would go back to the arguments of the
            function, which may stand for other tensors.
    """
    call_module = nn.Module.__call__
    apply_function = torch.autograd.Function.__dict__["apply"]

    def call_innermost(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call, _ = _call_hooks[-1]
        return (
            call_module(module, *args, **kwargs)
            if call is None
            else call(call_module, module, *args, **kwargs)
        )

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        _, applied = _call_hooks[-1]
        plain = functools.partial(apply_function.__func__, cls)
        return plain(*args, **kwargs) if applied is None else applied(plain, args, kwargs)

    _call_hooks.append((call_hook, apply_hook))
    if len(_call_hooks) == 1:
        nn.Module.__call__ = call_innermost  # type: ignore[method-assign]
        method: Any = classmethod(apply)
        torch.autograd.Function.apply = method  # type: ignore[method-assign]
    try:
        yield
    finally:
        _call_hooks.pop()
        if not _call_hooks:
            nn.Module.__call__ = call_module  # type: ignore[method-assign]
            torch.autograd.Function.apply = apply_function  # type: ignore[method-assign]


@contextlib.contextmanager
def replace_checkpoint(generator: Any, function: Any) -> Iterator[None]:
    """Replace the functions of torch.utils.checkpoint.

    Args:
        generator: Replaces the generator that saves tensors by hooks.
        function: Replaces the reentrant autograd function.
    """
    originals = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction
    checkpoint._checkpoint_without_reentrant_generator = generator
    checkpoint.CheckpointFunction = function
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction = (
            originals
        )


def _skip_checkpoint(*_: Any, **__: Any) -> Iterator[None]:
    """Run without a checkpoint."""
    yield


class _NoCheckpoint:
    """A reentrant checkpoint that calls the function and keeps its activations."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


# Checkpoints of the model itself (torch.utils.checkpoint) keep their activations: a recomputation
# would have no tensors without values.
SHARDED_CHECKPOINT = checkpoint_sharded, checkpoint.CheckpointFunction
NO_CHECKPOINT = _skip_checkpoint, _NoCheckpoint
