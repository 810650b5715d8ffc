"""What a cluster is to a clock: links, cores, and who shares them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """One kind of link; seconds per message and per byte (LogGP, Alexandrov et al. 1995, with the names of the field).

    A message of n bytes holds its sender's way out and its receiver's way in for alpha + beta n (single-port, full-duplex), and
    is in flight for `latency` more. Each of the two holds a core for `overhead` when it posts the message or takes it; where
    ranks share cores, also for `work` a byte while it travels. The textbook's model is alpha and beta alone.
    """
    alpha: float
    beta: float
    latency: float = 0.0
    overhead: float = 0.0
    work: float = 0.0

    def seconds(self, size: int) -> float:
        """From posting a message of `size` bytes to having it, undisturbed."""
        return 2 * self.overhead + self.alpha + max(self.beta, self.work) * size + self.latency


@dataclass(frozen=True)
class Cluster:
    """Ranks, link by link and core by core; neighbouring ranks share.

    gamma: seconds of a core per byte added. `group` neighbouring ranks are on a host: they share its link to other hosts, and
    talk over `inside` among themselves. `sharing` neighbouring ranks share `cores` cores. slow: ranks that are k times slower
    than the others, at everything, as (rank, k).
    """
    link: Link
    gamma: float = 0.0
    inside: Link | None = None
    group: int = 1
    sharing: int = 1
    cores: int = 1
    slow: tuple[tuple[int, float], ...] = field(default=())

    def between(self, one: int, other: int) -> Link:
        """The link of a message between two ranks."""
        return self.inside if self.inside and one // self.group == other // self.group else self.link

    def factor(self, rank: int) -> float:
        """How many times slower a rank is."""
        return dict(self.slow).get(rank, 1.0)
