"""Where workers and servers meet: as ranks of one world, or where the launching process says,
whose processes come and go.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paragrad.parallel.server.curve_keys import Address, Keys
from paragrad.parallel.server.join_endpoint import Entrance, Place
from paragrad.parallel.server.work_queue import Ticket
from paragrad.runtime.world import World
from paragrad.strategies.server import Server


def met(world: World, own: Any) -> tuple[int, list[Any]]:
    """The training's number, and what every rank says of itself. Collective: by what made the
    world, which is trusted.
    """
    every = world.agreed(world.collected((secrets.randbits(63), own)))
    return every[0][0], [each for _, each in every]


def workers_of(strategy: Server, world: World) -> World | None:
    """The world of the workers, or of the servers. Collective of both."""
    return world.among([range(strategy.workers), range(strategy.workers, world.size)])


@dataclass(frozen=True)
class Meeting:
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
    place: Place | None = None
    keys: Keys | None = None
    told: tuple[Address, ...] = ()

    def of(self, number: int, server: int | None = None) -> Meeting:
        return replace(self, number=number, server=server)

    @property
    def office(self) -> Address:
        return self.told[0] if self.told else Address(f"ipc://{Path(self.folder) / 'office'}")

    @property
    def addresses(self) -> list[Address]:
        return list(self.told[1:]) or [
            Address(f"ipc://{Path(self.folder) / f'server-{number}'}")
            for number in range(self.servers)
        ]

    @property
    def joined(self) -> Path:
        """The public keys of those whom the office let in, by their numbers: servers let in no
        other.
        """
        return Path(self.folder) / "joined"

    def entrance(self, server: int | None, allowed: Path | None = None) -> Entrance | None:
        """Of a server, or (None) of the office, which lets in those whose keys are in a folder
        of the user's. Their ports follow each other where one is given.
        """
        if self.place is None:
            return None
        number = 0 if server is None else 1 + server
        place = replace(self.place, port=self.place.port + number if self.place.port else 0)
        return Entrance(place, allowed or self.joined, Path(self.folder) / f"entrance-{number}")
