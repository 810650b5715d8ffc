"""How the ranks of a group find its region, and what lies where in it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor

from paragrad.shm.collectives import TITLE_BYTES, GroupAreas, make_title
from paragrad.shm.point_to_point import MessageQueue
from paragrad.shm.region import (
    CACHE_LINE_BYTES,
    TOKEN_BYTES,
    CreatedRegion,
    SharedRegion,
    align_to_cache_line,
    format_no_address,
    open_region,
)
from paragrad.shm.synchronization import (
    CROWDED_SPIN_TRIES,
    REASON_BYTES,
    SPIN_TRIES,
    Peers,
    Semaphores,
)

AREA_BYTES = 2**21  # bytes of an area: what a rank shows the others at a time
TOTAL_AREA_BYTES = 2**25  # bytes of all areas of a group at most
RING_BYTES = 2**21  # bytes of messages under way from one rank to another
TOTAL_RING_BYTES = 2**24  # bytes of all rings of a group at most, as far as each has SHORTEST
MIN_RING_BYTES = 2**14


@dataclass(frozen=True)
class RegionLayout:
    """Where things lie in the region of a group of `size` ranks: offsets in bytes."""

    size: int

    @property
    def area_bytes(self) -> int:
        return align_to_cache_line(min(AREA_BYTES, TOTAL_AREA_BYTES // (2 * self.size)))

    @property
    def ring_bytes(self) -> int:
        return align_to_cache_line(
            max(MIN_RING_BYTES, min(RING_BYTES, TOTAL_RING_BYTES // self.size**2))
        )

    def list_sections(self) -> dict[str, tuple[int, int]]:
        """name -> (offset, bytes)."""
        pairs = self.size**2
        found = {}
        offset = align_to_cache_line(TOKEN_BYTES)
        for name, count in (
            ("pids", 8 * self.size),
            ("marks", 2 * self.size * CACHE_LINE_BYTES),
            ("words", REASON_BYTES),
            ("looks", 8 * self.size),
            ("flags", 2 * CACHE_LINE_BYTES),
            ("barriers", pairs * CACHE_LINE_BYTES),
            ("filled", pairs * CACHE_LINE_BYTES),
            ("room", pairs * CACHE_LINE_BYTES),
            ("bells", self.size * CACHE_LINE_BYTES),
            ("titles", self.size * TITLE_BYTES),
            ("areas", 2 * self.size * self.area_bytes),
            ("rings", pairs * self.ring_bytes),
            ("end", 0),
        ):
            found[name] = (offset, count)
            offset += align_to_cache_line(count)
        return found


@dataclass
class AttachedGroup:
    """What a rank has of its group."""

    rank: int
    size: int
    region: SharedRegion
    peers: Peers
    areas: GroupAreas
    message_queue: MessageQueue


def attach_group(
    store: Any, rank: int, size: int, seconds: float, local_ranks: int
) -> AttachedGroup:
    """Meet the other ranks of a group. Rank 0 makes the region and tells its address through
    the store.

    seconds: the time limit;  neighbours: ranks that share this host's cores. Raises
    RuntimeError.
    """
    layout = RegionLayout(size)
    crowded = local_ranks > len(os.sched_getaffinity(0))
    if rank == 0:
        joined = _create_group_region(store, layout, crowded)
    else:
        store.wait(["region"], timedelta(seconds=seconds))
        joined = _build_attached_group(
            open_region(store.get("region").decode()), layout, rank, crowded
        )
    pids = _view_section(joined.region, layout, "pids").cast("q")
    pids[rank] = os.getpid()
    joined.areas.begin_collective(make_title("joining the group"), time.monotonic() + seconds)
    joined.areas.barrier()
    joined.peers.register_processes(list(pids))
    if isinstance(joined.region, CreatedRegion):
        joined.region.close_descriptor()
    return joined


def _create_group_region(store: Any, layout: RegionLayout, crowded: bool) -> AttachedGroup:
    """By rank 0, which tells the others also if it fails."""
    try:
        region = CreatedRegion(layout.list_sections()["end"][0])
    except RuntimeError as error:
        store.set("region", format_no_address(error))
        raise
    joined = _build_attached_group(region, layout, 0, crowded)
    joined.areas.group_barrier.semaphores.initialize(lambda number: 0)
    joined.peers.flags.initialize(lambda number: 1 - number)  # nobody has given up
    joined.message_queue.filled.initialize(lambda number: 0)
    joined.message_queue.freed.initialize(lambda number: 0)
    joined.message_queue.doorbells.initialize(lambda number: 0)
    store.set("region", region.address)
    return joined


def _build_attached_group(
    region: SharedRegion, layout: RegionLayout, rank: int, crowded: bool
) -> AttachedGroup:
    size = layout.size
    places = layout.list_sections()

    def semaphores(name: str, count: int) -> Semaphores:
        return Semaphores(region.start + places[name][0], count)

    def tensor(name: str) -> Tensor:
        start, count = places[name]
        return region.bytes[start : start + count]

    peers = Peers(
        rank,
        CROWDED_SPIN_TRIES if crowded else SPIN_TRIES,
        semaphores("flags", 2),
        _view_section(region, layout, "words"),
        _view_section(region, layout, "looks").cast("d"),
    )
    port = GroupAreas(
        rank,
        size,
        tensor("areas").view(2, size, layout.area_bytes),
        _view_section(region, layout, "marks"),
        _view_section(region, layout, "titles"),
        semaphores("barriers", size**2),
        peers,
        crowded,
    )
    messages = MessageQueue(
        rank,
        size,
        tensor("rings").view(size, size, layout.ring_bytes),
        semaphores("filled", size**2),
        semaphores("room", size**2),
        semaphores("bells", size),
        peers,
    )
    return AttachedGroup(rank, size, region, peers, port, messages)


def _view_section(region: SharedRegion, layout: RegionLayout, name: str) -> memoryview:
    start, count = layout.list_sections()[name]
    return memoryview(region.map)[start : start + count]
