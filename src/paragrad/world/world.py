"""World: which rank this is, of how many, and what all of them do together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paragrad.errors import StepFailed
from paragrad.world.signals import Request

CPU = torch.device("cpu")
TIMEOUT = 300.0         # seconds a rank waits for another before it gives up, unless told otherwise


@dataclass(frozen=True)
class World:
    """rank of size; a world of one needs no process group and is an ordinary world.

    Tensors of any device go in and come out; NCCL carries them on the GPU, gloo and shm through the host.
    """
    rank: int = 0
    size: int = 1
    backend: str | None = None
    timeout: float = TIMEOUT                    # seconds to wait for another rank
    device: torch.device = CPU
    group: Any = field(default=None, repr=False, compare=False)
    stop: Request = field(default_factory=Request, repr=False, compare=False)      # this rank was asked to stop
    walks: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)    # numbers the group's exchanges

    @property
    def carrier(self) -> torch.device:
        """Where a tensor must be for the backend to take it."""
        return self.device if self.backend == "nccl" else CPU

    @property
    def store(self) -> Any:
        """Where the ranks of the group met, with keys of the group's own."""
        return dist.distributed_c10d._get_process_group_store(self.group)        # torch has no public word for it

    def all_reduced(self, tensor: Tensor, operation: str = "SUM") -> Tensor:
        """The sum (or MAX, MIN) over all ranks, as a new tensor."""
        result = tensor.to(self.carrier, copy=True)
        if self.size > 1:
            dist.all_reduce(result, op=getattr(dist.ReduceOp, operation), group=self.group)
        return result.to(tensor.device)

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks (equal shapes), in rank order."""
        if self.size == 1:
            return [tensor]
        mine = tensor.to(self.carrier).contiguous()
        results = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(results, mine, group=self.group)
        return [result.to(tensor.device) for result in results]

    def copy_from_first(self, tensor: Tensor) -> None:
        """Overwrite a tensor with rank 0's."""
        if self.size > 1:
            carried = tensor.to(self.carrier, copy=True).contiguous()
            dist.broadcast(carried, group_src=0, group=self.group)
            tensor.copy_(carried)

    def agreed(self, value: Any) -> Any:
        """Rank 0's value (any that pickles), on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def collected(self, value: Any) -> list[Any]:
        """The values (any that pickle) of all ranks, on rank 0; an empty list on the others."""
        if self.size == 1:
            return [value]
        values = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    def twin(self, through_host: bool = False) -> World:
        """The same ranks over a process group of its own, so that its messages meet no others. Collective.

        through_host: over gloo, also where GPUs have NCCL.
        """
        if self.size == 1:
            return self
        backend = "gloo" if through_host else self.backend
        group = dist.new_group(timeout=timedelta(seconds=self.timeout), backend=backend)
        return replace(self, backend=backend, group=group, walks=itertools.count())

    def prove(self) -> None:
        """Run every kind of collective this library uses on known whole numbers; raise if one answers wrong."""
        if self.size == 1:
            return
        mine = torch.arange(3.0) + 10 * self.rank
        everyone = [torch.arange(3.0) + 10 * rank for rank in range(self.size)]
        answers = {"all_reduce(SUM)": (self.all_reduced(mine), sum(everyone)),
                   "all_reduce(MAX)": (self.all_reduced(mine, "MAX"), everyone[-1]),
                   "all_gather": (torch.stack(self.gathered(mine)), torch.stack(everyone))}
        if self.backend != "nccl":                  # schedules are played through the host
            answers["send and recv"] = self._passed_on(mine), everyone[self.rank - 1]
        for name, (answer, expected) in answers.items():
            if not torch.equal(answer, expected):       # type: ignore[arg-type]
                raise StepFailed(f"the backend {self.backend} gives a wrong {name}: {answer.tolist()}; "
                                 "use another backend or version of torch")

    def _passed_on(self, mine: Tensor) -> Tensor:
        """The left neighbour's tensor, having sent one's own to the right."""
        taken = torch.empty_like(mine)
        work = dist.isend(mine, group=self.group, group_dst=(self.rank + 1) % self.size)
        dist.recv(taken, group=self.group, group_src=(self.rank - 1) % self.size)
        if work is not None:
            work.wait()
        return taken
