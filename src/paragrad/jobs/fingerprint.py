"""Texts that describe a model or a loss; a checkpoint is compared by them."""

from __future__ import annotations

import functools
import re
from typing import Any

from torch import nn

ADDRESS_PATTERN = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object: it differs between processes


def describe_callable(value: Any) -> str:
    """Describe a module by its repr, a function by its name, and a partial by its contents.

    The code of a function or of a forward is not part of the text.

    Args:
        value: A module, a function, a partial or another object.

    Returns:
        The text.
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
    """Describe a loss with its numbers and texts; torch's own losses do not show label_smoothing.

    Args:
        loss: The loss.

    Returns:
        The text.
    """
    settings = (
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
    return describe_callable(loss) + "".join(
        f"\n{name}={each!r}" for name, each in settings.items()
    )


def _format_value_repr(value: Any) -> str:
    try:
        return ADDRESS_PATTERN.sub("", repr(value))
    except Exception:  # a repr of the user's class may raise anything
        return type(value).__qualname__
