"""The bound of ssp(s) if every worker has its share of every batch (torchrun, srun, mpirun).

Each server enforces it by itself. A worker gets the parameters for a step when no worker is more
than s steps behind. With a work queue, the queue enforces the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from paragrad.parallel.server.message_header import Header

PullRequest = tuple[bytes, Header]


@dataclass
class StalenessBound:
    """Decides which pulls may be answered.

    Attributes:
        bound: The bound s, or None if no worker waits.

        workers: Number of workers.

        first_step: The step with which all workers begin.

        requested_steps: The last step that each sender asked for.

        excluded_senders: Senders that ask for no step until all workers have met.

        waiting_pulls: Pulls that wait for slower workers.
    """

    bound: int | None
    workers: int
    first_step: int | None = None
    requested_steps: dict[int, int] = field(default_factory=dict)
    excluded_senders: set[int] = field(default_factory=set)
    waiting_pulls: list[PullRequest] = field(default_factory=list)

    def add_pull(
        self, connection: bytes, header: Header, for_step: bool = True
    ) -> list[PullRequest]:
        """Add a pull.

        Args:
            connection: The connection of the worker.
            header: The header of the pull.
            for_step: Whether the parameters are for a step. Otherwise the pull is answered at once.

        Returns:
            The pulls that may be answered now.
        """
        self.first_step = header.step if self.first_step is None else self.first_step
        self.requested_steps[header.sender] = header.step
        self.excluded_senders.discard(header.sender)
        if self.bound is None or not for_step:
            return [*self._take_ready_pulls(), (connection, header)]
        self.waiting_pulls.append((connection, header))
        return self._take_ready_pulls()

    def exclude_sender(self, sender: int) -> list[PullRequest]:
        """Exclude a worker that waits for the others.

        The others may have to reach the same point, so none of them waits for it.

        Args:
            sender: The sender.

        Returns:
            The pulls that may be answered now.
        """
        self.excluded_senders.add(sender)
        return self._take_ready_pulls()

    def _take_ready_pulls(self) -> list[PullRequest]:
        # the negative senders stand for workers that have not asked for anything yet
        steps = {
            **dict.fromkeys(
                range(len(self.requested_steps) - self.workers, 0), self.first_step or 0
            ),
            **self.requested_steps,
        }
        slowest = min(
            (step for sender, step in steps.items() if sender not in self.excluded_senders),
            default=inf,
        )
        ready = [each for each in self.waiting_pulls if each[1].step - slowest <= (self.bound or 0)]
        self.waiting_pulls = [each for each in self.waiting_pulls if each not in ready]
        return ready
