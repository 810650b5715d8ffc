"""The exchange of a server of `server(n, servers=m)`. It answers requests."""

from __future__ import annotations

from pathlib import Path

from paragrad.engine.exchange import NoExchange, Replica
from paragrad.parallel.server.curve_keys import KeyPair
from paragrad.parallel.server.endpoints import (
    ServerEndpoints,
    exchange_endpoints,
    name_rank,
    split_roles,
)
from paragrad.parallel.server.model_buffers import estimate_buffer_bytes
from paragrad.parallel.server.parameter_partition import partition_parameters
from paragrad.parallel.server.request_handler import RequestHandler
from paragrad.parallel.server.shard import ServerShard
from paragrad.parallel.server.snapshot import SnapshotStore
from paragrad.parallel.server.sockets import Listener, find_own_host
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.server import Server


class ServerExchange(NoExchange):
    """The exchange of a server, which makes no steps of its own.

    Args:
        strategy: The resolved strategy.

        replica: What this rank holds of the training.

        world: The world of workers and servers, or the world of this process alone.

        log: The step log.

        endpoints: Where workers and servers are, if workers can come and go; otherwise None.

    Attributes:
        log: The step log.

        seconds: Maximum time without any worker, or None.

        server_number: Number of the server.

        dismissals: Number of END requests after which the server ends.

        listener: The socket of the server.

        shard: The slice of the parameters.

        request_handler: Handles the requests.
    """

    def __init__(
        self,
        strategy: Server,
        replica: Replica,
        world: World,
        log: StepLog,
        endpoints: ServerEndpoints | None,
    ) -> None:
        super().__init__(replica)
        self.log = log
        keys = KeyPair.generate_pair()
        model = replica.module.model
        self.seconds = None if endpoints else world.timeout
        partition = partition_parameters(
            strategy, replica.optimizer, model, replica.changed_by_forward
        )
        if endpoints:
            assert endpoints.server is not None
            # with these endpoints only the launching process sends END
            self.server_number = endpoints.server
            self.dismissals = 1
            job = endpoints.job
            longest = (
                partition.longest_bytes
                if strategy.uses_work_queue
                else max(partition.longest_bytes, estimate_buffer_bytes(model))
            )
            self.listener = Listener(
                longest,
                None,
                keys,
                endpoints.server_addresses[endpoints.server],
                endpoints.build_join_endpoint(endpoints.server),
            )
        else:
            self.server_number = world.rank - strategy.workers
            self.dismissals = strategy.workers
            self.listener = Listener(
                partition.longest_bytes, find_own_host(world), keys, seconds=world.timeout
            )
            split_roles(strategy, world)
            job, shared, peers = exchange_endpoints(strategy, world, self.listener.address)
            names = [name_rank(strategy, rank) for rank in range(strategy.workers)]
            self.listener.watch_workers(
                dict(zip(names, shared[: strategy.workers], strict=True)), peers
            )
            world.barrier()
        obstacle = (
            "an update may come while they are read"
            if strategy.uses_work_queue
            else (
                "" if self.listener.address.is_local else "servers and workers are on several hosts"
            )
        )
        self.shard = ServerShard(
            strategy,
            replica,
            partition.slots[self.server_number],
            partition.names,
            partition.collect_tensors(model),
            replica.full_batch,
            obstacle,
        )
        self.request_handler = RequestHandler(self.shard, self.listener, job)
        self.peak_bytes = 2 * self.shard.nbytes
        if endpoints:
            self.shard.snapshots = SnapshotStore(Path(endpoints.folder), self.server_number)
            self.shard.snapshots.restore_shard(self.shard, endpoints.step)

    def serve(self) -> None:
        self.request_handler.serve_workers(self.dismissals, self.seconds)
        if self.log.recorder:
            self.log.recorder.write_line(
                "server", number=self.server_number, **self.shard.summarize_counts()
            )

    def close(self) -> None:
        self.listener.close()
        self.shard.shared_buffer.close()
        if self.shard.snapshots is not None:
            self.shard.snapshots.close()
