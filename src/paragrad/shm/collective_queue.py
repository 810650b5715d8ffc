"""The queue of a group's collectives. They run in the order of the calls, equal on all ranks.

Those that a callback of a collective's future calls run directly after that collective.
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

MAX_SHORT_SUMS = 256  # types and shapes of short sums that are kept


class CollectiveQueue(OperationQueue):
    """The queue of a group's collectives.

    Attributes:
        areas: The areas of the group.
        short_sums: Prepared sums, by type and shape.
        pending: Collectives that have not begun.
    """

    def __init__(self, areas: GroupAreas) -> None:
        super().__init__()
        self.areas = areas
        self.short_sums: dict[tuple[torch.dtype, torch.Size], ShortSum] = {}
        self.pending: deque[tuple[ShmWork, CollectiveTitle, Callable[[GroupAreas], None]]] = deque()

    def run_until_done(self, work: ShmWork, deadline: float, is_background: bool) -> None:
        while not work.done:
            next_work, title, perform = self.pending.popleft()
            try:
                self.run_collective(
                    title,
                    perform,
                    deadline if next_work is work else time.monotonic() + next_work.seconds,
                    is_background,
                )
            except BaseException as error:
                next_work.finish(error)
                if not isinstance(error, Exception):
                    raise
            else:
                next_work.finish()

    def handle_timeout(self, work: ShmWork) -> None:
        areas = self.areas
        areas.peers.abandon_group(
            f"rank {areas.rank} gave up waiting for {areas.peers.describe_away_ranks(None)} in "
            f"{areas.describe_progress()}"
        )

    def run_collective(
        self,
        title: CollectiveTitle,
        perform: Callable[[GroupAreas], None],
        deadline: float,
        is_background: bool = False,
    ) -> None:
        """Run one collective. The caller holds the lock, and no collective is before it.

        Args:
            title: The description of the collective.

            perform: Runs it on the areas.

            deadline: The time limit, on the monotonic clock.

            is_background: No caller waits for it, so do not spin.
        """
        try:
            self.areas.begin_collective(title, deadline, is_background)
            perform(self.areas)
        except (KeyboardInterrupt, SystemExit):
            self.areas.report_interrupt()
            raise

    def try_short_sum(self, tensor: Tensor, seconds: float) -> bool:
        """Run a short sum at once, if one of this type and shape is prepared.

        Most messages of a training are of this kind. The caller waits for the sum.

        Args:
            tensor: The contribution, which takes the sum.
            seconds: The time limit.

        Returns:
            False if the sum must go through the queue.
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
        """Prepare a sum, so that `try_short_sum` can run it from now on.

        Args:
            title: The description of the collective.
            tensor: A tensor of this type and shape.
        """
        if (
            0 < tensor.numel() * tensor.element_size() <= self.areas.small_bytes
            and tensor.dtype not in NARROW_DTYPES
        ):
            if len(self.short_sums) >= MAX_SHORT_SUMS:
                self.short_sums.clear()
            self.short_sums[tensor.dtype, tensor.shape] = ShortSum(self.areas, title, tensor)
