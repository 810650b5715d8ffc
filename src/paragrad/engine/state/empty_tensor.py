"""Empty tensors: placeholders in the model of the user while ranks train parts of it.

They have no values. An operation that needs values raises an error which says so.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paragrad.engine.unwrap import VALUE_FREE_ATTRIBUTES, get_function_name
from paragrad.errors import StepFailed

NO_VALUES_MESSAGE = (
    "the model is divided, and {} has no values from the first step to the end of `with "
    "parallelize(...)`: test by trainer.evaluate(dataset), read trainer.state() (also for a "
    "running average of the weights) and trainer.gradients(), save by trainer.save(folder), and "
    "write to it before the first step or after the `with` (after an exception, load a checkpoint "
    "into another model)"
)
ALLOWED_FUNCTIONS = VALUE_FREE_ATTRIBUTES | {
    "requires_grad",
    "requires_grad_",
    "is_leaf",
    "grad_fn",
    "__repr__",
    "__dir__",
}


class EmptyTensor(Tensor):
    """A parameter, buffer or gradient without values; it has only a shape and a type.

    Attributes:
        label: What the tensor is, for messages.
        original_device: The device of the tensor that it replaces.
        is_gradient: It stands for a gradient. It may be set to zero, as a training step does.
    """

    label: str
    original_device: torch.device
    is_gradient: bool

    @classmethod
    def make_empty(cls, tensor: Tensor, label: str, is_gradient: bool = False) -> Self:
        """Make an empty tensor with the shape and type of a tensor.

        Args:
            tensor: The tensor to replace.
            label: What the tensor is, for messages.
            is_gradient: It stands for a gradient.
        """
        device = tensor.original_device if isinstance(tensor, EmptyTensor) else tensor.device
        empty: Self = Tensor._make_subclass(
            cls, tensor.detach().to("meta"), not is_gradient and tensor.requires_grad
        )
        empty.__dict__.update(
            label=label,
            original_device=device,
            is_gradient=is_gradient,
            _is_param=isinstance(tensor, nn.Parameter) and not is_gradient,
        )
        return empty

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = get_function_name(func)
        first = args[0] if args else None
        # `optimizer.zero_grad` reads gradients, and sets them to None or to zero
        if name == "grad" and isinstance(first, EmptyTensor):
            return _access_gradient(first, *args[1:])
        # a loop moves its inputs to the device of a parameter: not `meta`, but the original one
        if name in ("device", "is_cpu", "is_cuda") and isinstance(first, EmptyTensor):
            return (
                first.original_device
                if name == "device"
                else first.original_device.type == name.removeprefix("is_")
            )
        is_zeroing = (
            name in ("zero_", "detach_") and isinstance(first, EmptyTensor) and first.is_gradient
        )
        if name in ALLOWED_FUNCTIONS or is_zeroing:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        label = next(
            (each.label for each in tree_leaves((args, kwargs)) if isinstance(each, EmptyTensor)),
            "one of its tensors",
        )
        raise StepFailed(NO_VALUES_MESSAGE.format(label))


def _access_gradient(tensor: EmptyTensor, *value: Any) -> EmptyTensor | None:
    """Read the gradient of an empty tensor, or write `value` to it, which must be None.

    A gradient is an empty tensor too. A tensor that is not trained has the gradient None.
    """
    if value and value[0] is not None:
        raise StepFailed(NO_VALUES_MESSAGE.format(f"the gradient of {tensor.label}"))
    if value or not tensor.requires_grad:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return EmptyTensor.make_empty(tensor, f"the gradient of {tensor.label}", is_gradient=True)
