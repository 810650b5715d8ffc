"""Collectives of a group, one after another in the order they were asked for, on all ranks the
same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from paragrad.shm.collectives import Port, Short, Title
from paragrad.shm.reductions import NARROW
from paragrad.shm.work import Lane, Work

SHORTS = 256  # kinds of short sums that are remembered


class Collectives(Lane):
    """The lane of a group's collectives."""

    def __init__(self, port: Port) -> None:
        super().__init__()
        self.port = port
        self.shorts: dict[tuple[torch.dtype, torch.Size], Short] = {}
        self.queue: deque[tuple[Work, Title, Callable[[Port], None]]] = deque()

    def advance(self, work: Work, deadline: float, patient: bool) -> None:
        while not work.done:
            each, title, perform = self.queue.popleft()
            try:
                self.perform(
                    title,
                    perform,
                    deadline if each is work else time.monotonic() + each.seconds,
                    patient,
                )
            except BaseException as error:
                each.finish(error)
                if not isinstance(error, Exception):
                    raise
            else:
                each.finish()

    def too_late(self, work: Work) -> None:
        port = self.port
        port.peers.give_up(
            f"rank {port.rank} gave up waiting for {port.peers.away(None)} in {port.late()}"
        )

    def perform(
        self, title: Title, perform: Callable[[Port], None], deadline: float, patient: bool = False
    ) -> None:
        """Carry out one collective; the lock is held, and nothing is before it."""
        try:
            self.port.begin(title, deadline, patient)
            perform(self.port)
        except (KeyboardInterrupt, SystemExit):
            self.port.interrupted()
            raise

    def summed_at_once(self, tensor: Tensor, seconds: float) -> bool:
        """A short sum that its caller waits for, of a kind that was seen before: what most
        messages of a training are.

        False if it must go the usual way.
        """
        short = self.shorts.get((tensor.dtype, tensor.shape))
        if (
            short is None
            or self.queue
            or not (tensor.is_cpu and tensor.is_contiguous())
            or tensor.requires_grad
            or (not self.lock.acquire(blocking=False))
        ):
            return False
        try:
            self.port.begin(short.title, time.monotonic() + seconds)
            short.sum(tensor, self.port)
        except (KeyboardInterrupt, SystemExit):
            self.port.interrupted()
            raise
        finally:
            self.lock.release()
        return True

    def will_be_short(self, title: Title, tensor: Tensor) -> None:
        """Remember a sum that `summed_at_once` may carry out from now on."""
        if (
            0 < tensor.numel() * tensor.element_size() <= self.port.small
            and tensor.dtype not in NARROW
        ):
            if len(self.shorts) >= SHORTS:
                self.shorts.clear()
            self.shorts[tensor.dtype, tensor.shape] = Short(self.port, title, tensor)
