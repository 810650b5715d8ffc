"""Where workers and servers meet: as ranks of one world, or where the launching process says,
whose processes come and go.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paragrad.parallel.server.curve_keys import Address, KeyPair
from paragrad.parallel.server.join_endpoint import HostPort, JoinEndpoint
from paragrad.parallel.server.work_queue import Ticket
from paragrad.runtime.world import World
from paragrad.strategies.server import Server


def exchange_endpoints(world: World, own_endpoint: Any) -> tuple[int, list[Any]]:
    """The training's number, and what every rank says of itself. Collective: by what made the
    world, which is trusted.
    """
    every = world.broadcast_object(world.gather_objects((secrets.randbits(63), own_endpoint)))
    return every[0][0], [each for _, each in every]


def split_roles(strategy: Server, world: World) -> World | None:
    """The world of the workers, or of the servers. Collective of both."""
    return world.split_ranks([range(strategy.workers), range(strategy.workers, world.size)])


@dataclass(frozen=True)
class ServerEndpoints:
    """What a rank is told when it is started. job: the training's number;  folder: which only
    its owner may enter;  servers: how many;  number: of this rank;  server: which one it is, or
    None;  ticket: what a worker is at, as its exchange is made; place: where workers may join
    from elsewhere, or None;  step: with which it goes on, where others began;  last: of every
    share (weight, loss) in the step before, which whoever was there may not have recorded.

    Of a worker that joined: keys: its own;  told: where the office and the servers are, for it
    has no folder.
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
        return replace(self, number=number, server=server)

    @property
    def queue_address(self) -> Address:
        return (
            self.known_addresses[0]
            if self.known_addresses
            else Address(f"ipc://{Path(self.folder) / 'office'}")
        )

    @property
    def server_addresses(self) -> list[Address]:
        return list(self.known_addresses[1:]) or [
            Address(f"ipc://{Path(self.folder) / f'server-{number}'}")
            for number in range(self.servers)
        ]

    @property
    def joined_folder(self) -> Path:
        """The public keys of those whom the office let in, by their numbers: servers let in no
        other.
        """
        return Path(self.folder) / "joined"

    def build_join_endpoint(
        self, server: int | None, allowed_folder: Path | None = None
    ) -> JoinEndpoint | None:
        """Of a server, or (None) of the office, which lets in those whose keys are in a folder
        of the user's. Their ports follow each other where one is given.
        """
        if self.host_port is None:
            return None
        number = 0 if server is None else 1 + server
        place = replace(
            self.host_port, port=self.host_port.port + number if self.host_port.port else 0
        )
        return JoinEndpoint(
            place, allowed_folder or self.joined_folder, Path(self.folder) / f"entrance-{number}"
        )
