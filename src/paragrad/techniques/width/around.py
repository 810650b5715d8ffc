"""What asks nobody about its tensors, brought to ask: autograd functions in Python, and torch's own checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map_only

from paragrad.errors import StepFailed
from paragrad.techniques.model_parallel.watch import Call, calls_watched, checkpointing
from paragrad.techniques.width.divided import Divided, whole
from paragrad.techniques.width.pairs import Copied, Gathered, Sliced, Summed

PAIRS = Copied, Summed, Sliced, Gathered
PLAIN = checkpoint._checkpoint_without_reentrant_generator


@contextlib.contextmanager
def asked(call: Call = None) -> Iterator[None]:
    """Around forwards and backwards in which tensors are divided. call: as calls_watched has it."""
    with calls_watched(call, _applied), checkpointing(_kept, _NotReentrant):
        yield


def _applied(apply: Any, args: Any, kwargs: Any) -> Any:
    """An autograd function in Python gets whole tensors."""
    if apply.args[0] in PAIRS:
        return apply(*args, **kwargs)
    args, kwargs = tree_map_only(Divided, whole, (args, kwargs))
    out = apply(*args, **kwargs)
    if any(isinstance(each, Divided) for each in tree_leaves(out)):
        raise StepFailed(f"{apply.args[0].__name__}, an autograd function in Python, uses parameters that are divided over "
                         "ranks and not among its arguments; give them to it, or train the model with data(n)")
    return out


def _kept(function: Callable[..., Any], preserve: bool, context: Any, check: Any, debug: bool, early_stop: bool, *args: Any,
          **kwargs: Any) -> Iterator[None]:
    """A checkpoint keeps what it was given as it is: torch's would keep it by an autograd function."""
    return PLAIN(lambda: function(*args, **kwargs), preserve, context, check, debug, early_stop)


class _NotReentrant:
    """A reentrant checkpoint, which is an autograd function around others, as one that is not."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
