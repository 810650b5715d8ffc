"""Activation checkpointing of functions whose arguments are sharded tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from paragrad.parallel.sharding.sharded_tensor import ShardedTensor

HOOK_CHECKPOINT = checkpoint._checkpoint_without_reentrant_generator


def checkpoint_sharded(
    function: Callable[..., Any],
    preserve: bool,
    context: Any,
    check: Any,
    debug: bool,
    early_stop: bool,
    *args: Any,
    **kwargs: Any,
) -> Iterator[None]:
    """A checkpoint that keeps divided tensors as they are: torch's keeps what it is given by an
    autograd function. It runs to its end again: what is kept last, where torch would stop, is
    not the same on all ranks (a part without a halo).
    """
    if any(isinstance(each, ShardedTensor) for each in tree_leaves((args, kwargs))):
        function = functools.partial(function, *args, **kwargs)
        args = ()
        kwargs = {}
    return HOOK_CHECKPOINT(function, preserve, context, check, debug, False, *args, **kwargs)
