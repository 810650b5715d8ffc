"""What stands in a model of the user's own while ranks train parts of it: tensors without
values, which say so when asked.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paragrad.engine.unwrap import OF_THE_WHOLE, name_of
from paragrad.errors import StepFailed

NO_VALUES = (
    "the model is cut, and {} has no values from the first step to the end of the with: test by "
    "trainer.evaluate(dataset), read trainer.state() and trainer.gradients() (an average of the "
    "weights too), save by "
    "trainer.save(folder), and write to it before the first step or after the with (after an "
    "exception, load a "
    "checkpoint into another model)"
)
KNOWN = OF_THE_WHOLE | {
    "requires_grad",
    "requires_grad_",
    "is_leaf",
    "grad_fn",
    "__repr__",
    "__dir__",
}


class Vacant(Tensor):
    """A parameter, a buffer or a gradient: its shape and type. called: what it is;  home: its
    device;  gradient: then it may be set to zero, which the step does.
    """

    called: str
    home: torch.device
    gradient: bool

    @classmethod
    def of(cls, tensor: Tensor, called: str, gradient: bool = False) -> Self:
        home = tensor.home if isinstance(tensor, Vacant) else tensor.device
        made = Tensor._make_subclass(
            cls, tensor.detach().to("meta"), not gradient and tensor.requires_grad
        )
        made.__dict__.update(
            called=called,
            home=home,
            gradient=gradient,
            _is_param=isinstance(tensor, nn.Parameter) and not gradient,
        )
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        first = args[0] if args else None
        if name == "grad" and isinstance(first, Vacant):
            return _gradient(first, *args[1:])
        # to which inputs are brought
        if name in ("device", "is_cpu", "is_cuda") and isinstance(first, Vacant):
            return first.home if name == "device" else first.home.type == name.removeprefix("is_")
        zeroed = name in ("zero_", "detach_") and isinstance(first, Vacant) and first.gradient
        if name in KNOWN or zeroed:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        what = next(
            (each.called for each in tree_leaves((args, kwargs)) if isinstance(each, Vacant)),
            "one of its tensors",
        )
        raise StepFailed(NO_VALUES.format(what))


def _gradient(tensor: Vacant, *given: Any) -> Vacant | None:
    """What it has, or is set to."""
    if given and given[0] is not None:
        raise StepFailed(NO_VALUES.format(f"the gradient of {tensor.called}"))
    if given or not tensor.requires_grad:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return Vacant.of(tensor, f"the gradient of {tensor.called}", gradient=True)
