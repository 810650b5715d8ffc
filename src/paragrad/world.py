"""World: which rank this is, of how many, and how to reach the others. The one reader of the rank variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paragrad.errors import Refused, StepFailed

TIMEOUT = 300.0         # seconds a rank waits for another before it gives up, unless told otherwise


@dataclass(frozen=True)
class World:
    """rank of size; a world of one needs no process group and is an ordinary world."""
    rank: int = 0
    size: int = 1
    backend: str | None = None
    timeout: float = TIMEOUT                    # seconds to wait for another rank
    group: Any = field(default=None, repr=False, compare=False)

    def all_reduced(self, tensor: Tensor, operation: str = "SUM") -> Tensor:
        """The sum (or MAX, MIN) over all ranks, as a new tensor."""
        result = tensor.clone()
        if self.size > 1:
            dist.all_reduce(result, op=getattr(dist.ReduceOp, operation), group=self.group)
        return result

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks (equal shapes), in rank order."""
        if self.size == 1:
            return [tensor]
        results = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(results, tensor.contiguous(), group=self.group)
        return results

    def agreed(self, value: Any) -> Any:
        """Rank 0's value (any that pickles), on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    def twin(self) -> World:
        """The same ranks over a process group of its own, so that its messages meet no others. Collective."""
        if self.size == 1:
            return self
        return replace(self, group=dist.new_group(timeout=timedelta(seconds=self.timeout)))

    def prove(self) -> None:
        """Run every kind of collective this library uses on known whole numbers; raise if one answers wrong."""
        if self.size == 1:
            return
        mine = torch.arange(3.0) + 10 * self.rank
        everyone = [torch.arange(3.0) + 10 * rank for rank in range(self.size)]
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        taken = torch.empty(3)
        work = dist.isend(mine, group=self.group, group_dst=right)
        dist.recv(taken, group=self.group, group_src=left)
        if work is not None:
            work.wait()
        answers = {"send and recv": (taken, everyone[left]),
                   "all_reduce(SUM)": (self.all_reduced(mine), sum(everyone)),
                   "all_reduce(MAX)": (self.all_reduced(mine, "MAX"), everyone[-1]),
                   "all_gather": (torch.stack(self.gathered(mine)), torch.stack(everyone))}
        for name, (answer, expected) in answers.items():
            if not torch.equal(answer, expected):       # type: ignore[arg-type]
                raise StepFailed(f"the backend {self.backend} gives a wrong {name}: {answer.tolist()}; "
                                 "use another backend or version of torch")


@contextmanager
def joined(rank: int, size: int, store: Path, backend: str = "gloo", timeout: float = TIMEOUT) -> Iterator[World]:
    """Join a world of ranks on this host that meet in the file `store`; leave it at the end."""
    if size == 1:
        yield World()
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")           # one host: listen on loopback only
    meeting = dist.FileStore(str(store), size)
    with _group(backend, timeout, rank=rank, world_size=size, store=meeting) as world:
        yield world


@contextmanager
def joined_from_environment(backend: str = "gloo", timeout: float = TIMEOUT) -> Iterator[World]:
    """Join the world that torchrun described in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise Refused(f"under a launcher {', '.join(missing)} must be set in the environment; torchrun sets them")
    if launched_size() == 1:
        yield World()
        return
    with _group(backend, timeout, init_method="env://") as world:
        yield world


def launched_size() -> int | None:
    """The world's size where torchrun started this process, else None."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def ranks_here() -> int | None:
    """How many of the launched ranks share this host's cores, where torchrun started this process, else None."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) if launched_size() else None


def launched_rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextmanager
def _group(backend: str, timeout: float, **meeting: Any) -> Iterator[World]:
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **meeting)
    try:
        world = World(dist.get_rank(), dist.get_world_size(), backend, timeout, dist.group.WORLD)
        world.prove()
        yield world
        world.barrier()         # who leaves early appears to a peer as a closed connection
    finally:
        dist.destroy_process_group()
