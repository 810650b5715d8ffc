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
from paragrad.shm.region import LINE, TOKEN, OwnRegion, Region, aligned, no_address, opened
from paragrad.shm.synchronization import CROWDED_SPIN, WORDS, Barrier, GroupError, Peers, Semaphores

# tries at a barrier before a rank sleeps (about 2 ms): its core has nothing else to do
SPIN = 1000
COUNTED = struct.Struct("4d")  # numbers that every rank adds: weight, loss, stop, doubt


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
        self.places, self.row = _packed(trained)
        inside, everything = _packed(parameters)
        size = world.size
        offsets = {}
        end = aligned(TOKEN)
        for name, count in (
            ("words", WORDS),
            ("looks", 8 * size),
            ("flags", 2 * LINE),
            ("barriers", size**2 * LINE),
            ("counts", size * LINE),
            ("norms", 8 * size),
            ("used", size * aligned(len(trained))),
            ("shared", everything),
            ("rows", size * self.row),
        ):
            offsets[name] = end
            end += aligned(count)
        self.offsets = offsets
        self.region = self._joined(end)
        flags, signals = (
            Semaphores(self.region.start + offsets[name], count)
            for name, count in (("flags", 2), ("barriers", size**2))
        )
        spins = SPIN if size <= len(os.sched_getaffinity(0)) else CROWDED_SPIN
        self.peers = Peers(
            world.rank,
            spins,
            flags,
            self._bytes(offsets["words"], WORDS),
            self._bytes(offsets["looks"], 8 * size).cast("d"),
        )
        self.gate = Barrier(world.rank, size, signals, self.peers)
        if world.rank == 0:
            flags.initialize(lambda number: 1 - number)
            signals.initialize(lambda number: 0)
        # and nobody goes on before that
        pids = [int(pid) for pid in world.gathered(torch.tensor([os.getpid()]))]
        self.peers.know(pids)
        if isinstance(self.region, OwnRegion):
            self.region.opened_by_all()
        self.shared = [
            self._tensor(offsets["shared"] + place, parameter.dtype, parameter.numel()).view(
                parameter.shape
            )
            for place, parameter in zip(inside, parameters, strict=True)
        ]
        self.norms = self._tensor(offsets["norms"], torch.float64, size)

    def _joined(self, count: int) -> Region:
        """Rank 0 makes the region, the others open it; if it cannot be made, all raise."""
        own = None
        told = ""
        if self.world.rank == 0:
            try:
                own = OwnRegion(count)
                told = own.address
            except RuntimeError as error:
                told = no_address(error)
        told = self.world.agreed(told)
        try:
            return own or opened(told)
        except RuntimeError as error:
            raise StepFailed(str(error)) from error

    def gradient(self, rank: int, index: int) -> Tensor:
        """The place of a trained parameter's gradient in a rank's row, in the parameter's
        shape.
        """
        parameter = self.trained[index]
        stop = self.places[index] + parameter.numel() * parameter.element_size()
        return self.stretch(rank, parameter.dtype, self.places[index], stop).view(parameter.shape)

    def stretch(self, rank: int, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Bytes start to stop of a rank's row, flat."""
        return self._tensor(
            self.offsets["rows"] + rank * self.row + start, dtype, (stop - start) // dtype.itemsize
        )

    def used(self, rank: int) -> memoryview:
        """By trained parameter: 1 where this rank had a gradient."""
        return self._bytes(
            self.offsets["used"] + rank * aligned(len(self.trained)), len(self.trained)
        )

    def count(self, rank: int, *numbers: float) -> None:
        """Tell the others a rank's weight, loss, wish to stop, and doubtful weight."""
        COUNTED.pack_into(self.region.map, self.offsets["counts"] + rank * LINE, *numbers)

    def counts(self, rank: int) -> tuple[float, ...]:
        return COUNTED.unpack_from(self.region.map, self.offsets["counts"] + rank * LINE)

    def barrier(self, doing: Callable[[], str]) -> None:
        """Until every rank has come here. Raises StepFailed."""
        try:
            self.gate.wait(time.monotonic() + self.world.timeout, doing)
        except GroupError as error:
            raise StepFailed(str(error)) from None

    def _tensor(self, start: int, dtype: torch.dtype, count: int) -> Tensor:
        """A tensor with a storage of its own, as files of checkpoints and users expect of a
        parameter.
        """
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.region.map, dtype=dtype, count=count, offset=start)

    def _bytes(self, start: int, count: int) -> memoryview:
        return memoryview(self.region.map)[start : start + count]

    def forget(self) -> None:
        self.peers.forget()


def _packed(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """(offset of each, bytes of all), one after another on cache lines."""
    offsets = []
    end = 0
    for tensor in tensors:
        offsets.append(end)
        end = aligned(end + tensor.numel() * tensor.element_size())
    return offsets, end
