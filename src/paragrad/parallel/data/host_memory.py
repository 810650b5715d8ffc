"""HostMemory: the region in which ranks of one host keep parameters once, and a row of
gradients each.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paragrad.errors import StepFailed
from paragrad.runtime.world import World
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
    DisseminationBarrier,
    GroupError,
    Peers,
    Semaphores,
)

# tries at a barrier before a rank sleeps (about 2 ms): its core has nothing else to do
SPIN_TRIES = 1000
TOTALS_STRUCT = struct.Struct("4d")  # numbers that every rank adds: weight, loss, stop, doubt


class HostMemory:
    """Laid out for the parameters of a model, of which `trained` have gradients. Collective:
    all ranks make it together.

    shared: the parameters' places, in their shapes;  places: offset of every trained one in a
    row, in bytes;  row: bytes of a row;  norms: [size] float64.
    """

    def __init__(
        self, world: World, parameters: Sequence[Tensor], trained: Sequence[Tensor]
    ) -> None:
        self.world = world
        self.trained = trained
        self.row_offsets, self.row_bytes = _compute_offsets(trained)
        inside, everything = _compute_offsets(parameters)
        size = world.size
        offsets = {}
        end = align_to_cache_line(TOKEN_BYTES)
        for name, count in (
            ("words", REASON_BYTES),
            ("looks", 8 * size),
            ("flags", 2 * CACHE_LINE_BYTES),
            ("barriers", size**2 * CACHE_LINE_BYTES),
            ("counts", size * CACHE_LINE_BYTES),
            ("norms", 8 * size),
            ("used", size * align_to_cache_line(len(trained))),
            ("shared", everything),
            ("rows", size * self.row_bytes),
        ):
            offsets[name] = end
            end += align_to_cache_line(count)
        self.offsets = offsets
        self.region = self._open_region(end)
        flags, signals = (
            Semaphores(self.region.start + offsets[name], count)
            for name, count in (("flags", 2), ("barriers", size**2))
        )
        spins = SPIN_TRIES if size <= len(os.sched_getaffinity(0)) else CROWDED_SPIN_TRIES
        self.peers = Peers(
            world.rank,
            spins,
            flags,
            self._map_bytes(offsets["words"], REASON_BYTES),
            self._map_bytes(offsets["looks"], 8 * size).cast("d"),
        )
        self.rank_barrier = DisseminationBarrier(world.rank, size, signals, self.peers)
        if world.rank == 0:
            flags.initialize(lambda number: 1 - number)
            signals.initialize(lambda number: 0)
        # and nobody goes on before that
        pids = [int(pid) for pid in world.all_gather(torch.tensor([os.getpid()]))]
        self.peers.register_processes(pids)
        if isinstance(self.region, CreatedRegion):
            self.region.close_descriptor()
        self.shared_parameters = [
            self._map_tensor(offsets["shared"] + place, parameter.dtype, parameter.numel()).view(
                parameter.shape
            )
            for place, parameter in zip(inside, parameters, strict=True)
        ]
        self.norms = self._map_tensor(offsets["norms"], torch.float64, size)

    def _open_region(self, count: int) -> SharedRegion:
        """Rank 0 makes the region, the others open it; if it cannot be made, all raise."""
        own = None
        told = ""
        if self.world.rank == 0:
            try:
                own = CreatedRegion(count)
                told = own.address
            except RuntimeError as error:
                told = format_no_address(error)
        told = self.world.broadcast_object(told)
        try:
            return own or open_region(told)
        except RuntimeError as error:
            raise StepFailed(str(error)) from error

    def get_gradient(self, rank: int, index: int) -> Tensor:
        """The place of a trained parameter's gradient in a rank's row, in the parameter's
        shape.
        """
        parameter = self.trained[index]
        stop = self.row_offsets[index] + parameter.numel() * parameter.element_size()
        return self.get_row_range(rank, parameter.dtype, self.row_offsets[index], stop).view(
            parameter.shape
        )

    def get_row_range(self, rank: int, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Bytes start to stop of a rank's row, flat."""
        return self._map_tensor(
            self.offsets["rows"] + rank * self.row_bytes + start,
            dtype,
            (stop - start) // dtype.itemsize,
        )

    def get_used_flags(self, rank: int) -> memoryview:
        """By trained parameter: 1 where this rank had a gradient."""
        return self._map_bytes(
            self.offsets["used"] + rank * align_to_cache_line(len(self.trained)), len(self.trained)
        )

    def write_totals(self, rank: int, *numbers: float) -> None:
        """Tell the others a rank's weight, loss, wish to stop, and doubtful weight."""
        TOTALS_STRUCT.pack_into(
            self.region.map, self.offsets["counts"] + rank * CACHE_LINE_BYTES, *numbers
        )

    def read_totals(self, rank: int) -> tuple[float, ...]:
        return TOTALS_STRUCT.unpack_from(
            self.region.map, self.offsets["counts"] + rank * CACHE_LINE_BYTES
        )

    def wait_for_ranks(self, describe: Callable[[], str]) -> None:
        """Until every rank has come here. Raises StepFailed."""
        try:
            self.rank_barrier.wait(time.monotonic() + self.world.timeout, describe)
        except GroupError as error:
            raise StepFailed(str(error)) from None

    def _map_tensor(self, start: int, dtype: torch.dtype, count: int) -> Tensor:
        """A tensor with a storage of its own, as files of checkpoints and users expect of a
        parameter.
        """
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.region.map, dtype=dtype, count=count, offset=start)

    def _map_bytes(self, start: int, count: int) -> memoryview:
        return memoryview(self.region.map)[start : start + count]

    def forget_peers(self) -> None:
        self.peers.close_pidfds()


def _compute_offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """(offset of each, bytes of all), one after another on cache lines."""
    offsets = []
    end = 0
    for tensor in tensors:
        offsets.append(end)
        end = align_to_cache_line(end + tensor.numel() * tensor.element_size())
    return offsets, end
