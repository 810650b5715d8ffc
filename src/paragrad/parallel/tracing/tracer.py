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

from paragrad.datasets.loading import called
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.checkpointing import kept_as_given

# which operation or unit of a forward made a value, and which of its outputs it is
Place = tuple[int, int]
# a call of a module: its name, and which of its calls in a forward it is, from 0
Unit = tuple[str, int]
Call = Callable[..., Any] | None  # for calls of modules: call(plain, module, *arguments)
# for those of autograd functions: applied(apply, args, kwargs)
Applied = Callable[[Any, Any, Any], Any] | None


class InUnits:
    """A model and its units. parts: the units of each part, in order; other calls of modules
    belong to the part in which they come.
    """

    def __init__(self, model: nn.Module, parts: Sequence[Sequence[Unit]]) -> None:
        self.model = model
        self.parts = parts
        self.last = len(parts) - 1
        self.part_of = {unit: part for part, units in enumerate(parts) for unit in units}
        self.units = {model.get_submodule(name): name for name, _ in self.part_of}
        self.parameters: list[nn.Parameter] | None = None  # in a step
        # and the buffers that there were when it was planned
        self.names: set[str] | None = None
        # parameters and buffers that other ranks hold: attributes here
        self.elsewhere: list[tuple[nn.Module, str]] = []

    def held(self) -> dict[int, Any]:
        """The model's tensors now, by their ids: a forward may put other buffers in the place
        of some, and the ids stay theirs as long as they are held here.
        """
        parameters = list(self.model.parameters()) if self.parameters is None else self.parameters
        return {
            id(each): each
            for each in (
                *parameters,
                *(
                    each
                    for name, each in self.model.named_buffers()
                    if self.names is None or name in self.names
                ),
                *(getattr(module, name, None) for module, name in self.elsewhere),
            )
        }

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Meanwhile the model's parameters are those that it has now, and what is a buffer now
        counts as one.
        """
        self.parameters = list(self.model.parameters())
        self.names = {name for name, _ in self.model.named_buffers()}
        try:
            yield
        finally:
            self.parameters = None
            self.names = None


def tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):  # as most are
        return [tree]
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def tensors_within(tree: Any) -> list[Tensor]:
    """Those in attributes of its objects, too."""
    leaves = tree_flatten(tree)[0]
    return [
        *tensors_in(leaves),
        *(
            tensor
            for leaf in leaves
            if not isinstance(leaf, Tensor)
            for tensor in tensors_in(getattr(leaf, "__dict__", {}))
        ),
    ]


IN_PLACE = {
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


def noted(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    """What a module that is not run gives, to its forward hooks, which may keep it for later.
    What they return is in it.
    """
    for number, hook in module._forward_hooks.items():
        hook(module, args, kwargs, out) if number in module._forward_hooks_with_kwargs else hook(
            module, args, out
        )


class Running(TorchFunctionMode):
    """One forward, watched between its units."""

    def __init__(self, flow: InUnits) -> None:
        super().__init__()
        self.flow = flow
        self.part = 0
        self.places = itertools.count()
        self.calls = itertools.count()
        self.made: Any = WeakIdKeyDictionary()  # tensor -> (place, part)
        self.held = flow.held()
        self.counted: dict[str, int] = {}
        # of a unit or an operation, where nothing is watched
        self.inside = 0

    def run(self, inputs: Any) -> Any:
        with self.watched():
            return called(self.flow.model, inputs)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Operations come to `operation`, and calls of units to `unit`."""

        def call(plain: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self.flow.units.get(module)
            if name is None:
                return self.around(module, functools.partial(plain, module, *args, **kwargs))
            return self.unit(name, functools.partial(plain, module), args, kwargs)

        with calls_watched(call, self.applied), checkpointing(*KEPT), self:
            yield

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside of a unit. Below another mode (`with torch.device(...)`) this one stays, and
        lets all pass.
        """
        last = _get_current_function_mode() is self
        if last:
            self.__exit__(None, None, None)
        self.inside += 1
        try:
            with calls_watched(None), checkpointing(*PLAIN):
                yield
        finally:
            self.inside -= 1
            if last:
                self.__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside:
            return func(*args, **(kwargs or {}))
        self.inside += 1
        try:
            return self.operated(func, args, kwargs or {})
        finally:
            self.inside -= 1

    def applied(self, apply: Any, args: Any, kwargs: Any) -> Any:
        """An autograd function of Python's is called."""
        if self.inside:
            return apply(*args, **kwargs)
        with self.unwatched():
            return self.operated(apply, args, kwargs)

    def operated(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        if not any(
            each in self.made or id(each) in self.held or isinstance(each, FakeTensor)
            for each in tensors
        ):
            out = func(*args, **kwargs)
            self.of_inputs(func, args, kwargs, out)
            return out
        written = self.written(func, args, kwargs)
        out = self.operation(func, args, kwargs, written)
        found = tensors_in(out)
        if found or written:
            place = next(self.places)
            # the first of which are the same, where there are values
            for tensors in (found, written):
                for number, tensor in enumerate(tensors):
                    self.make(tensor, (place, number))
        return out

    def written(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that an operation changes in place, and what they are views of: not where
        a view came from another part, in memory of its own.
        """
        name = getattr(func, "__name__", "")
        found = (
            tensors_in(kwargs.get("out"))
            if "out" in kwargs
            else tensors_in(args[0])
            if args
            and (
                name in IN_PLACE
                or kwargs.get("inplace") is True
                or (name.endswith("_") and not name.endswith("__"))
            )
            else []
        )
        here = [
            each
            for each in found
            if each._base is not None and self.made.get(each, (None, self.part))[1] == self.part
        ]
        return [*found, *(each._base for each in here)]  # type: ignore[misc]

    def make(self, tensor: Tensor, place: Place) -> None:
        self.made[tensor] = place, self.part

    def of_inputs(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation on the inputs alone was made."""

    def begins(self, name: str) -> None:
        """A unit is called: a part may begin with it."""
        number = self.counted.get(name, -1) + 1
        self.counted[name] = number
        part = self.flow.part_of.get((name, number), self.part)
        if part < self.part:
            raise StepFailed(
                f"{name} comes after modules that it came before when the model was cut; a part is "
                f"what follows "
                "one another in every forward"
            )
        self.part = part

    def around(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """A call of a module that is no unit."""
        return call()

    def operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any: ...
    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any: ...


_asked: list[tuple[Call, Applied]] = []


@contextlib.contextmanager
def whereabouts(model: nn.Module) -> Iterator[list[str]]:
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

    with calls_watched(call):
        yield at


@contextlib.contextmanager
def calls_watched(call: Call, applied: Applied = None) -> Iterator[None]:
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
        call, _ = _asked[-1]
        return (
            call_module(module, *args, **kwargs)
            if call is None
            else call(call_module, module, *args, **kwargs)
        )

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        _, applied = _asked[-1]
        plain = functools.partial(apply_function.__func__, cls)
        return plain(*args, **kwargs) if applied is None else applied(plain, args, kwargs)

    _asked.append((call, applied))
    if len(_asked) == 1:
        nn.Module.__call__ = ask  # type: ignore[method-assign]
        method: Any = classmethod(apply)
        torch.autograd.Function.apply = method  # type: ignore[method-assign]
    try:
        yield
    finally:
        _asked.pop()
        if not _asked:
            nn.Module.__call__ = call_module  # type: ignore[method-assign]
            torch.autograd.Function.apply = apply_function  # type: ignore[method-assign]


@contextlib.contextmanager
def checkpointing(generator: Any, function: Any) -> Iterator[None]:
    """torch.utils.checkpoint with other functions."""
    before = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction
    checkpoint._checkpoint_without_reentrant_generator = generator
    checkpoint.CheckpointFunction = function
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction = before


def _kept(*_: Any, **__: Any) -> Iterator[None]:
    yield


class _Kept:
    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


# what a model checkpoints by itself (torch.utils.checkpoint) is kept: what is computed again
# comes with values alone
PLAIN = kept_as_given, checkpoint.CheckpointFunction
KEPT = _kept, _Kept
