"""The process group `shm`: torch.distributed's operations on CPU tensors of one Linux host.

    import paragrad.backends
    dist.init_process_group("shm", ...)         # instead of "gloo"

Each group has one region with everything: the process ids of its ranks, semaphores, areas of the
collectives and rings of the messages. Rank 0 makes the region and sends its address through the
store. Afterwards the group needs no port, no file and no store.

torch calls most methods here from C++, and the names depend on its version: 2.11 looks for
`_allgather_base`, 2.13 for `all_gather_single`. Both names are therefore defined.
"""

from __future__ import annotations

import functools
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paragrad.shm import collectives
from paragrad.shm.attach import AttachedGroup, attach_group
from paragrad.shm.collective_queue import CollectiveQueue
from paragrad.shm.collectives import GroupAreas, make_title
from paragrad.shm.flat_tensors import (
    FlatOperation,
    FlatTensors,
    check_dense_cpu_tensor,
    describe_tensors,
    name_tensor_dtype,
    run_on_flat_tensors,
)
from paragrad.shm.reductions import SUM, find_reduction
from paragrad.shm.work import COMPLETED_WORK, OperationQueue, ShmWork

# time in which a closed group completes the operations that no caller waited for
CLOSE_SECONDS = 1.0

_NO_TIME = timedelta(0)
# the options of a collective for which its caller waits
_AWAITED = dist.AllreduceOptions()
_AWAITED.asyncOp = False


def register_backend() -> None:
    """Register the backend shm with torch.distributed, once."""
    if not hasattr(dist.Backend, "SHM"):
        dist.Backend.register_backend(
            "shm", _create_process_group, extended_api=True, devices=["cpu"]
        )


def _create_process_group(backend_options: Any, options: Any) -> SharedMemoryGroup:
    seconds = backend_options.timeout.total_seconds()
    local_ranks = dist.get_world_size() if dist.is_initialized() else backend_options.group_size
    return SharedMemoryGroup(
        attach_group(
            backend_options.store,
            backend_options.group_rank,
            backend_options.group_size,
            seconds,
            local_ranks,
        ),
        backend_options.group_id,
        seconds,
    )


