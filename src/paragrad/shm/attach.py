"""Attach a rank to its group: find the region, and lay out what is in it."""

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

AREA_BYTES = 2**21  # an area: what a rank shows the others at a time
TOTAL_AREA_BYTES = 2**25  # the limit for all areas of a group
RING_BYTES = 2**21  # a ring: messages under way from one rank to another
TOTAL_RING_BYTES = 2**24  # the limit for all rings of a group; MIN_RING_BYTES takes precedence
MIN_RING_BYTES = 2**14


@dataclass(frozen=True)
class RegionLayout:
    """The layout of the region of a group.

    Attributes:
        size: The number of ranks.
    """

    size: int

    @property
    def area_bytes(self) -> int:
        """The size of an area in bytes."""
        return align_to_cache_line(min(AREA_BYTES, TOTAL_AREA_BYTES // (2 * self.size)))

    @property
    def ring_bytes(self) -> int:
        """The size of a ring in bytes."""
        return align_to_cache_line(
            max(MIN_RING_BYTES, min(RING_BYTES, TOTAL_RING_BYTES // self.size**2))
        )

    def list_sections(self) -> dict[str, tuple[int, int]]:
        """List the sections of the region.

        Returns:
            The offset and size of each section in bytes, by name.
        """
        pairs = self.size**2
        sections = {}
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
            sections[name] = (offset, count)
            offset += align_to_cache_line(count)
        return sections


@dataclass
class AttachedGroup:
    """The parts of a group that a rank uses.

    Attributes:
        rank: The number of this rank.

        size: The number of ranks.

        region: The shared memory of the group.

        peers: The processes of the other ranks.

        areas: The areas of the collectives.

        message_queue: The point-to-point messages.
    """

    rank: int
    size: int
    region: SharedRegion
    peers: Peers
    areas: GroupAreas
    message_queue: MessageQueue


def attach_group(
    store: Any, rank: int, size: int, seconds: float, local_ranks: int
) -> AttachedGroup:
    """Meet the other ranks of a group. Rank 0 makes the region and sends its address by the store.

    Args:
        store: The store of the group.
        rank: This rank.
        size: The number of ranks.
        seconds: The time limit.
        local_ranks: The number of ranks that share this host's cores.

    Returns:
        The attached group.

    Raises:
        RuntimeError: The region could not be made or opened, or a rank did not come.
    """
    layout = RegionLayout(size)
    crowded = local_ranks > len(os.sched_getaffinity(0))
    if rank == 0:
        attached = _create_group_region(store, layout, crowded)
    else:
        store.wait(["region"], timedelta(seconds=seconds))
        attached = _build_attached_group(
            open_region(store.get("region").decode()), layout, rank, crowded
        )
    pids = _view_section(attached.region, layout, "pids").cast("q")
    pids[rank] = os.getpid()
    attached.areas.begin_collective(make_title("joining the group"), time.monotonic() + seconds)
    attached.areas.barrier()
    attached.peers.register_processes(list(pids))
    if isinstance(attached.region, CreatedRegion):
        attached.region.close_descriptor()
    return attached


def _create_group_region(store: Any, layout: RegionLayout, crowded: bool) -> AttachedGroup:
    """Create the region on rank 0, and send its address or the error to the other ranks."""
    try:
        region = CreatedRegion(layout.list_sections()["end"][0])
    except RuntimeError as error:
        store.set("region", format_no_address(error))
        raise
    attached = _build_attached_group(region, layout, 0, crowded)
    attached.areas.group_barrier.semaphores.initialize(lambda number: 0)
    attached.peers.flags.initialize(lambda number: 1 - number)  # not abandoned
    attached.message_queue.filled.initialize(lambda number: 0)
    attached.message_queue.freed.initialize(lambda number: 0)
    attached.message_queue.doorbells.initialize(lambda number: 0)
    store.set("region", region.address)
    return attached


def _build_attached_group(
    region: SharedRegion, layout: RegionLayout, rank: int, crowded: bool
) -> AttachedGroup:
    size = layout.size
    sections = layout.list_sections()

    def make_semaphores(name: str, count: int) -> Semaphores:
        return Semaphores(region.start + sections[name][0], count)

    def view_tensor(name: str) -> Tensor:
        start, count = sections[name]
        return region.bytes[start : start + count]

    peers = Peers(
        rank,
        CROWDED_SPIN_TRIES if crowded else SPIN_TRIES,
        make_semaphores("flags", 2),
        _view_section(region, layout, "words"),
        _view_section(region, layout, "looks").cast("d"),
    )
    areas = GroupAreas(
        rank,
        size,
        view_tensor("areas").view(2, size, layout.area_bytes),
        _view_section(region, layout, "marks"),
        _view_section(region, layout, "titles"),
        make_semaphores("barriers", size**2),
        peers,
        crowded,
    )
    message_queue = MessageQueue(
        rank,
        size,
        view_tensor("rings").view(size, size, layout.ring_bytes),
        make_semaphores("filled", size**2),
        make_semaphores("room", size**2),
        make_semaphores("bells", size),
        peers,
    )
    return AttachedGroup(rank, size, region, peers, areas, message_queue)


def _view_section(region: SharedRegion, layout: RegionLayout, name: str) -> memoryview:
    start, count = layout.list_sections()[name]
    return memoryview(region.map)[start : start + count]
