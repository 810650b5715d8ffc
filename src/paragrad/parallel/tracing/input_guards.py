"""Guards of a plan: what Python read of values that are computed from the inputs alone.

The operations are replayed for other inputs, to know whether a forward takes the same path.
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
}  # read values
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


# read sizes that they are given; the second set, after a tensor
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
    """Find tensors of one whole number that an operation uses as a size or a position.

    The operation reads their values without a call of a Python function.

    Args:
        func: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The tensors.
    """
    name = getattr(func, "__name__", "")
    if name in ("__getitem__", "__setitem__"):
        candidates = [
            each
            for index in (args[1] if isinstance(args[1], tuple) else args[1:2])
            if isinstance(index, slice)
            for each in (index.start, index.stop, index.step)
        ]
    else:
        candidates = (
            tree_leaves((args[name in SIZE_METHODS :], kwargs))
            if name in SIZE_FACTORIES | SIZE_METHODS
            else []
        )
    return [
        each
        for each in candidates
        if isinstance(each, Tensor) and not each.dim() and not each.is_floating_point()
    ]


def extract_read_value(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Extract what Python learns of values by an operation, in a form that can be compared.

    Args:
        func: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        out: Its result.

    Returns:
        The value; the shapes of the result, if values determine them; or None, if Python learns
        nothing.
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
    """Stands for a tensor that a recorded step made.

    Attributes:
        step: Number of the step; -1: the inputs.
        number: Which tensor of its output.
    """

    step: int
    number: int


class InputGuards:
    """A record of what Python read of values that a forward computes from its inputs alone.

    Between reads, Python depends on shapes and on what it has read. So inputs of the same shapes
    from which Python reads the same values take the same path.

    Attributes:
        steps: (function, (args, kwargs), value that was read or None) of each operation.

        read_steps: Number of steps up to the last read.

        step_outputs: Which step made each tensor, while a forward is recorded.
    """

    def __init__(self, inputs: Any) -> None:
        self.steps: list[tuple[Any, Any, Any]] = []
        self.read_steps = 0
        self.step_outputs: Any = WeakIdKeyDictionary()
        self._note_outputs(-1, inputs)

    def _note_outputs(self, step: int, out: Any) -> None:
        for number, tensor in enumerate(find_tensors(out)):
            self.step_outputs[tensor] = StepOutput(step, number)

    def note_operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note an operation after it ran.

        Args:
            func: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            out: Its result.
        """
        arguments = tree_map_only(
            Tensor, lambda each: self.step_outputs.get(each, each), (args, kwargs)
        )
        self._note_outputs(len(self.steps), out)
        self.steps.append((func, arguments, value := extract_read_value(func, args, kwargs, out)))
        if value is not None:
            self.read_steps = len(self.steps)

    def drop_unread_steps(self) -> InputGuards:
        """Drop steps after the last read, and references to tensors; return the guards."""
        del self.steps[self.read_steps :]
        self.step_outputs = None
        return self

    def is_same_path(self, inputs: Any) -> bool:
        """Return whether Python reads the same values of these inputs."""
        if not self.steps:
            return True
        outputs = {-1: [each.clone() for each in find_tensors(inputs)]}
        # other tensors of the steps; a step may change a copy of them in place
        copies: dict[int, Tensor] = {}

        def substitute(each: Any) -> Any:
            if isinstance(each, StepOutput):
                return outputs[each.step][each.number]
            return copies.setdefault(id(each), each.clone()) if isinstance(each, Tensor) else each

        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for number, (func, arguments, expected) in enumerate(self.steps):
                args, kwargs = tree_map(substitute, arguments)
                try:
                    out = func(*args, **kwargs)
                # an operation behind a read that gives another value
                except (RuntimeError, ValueError, IndexError):
                    return False
                if expected is not None and not numpy.array_equal(
                    extract_read_value(func, args, kwargs, out), expected
                ):
                    return False
                outputs[number] = find_tensors(out)
        return True