class SharedMemoryGroup(dist.ProcessGroup):
    """One rank's end of a group. torch.distributed creates it.

    Attributes:
        attached: The parts of the group that this rank uses.

        seconds: The time limit of an operation.

        collective_queue: The collectives.

        message_queue: The point-to-point messages.

        peers: The processes of the other ranks.

        names: The name and the description of the group.

        finalizer: Closes the group.
    """

    def __init__(self, attached: AttachedGroup, name: str, seconds: float) -> None:
        super().__init__(attached.rank, attached.size)
        self.attached = attached
        self.seconds = seconds
        self.collective_queue = CollectiveQueue(attached.areas)
        self.message_queue = attached.message_queue
        self.peers = attached.peers
        self.names = [name, "undefined"]
        self.finalizer = weakref.finalize(
            self, _close_group, (self.collective_queue, self.message_queue), attached
        )

    # ---- the interface of torch's groups -----------------------------------------------------
    def getBackendName(self) -> str:  # noqa: N802
        return "shm"

    def name(self) -> str:
        return "shm"

    def _set_group_name(self, name: str) -> None:
        self.names[0] = name

    @property
    def group_name(self) -> str:
        return self.names[0]

    def getGroupName(self) -> str:  # noqa: N802
        return self.names[0]

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self.names[0] = name

    def _set_group_desc(self, description: str) -> None:
        self.names[1] = description

    @property
    def group_desc(self) -> str:
        return self.names[1]

    def set_timeout(self, timeout: timedelta) -> None:
        self.seconds = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: collectives are numbered anyway."""

    def _get_sequence_number_for_group(self) -> int:
        return self.collective_queue.areas.collective_count

    def shutdown(self) -> None:
        self.finalizer()

    def abort(self) -> None:
        self.peers.abandon_group(f"rank {self.rank()} aborted the group")
        self.finalizer()

    # ---- collectives -------------------------------------------------------------------------
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        opts = opts or dist.AllreduceOptions()
        if (
            not opts.asyncOp
            and opts.reduceOp == SUM
            and self.collective_queue.try_short_sum(tensors[0], self.seconds)
        ):
            return COMPLETED_WORK
        return self._queue_reduction("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        return self._queue_reduction(
            "all_reduce_coalesced", tensors, opts or dist.AllreduceCoalescedOptions()
        )

    def reduce(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        return self._queue_reduction(f"reduce to {opts.rootRank}", tensors, opts, opts.rootRank)

    def _queue_reduction(
        self, operation: str, tensors: list[Tensor], opts: Any, root: int | None = None
    ) -> ShmWork:
        reduction = find_reduction(opts.reduceOp, tensors[0].dtype)

        def run(areas: GroupAreas, outs: FlatTensors, _: FlatTensors) -> None:
            for out in outs:
                collectives.all_reduce_flat(areas, out, reduction, root)

        description = describe_tensors(f"{operation} {reduction.name}", tensors)
        if operation == "all_reduce" and opts.reduceOp == SUM:
            self.collective_queue.remember_short_sum(make_title(description), tensors[0])
        return self._queue_collective(description, run, tensors, (), opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        def run(areas: GroupAreas, outs: FlatTensors, _: FlatTensors) -> None:
            for out in outs:
                collectives.broadcast_flat(areas, out, root)

        root = opts.rootRank
        return self._queue_collective(
            describe_tensors(f"broadcast from {root}", tensors), run, tensors, (), opts
        )

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> ShmWork:
        def run(areas: GroupAreas, outs: FlatTensors, ins: FlatTensors) -> None:
            collectives.all_gather_flat(areas, outs, ins[0])

        title = describe_tensors("all_gather", outputs[0])
        own_output = outputs[0][self.rank()]
        # with such a title all ranks raise, and the message names this rank
        if own_output.numel() != inputs[0].numel() or own_output.dtype != inputs[0].dtype:
            title += f", of which rank {self.rank()} gives {describe_tensors('', inputs)}"
        return self._queue_collective(title, run, outputs[0], inputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> ShmWork:
        """Gather several tensors: outputs[rank][i] becomes that rank's inputs[i].

        Args:
            outputs: Take the results.
            inputs: This rank's tensors.
            opts: The options of torch.distributed.
        """

        def run(areas: GroupAreas, outs: FlatTensors, ins: FlatTensors) -> None:
            for index, tensor in enumerate(ins):
                collectives.all_gather_flat(areas, outs[index :: len(ins)], tensor)

        all_outputs = [tensor for row in outputs for tensor in row]
        return self._queue_collective(
            describe_tensors("all_gather_coalesced", inputs), run, all_outputs, inputs, opts
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> ShmWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ShmWork:
        """Gather several tensors: outputs[i] becomes all ranks' inputs[i], concatenated or stacked.

        Args:
            outputs: Take the results.
            inputs: This rank's tensors.
            opts: The options of torch.distributed.
        """

        def run(areas: GroupAreas, outs: FlatTensors, ins: FlatTensors) -> None:
            for out, tensor in zip(outs, ins, strict=True):
                collectives.all_gather_flat(areas, self._split_evenly(out), tensor)

        self._check_lengths("all_gather", outputs, inputs)
        return self._queue_collective(
            describe_tensors("all_gather_single", inputs), run, outputs, inputs, opts
        )

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Gather a few numbers from all ranks. It makes no tensors, which take longer than this.

        Args:
            numbers: This rank's numbers, equally many on all ranks.

        Returns:
            The numbers of each rank, in rank order, in double precision.
        """
        rows: list[list[float]] = []
        own = array("d", numbers)

        def run(areas: GroupAreas, outs: FlatTensors, ins: FlatTensors) -> None:
            rows.extend(collectives.all_gather_numbers(areas, own))

        title = f"gather {len(own)} numbers of each rank"
        self._queue_collective(title, run, (), (), _AWAITED).wait()
        return rows

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> ShmWork:
        def run(areas: GroupAreas, outs: FlatTensors, ins: FlatTensors) -> None:
            collectives.gather_flat(areas, outs, ins[0])

        results = outputs[0] if outputs else []
        if any(each.numel() != inputs[0].numel() for each in results):
            raise ValueError(
                "gather needs tensors of one length, got "
                f"{describe_tensors('', [*inputs, *results])}"
            )
        return self._queue_collective(
            describe_tensors(f"gather to {opts.rootRank}", inputs), run, results, inputs, opts
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> ShmWork:
        def run(areas: GroupAreas, outs: FlatTensors, ins: FlatTensors) -> None:
            collectives.scatter_flat(areas, outs[0], ins, root)

        root = opts.rootRank
        contributions = inputs[0] if inputs else []
        if any(each.numel() != outputs[0].numel() for each in contributions):
            raise ValueError(
                "scatter needs tensors of one length, got "
                f"{describe_tensors('', [*outputs, *contributions])}"
            )
        return self._queue_collective(
            describe_tensors(f"scatter from {root}", outputs), run, outputs, contributions, opts
        )

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> ShmWork:
        def run(areas: GroupAreas, outs: FlatTensors, ins: FlatTensors) -> None:
            collectives.reduce_scatter_flat(areas, outs[0], ins, reduction)

        opts = opts or dist.ReduceScatterOptions()
        reduction = find_reduction(opts.reduceOp, outputs[0].dtype)
        if inputs[0][self.rank()].numel() != outputs[0].numel():
            raise ValueError(
                f"reduce_scatter: the output of rank {self.rank()} is "
                f"{describe_tensors('', outputs)}, and its inputs are "
                f"{describe_tensors('', inputs[0])}"
            )
        return self._queue_collective(
            describe_tensors(f"reduce_scatter {reduction.name}", inputs[0]),
            run,
            outputs,
            inputs[0],
            opts,
        )

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> ShmWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ShmWork:
        def run(areas: GroupAreas, outs: FlatTensors, ins: FlatTensors) -> None:
            for out, tensor in zip(outs, ins, strict=True):
                collectives.reduce_scatter_flat(areas, out, self._split_evenly(tensor), reduction)

        opts = opts or dist.ReduceScatterOptions()
        reduction = find_reduction(opts.reduceOp, outputs[0].dtype)
        self._check_lengths("reduce_scatter", inputs, outputs)
        return self._queue_collective(
            describe_tensors(f"reduce_scatter_single {reduction.name}", inputs),
            run,
            outputs,
            inputs,
            opts,
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        def run(areas: GroupAreas, outs: FlatTensors, ins: FlatTensors) -> None:
            collectives.all_to_all_flat(areas, outs, ins)

        return self._queue_collective(
            f"all_to_all of {name_tensor_dtype(inputs[0])}", run, outputs, inputs, opts
        )

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_rows: list[int],
        input_rows: list[int],
        opts: Any = None,
    ) -> ShmWork:
        """Exchange the parts of a tensor, split along the first dim.

        Args:
            output: Takes the parts of all ranks.

            tensor: The parts for all ranks.

            output_rows: The number of rows from each rank; empty for an even split.

            input_rows: The number of rows for each rank; empty for an even split.

            opts: The options of torch.distributed.
        """

        def run(areas: GroupAreas, outs: FlatTensors, ins: FlatTensors) -> None:
            collectives.all_to_all_flat(
                areas,
                self._split_rows(outs[0], output, output_rows),
                self._split_rows(ins[0], tensor, input_rows),
            )

        for each, rows in ((output, output_rows), (tensor, input_rows)):
            if (sum(rows) != len(each)) if rows else len(each) % self.size():
                raise ValueError(
                    f"all_to_all_single: {len(each)} rows cannot be split into "
                    f"{rows or self.size()}"
                )
        return self._queue_collective(
            f"all_to_all_single of {name_tensor_dtype(tensor)}", run, [output], [tensor], opts
        )

    def barrier(self, opts: Any = None) -> ShmWork:
        return self._queue_collective(
            "barrier", lambda areas, outs, ins: collectives.run_barrier(areas), (), (), opts
        )

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until every rank is here, and name all ranks that did not come.

        torch's dist.monitored_barrier accepts no backend but gloo.

        Args:
            timeout: The time limit; None takes the group's.
            wait_all_ranks: Has no effect: all missing ranks are named in either case.
        """
        opts = dist.BarrierOptions()
        opts.timeout = timeout or timedelta(seconds=self.seconds)
        self._queue_collective(
            "monitored_barrier",
            lambda areas, outs, ins: collectives.run_barrier(areas),
            (),
            (),
            opts,
        ).wait()

    _allgather_base = all_gather_single  # torch's names until 2.12
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _split_evenly(self, flat: Tensor) -> FlatTensors:
        return list(flat.view(self.size(), -1)) if flat.numel() else [flat] * self.size()

    def _split_rows(self, flat: Tensor, tensor: Tensor, rows: list[int]) -> FlatTensors:
        if not rows:
            return self._split_evenly(flat)
        row = flat.numel() // max(1, len(tensor))
        return list(flat.split([row * count for count in rows]))

    def _check_lengths(self, operation: str, large: list[Tensor], small: list[Tensor]) -> None:
        for whole, part in zip(large, small, strict=True):
            if whole.numel() != self.size() * part.numel() or whole.dtype != part.dtype:
                raise ValueError(
                    f"{operation}: {describe_tensors('', [whole])} is not {self.size()} times "
                    f"{describe_tensors('', [part])}"
                )

    def _queue_collective(
        self,
        description: str,
        operation: FlatOperation,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any,
    ) -> ShmWork:
        """Queue a collective, or run it here.

        It runs here if its caller waits for it at once and no operation is before it, or if its
        caller is a callback of another collective's future. A caller that gives no options waits.
        """
        opts = opts or _AWAITED
        for each in (*outputs, *inputs):
            check_dense_cpu_tensor(each)
        queue = self.collective_queue
        seconds = _choose_time_limit(opts, self.seconds)
        title = make_title(description)
        perform = functools.partial(run_on_flat_tensors, operation, outputs, inputs)
        if not opts.asyncOp and not queue.pending and queue.lock.acquire(blocking=False):
            try:
                queue.run_collective(title, perform, time.monotonic() + seconds)
            finally:
                queue.lock.release()
            return COMPLETED_WORK
        work = ShmWork(queue, list(outputs), seconds)
        if queue.is_in_callback():
            # How many collectives other threads have queued by now depends on the time and differs
            # between ranks. Before all of them is the one place that is the same on all ranks.
            # The callback may wait for the future, which would not run the queue: run it now.
            queue.pending.appendleft((work, title, perform))
            queue.complete_work(work, time.monotonic() + seconds)
            return work
        queue.pending.append((work, title, perform))
        if opts.asyncOp:
            queue.leave_to_daemon(work)
        return work

    # ---- messages ----------------------------------------------------------------------------
    def send(self, tensors: list[Tensor], destination: int, tag: int) -> ShmWork:
        return self._queue_message(self.message_queue.send, tensors, destination, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> ShmWork:
        return self._queue_message(self.message_queue.receive, tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> ShmWork:
        return self._queue_message(self.message_queue.receive, tensors, None, tag)

    def _queue_message(
        self, start: Callable[..., ShmWork], tensors: list[Tensor], peer: int | None, tag: int
    ) -> ShmWork:
        (tensor,) = tensors
        check_dense_cpu_tensor(tensor)
        self.peers.check_abandoned(lambda: "a new message")
        work = start(tensor, peer, tag, self.seconds)
        if not work.done:
            self.message_queue.leave_to_daemon(work)
        return work


def _choose_time_limit(opts: Any, default_seconds: float) -> float:
    """Return an operation's own time limit, or the group's if its own is negative (none)."""
    own_limit = opts.timeout
    return own_limit.total_seconds() if own_limit > _NO_TIME else default_seconds


def _close_group(queues: Sequence[OperationQueue], attached: AttachedGroup) -> None:
    if not all(queue.close(CLOSE_SECONDS) for queue in queues):
        attached.peers.abandon_group(
            f"rank {attached.rank} left the group before its operations ended"
        )
        for queue in queues:
            queue.close(CLOSE_SECONDS)
    attached.peers.close_pidfds()
