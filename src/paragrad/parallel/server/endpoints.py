"""The addresses of workers, servers and the work queue.

Either all are ranks of one world, or the launching process defines the addresses. In the latter
case workers and servers can come and go.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paragrad.parallel.server.curve_keys import Address, KeyPair
from paragrad.parallel.server.join_endpoint import HostPort, JoinEndpoint
from paragrad.parallel.server.work_queue import Ticket
from paragrad.runtime.peer_processes import PeerProcesses, ProcessAddress
from paragrad.runtime.world import World
from paragrad.strategies.server import Server


def exchange_endpoints(
    strategy: Server, world: World, own_endpoint: Any
) -> tuple[int, list[Any], PeerProcesses]:
    """Share the endpoints of all ranks. Collective.

    The messages use the transport of the world, which is trusted.

    Args:
        strategy: The resolved strategy.
        world: The world of workers and servers.
        own_endpoint: The address or public key of this rank.

    Returns:
        The number of the training, what each rank shared, and the processes of the other ranks.
    """
    shared = world.broadcast_object(
        world.gather_objects((secrets.randbits(63), own_endpoint, ProcessAddress.read_own()))
    )
    peers = PeerProcesses(
        {name_rank(strategy, rank): process for rank, (*_, process) in enumerate(shared)}
    )
    peers.refuse_ended()
    return shared[0][0], [each for _, each, _ in shared], peers


def name_rank(strategy: Server, rank: int) -> str:
    """Name a rank for messages.

    Args:
        strategy: The resolved strategy.
        rank: The rank in the world of workers and servers.
    """
    if strategy.is_server(rank):
        return f"rank {rank} (server {rank - strategy.workers})"
    return f"rank {rank} (worker {rank})"


def split_roles(strategy: Server, world: World) -> World | None:
    """Split the world into the workers and the servers. Collective.

    Args:
        strategy: The resolved strategy.
        world: The world of workers and servers.

    Returns:
        The world of the workers or of the servers, whichever this rank is.
    """
    return world.split_ranks([range(strategy.workers), range(strategy.workers, world.size)])


@dataclass(frozen=True)
class ServerEndpoints:
    """What a rank receives when it is started.

    Attributes:
        job: The number of the training.

        folder: A folder that only its owner may enter.

        servers: Number of servers.

        number: Number of this rank.

        server: Number of the server, or None for a worker.

        ticket: The current ticket of a worker when its exchange is made.

        step: The step at which the rank continues a training of other processes, or None.

        last: (weight, loss) of every share of the step before, which those processes may not have
            recorded.

        host_port: Where workers can join from other hosts, or None.

        keys: The keys of a worker that joined.

        known_addresses: Addresses of the work queue and the servers, for a worker that joined,
            because it has no folder.
    """

    job: int
    folder: str
    servers: int
    number: int = 0
    server: int | None = None
    ticket: Ticket | None = None
    step: int | None = None
    last: tuple[tuple[float, float], ...] = ()
    host_port: HostPort | None = None
    keys: KeyPair | None = None
    known_addresses: tuple[Address, ...] = ()

    def assign_rank(self, number: int, server: int | None = None) -> ServerEndpoints:
        """Return the endpoints for another rank.

        Args:
            number: Number of the rank.
            server: Number of the server, or None for a worker.
        """
        return replace(self, number=number, server=server)

    @property
    def queue_address(self) -> Address:
        """The address of the work queue."""
        return (
            self.known_addresses[0]
            if self.known_addresses
            else Address(f"ipc://{Path(self.folder) / 'queue'}")
        )

    @property
    def server_addresses(self) -> list[Address]:
        """The addresses of the servers."""
        return list(self.known_addresses[1:]) or [
            Address(f"ipc://{Path(self.folder) / f'server-{number}'}")
            for number in range(self.servers)
        ]

    @property
    def joined_folder(self) -> Path:
        """The folder of the public keys that the work queue admitted, by worker number.

        Servers accept no other keys.
        """
        return Path(self.folder) / "joined"

    def build_join_endpoint(
        self, server: int | None, allowed_folder: Path | None = None
    ) -> JoinEndpoint | None:
        """Build the endpoint for connections from other hosts.

        If a port is given, the processes use consecutive ports.

        Args:
            server: Number of the server, or None for the work queue.
            allowed_folder: The user's folder of allowed keys, for the work queue.

        Returns:
            The endpoint, or None if workers cannot join from other hosts.
        """
        if self.host_port is None:
            return None
        number = 0 if server is None else 1 + server
        host_port = replace(
            self.host_port, port=self.host_port.port + number if self.host_port.port else 0
        )
        return JoinEndpoint(
            host_port,
            allowed_folder or self.joined_folder,
            Path(self.folder) / f"entrance-{number}",
        )
