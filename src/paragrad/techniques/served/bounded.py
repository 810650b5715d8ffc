"""The bound of ssp(s) where every worker has its share of every batch (torchrun, srun, mpirun), which a server keeps by itself:
who asks for the parameters of a step has them once nobody is more than s steps behind. Where samples are handed out the office
keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

from paragrad.techniques.served.header import Header

Asked = tuple[bytes, Header]


@dataclass
class Bounded:
    """bound: s, or None where nobody waits;  workers: how many there are."""
    bound: int | None
    workers: int
    first: int | None = None                            # step, with which all begin
    at: dict[int, int] = field(default_factory=dict)    # by sender: the step that it asked for last
    waiting: list[Asked] = field(default_factory=list)

    def ready(self, whose: bytes, header: Header) -> list[Asked]:
        """Somebody asks for the parameters of a step: who may have theirs now."""
        if self.bound is None:
            return [(whose, header)]
        self.first = header.step if self.first is None else self.first
        self.at[header.sender] = header.step
        self.waiting.append((whose, header))
        slowest = min(self.at.values()) if len(self.at) == self.workers else self.first
        ready = [each for each in self.waiting if each[1].step - slowest <= self.bound]
        self.waiting = [each for each in self.waiting if each not in ready]
        return ready
