"""The bound of ssp(s) where every worker has its share of every batch (torchrun, srun, mpirun),
which a server keeps by itself: who asks for the parameters of a step has them once nobody is
more than s steps behind. Where samples are handed out the office keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from paragrad.parallel.server.message_header import Header

Asked = tuple[bytes, Header]


@dataclass
class Bounded:
    """bound: s, or None where nobody waits;  workers: how many there are."""

    bound: int | None
    workers: int
    first: int | None = None  # step, with which all begin
    # by sender: the step that it asked for last
    at: dict[int, int] = field(default_factory=dict)
    # who asks for no step until all have met
    apart: set[int] = field(default_factory=set)
    waiting: list[Asked] = field(default_factory=list)

    def asks(self, whose: bytes, header: Header, for_step: bool = True) -> list[Asked]:
        """Somebody asks for the parameters of a step, or as they are: who may have theirs
        now.
        """
        self.first = header.step if self.first is None else self.first
        self.at[header.sender] = header.step
        self.apart.discard(header.sender)
        if self.bound is None or not for_step:
            return [*self._ready(), (whose, header)]
        self.waiting.append((whose, header))
        return self._ready()

    def is_apart(self, sender: int) -> list[Asked]:
        """It waits for the others, who may have to come to where it waits: so nobody waits for
        it.
        """
        self.apart.add(sender)
        return self._ready()

    def _ready(self) -> list[Asked]:
        # who did not come yet
        every = {**dict.fromkeys(range(len(self.at) - self.workers, 0), self.first or 0), **self.at}
        slowest = min(
            (step for sender, step in every.items() if sender not in self.apart), default=inf
        )
        ready = [each for each in self.waiting if each[1].step - slowest <= (self.bound or 0)]
        self.waiting = [each for each in self.waiting if each not in ready]
        return ready
