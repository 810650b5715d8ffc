"""The process group `shm`: torch.distributed's operations for CPU tensors of ranks on one Linux
host.

    import paragrad.backends
    dist.init_process_group("shm", ...)         # the one word that changes in a script for gloo

A region per group holds everything: its ranks' processes, semaphores, areas of the collectives,
blocks of the messages. Rank 0 makes it and tells the others through the store; from then on no
port, no file and no store is needed.

torch's own methods take the place of everything here only in C++: it looks for the old and the
new names of operations (2.11 asks for `_allgather_base`, 2.13 for `all_gather_single`), so both
are there.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paragrad.shm import collectives
from paragrad.shm.attach import Joined, join
from paragrad.shm.collective_queue import Collectives
from paragrad.shm.collectives import Port, titled
from paragrad.shm.flat_tensors import Flats, Run, check, described, performed, type_of
from paragrad.shm.reductions import SUM, reduction
from paragrad.shm.work import DONE, Lane, Work

# seconds that a group which is left still gives to what nobody waited for
CLOSING = 1.0

_NONE = timedelta(0)


def register() -> None:
    """Tell torch.distributed of the backend, once."""
    if not hasattr(dist.Backend, "SHM"):
        dist.Backend.register_backend("shm", _created, extended_api=True, devices=["cpu"])


def _created(told: Any, options: Any) -> SharedMemoryGroup:
    seconds = told.timeout.total_seconds()
    neighbours = dist.get_world_size() if dist.is_initialized() else told.group_size
    return SharedMemoryGroup(
        join(told.store, told.group_rank, told.group_size, seconds, neighbours),
        told.group_id,
        seconds,
    )


class SharedMemoryGroup(dist.ProcessGroup):
    """One rank's end of a group; made by torch.distributed."""

    def __init__(self, joined: Joined, name: str, seconds: float) -> None:
        super().__init__(joined.rank, joined.size)
        self.joined = joined
        self.seconds = seconds
        self.lane = Collectives(joined.port)
        self.messages = joined.messages
        self.peers = joined.peers
        self.names = [name, "undefined"]
        self.finalizer = weakref.finalize(self, _closed, (self.lane, self.messages), joined)

    # ---- what torch asks of a group ----------------------------------------------------------
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
        """Collectives are numbered anyway."""

    def _get_sequence_number_for_group(self) -> int:
        return self.lane.port.number

    def shutdown(self) -> None:
        self.finalizer()

    def abort(self) -> None:
        self.peers.give_up(f"rank {self.rank()} aborted the group")
        self.finalizer()

    # ---- collectives -------------------------------------------------------------------------
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        if (
            not opts.asyncOp
            and opts.reduceOp == SUM
            and self.lane.summed_at_once(tensors[0], self.seconds)
        ):
            return DONE
        return self._reduced("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._reduced(
            "all_reduce_coalesced", tensors, opts or dist.AllreduceCoalescedOptions()
        )

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        return self._reduced(f"reduce to {opts.rootRank}", tensors, opts, opts.rootRank)

    def _reduced(
        self, what: str, tensors: list[Tensor], opts: Any, root: int | None = None
    ) -> Work:
        how = reduction(opts.reduceOp, tensors[0].dtype)

        def run(port: Port, outs: Flats, _: Flats) -> None:
            for out in outs:
                collectives.all_reduce(port, out, how, root)

        words = described(f"{what} {how.name}", tensors)
        if what == "all_reduce" and opts.reduceOp == SUM:
            self.lane.will_be_short(titled(words), tensors[0])
        return self._ask(words, run, tensors, (), opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        def run(port: Port, outs: Flats, _: Flats) -> None:
            for out in outs:
                collectives.broadcast(port, out, root)

        root = opts.rootRank
        return self._ask(described(f"broadcast from {root}", tensors), run, tensors, (), opts)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        def run(port: Port, outs: Flats, ins: Flats) -> None:
            collectives.all_gather(port, outs, ins[0])

        title = described("all_gather", outputs[0])
        own = outputs[0][self.rank()]
        # all ranks raise, and this one is named
        if own.numel() != inputs[0].numel() or own.dtype != inputs[0].dtype:
            title += f", of which rank {self.rank()} gives {described('', inputs)}"
        return self._ask(title, run, outputs[0], inputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """outputs[rank][i] becomes that rank's inputs[i]."""

        def run(port: Port, outs: Flats, ins: Flats) -> None:
            for place, each in enumerate(ins):
                collectives.all_gather(port, outs[place :: len(ins)], each)

        everything = [each for row in outputs for each in row]
        return self._ask(described("all_gather_coalesced", inputs), run, everything, inputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """outputs[i] becomes all ranks' inputs[i], one after another or stacked."""

        def run(port: Port, outs: Flats, ins: Flats) -> None:
            for out, each in zip(outs, ins, strict=True):
                collectives.all_gather(port, self._equal_parts(out), each)

        self._fit("all_gather", outputs, inputs)
        return self._ask(described("all_gather_single", inputs), run, outputs, inputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        def run(port: Port, outs: Flats, ins: Flats) -> None:
            collectives.gather(port, outs, ins[0])

        results = outputs[0] if outputs else []
        if any(each.numel() != inputs[0].numel() for each in results):
            raise ValueError(
                f"gather wants tensors of one length, got {described('', [*inputs, *results])}"
            )
        return self._ask(
            described(f"gather to {opts.rootRank}", inputs), run, results, inputs, opts
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        def run(port: Port, outs: Flats, ins: Flats) -> None:
            collectives.scatter(port, outs[0], ins, root)

        root = opts.rootRank
        given = inputs[0] if inputs else []
        if any(each.numel() != outputs[0].numel() for each in given):
            raise ValueError(
                f"scatter wants tensors of one length, got {described('', [*outputs, *given])}"
            )
        return self._ask(described(f"scatter from {root}", outputs), run, outputs, given, opts)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Work:
        def run(port: Port, outs: Flats, ins: Flats) -> None:
            collectives.reduce_scatter(port, outs[0], ins, how)

        opts = opts or dist.ReduceScatterOptions()
        how = reduction(opts.reduceOp, outputs[0].dtype)
        if inputs[0][self.rank()].numel() != outputs[0].numel():
            raise ValueError(
                f"reduce_scatter: rank {self.rank()} takes {described('', outputs)} of "
                f"{described('', inputs[0])}"
            )
        return self._ask(
            described(f"reduce_scatter {how.name}", inputs[0]), run, outputs, inputs[0], opts
        )

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        def run(port: Port, outs: Flats, ins: Flats) -> None:
            for out, each in zip(outs, ins, strict=True):
                collectives.reduce_scatter(port, out, self._equal_parts(each), how)

        opts = opts or dist.ReduceScatterOptions()
        how = reduction(opts.reduceOp, outputs[0].dtype)
        self._fit("reduce_scatter", inputs, outputs)
        return self._ask(
            described(f"reduce_scatter_single {how.name}", inputs), run, outputs, inputs, opts
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        def run(port: Port, outs: Flats, ins: Flats) -> None:
            collectives.all_to_all(port, outs, ins)

        return self._ask(f"all_to_all of {type_of(inputs[0])}", run, outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_rows: list[int],
        input_rows: list[int],
        opts: Any = None,
    ) -> Work:
        """Split along the first dim, by the numbers of rows given, or evenly."""

        def run(port: Port, outs: Flats, ins: Flats) -> None:
            collectives.all_to_all(
                port,
                self._parts(outs[0], output, output_rows),
                self._parts(ins[0], tensor, input_rows),
            )

        for each, rows in ((output, output_rows), (tensor, input_rows)):
            if (sum(rows) != len(each)) if rows else len(each) % self.size():
                raise ValueError(
                    f"all_to_all_single: {len(each)} rows cannot be split into "
                    f"{rows or self.size()}"
                )
        return self._ask(f"all_to_all_single of {type_of(tensor)}", run, [output], [tensor], opts)

    def barrier(self, opts: Any = None) -> Work:
        return self._ask("barrier", lambda port, outs, ins: collectives.barrier(port), (), (), opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that names everybody who did not come, with wait_all_ranks or without.

        dist.monitored_barrier itself lets no backend pass but gloo.
        """
        opts = dist.BarrierOptions()
        opts.timeout = timeout or timedelta(seconds=self.seconds)
        self._ask(
            "monitored_barrier", lambda port, outs, ins: collectives.barrier(port), (), (), opts
        ).wait()

    _allgather_base = all_gather_single  # the names until 2.12
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _equal_parts(self, flat: Tensor) -> Flats:
        return list(flat.view(self.size(), -1)) if flat.numel() else [flat] * self.size()

    def _parts(self, flat: Tensor, tensor: Tensor, rows: list[int]) -> Flats:
        if not rows:
            return self._equal_parts(flat)
        row = flat.numel() // max(1, len(tensor))
        return list(flat.split([row * count for count in rows]))

    def _fit(self, what: str, large: list[Tensor], small: list[Tensor]) -> None:
        for whole, part in zip(large, small, strict=True):
            if whole.numel() != self.size() * part.numel() or whole.dtype != part.dtype:
                raise ValueError(
                    f"{what}: {described('', [whole])} is not {self.size()} times "
                    f"{described('', [part])}"
                )

    def _ask(
        self, words: str, run: Run, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Queue a collective. What its caller waits for at once is carried out here, if nothing
        is before it.
        """
        opts = opts or dist.AllgatherOptions()
        for each in (*outputs, *inputs):
            check(each)
        lane = self.lane
        seconds = _seconds(opts, self.seconds)
        title = titled(words)
        perform = functools.partial(performed, run, outputs, inputs)
        if not opts.asyncOp and not lane.queue and lane.lock.acquire(blocking=False):
            try:
                lane.perform(title, perform, time.monotonic() + seconds)
            finally:
                lane.lock.release()
            return DONE
        work = Work(lane, list(outputs), seconds)
        lane.queue.append((work, title, perform))
        if opts.asyncOp:
            lane.leave(work)
        return work

    # ---- messages ----------------------------------------------------------------------------
    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        return self._message(self.messages.send, tensors, to, tag)

    def recv(self, tensors: list[Tensor], frm: int, tag: int) -> Work:
        return self._message(self.messages.receive, tensors, frm, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        return self._message(self.messages.receive, tensors, None, tag)

    def _message(
        self, ask: Callable[..., Work], tensors: list[Tensor], peer: int | None, tag: int
    ) -> Work:
        (tensor,) = tensors
        check(tensor)
        self.peers.check(lambda: "a new message")
        work = ask(tensor, peer, tag, self.seconds)
        if not work.done:
            self.messages.leave(work)
        return work


def _seconds(opts: Any, otherwise: float) -> float:
    """The time limit of one operation: its own, or the group's where it has none (torch says so
    by a negative one).
    """
    told = opts.timeout
    return told.total_seconds() if told > _NONE else otherwise


def _closed(lanes: Sequence[Lane], joined: Joined) -> None:
    if not all(lane.close(CLOSING) for lane in lanes):
        joined.peers.give_up(
            f"rank {joined.rank} left the group, and what it had asked for was not done"
        )
        for lane in lanes:
            lane.close(CLOSING)
    joined.peers.forget()
