"""The exchange of a server of `server(n, servers=m)`, which answers."""

from __future__ import annotations

from pathlib import Path

from paragrad.engine.exchange import Alone, Replica
from paragrad.parallel.server.curve_keys import Keys
from paragrad.parallel.server.endpoints import Meeting, met, workers_of
from paragrad.parallel.server.model_buffers import room_for
from paragrad.parallel.server.parameter_partition import cut_of
from paragrad.parallel.server.request_handler import Reception
from paragrad.parallel.server.shard import Shard
from paragrad.parallel.server.snapshot import Snapshots
from paragrad.parallel.server.sockets import Listening, own_host
from paragrad.record.step_log import Log
from paragrad.runtime.world import World
from paragrad.strategies.server import Server


class Serving(Alone):
    """A server's, which has no steps."""

    def __init__(
        self, strategy: Server, replica: Replica, world: World, log: Log, meeting: Meeting | None
    ) -> None:
        super().__init__(replica)
        self.log = log
        keys = Keys.made()
        model = replica.module.model
        self.seconds = None if meeting else world.timeout
        cut = cut_of(strategy, replica.optimizer, model, replica.follows)
        if meeting:
            assert meeting.server is not None
            # the office's
            self.number = meeting.server
            self.dismissals = 1
            job = meeting.job
            longest = cut.longest if strategy.hands_out else max(cut.longest, room_for(model))
            self.listening = Listening(
                longest,
                None,
                keys,
                meeting.addresses[meeting.server],
                meeting.entrance(meeting.server),
            )
        else:
            self.number = world.rank - strategy.workers
            self.dismissals = strategy.workers
            self.listening = Listening(cut.longest, own_host(world), keys, seconds=world.timeout)
            workers_of(strategy, world)
            job, told = met(world, self.listening.address)
            self.listening.allow(told[: strategy.workers])
            world.barrier()
        against = (
            "an update may come while they are read"
            if strategy.hands_out
            else (
                "" if self.listening.address.on_host else "servers and workers are on several hosts"
            )
        )
        self.shard = Shard(
            strategy,
            replica,
            cut.slots[self.number],
            cut.names,
            cut.tensors(model),
            replica.full,
            against,
        )
        self.reception = Reception(self.shard, self.listening, job)
        self.largest = 2 * self.shard.nbytes
        if meeting:
            self.shard.snapshots = Snapshots(Path(meeting.folder), self.number)
            self.shard.snapshots.restore(self.shard, meeting.step)

    def serve(self) -> None:
        self.reception.serve(self.dismissals, self.seconds)
        if self.log.recorder:
            self.log.recorder.write("server", number=self.number, **self.shard.told())

    def close(self) -> None:
        self.listening.close()
        self.shard.shelf.close()
        if self.shard.snapshots is not None:
            self.shard.snapshots.close()
