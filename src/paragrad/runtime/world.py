"""World: which rank this is, of how many, and what all of them do together."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paragrad.errors import StepFailed
from paragrad.runtime.mesh import Axis, build_grid, check_disjoint, group_ranks_by_axes, locate_rank
from paragrad.runtime.stop_signals import StopRequest

CPU = torch.device("cpu")
# seconds a rank waits for another before it gives up, unless told otherwise
DEFAULT_TIMEOUT = 300.0
UNUSED_TAG = 1 << 20  # a tag
# the same where ranks that just met connect once more: of one that dies then gloo sees nothing
CONNECT_SECONDS = 4.0


@dataclass(frozen=True)
class World:
    """rank of size; a world of one needs no process group and is an ordinary world.

    Tensors of any device go in and come out; NCCL carries them on the GPU, gloo and shm through
    the host. A world may be cut into worlds; every rank named here is one of this world's own,
    whatever it was cut from.
    """

    rank: int = 0
    size: int = 1
    backend: str | None = None
    timeout: float = DEFAULT_TIMEOUT  # seconds to wait for another rank
    device: torch.device = CPU
    group: Any = field(default=None, repr=False, compare=False)
    # this rank was asked to stop
    stop: StopRequest = field(default_factory=StopRequest, repr=False, compare=False)
    # numbers the group's exchanges
    schedule_numbers: Iterator[int] = field(
        default_factory=itertools.count, repr=False, compare=False
    )
    # of the grid in which its ranks stand, from outer to inner
    axes: tuple[Axis, ...] = ()
    # all that were joined with it
    related_worlds: list[weakref.ref[World]] = field(
        default_factory=list, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.related_worlds.append(weakref.ref(self))

    def drop_groups(self) -> None:
        """As it is left: take the groups from this world and all cut from it. One still held as
        the interpreter ends may abort it, threads running.
        """
        for found in self.related_worlds:
            if (world := found()) is not None:
                object.__setattr__(world, "group", None)

    @property
    def transport_device(self) -> torch.device:
        """Where a tensor must be for the backend to take it."""
        return self.device if self.backend == "nccl" else CPU

    @property
    def store(self) -> Any:
        """Where the ranks of the group met, with keys of the group's own."""
        # torch has no public word for it
        return dist.distributed_c10d._get_process_group_store(self.group)

    @property
    def global_ranks(self) -> list[int]:
        """Of its ranks, the numbers by which they were launched, which everybody knows them
        by.
        """
        return [self.rank] if self.group is None else list(dist.get_process_group_ranks(self.group))

    @property
    def has_all_ranks(self) -> bool:
        """Are its ranks all that were launched?"""
        return self.group is None or self.size == dist.get_world_size()

    def all_reduce(self, tensor: Tensor, operation: str = "SUM") -> Tensor:
        """The sum (or MAX, MIN) over all ranks, as a new tensor."""
        result = tensor.to(self.transport_device, copy=True)
        if self.size > 1:
            dist.all_reduce(result, op=getattr(dist.ReduceOp, operation), group=self.group)
        return result.to(tensor.device)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks (equal shapes), in rank order."""
        if self.size == 1:
            return [tensor]
        mine = tensor.to(self.transport_device).contiguous()
        results = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(results, mine, group=self.group)
        return [result.to(tensor.device) for result in results]

    def start_transfers(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Begin to send tensors to other ranks, and to receive others from ranks into tensors,
        by rank; what is returned waits until all have come and gone.
        """
        own = [each.to(self.transport_device).contiguous() for each in sends.values()]
        wanted = list(receives.values())
        came = [
            each
            if each.device == self.transport_device
            else torch.empty_like(each, device=self.transport_device)
            for each in wanted
        ]
        messages = [
            dist.P2POp(function, tensor, group=self.group, group_peer=peer)
            for function, peers, tensors in ((dist.irecv, receives, came), (dist.isend, sends, own))
            for peer, tensor in zip(peers, tensors, strict=True)
        ]
        works = dist.batch_isend_irecv(messages) if messages else []

        def over() -> None:
            for work in works:
                work.wait()
            for into, found in zip(wanted, came, strict=True):
                if found is not into:
                    into.copy_(found)
            own.clear()  # which the backend reads until then

        return over

    def all_gather_into(self, output: Tensor, tensor: Tensor) -> None:
        """The flat tensors of all ranks, one after another, into one of their lengths together;
        NCCL's on its GPU.
        """
        dist.all_gather_single(output, tensor, group=self.group)

    def reduce_scatter_into(self, output: Tensor, tensor: Tensor, operation: Any) -> None:
        """The sum (or another of torch's) over all ranks of a flat tensor, of which each gets
        its part, in rank order.
        """
        dist.reduce_scatter_single(output, tensor, op=operation, group=self.group)

    def copy_from_first(self, tensor: Tensor) -> None:
        """Overwrite a tensor with rank 0's."""
        self.copy_from(tensor, 0)

    def copy_from(self, tensor: Tensor, rank: int) -> None:
        """Overwrite a tensor with that rank's."""
        if self.size > 1:
            carried = tensor.to(self.transport_device, copy=True).contiguous()
            dist.broadcast(carried, group_src=rank, group=self.group)
            tensor.copy_(carried)

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value (any that pickles), on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, group_src=0, group=self.group)
        return values[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """The values (any that pickle) of all ranks, on rank 0; an empty list on the others."""
        if self.size == 1:
            return [value]
        values = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    # ---- sub-worlds: each has a process group of its own, and what it does not say itself from the
    # world it is cut from
    def add_axes(self, *axes: Axis | tuple[str, int]) -> World:
        """The same ranks in a grid of axes (name, size), from outer to inner: along the last
        one stand neighbours.

        Raises Refused where the sizes' product is not this world's size.
        """
        return replace(self, axes=build_grid(axes, self.size))

    def select_axes(self, names: str | Collection[str], through_host: bool = False) -> World:
        """The ranks that differ from this one along this axis, or these, alone; in the order
        they have here. Collective.

        A group of its own for every call: its messages meet no others. through_host: over gloo
        where GPUs have NCCL, which plays no schedules of ours.
        """
        names = {names} if isinstance(names, str) else set(names)
        found = self.split_ranks(
            group_ranks_by_axes(self.axes, names), self._choose_host_backend(through_host)
        )
        assert found is not None  # every rank stands on a line
        return replace(found, axes=tuple(axis for axis in self.axes if axis.name in names))

    def select_dividing_axes(self, kind: str) -> World:
        """The ranks that divide that (samples, domain, model) among them; this world where its
        axes divide nothing else. Collective.
        """
        names = [axis.name for axis in self.axes if axis.divides == kind]
        return self if len(names) == len(self.axes) else self.select_axes(names)

    def is_first(self, kind: str) -> bool:
        """Is this rank the first of those with the same part of that?"""
        here = locate_rank(self.axes, self.rank)
        return not any(here[axis.name] for axis in self.axes if axis.divides != kind)

    def split_ranks(
        self, rank_sets: Sequence[Sequence[int]], backend: str | None = None
    ) -> World | None:
        """The world of that set which this rank is in; None if it is in none. Collective: every
        rank of this world calls it, with all the sets; no two share a rank. Ranks there are in
        the order in which the set names them.

        backend: otherwise this world's.
        """
        check_disjoint(rank_sets, self.size)
        if (told := self.broadcast_object(wanted := [list(each) for each in rank_sets])) != wanted:
            raise StepFailed(
                f"rank 0 asks for worlds among {told}, rank {self.rank} among {wanted}; all must "
                f"ask for the same"
            )
        found = None
        backend = backend or self.backend
        if backend == "gloo":
            # a new group waits for its ranks for some seconds only
            self.barrier()
        for each in rank_sets:
            group = self._create_group(each, backend) if len(each) > 1 else None
            if self.rank in each:
                found = replace(
                    self,
                    rank=each.index(self.rank),
                    size=len(each),
                    backend=backend,
                    axes=(),
                    group=group,
                    schedule_numbers=itertools.count(),
                )
        return found

    def duplicate(self, through_host: bool = False) -> World:
        """The same ranks over a process group of its own, so that its messages meet no others;
        through_host as `along` has it. Collective.
        """
        if self.size == 1:
            return self
        found = self.split_ranks([range(self.size)], self._choose_host_backend(through_host))
        assert found is not None
        return replace(found, axes=self.axes)

    def _choose_host_backend(self, through_host: bool) -> str | None:
        return "gloo" if through_host and self.backend == "nccl" else None

    def _create_group(self, ranks: Sequence[int], backend: str | None) -> Any:
        """A process group of some of this world's ranks, on those; all ranks of this world call
        it.

        Not by new_group, nor by DeviceMesh, which uses it: torch names a group by how many a
        rank was asked for, so all launched ranks would have to come, whichever sub-world calls.
        This is the step behind both, with a name that its ranks agree on unasked: which they
        are, and how manieth group of just these. Not one by chance: DTensor remembers names,
        and looks for them in the next world.
        """
        inside = dist.distributed_c10d
        whole = dist.get_process_group_ranks(self.group)
        members = [whole[rank] for rank in ranks]
        own = ranks.index(self.rank) if self.rank in ranks else None
        name = f"paragrad/{hashlib.sha256(str(members).encode()).hexdigest()}/"
        name += str(sum(each.startswith(name) for each in inside._world.pg_names.values()))
        meeting = (
            min(self.timeout, CONNECT_SECONDS + len(ranks) / 10)
            if backend == "gloo"
            else self.timeout
        )
        group, _ = inside._new_process_group_helper(
            len(ranks), own, members, backend, self.store, name, timeout=timedelta(seconds=meeting)
        )
        if own is not None:
            inside._world.pg_group_ranks[group] = {
                member: rank for rank, member in enumerate(members)
            }
            if meeting < self.timeout:
                inside._set_pg_timeout(timedelta(seconds=self.timeout), group)
        return group

    def abort(self) -> None:
        """Close this rank's connections: whoever waits for it fails as well, and says where it
        stands, and does not wait on for its own limit. gloo closes all of a rank's when a
        receive is too late; one with a tag that nobody sends: it ends the process where a
        message that is under way is longer than what it would come into.
        """
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    work = dist.irecv(
                        torch.empty(0), group=self.group, group_src=peer, tag=UNUSED_TAG
                    )
                    work.wait(timedelta(milliseconds=1))

    def check_collectives(self) -> None:
        """Run every kind of collective this library uses on known whole numbers; raise if one
        answers wrong.
        """
        if self.size == 1:
            return
        mine = torch.arange(3.0) + 10 * self.rank
        everyone = [torch.arange(3.0) + 10 * rank for rank in range(self.size)]
        answers = {
            "all_reduce(SUM)": (self.all_reduce(mine), sum(everyone)),
            "all_reduce(MAX)": (self.all_reduce(mine, "MAX"), everyone[-1]),
            "all_gather": (torch.stack(self.all_gather(mine)), torch.stack(everyone)),
        }
        if self.backend != "nccl":  # schedules are played through the host
            answers["send and recv"] = self._shift_right(mine), everyone[self.rank - 1]
        for name, (answer, expected) in answers.items():
            if not torch.equal(answer, expected):  # type: ignore[arg-type]
                raise StepFailed(
                    f"the backend {self.backend} gives a wrong {name}: {answer.tolist()}; "
                    "use another backend or version of torch"
                )

    def _shift_right(self, tensor: Tensor) -> Tensor:
        """The left neighbour's tensor, having sent one's own to the right."""
        taken = torch.empty_like(tensor)
        work = dist.isend(tensor, group=self.group, group_dst=(self.rank + 1) % self.size)
        dist.recv(taken, group=self.group, group_src=(self.rank - 1) % self.size)
        if work is not None:
            work.wait()
        return taken
