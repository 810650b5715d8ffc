"""Collectives of a group, one after another in the order they were asked for, on all ranks the
same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from paragrad.shm.collectives import CollectiveTitle, GroupAreas, ShortSum
from paragrad.shm.reductions import NARROW_DTYPES
from paragrad.shm.work import OperationQueue, ShmWork

MAX_SHORT_SUMS = 256  # kinds of short sums that are remembered


class CollectiveQueue(OperationQueue):
    """The lane of a group's collectives."""

    def __init__(self, areas: GroupAreas) -> None:
        super().__init__()
        self.areas = areas
        self.short_sums: dict[tuple[torch.dtype, torch.Size], ShortSum] = {}
        self.pending: deque[tuple[ShmWork, CollectiveTitle, Callable[[GroupAreas], None]]] = deque()

    def run_until_done(self, work: ShmWork, deadline: float, is_background: bool) -> None:
        while not work.done:
            each, title, perform = self.pending.popleft()
            try:
                self.run_collective(
                    title,
                    perform,
                    deadline if each is work else time.monotonic() + each.seconds,
                    is_background,
                )
            except BaseException as error:
                each.finish(error)
                if not isinstance(error, Exception):
                    raise
            else:
                each.finish()

    def handle_timeout(self, work: ShmWork) -> None:
        port = self.areas
        port.peers.abandon_group(
            f"rank {port.rank} gave up waiting for {port.peers.describe_away_ranks(None)} in "
            f"{port.describe_progress()}"
        )

    def run_collective(
        self,
        title: CollectiveTitle,
        perform: Callable[[GroupAreas], None],
        deadline: float,
        is_background: bool = False,
    ) -> None:
        """Carry out one collective; the lock is held, and nothing is before it."""
        try:
            self.areas.begin_collective(title, deadline, is_background)
            perform(self.areas)
        except (KeyboardInterrupt, SystemExit):
            self.areas.report_interrupt()
            raise

    def try_short_sum(self, tensor: Tensor, seconds: float) -> bool:
        """A short sum that its caller waits for, of a kind that was seen before: what most
        messages of a training are.

        False if it must go the usual way.
        """
        short = self.short_sums.get((tensor.dtype, tensor.shape))
        if (
            short is None
            or self.pending
            or not (tensor.is_cpu and tensor.is_contiguous())
            or tensor.requires_grad
            or (not self.lock.acquire(blocking=False))
        ):
            return False
        try:
            self.areas.begin_collective(short.title, time.monotonic() + seconds)
            short.sum_ranks(tensor, self.areas)
        except (KeyboardInterrupt, SystemExit):
            self.areas.report_interrupt()
            raise
        finally:
            self.lock.release()
        return True

    def remember_short_sum(self, title: CollectiveTitle, tensor: Tensor) -> None:
        """Remember a sum that `summed_at_once` may carry out from now on."""
        if (
            0 < tensor.numel() * tensor.element_size() <= self.areas.small_bytes
            and tensor.dtype not in NARROW_DTYPES
        ):
            if len(self.short_sums) >= MAX_SHORT_SUMS:
                self.short_sums.clear()
            self.short_sums[tensor.dtype, tensor.shape] = ShortSum(self.areas, title, tensor)
