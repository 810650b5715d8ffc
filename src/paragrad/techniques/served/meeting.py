"""Where the servers and the office of a training are, whose workers come and go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paragrad.techniques.served.office import Ticket
from paragrad.techniques.served.sockets import Address


@dataclass(frozen=True)
class Meeting:
    """What a rank is told when it is started. job: the training's number;  folder: which only its owner may enter;  number: of
    this rank;  server: which one it is, or None;  servers: how many;  ticket: what a worker is
    at, as its exchange is made;  step: with which it goes on, where others began;  last: of every share (weight, loss) in the
    step before, which whoever was there may not have recorded."""
    job: int
    folder: str
    servers: int
    number: int = 0
    server: int | None = None
    ticket: Ticket | None = None
    step: int | None = None
    last: tuple[tuple[float, float], ...] = ()

    def of(self, number: int, server: int | None = None) -> Meeting:
        return replace(self, number=number, server=server)

    @property
    def office(self) -> Address:
        return Address(f"ipc://{Path(self.folder) / 'office'}")

    @property
    def addresses(self) -> list[Address]:
        return [Address(f"ipc://{Path(self.folder) / f'server-{number}'}") for number in range(self.servers)]
