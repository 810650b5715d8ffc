"""Which way a forward goes: what Python read of values made of the inputs alone, played again
for other inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from paragrad.parallel.tracing.tracer import find_tensors

VALUE_READS = {
    "item",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "tolist",
    "numpy",
    "__array__",
    "__contains__",
    "equal",
    "allclose",
    "is_nonzero",
}  # look at values
VALUE_SHAPED = {
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "unique_consecutive",
    "repeat_interleave",
    "bincount",
    "where",
}


# look at sizes that they are given, and after a tensor
SIZE_FACTORIES = {"arange", "zeros", "ones", "empty"}
SIZE_METHODS = {
    "new_zeros",
    "new_ones",
    "new_empty",
    "view",
    "reshape",
    "expand",
    "repeat",
    "narrow",
    "split",
    "unflatten",
}


def find_size_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors of one whole number that an operation takes for a size or a place, and looks at
    in doing so: no function of Python's is called for that.
    """
    name = getattr(func, "__name__", "")
    if name in ("__getitem__", "__setitem__"):
        found = [
            each
            for part in (args[1] if isinstance(args[1], tuple) else args[1:2])
            if isinstance(part, slice)
            for each in (part.start, part.stop, part.step)
        ]
    else:
        found = (
            tree_leaves((args[name in SIZE_METHODS :], kwargs))
            if name in SIZE_FACTORIES | SIZE_METHODS
            else []
        )
    return [
        each
        for each in found
        if isinstance(each, Tensor) and not each.dim() and not each.is_floating_point()
    ]


def extract_read_value(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """What Python gets to know of values by an operation, in a form to be compared; None where
    that is nothing. Where values decide a shape, it is the shape.
    """
    name = getattr(func, "__name__", "")
    if name in VALUE_READS and find_tensors((args, kwargs)):
        return numpy.copy(out) if isinstance(out, numpy.ndarray) else out
    if name in VALUE_SHAPED or (
        name == "__getitem__" and any(each.dtype == torch.bool for each in find_tensors(args[1]))
    ):
        return str([tuple(each.shape) for each in find_tensors(out)])
    return None


@dataclass(frozen=True)
class StepOutput:
    """Stands for a tensor: which output of which step; of step -1: which tensor of the
    inputs.
    """

    step: int
    number: int


class InputGuards:
    """The operations of a forward on its inputs alone, in order, and what Python read of their
    results.

    Between reads, Python is a function of shapes and of what it has read: inputs of the same
    shapes, of which it reads the same, go the same way.
    """

    def __init__(self, inputs: Any) -> None:
        # function, (args, kwargs), what was read
        self.steps: list[tuple[Any, Any, Any]] = []
        self.read_steps = 0  # steps up to the last read
        self.step_outputs: Any = WeakIdKeyDictionary()
        self._note_outputs(-1, inputs)

    def _note_outputs(self, step: int, out: Any) -> None:
        for number, tensor in enumerate(find_tensors(out)):
            self.step_outputs[tensor] = StepOutput(step, number)

    def note_operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation, after it was made."""
        given = tree_map_only(
            Tensor, lambda each: self.step_outputs.get(each, each), (args, kwargs)
        )
        self._note_outputs(len(self.steps), out)
        self.steps.append((func, given, found := extract_read_value(func, args, kwargs, out)))
        if found is not None:
            self.read_steps = len(self.steps)

    def drop_unread_steps(self) -> InputGuards:
        """What comes after the last read is of no matter. Tensors of the forward are let go."""
        del self.steps[self.read_steps :]
        self.step_outputs = None
        return self

    def is_same_path(self, inputs: Any) -> bool:
        """Does Python read the same of these inputs?"""
        if not self.steps:
            return True
        made = {-1: [each.clone() for each in find_tensors(inputs)]}
        # which a step may change in place, and here changes a copy of
        others: dict[int, Tensor] = {}

        def value(each: Any) -> Any:
            if isinstance(each, StepOutput):
                return made[each.step][each.number]
            return others.setdefault(id(each), each.clone()) if isinstance(each, Tensor) else each

        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for number, (func, given, before) in enumerate(self.steps):
                args, kwargs = tree_map(value, given)
                try:
                    out = func(*args, **kwargs)
                # what follows a read that would be another
                except (RuntimeError, ValueError, IndexError):
                    return False
                if before is not None and not numpy.array_equal(
                    extract_read_value(func, args, kwargs, out), before
                ):
                    return False
                made[number] = find_tensors(out)
        return True
