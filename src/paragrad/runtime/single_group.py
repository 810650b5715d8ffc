"""A process group of one rank, for user code that runs for one worker alone.

User code may call torch.distributed itself: detection models sum the number of boxes over ranks. If
one rank runs such code alone, to compare with one worker or to test its part of the samples, the
others do not come to the collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

CREATE_SECONDS = 60.0  # to create the group, which waits for no other rank

# the group of one rank that belongs to a default group
_single_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@contextmanager
def act_alone() -> Iterator[None]:
    """Let the default process group have this rank only, while the context is active.

    Collectives of groups that are named in a call are as they were. `dist.get_rank(group)` is not:
    it looks for the rank of the default group in them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    members = dist.distributed_c10d.GroupMember
    previous = members.WORLD
    members.WORLD = _get_single_group(previous)  # type: ignore[assignment]
    try:
        yield
    finally:
        members.WORLD = previous


def _get_single_group(default: Any) -> Any:
    """Return the group of this rank alone, and create it at the first call."""
    if default not in _single_groups:
        c10d = dist.distributed_c10d
        rank = dist.get_rank()
        # over shared memory no rank opens a port
        backend = "shm" if dist.get_backend() == "shm" else "gloo"
        group, _ = c10d._new_process_group_helper(
            1,
            0,
            [rank],
            backend,
            dist.HashStore(),
            f"paragrad/alone/{rank}/{len(c10d._world.pg_names)}",
            timeout=timedelta(seconds=CREATE_SECONDS),
        )
        # its only rank has the number 0, as on one worker
        c10d._world.pg_group_ranks[group] = {0: 0}
        _single_groups[default] = group
    return _single_groups[default]
