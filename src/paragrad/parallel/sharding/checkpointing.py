"""Activation checkpointing of functions with sharded tensors as arguments."""

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
    """Checkpoint a function, and keep sharded tensors as they are.

    Torch's own checkpoint saves its arguments by an autograd function. The recomputation runs to
    its end. Torch would stop after the last saved tensor, which is not the same one on all ranks (a
    part without a halo).

    Args:
        function: The function, as are all arguments, of torch's generator.

        preserve: Whether the state of random generators is restored.

        context: Makes the contexts of the forward and of the recomputation.

        check: Name of the check that compares both.

        debug: Whether errors of the check list all operations.

        early_stop: Not used: the recomputation runs to its end.

        *args: Arguments of the function.

        **kwargs: Keyword arguments of the function.

    Yields:
        Once, for the forward.
    """
    if any(isinstance(each, ShardedTensor) for each in tree_leaves((args, kwargs))):
        function = functools.partial(function, *args, **kwargs)
        args = ()
        kwargs = {}
    return HOOK_CHECKPOINT(function, preserve, context, check, debug, False, *args, **kwargs)
