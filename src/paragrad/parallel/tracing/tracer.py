"""Watching a forward between the calls of some of its modules, the *units*: each operation, and
each call of a unit, belongs to the part of the model in which it is reached.
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

from paragrad.datasets.loading import call_model
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.checkpointing import checkpoint_sharded

# which operation or unit of a forward made a value, and which of its outputs it is
ValueId = tuple[int, int]
# a call of a module: its name, and which of its calls in a forward it is, from 0
Unit = tuple[str, int]
CallHook = Callable[..., Any] | None  # for calls of modules: call(plain, module, *arguments)
# for those of autograd functions: applied(apply, args, kwargs)
ApplyHook = Callable[[Any, Any, Any], Any] | None


class StagedModel:
    """A model and its units. parts: the units of each part, in order; other calls of modules
    belong to the part in which they come.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Sequence[Unit]]) -> None:
        self.model = model
        self.stages = stages
        self.last_stage = len(stages) - 1
        self.stage_of_unit = {unit: part for part, units in enumerate(stages) for unit in units}
        self.units = {model.get_submodule(name): name for name, _ in self.stage_of_unit}
        self.step_parameters: list[nn.Parameter] | None = None  # in a step
        # and the buffers that there were when it was planned
        self.step_buffers: set[str] | None = None
        # parameters and buffers that other ranks hold: attributes here
        self.remote_tensors: list[tuple[nn.Module, str]] = []

    def collect_model_tensors(self) -> dict[int, Any]:
        """The model's tensors now, by their ids: a forward may put other buffers in the place
        of some, and the ids stay theirs as long as they are held here.
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
        """Meanwhile the model's parameters are those that it has now, and what is a buffer now
        counts as one.
        """
        self.step_parameters = list(self.model.parameters())
        self.step_buffers = {name for name, _ in self.model.named_buffers()}
        try:
            yield
        finally:
            self.step_parameters = None
            self.step_buffers = None


def find_tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):  # as most are
        return [tree]
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def find_attribute_tensors(tree: Any) -> list[Tensor]:
    """Those in attributes of its objects, too."""
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
    """What a module that is not run gives, to its forward hooks, which may keep it for later.
    What they return is in it.
    """
    for number, hook in module._forward_hooks.items():
        hook(module, args, kwargs, out) if number in module._forward_hooks_with_kwargs else hook(
            module, args, out
        )


class TracedForward(TorchFunctionMode):
    """One forward, watched between its units."""

    def __init__(self, staged_model: StagedModel) -> None:
        super().__init__()
        self.staged_model = staged_model
        self.stage = 0
        self.operation_ids = itertools.count()
        self.unit_numbers = itertools.count()
        self.origins: Any = WeakIdKeyDictionary()  # tensor -> (place, part)
        self.model_tensors = staged_model.collect_model_tensors()
        self.call_counts: dict[str, int] = {}
        # of a unit or an operation, where nothing is watched
        self.untraced_depth = 0

    def run_forward(self, inputs: Any) -> Any:
        with self.trace_calls():
            return call_model(self.staged_model.model, inputs)

    @contextlib.contextmanager
    def trace_calls(self) -> Iterator[None]:
        """Operations come to `operation`, and calls of units to `unit`."""

        def call(plain: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self.staged_model.units.get(module)
            if name is None:
                return self.run_module(module, functools.partial(plain, module, *args, **kwargs))
            return self.run_unit(name, functools.partial(plain, module), args, kwargs)

        with (
            hook_module_calls(call, self.trace_autograd_function),
            replace_checkpoint(*NO_CHECKPOINT),
            self,
        ):
            yield

    @contextlib.contextmanager
    def pause_tracing(self) -> Iterator[None]:
        """Inside of a unit. Below another mode (`with torch.device(...)`) this one stays, and
        lets all pass.
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
        """An autograd function of Python's is called."""
        if self.untraced_depth:
            return apply(*args, **kwargs)
        with self.pause_tracing():
            return self.trace_operation(apply, args, kwargs)

    def trace_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
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
        found = find_tensors(out)
        if found or written:
            place = next(self.operation_ids)
            # the first of which are the same, where there are values
            for tensors in (found, written):
                for number, tensor in enumerate(tensors):
                    self.mark_made(tensor, (place, number))
        return out

    def find_written_tensors(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that an operation changes in place, and what they are views of: not where
        a view came from another part, in memory of its own.
        """
        name = getattr(func, "__name__", "")
        found = (
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
        here = [
            each
            for each in found
            if each._base is not None
            and self.origins.get(each, (None, self.stage))[1] == self.stage
        ]
        return [*found, *(each._base for each in here)]  # type: ignore[misc]

    def mark_made(self, tensor: Tensor, value_id: ValueId) -> None:
        self.origins[tensor] = value_id, self.stage

    def note_input_operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation on the inputs alone was made."""

    def begin_unit(self, name: str) -> None:
        """A unit is called: a part may begin with it."""
        number = self.call_counts.get(name, -1) + 1
        self.call_counts[name] = number
        part = self.staged_model.stage_of_unit.get((name, number), self.stage)
        if part < self.stage:
            raise StepFailed(
                f"{name} comes after modules that it came before when the model was cut; a part is "
                f"what follows "
                "one another in every forward"
            )
        self.stage = part

    def run_module(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """A call of a module that is no unit."""
        return call()

    def run_operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any: ...
    def run_unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any: ...


_call_hooks: list[tuple[CallHook, ApplyHook]] = []


@contextlib.contextmanager
def track_modules(model: nn.Module) -> Iterator[list[str]]:
    """Meanwhile the last of these is the name of the module of a model that is being called; of
    a stranger, its type's.
    """
    names = {module: name for name, module in model.named_modules()}
    at = [""]

    def call(plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        at.append(names.get(module, type(module).__name__))
        try:
            return plain(module, *args, **kwargs)
        finally:
            at.pop()

    with hook_module_calls(call):
        yield at


@contextlib.contextmanager
def hook_module_calls(call_hook: CallHook, apply_hook: ApplyHook = None) -> Iterator[None]:
    """call(plain, module, *arguments) is asked for every call of a module; with None nobody is.

    applied(apply, args, kwargs): in the place of every Function.apply, which no
    TorchFunctionMode sees: autograd would go back to what the function was called with, which
    may stand for something else.

    Where one is in another, the innermost is asked, and the outermost alone changes nn.Module
    and Function: whenever these are changed, Python looks up every method of every module and
    function anew.
    """
    call_module = nn.Module.__call__
    apply_function = torch.autograd.Function.__dict__["apply"]

    def ask(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
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
        nn.Module.__call__ = ask  # type: ignore[method-assign]
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
    """torch.utils.checkpoint with other functions."""
    before = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction
    checkpoint._checkpoint_without_reentrant_generator = generator
    checkpoint.CheckpointFunction = function
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction = before


def _skip_checkpoint(*_: Any, **__: Any) -> Iterator[None]:
    yield


class _NoCheckpoint:
    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


# what a model checkpoints by itself (torch.utils.checkpoint) is kept: what is computed again
# comes with values alone
SHARDED_CHECKPOINT = checkpoint_sharded, checkpoint.CheckpointFunction
NO_CHECKPOINT = _skip_checkpoint, _NoCheckpoint
