"""The bound of ssp(s) where every worker has its share of every batch (torchrun, srun, mpirun),
which a server keeps by itself: who asks for the parameters of a step has them once nobody is
more than s steps behind. Where samples are handed out the office keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from paragrad.parallel.server.message_header import Header

PullRequest = tuple[bytes, Header]


@dataclass
class StalenessBound:
    """bound: s, or None where nobody waits;  workers: how many there are."""

    bound: int | None
    workers: int
    first_step: int | None = None  # step, with which all begin
    # by sender: the step that it asked for last
    requested_steps: dict[int, int] = field(default_factory=dict)
    # who asks for no step until all have met
    excluded_senders: set[int] = field(default_factory=set)
    waiting_pulls: list[PullRequest] = field(default_factory=list)

    def add_pull(
        self, connection: bytes, header: Header, for_step: bool = True
    ) -> list[PullRequest]:
        """Somebody asks for the parameters of a step, or as they are: who may have theirs
        now.
        """
        self.first_step = header.step if self.first_step is None else self.first_step
        self.requested_steps[header.sender] = header.step
        self.excluded_senders.discard(header.sender)
        if self.bound is None or not for_step:
            return [*self._take_ready_pulls(), (connection, header)]
        self.waiting_pulls.append((connection, header))
        return self._take_ready_pulls()

    def exclude_sender(self, sender: int) -> list[PullRequest]:
        """It waits for the others, who may have to come to where it waits: so nobody waits for
        it.
        """
        self.excluded_senders.add(sender)
        return self._take_ready_pulls()

    def _take_ready_pulls(self) -> list[PullRequest]:
        # who did not come yet
        every = {
            **dict.fromkeys(
                range(len(self.requested_steps) - self.workers, 0), self.first_step or 0
            ),
            **self.requested_steps,
        }
        slowest = min(
            (step for sender, step in every.items() if sender not in self.excluded_senders),
            default=inf,
        )
        ready = [each for each in self.waiting_pulls if each[1].step - slowest <= (self.bound or 0)]
        self.waiting_pulls = [each for each in self.waiting_pulls if each not in ready]
        return ready
