"""Watching a forward between the calls of some of its modules, the *units*: each operation, and each call of a unit, belongs
to the part of the model in which it is reached."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from paragrad.datasets.loading import called
from paragrad.errors import StepFailed

Place = tuple[int, int]                 # which operation or unit of a forward made a value, and which of its outputs it is
Unit = tuple[str, int]                  # a call of a module: its name, and which of its calls in a forward it is, from 0
# what is replaced around a forward, and is itself inside of a unit
PLAIN = [(owner, name, getattr(owner, name)) for owner, name in (
    (nn.Module, "__call__"), (checkpoint, "_checkpoint_without_reentrant_generator"), (checkpoint, "CheckpointFunction"))]


class InUnits:
    """A model and its units. parts: the units of each part, in order; other calls of modules belong to the part in which they
    come."""

    def __init__(self, model: nn.Module, parts: Sequence[Sequence[Unit]]) -> None:
        self.model, self.last = model, len(parts) - 1
        self.part_of = {unit: part for part, units in enumerate(parts) for unit in units}
        self.units = {model.get_submodule(name): name for name, _ in self.part_of}


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


class Running(TorchFunctionMode):
    """One forward, watched between its units."""

    def __init__(self, flow: InUnits) -> None:
        super().__init__()
        self.flow, self.part, self.places, self.calls = flow, 0, itertools.count(), itertools.count()
        self.made: Any = WeakIdKeyDictionary()           # tensor -> (place, part)
        self.held = {id(each) for each in itertools.chain(flow.model.parameters(), flow.model.buffers())}
        self.counted: dict[str, int] = {}

    def run(self, inputs: Any) -> Any:
        with self.watched():
            return called(self.flow.model, inputs)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Operations come to `operation`, and calls of units to `unit`."""
        def call(plain: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self.flow.units.get(module)
            if name is None:
                return plain(module, *args, **kwargs)
            return self.unit(name, functools.partial(plain, module), args, kwargs)
        with calls_watched(call), uncheckpointed(), self:
            yield

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside of a unit."""
        ours = [(owner, name, getattr(owner, name)) for owner, name, _ in PLAIN]
        self.__exit__(None, None, None)
        for owner, name, plain in PLAIN:
            setattr(owner, name, plain)
        try:
            yield
        finally:
            for owner, name, value in ours:
                setattr(owner, name, value)
            self.__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        name = getattr(func, "__name__", "")
        if not any(each in self.made or id(each) in self.held or isinstance(each, FakeTensor) for each in tensors):
            out = func(*args, **kwargs)
            self.of_inputs(func, args, kwargs, out)
            return out
        out = self.operation(func, args, kwargs)
        found = tensors_in(out)
        if name == "__setitem__":
            found = [args[0]]
        if found:
            place = next(self.places)
            for number, tensor in enumerate(found):
                self.make(tensor, (place, number))
        return out

    def make(self, tensor: Tensor, place: Place) -> None:
        self.made[tensor] = place, self.part

    def of_inputs(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation on the inputs alone was made."""

    def begins(self, name: str) -> None:
        """A unit is called: a part may begin with it."""
        number = self.counted[name] = self.counted.get(name, -1) + 1
        part = self.flow.part_of.get((name, number), self.part)
        if part < self.part:
            raise StepFailed(f"{name} comes after modules that it came before when the model was cut; a part is what follows "
                             "one another in every forward")
        self.part = part

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any: ...
    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any: ...


@contextlib.contextmanager
def calls_watched(call: Callable[..., Any]) -> Iterator[None]:
    """call(plain, module, *arguments) is asked for every call of a module."""
    plain = nn.Module.__call__
    nn.Module.__call__ = lambda module, *args, **kwargs: call(plain, module, *args, **kwargs)   # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain          # type: ignore[method-assign]


@contextlib.contextmanager
def uncheckpointed() -> Iterator[None]:
    """What a model checkpoints by itself (torch.utils.checkpoint) is kept: what is computed again comes with values alone."""
    names = "_checkpoint_without_reentrant_generator", "CheckpointFunction"
    before = {name: getattr(checkpoint, name) for name in names}
    checkpoint._checkpoint_without_reentrant_generator = _kept                      # type: ignore[assignment]
    checkpoint.CheckpointFunction = _Kept                                           # type: ignore[misc]
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(checkpoint, name, value)


def _kept(*_: Any, **__: Any) -> Iterator[None]:
    yield


class _Kept:
    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)
