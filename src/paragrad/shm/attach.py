"""How the ranks of a group find its region, and what lies where in it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor

from paragrad.shm.collectives import TITLE, Port, titled
from paragrad.shm.point_to_point import Messages
from paragrad.shm.region import LINE, TOKEN, OwnRegion, Region, aligned, no_address, opened
from paragrad.shm.synchronization import CROWDED_SPIN, SPIN, WORDS, Peers, Semaphores

AREA = 2**21  # bytes of an area: what a rank shows the others at a time
AREAS = 2**25  # bytes of all areas of a group at most
RING = 2**21  # bytes of messages under way from one rank to another
RINGS = 2**24  # bytes of all rings of a group at most, as far as each has SHORTEST
SHORTEST = 2**14


@dataclass(frozen=True)
class Layout:
    """Where things lie in the region of a group of `size` ranks: offsets in bytes."""

    size: int

    @property
    def area(self) -> int:
        return aligned(min(AREA, AREAS // (2 * self.size)))

    @property
    def ring(self) -> int:
        return aligned(max(SHORTEST, min(RING, RINGS // self.size**2)))

    def places(self) -> dict[str, tuple[int, int]]:
        """name -> (offset, bytes)."""
        pairs = self.size**2
        found = {}
        offset = aligned(TOKEN)
        for name, count in (
            ("pids", 8 * self.size),
            ("marks", 2 * self.size * LINE),
            ("words", WORDS),
            ("looks", 8 * self.size),
            ("flags", 2 * LINE),
            ("barriers", pairs * LINE),
            ("filled", pairs * LINE),
            ("room", pairs * LINE),
            ("bells", self.size * LINE),
            ("titles", self.size * TITLE),
            ("areas", 2 * self.size * self.area),
            ("rings", pairs * self.ring),
            ("end", 0),
        ):
            found[name] = (offset, count)
            offset += aligned(count)
        return found


@dataclass
class Joined:
    """What a rank has of its group."""

    rank: int
    size: int
    region: Region
    peers: Peers
    port: Port
    messages: Messages


def join(store: Any, rank: int, size: int, seconds: float, neighbours: int) -> Joined:
    """Meet the other ranks of a group. Rank 0 makes the region and tells its address through
    the store.

    seconds: the time limit;  neighbours: ranks that share this host's cores. Raises
    RuntimeError.
    """
    layout = Layout(size)
    crowded = neighbours > len(os.sched_getaffinity(0))
    if rank == 0:
        joined = _made(store, layout, crowded)
    else:
        store.wait(["region"], timedelta(seconds=seconds))
        joined = _carved(opened(store.get("region").decode()), layout, rank, crowded)
    pids = _part(joined.region, layout, "pids").cast("q")
    pids[rank] = os.getpid()
    joined.port.begin(titled("joining the group"), time.monotonic() + seconds)
    joined.port.barrier()
    joined.peers.know(list(pids))
    if isinstance(joined.region, OwnRegion):
        joined.region.opened_by_all()
    return joined


def _made(store: Any, layout: Layout, crowded: bool) -> Joined:
    """By rank 0, which tells the others also if it fails."""
    try:
        region = OwnRegion(layout.places()["end"][0])
    except RuntimeError as error:
        store.set("region", no_address(error))
        raise
    joined = _carved(region, layout, 0, crowded)
    joined.port.gate.signals.initialize(lambda number: 0)
    joined.peers.flags.initialize(lambda number: 1 - number)  # nobody has given up
    joined.messages.filled.initialize(lambda number: 0)
    joined.messages.room.initialize(lambda number: 0)
    joined.messages.bells.initialize(lambda number: 0)
    store.set("region", region.address)
    return joined


def _carved(region: Region, layout: Layout, rank: int, crowded: bool) -> Joined:
    size = layout.size
    places = layout.places()

    def semaphores(name: str, count: int) -> Semaphores:
        return Semaphores(region.start + places[name][0], count)

    def tensor(name: str) -> Tensor:
        start, count = places[name]
        return region.bytes[start : start + count]

    peers = Peers(
        rank,
        CROWDED_SPIN if crowded else SPIN,
        semaphores("flags", 2),
        _part(region, layout, "words"),
        _part(region, layout, "looks").cast("d"),
    )
    port = Port(
        rank,
        size,
        tensor("areas").view(2, size, layout.area),
        _part(region, layout, "marks"),
        _part(region, layout, "titles"),
        semaphores("barriers", size**2),
        peers,
        crowded,
    )
    messages = Messages(
        rank,
        size,
        tensor("rings").view(size, size, layout.ring),
        semaphores("filled", size**2),
        semaphores("room", size**2),
        semaphores("bells", size),
        peers,
    )
    return Joined(rank, size, region, peers, port, messages)


def _part(region: Region, layout: Layout, name: str) -> memoryview:
    start, count = layout.places()[name]
    return memoryview(region.map)[start : start + count]
