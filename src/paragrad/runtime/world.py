"""The `World`: this rank, the number of ranks, and the collectives that connect them."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from array import array
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
from paragrad.runtime.object_message import decode_object, encode_object, make_head, read_head
from paragrad.runtime.stop_signals import StopRequest

CPU = torch.device("cpu")
# seconds that a rank waits for another before it gives up
DEFAULT_TIMEOUT = 300.0
UNUSED_TAG = 1 << 20  # no message has this tag
# The same, in seconds, for connected ranks that form one more group: gloo does not notice when
# a rank dies meanwhile.
CONNECT_SECONDS = 4.0


@dataclass(frozen=True)
class World:
    """The ranks of a run, as one of them sees them: its rank, the size and the process group.

    A world of one rank needs no process group and is an ordinary world. Methods take and return
    tensors of any device. NCCL carries them on the GPU; gloo and shm carry them through the host.

    A world can be split into sub-worlds. Arguments and results name ranks by their numbers in this
    world, and not in the world from which it was split.

    Attributes:
        rank: The number of this rank, from 0.

        size: The number of ranks.

        backend: The torch.distributed backend (gloo, nccl or shm); None in a world of one.

        timeout: Seconds to wait for another rank.

        device: The device of this rank.

        group: The process group; None in a world of one.

        stop: Is set when this rank must stop.

        schedule_numbers: Numbers the schedules that are run over this group.

        axes: The axes of the grid that the ranks form, from outer to inner.

        related_worlds: This world and all worlds that were split from the same one.
    """

    rank: int = 0
    size: int = 1
    backend: str | None = None
    timeout: float = DEFAULT_TIMEOUT
    device: torch.device = CPU
    group: Any = field(default=None, repr=False, compare=False)
    stop: StopRequest = field(default_factory=StopRequest, repr=False, compare=False)
    schedule_numbers: Iterator[int] = field(
        default_factory=itertools.count, repr=False, compare=False
    )
    axes: tuple[Axis, ...] = ()
    related_worlds: list[weakref.ref[World]] = field(
        default_factory=list, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.related_worlds.append(weakref.ref(self))

    def drop_groups(self) -> None:
        """Remove the process groups from this world and from all related worlds.

        Called when the world is left. A group that is still held when the interpreter exits can
        abort the process, because its threads still run.
        """
        for reference in self.related_worlds:
            if (world := reference()) is not None:
                object.__setattr__(world, "group", None)

    @property
    def transport_device(self) -> torch.device:
        """The device on which the backend takes tensors."""
        return self.device if self.backend == "nccl" else CPU

    @property
    def store(self) -> Any:
        """The store in which the ranks of the group met, with keys of the group's own."""
        # torch has no public function for it
        return dist.distributed_c10d._get_process_group_store(self.group)

    @property
    def global_ranks(self) -> list[int]:
        """The launch numbers of this world's ranks, which are the numbers that messages show."""
        return [self.rank] if self.group is None else list(dist.get_process_group_ranks(self.group))

    @property
    def has_all_ranks(self) -> bool:
        """Does this world hold all launched ranks?"""
        return self.group is None or self.size == dist.get_world_size()

    def all_reduce(self, tensor: Tensor, operation: str = "SUM") -> Tensor:
        """Reduce a tensor over all ranks.

        Args:
            tensor: This rank's contribution, of the same shape on all ranks.
            operation: SUM, MAX or MIN.

        Returns:
            The reduction, as a new tensor on the tensor's device.
        """
        result = tensor.to(self.transport_device, copy=True)
        if self.size > 1:
            self._reduce_in_place(result, operation)
        return result.to(tensor.device)

    def _reduce_in_place(self, tensor: Tensor, operation: str = "SUM") -> None:
        """Reduce a tensor over all ranks into itself.

        The group is called directly. The checks in the functions of torch.distributed take longer
        than a short collective.
        """
        if self.group is None or tensor.is_complex():
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation), group=self.group)
            return
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, operation)
        options.asyncOp = False
        if (work := self.group.allreduce([tensor], options)) is not None:
            work.wait()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather the tensors of all ranks.

        Args:
            tensor: This rank's tensor, of the same shape on all ranks.

        Returns:
            The tensors in rank order.
        """
        if self.size == 1:
            return [tensor]
        sent = tensor.to(self.transport_device).contiguous()
        results = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(results, sent, group=self.group)
        return [result.to(tensor.device) for result in results]

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Gather a few numbers from all ranks, in double precision.

        The backend shm has an operation for it. For others, each rank has a row and adds zeros to
        the rows of the others: a short sum is their fastest collective.

        Args:
            numbers: This rank's numbers, equally many on all ranks.

        Returns:
            The numbers of each rank, in rank order.
        """
        if not numbers:
            return [[] for _ in range(self.size)]
        if self.backend == "shm" and self.size > 1:
            return self.group.gather_numbers(numbers)  # type: ignore[no-any-return]
        count = len(numbers)
        zeros = array("d", [0.0]) * count
        rows = zeros * self.rank + array("d", numbers) + zeros * (self.size - 1 - self.rank)
        if self.size > 1:
            sums = torch.frombuffer(rows, dtype=torch.float64).to(self.transport_device)
            self._reduce_in_place(sums)
            rows = array("d", sums.tolist())
        return [rows[start : start + count].tolist() for start in range(0, len(rows), count)]

    def start_transfers(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Start point-to-point transfers with other ranks.

        Args:
            sends: The tensor to send, by the rank that receives it.
            receives: The tensor to receive into, by the rank that sends.

        Returns:
            A function that waits until all transfers are complete.
        """
        outgoing = [each.to(self.transport_device).contiguous() for each in sends.values()]
        targets = list(receives.values())
        incoming = [
            each
            if each.device == self.transport_device
            else torch.empty_like(each, device=self.transport_device)
            for each in targets
        ]
        messages = [
            dist.P2POp(function, tensor, group=self.group, group_peer=peer)
            for function, peers, tensors in (
                (dist.irecv, receives, incoming),
                (dist.isend, sends, outgoing),
            )
            for peer, tensor in zip(peers, tensors, strict=True)
        ]
        works = dist.batch_isend_irecv(messages) if messages else []

        def finish() -> None:
            for work in works:
                work.wait()
            for target, received in zip(targets, incoming, strict=True):
                if received is not target:
                    target.copy_(received)
            outgoing.clear()  # until here the backend reads these tensors

        return finish

    def all_gather_into(self, output: Tensor, tensor: Tensor) -> None:
        """Concatenate the flat tensors of all ranks, in rank order. With NCCL they are on the GPU.

        Args:
            output: A flat tensor that takes the result; its length is the sum of all lengths.
            tensor: This rank's flat tensor.
        """
        if self.size == 1:
            output.copy_(tensor)
        elif self.backend == "shm" and self.group is not None:
            self.group.all_gather_single(output, tensor).wait()
        else:
            dist.all_gather_single(output, tensor, group=self.group)

    def reduce_scatter_into(self, output: Tensor, tensor: Tensor, operation: Any) -> None:
        """Reduce a flat tensor over all ranks, and give each rank its part in rank order.

        Args:
            output: A flat tensor that takes this rank's part.
            tensor: This rank's contribution.
            operation: The reduction, of torch.distributed.ReduceOp.
        """
        if self.size == 1:
            output.copy_(tensor)
        elif self.backend == "shm" and self.group is not None:
            options = dist.ReduceScatterOptions()
            options.reduceOp = operation
            options.asyncOp = False
            self.group.reduce_scatter_single(output, tensor, options).wait()
        else:
            dist.reduce_scatter_single(output, tensor, op=operation, group=self.group)

    def copy_from_first(self, tensor: Tensor) -> None:
        """Overwrite a tensor with the one of rank 0 (a broadcast).

        Args:
            tensor: The tensor to send or to overwrite.
        """
        self.copy_from(tensor, 0)

    def copy_from(self, tensor: Tensor, rank: int) -> None:
        """Overwrite a tensor with the one of a given rank (a broadcast).

        Args:
            tensor: The tensor to send or to overwrite.
            rank: The rank that sends.
        """
        if self.size > 1:
            carried = tensor.to(self.transport_device, copy=True).contiguous()
            dist.broadcast(carried, group_src=rank, group=self.group)
            tensor.copy_(carried)

    def broadcast_object(self, value: Any) -> Any:
        """Send a Python object from rank 0 to all ranks.

        Args:
            value: Any value that can be pickled; only rank 0's is used.

        Returns:
            Rank 0's value.
        """
        if self.size == 1:
            return value
        sent = encode_object(value) if self.rank == 0 else torch.zeros(0, dtype=torch.uint8)
        head = make_head(sent)
        self.copy_from_first(head)
        length, data = read_head(head)
        if data is None:
            data = sent if self.rank == 0 else torch.zeros(length, dtype=torch.uint8)
            self.copy_from_first(data)
        return value if self.rank == 0 else decode_object(data)

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather a Python object of every rank on rank 0.

        Args:
            value: Any value that can be pickled.

        Returns:
            The values in rank order on rank 0, of which its own is the given object and no copy; an
            empty list on other ranks.
        """
        if self.size == 1:
            return [value]
        sent = torch.zeros(0, dtype=torch.uint8) if self.rank == 0 else encode_object(value)
        heads = [read_head(each) for each in self.all_gather(make_head(sent))]
        if self.rank:
            if heads[self.rank][1] is None:
                self.start_transfers({0: sent}, {})()
            return []
        values = [value]
        # one after the other, so that there is memory for one message
        for rank, (length, data) in enumerate(heads[1:], 1):
            if data is None:
                data = torch.empty(length, dtype=torch.uint8)
                self.start_transfers({}, {rank: data})()
            values.append(decode_object(data))
        return values

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier(group=self.group)

    # ---- sub-worlds: each has its own process group and takes its other settings from this world
    def add_axes(self, *axes: Axis | tuple[str, int]) -> World:
        """Arrange the ranks in a grid. Neighbouring ranks differ along the last axis.

        Args:
            axes: The axes, or pairs (name, size), from outer to inner.

        Returns:
            This world with those axes.

        Raises:
            Refused: The product of the sizes is not the size of this world.
        """
        return replace(self, axes=build_grid(axes, self.size))

    def select_axes(self, names: str | Collection[str], through_host: bool = False) -> World:
        """Create the sub-world of the ranks that differ from this one only along the given axes.

        Collective. Every call creates a process group of its own, so that messages do not mix.
        Ranks keep their order.

        Args:
            names: The name of one axis, or several names.
            through_host: Use gloo where this world uses NCCL, which runs no schedules of paragrad.

        Returns:
            The sub-world, with those axes.
        """
        names = {names} if isinstance(names, str) else set(names)
        selected = self.split_ranks(
            group_ranks_by_axes(self.axes, names), self._choose_host_backend(through_host)
        )
        assert selected is not None  # every rank is in one set
        return replace(selected, axes=tuple(axis for axis in self.axes if axis.name in names))

    def select_dividing_axes(self, kind: str) -> World:
        """Create the sub-world of the ranks among which samples, domain or model are divided.

        Collective. If all axes of this world divide the same kind, no new world is created.

        Args:
            kind: What the axes divide: samples, domain or model.

        Returns:
            The sub-world, or this world.
        """
        names = [axis.name for axis in self.axes if axis.divides == kind]
        return self if len(names) == len(self.axes) else self.select_axes(names)

    def is_first(self, kind: str) -> bool:
        """Tell whether this rank is the first of those that hold the same part of a kind.

        Args:
            kind: What is divided: samples, domain or model.
        """
        position = locate_rank(self.axes, self.rank)
        return not any(position[axis.name] for axis in self.axes if axis.divides != kind)

    def split_ranks(
        self, rank_sets: Sequence[Sequence[int]], backend: str | None = None
    ) -> World | None:
        """Split this world into disjoint sub-worlds.

        Collective: every rank of this world calls it with all sets. The ranks of a sub-world have
        the order in which the set names them.

        Args:
            rank_sets: Sets of ranks, without common ranks.
            backend: The backend of the sub-worlds; None takes this world's.

        Returns:
            The sub-world of this rank; None if this rank is in no set.

        Raises:
            StepFailed: The ranks gave different sets.
            ValueError: A set names an unknown rank, or two sets share one.
        """
        check_disjoint(rank_sets, self.size)
        if (
            first_sets := self.broadcast_object(
                own_sets := [list(ranks_of_set) for ranks_of_set in rank_sets]
            )
        ) != own_sets:
            raise StepFailed(
                f"rank 0 asks for worlds among {first_sets}, rank {self.rank} among {own_sets}; "
                "all must ask for the same"
            )
        result = None
        backend = backend or self.backend
        if backend == "gloo":
            # a new group waits for its ranks only CONNECT_SECONDS
            self.barrier()
        for ranks_of_set in rank_sets:
            group = self._create_group(ranks_of_set, backend) if len(ranks_of_set) > 1 else None
            if self.rank in ranks_of_set:
                result = replace(
                    self,
                    rank=ranks_of_set.index(self.rank),
                    size=len(ranks_of_set),
                    backend=backend,
                    axes=(),
                    group=group,
                    schedule_numbers=itertools.count(),
                )
        return result

    def duplicate(self, through_host: bool = False) -> World:
        """Create a world of the same ranks with a process group of its own. Collective.

        The messages of the two worlds do not mix.

        Args:
            through_host: Use gloo where this world uses NCCL.

        Returns:
            The new world; this world if it has only one rank.
        """
        if self.size == 1:
            return self
        copied = self.split_ranks([range(self.size)], self._choose_host_backend(through_host))
        assert copied is not None
        return replace(copied, axes=self.axes)

    def _choose_host_backend(self, through_host: bool) -> str | None:
        return "gloo" if through_host and self.backend == "nccl" else None

    def _create_group(self, ranks: Sequence[int], backend: str | None) -> Any:
        """Create a process group of some ranks. Every rank of this world calls it.

        torch.distributed.new_group, which DeviceMesh uses as well, numbers the groups of a process.
        All launched ranks would therefore have to take part in every call. This method uses the
        function below it. The ranks find the group's name without a message: it is made of the
        members and of the count of groups with these members. The name is not random, because
        DTensor remembers names and looks for them in the next world.
        """
        c10d = dist.distributed_c10d
        global_ranks = dist.get_process_group_ranks(self.group)
        members = [global_ranks[rank] for rank in ranks]
        own_rank = ranks.index(self.rank) if self.rank in ranks else None
        name = f"paragrad/{hashlib.sha256(str(members).encode()).hexdigest()}/"
        name += str(sum(each.startswith(name) for each in c10d._world.pg_names.values()))
        connect_limit = (
            min(self.timeout, CONNECT_SECONDS + len(ranks) / 10)
            if backend == "gloo"
            else self.timeout
        )
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            own_rank,
            members,
            backend,
            self.store,
            name,
            timeout=timedelta(seconds=connect_limit),
        )
        if own_rank is not None:
            c10d._world.pg_group_ranks[group] = {
                member: rank for rank, member in enumerate(members)
            }
            if connect_limit < self.timeout:
                c10d._set_pg_timeout(timedelta(seconds=self.timeout), group)
        return group

    def abort(self) -> None:
        """Close this rank's connections, so that ranks which wait for it fail at once.

        Otherwise they would wait until their own time limit, and could not report where they stand.
        gloo closes all connections of a rank when one receive is late. This method therefore posts
        receives with a tag that no rank sends. With a tag in use, gloo ends the process if a
        message under way is longer than the tensor of the receive.
        """
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    work = dist.irecv(
                        torch.empty(0), group=self.group, group_src=peer, tag=UNUSED_TAG
                    )
                    work.wait(timedelta(milliseconds=1))

    def check_collectives(self) -> None:
        """Run each kind of collective that paragrad uses on known whole numbers.

        Raises:
            StepFailed: The backend gives a wrong result.
        """
        if self.size == 1:
            return
        own_tensor = torch.arange(3.0) + 10 * self.rank
        all_tensors = [torch.arange(3.0) + 10 * rank for rank in range(self.size)]
        answers = {
            "all_reduce(SUM)": (self.all_reduce(own_tensor), sum(all_tensors)),
            "all_reduce(MAX)": (self.all_reduce(own_tensor, "MAX"), all_tensors[-1]),
            "all_gather": (torch.stack(self.all_gather(own_tensor)), torch.stack(all_tensors)),
        }
        if self.backend != "nccl":  # schedules run through the host
            answers["send and recv"] = self._shift_right(own_tensor), all_tensors[self.rank - 1]
        for name, (answer, expected) in answers.items():
            if not torch.equal(answer, expected):  # type: ignore[arg-type]
                raise StepFailed(
                    f"the backend {self.backend} gives a wrong {name}: {answer.tolist()}; use "
                    "another backend or version of torch"
                )

    def _shift_right(self, tensor: Tensor) -> Tensor:
        """Send a tensor to the right neighbour and return the one of the left neighbour."""
        received = torch.empty_like(tensor)
        work = dist.isend(tensor, group=self.group, group_dst=(self.rank + 1) % self.size)
        dist.recv(received, group=self.group, group_src=(self.rank - 1) % self.size)
        if work is not None:
            work.wait()
        return received
