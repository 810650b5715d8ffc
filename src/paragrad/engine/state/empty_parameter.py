"""What stands in a model of the user's own while ranks train parts of it: tensors without
values, which say so when asked.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paragrad.engine.unwrap import GLOBAL_ATTRIBUTES, get_function_name
from paragrad.errors import StepFailed

NO_VALUES_MESSAGE = (
    "the model is cut, and {} has no values from the first step to the end of the with: test by "
    "trainer.evaluate(dataset), read trainer.state() and trainer.gradients() (an average of the "
    "weights too), save by "
    "trainer.save(folder), and write to it before the first step or after the with (after an "
    "exception, load a "
    "checkpoint into another model)"
)
ALLOWED_FUNCTIONS = GLOBAL_ATTRIBUTES | {
    "requires_grad",
    "requires_grad_",
    "is_leaf",
    "grad_fn",
    "__repr__",
    "__dir__",
}


class EmptyTensor(Tensor):
    """A parameter, a buffer or a gradient: its shape and type. called: what it is;  home: its
    device;  gradient: then it may be set to zero, which the step does.
    """

    label: str
    original_device: torch.device
    is_gradient: bool

    @classmethod
    def make_empty(cls, tensor: Tensor, label: str, is_gradient: bool = False) -> Self:
        home = tensor.original_device if isinstance(tensor, EmptyTensor) else tensor.device
        made = Tensor._make_subclass(
            cls, tensor.detach().to("meta"), not is_gradient and tensor.requires_grad
        )
        made.__dict__.update(
            label=label,
            original_device=home,
            is_gradient=is_gradient,
            _is_param=isinstance(tensor, nn.Parameter) and not is_gradient,
        )
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = get_function_name(func)
        first = args[0] if args else None
        if name == "grad" and isinstance(first, EmptyTensor):
            return _access_gradient(first, *args[1:])
        # to which inputs are brought
        if name in ("device", "is_cpu", "is_cuda") and isinstance(first, EmptyTensor):
            return (
                first.original_device
                if name == "device"
                else first.original_device.type == name.removeprefix("is_")
            )
        zeroed = (
            name in ("zero_", "detach_") and isinstance(first, EmptyTensor) and first.is_gradient
        )
        if name in ALLOWED_FUNCTIONS or zeroed:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        what = next(
            (each.label for each in tree_leaves((args, kwargs)) if isinstance(each, EmptyTensor)),
            "one of its tensors",
        )
        raise StepFailed(NO_VALUES_MESSAGE.format(what))


def _access_gradient(tensor: EmptyTensor, *given: Any) -> EmptyTensor | None:
    """What it has, or is set to."""
    if given and given[0] is not None:
        raise StepFailed(NO_VALUES_MESSAGE.format(f"the gradient of {tensor.label}"))
    if given or not tensor.requires_grad:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return EmptyTensor.make_empty(tensor, f"the gradient of {tensor.label}", is_gradient=True)
