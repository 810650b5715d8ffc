"""What a model or a loss shows of itself, as text: by it a training is known again."""

from __future__ import annotations

import functools
import re
from typing import Any

from torch import nn

ADDRESS_PATTERN = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object in one process


def describe_callable(value: Any) -> str:
    """A module by its repr; a function by its name, a partial by what it holds. What only code
    says (a function's body, a forward) is not in it.
    """
    if isinstance(value, functools.partial):
        return ", ".join(
            [
                describe_callable(value.func),
                *map(_format_value_repr, value.args),
                *(f"{name}={_format_value_repr(each)}" for name, each in value.keywords.items()),
            ]
        )
    return (
        _format_value_repr(value)
        if isinstance(value, nn.Module)
        else str(getattr(value, "__qualname__", type(value).__qualname__))
    )


def describe_loss(loss: Any) -> str:
    """A loss, with the numbers and texts that it holds: torch's own show none
    (label_smoothing).
    """
    own = (
        {
            name: each
            for name, each in vars(loss).items()
            if not name.startswith("_")
            and name != "training"
            and isinstance(each, str | int | float)
        }
        if isinstance(loss, nn.Module)
        else {}
    )
    return describe_callable(loss) + "".join(f"\n{name}={each!r}" for name, each in own.items())


def _format_value_repr(value: Any) -> str:
    try:
        return ADDRESS_PATTERN.sub("", repr(value))
    except Exception:  # of somebody's own repr
        return type(value).__qualname__
