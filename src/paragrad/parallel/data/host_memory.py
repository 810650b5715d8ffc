"""A shared memory region that holds parameters once for all ranks of a host.

It also holds a row of gradients for each rank.
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

# tries at a barrier before a rank sleeps (about 2 ms): its core has no other work
SPIN_TRIES = 1000
TOTALS_STRUCT = struct.Struct("4d")  # weight, loss, stop request, doubtful weight


class HostMemory:
    """A shared memory region, laid out for the parameters of a model.

    The constructor is collective: all ranks make it together.

    Args:
        world: The world of the ranks, which are on one host.

        parameters: All parameters of the model.

        trained: Those of them that have gradients.

    Attributes:
        world: The world of the ranks.

        trained: The trained parameters.

        row_offsets: Offset of each trained parameter in a row, in bytes.

        row_bytes: Bytes of a row.

        offsets: Offset of each area of the region, in bytes.

        region: The shared region.

        peers: The other processes, which are watched during a wait.

        rank_barrier: The barrier of all ranks.

        shared_parameters: The shared places of all parameters, in their shapes.

        norms: For each rank, the squared norm of its slice, as float64.
    """

    def __init__(
        self, world: World, parameters: Sequence[Tensor], trained: Sequence[Tensor]
    ) -> None:
        self.world = world
        self.trained = trained
        self.row_offsets, self.row_bytes = _compute_offsets(trained)
        parameter_offsets, parameter_bytes = _compute_offsets(parameters)
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
            ("shared", parameter_bytes),
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
        # this gather also ensures that no rank continues before the initialization above
        pids = [int(pid) for pid in world.all_gather(torch.tensor([os.getpid()]))]
        self.peers.register_processes(pids)
        if isinstance(self.region, CreatedRegion):
            self.region.close_descriptor()
        self.shared_parameters = [
            self._map_tensor(offsets["shared"] + place, parameter.dtype, parameter.numel()).view(
                parameter.shape
            )
            for place, parameter in zip(parameter_offsets, parameters, strict=True)
        ]
        self.norms = self._map_tensor(offsets["norms"], torch.float64, size)

    def _open_region(self, count: int) -> SharedRegion:
        """Create the region on rank 0 and open it on the others. If that fails, all ranks raise."""
        own = None
        address = ""
        if self.world.rank == 0:
            try:
                own = CreatedRegion(count)
                address = own.address
            except RuntimeError as error:
                address = format_no_address(error)
        address = self.world.broadcast_object(address)
        try:
            return own or open_region(address)
        except RuntimeError as error:
            raise StepFailed(str(error)) from error

    def get_gradient(self, rank: int, index: int) -> Tensor:
        """Return the place of a gradient in the row of a rank.

        Args:
            rank: The rank.
            index: Number of the trained parameter.

        Returns:
            A view of the region, in the shape of the parameter.
        """
        parameter = self.trained[index]
        stop = self.row_offsets[index] + parameter.numel() * parameter.element_size()
        return self.get_row_range(rank, parameter.dtype, self.row_offsets[index], stop).view(
            parameter.shape
        )

    def get_row_range(self, rank: int, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Return a range of the row of a rank.

        Args:
            rank: The rank.
            dtype: The dtype of the elements.
            start: First byte of the range.
            stop: End of the range, in bytes.

        Returns:
            A flat view of the region.
        """
        return self._map_tensor(
            self.offsets["rows"] + rank * self.row_bytes + start,
            dtype,
            (stop - start) // dtype.itemsize,
        )

    def get_used_flags(self, rank: int) -> memoryview:
        """Return the flags of used parameters of a rank.

        Args:
            rank: The rank.

        Returns:
            One byte for each trained parameter: 1 if the rank had a gradient.
        """
        return self._map_bytes(
            self.offsets["used"] + rank * align_to_cache_line(len(self.trained)), len(self.trained)
        )

    def write_totals(self, rank: int, *numbers: float) -> None:
        """Write the numbers that all ranks add.

        Args:
            rank: The rank.
            numbers: Its weight, loss, stop request and doubtful weight.
        """
        TOTALS_STRUCT.pack_into(
            self.region.map, self.offsets["counts"] + rank * CACHE_LINE_BYTES, *numbers
        )

    def read_totals(self, rank: int) -> tuple[float, ...]:
        """Read the numbers of a rank.

        Args:
            rank: The rank.

        Returns:
            Its weight, loss, stop request and doubtful weight.
        """
        return TOTALS_STRUCT.unpack_from(
            self.region.map, self.offsets["counts"] + rank * CACHE_LINE_BYTES
        )

    def wait_for_ranks(self, describe: Callable[[], str]) -> None:
        """Wait until every rank has called this.

        Args:
            describe: Describes the wait for the error message.

        Raises:
            StepFailed: A rank failed, or did not come within the timeout.
        """
        try:
            self.rank_barrier.wait(time.monotonic() + self.world.timeout, describe)
        except GroupError as error:
            raise StepFailed(str(error)) from None

    def _map_tensor(self, start: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return a part of the region as a tensor.

        It has a storage of its own, as users and checkpoint files expect of a parameter.
        """
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.region.map, dtype=dtype, count=count, offset=start)

    def _map_bytes(self, start: int, count: int) -> memoryview:
        """Return a part of the region as bytes."""
        return memoryview(self.region.map)[start : start + count]

    def forget_peers(self) -> None:
        """Stop watching the other processes."""
        self.peers.close_pidfds()


def _compute_offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor and the bytes of all, aligned to cache lines."""
    offsets = []
    end = 0
    for tensor in tensors:
        offsets.append(end)
        end = align_to_cache_line(end + tensor.numel() * tensor.element_size())
    return offsets, end
