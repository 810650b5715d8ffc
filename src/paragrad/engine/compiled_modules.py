"""Modules that torch.compile has compiled, and code that runs without torch.compile."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

FunctionType = TypeVar("FunctionType", bound=Callable[..., Any])


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile made this module of another one, or compiled it in place.

    Args:
        module: The module itself; modules inside of it do not count.
    """
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def disable_compile() -> AbstractContextManager[Any]:
    """Return a context in which compiled modules and functions run as they are written.

    Passes that inspect a model take it: hooks and saved tensors are then those of the model, and
    batches of other sizes compile no further graphs.
    """
    # importing the compiler takes longer than a second; if it is not there, nothing is compiled
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context


def exclude_from_compile(function: FunctionType) -> FunctionType:
    """Return a function that torch.compile does not compile where compiled code calls it.

    Args:
        function: A function that torch calls inside a forward, such as a hook or a kernel.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    excluded: FunctionType = torch.compiler.disable(function)
    return excluded
