"""server: servers hold the parameters; workers push gradients and pull parameters.

`bsp` is bulk synchronous parallel: all workers finish a step before the next begins. `ssp(s)`
is stale synchronous parallel: a worker is at most s shares ahead of the slowest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Self

from paragrad.errors import Refused
from paragrad.notation.choices import Choice, Integer, OneOf, Word, option
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.job_facts import JobFacts
from paragrad.strategies.strategy import Environment, Guarantees, Strategy


class Bsp(Choice):
    """Bulk synchronous: every step waits for all workers, but for backups (Chen et al. 2016).

    Attributes:
        backup: The number of slowest workers that a step does not wait for.
    """

    backup: int = option(Integer(0), default=0)


class Ssp(Choice):
    """Stale synchronous: a worker is at most `bound` steps ahead of the slowest (Ho et al. 2013).

    Attributes:
        bound: The steps that a worker may be ahead.
    """

    bound: int = option(Integer(0))


class Asp(Choice):
    """Asynchronous: no worker waits (Dean et al. 2012)."""


class Server(Strategy):
    """Servers hold parameters in slices; workers push gradients, pull parameters (Li et al. 2014).

    Attributes:
        workers: The number of workers.

        servers: The number of servers; each holds a slice of the parameters and of the optimizer
            state.

        sync: Which workers wait for which.

        rate: Whether the rate of an update is divided by its staleness where that is above 1 (Zhang
            et al. 2015).

        compress: The compressor of the gradients that are pushed.
    """

    workers: int = option(Integer())
    servers: int = option(Integer(), default=1)
    sync: Choice = option(OneOf(Bsp, Ssp, Asp), default=Bsp())
    rate: str = option(Word("constant", "by_staleness"), default="constant")
    compress: Compressor | None = option(OneOf(Compressor), Word("none"), default=None)
    is_replicated = True
    uses_buckets = False

    def check_options(self) -> None:
        if self.rate == "by_staleness" and self.is_synchronous:
            raise Refused(
                f"server(rate=by_staleness): under {self.sync} no gradient is stale; leave rate "
                "out, or give sync=asp or sync=ssp(4)"
            )
        if self.compress is not None and self.compress.feedback:
            raise Refused(
                f"server: {self.compress} adds what it does not send to the next gradient, and a "
                "lost worker loses that too; compress by int8 or bf16, or use "
                f"{self.compress} under data(n)"
            )
        if self.compress is not None and self.compress.agrees:
            raise Refused(
                f"server: for {self.compress} all ranks agree on a scale first, and workers push "
                "by themselves; compress by bf16 or int8"
            )

    @property
    def is_synchronous(self) -> bool:
        """Whether a step uses all of its shares."""
        return isinstance(self.sync, Bsp)

    @property
    def backup(self) -> int:
        """The number of workers that a step does not wait for."""
        return self.sync.backup if isinstance(self.sync, Bsp) else 0

    @property
    def uses_work_queue(self) -> bool:
        return self.sync != Bsp()

    @property
    def can_recover(self) -> bool:
        return not self.uses_work_queue

    @property
    def staleness_bound(self) -> int | None:
        """The steps that a worker may be ahead of the slowest."""
        return self.sync.bound if isinstance(self.sync, Ssp) else None

    @property
    def share_count(self) -> int:
        """The number of shares of a full batch."""
        return self.workers

    @property
    def required_shares(self) -> int:
        """The number of shares that a synchronous step waits for."""
        return self.workers - self.backup

    def scale_rate(self, staleness: int, workers: float) -> float:
        """Return the factor of the learning rate for the update of one share.

        If there are more workers than the strategy has, all of them together move as far as one
        synchronous step. The reason: staleness grows with their number, and adds to momentum
        (Mitliagkas et al. 2016, arXiv 1605.09774).

        Args:
            staleness: The staleness of the share.
            workers: The number of workers at that time.
        """
        return (
            1.0 / max(1, staleness)
            if self.rate == "by_staleness"
            else self.workers / max(self.workers, workers)
        )

    @property
    def guarantees(self) -> Guarantees:
        equal = self.sync == Bsp()
        return Guarantees(
            exact=equal and self.compress is None, replicas_equal=equal, buffers_equal=equal
        )

    @property
    def verifiable(self) -> Self:
        """The strategy without backup workers: a step in which no worker is late."""
        return replace(self, sync=Bsp()) if self.backup else self

    @property
    def batch_norm(self) -> str:
        # A worker that waits for no other cannot share statistics.
        return "share" if self.uses_work_queue else "whole"

    def resolve(self, environment: Environment) -> Self:
        if self.backup >= self.workers:
            raise Refused(
                f"{self}: {self.backup} of {self.workers} worker(s) for backup leave no other "
                "worker; give fewer"
            )
        if self.backup and self.servers > 1:
            raise Refused(
                f"{self}: only a single server knows which pushes come first; give servers=1, or "
                "no backup"
            )
        if self.backup and environment.ranks is not None:
            raise Refused(
                f"{self}: only paragrad's own launcher queues samples again; start it without "
                "another launcher, or leave out backup"
            )
        return self

    def refuse_job(
        self, facts: JobFacts, requested: Strategy, skip_first_step_check: bool = False
    ) -> None:
        super().refuse_job(facts, requested, skip_first_step_check)
        if facts.trained_elements < self.servers:
            raise Refused(
                f"{requested} has {self.servers} servers, and job {facts.job} "
                f"{facts.trained_elements} trained parameter(s); give fewer servers"
            )
        if self.servers > 1 and facts.update_granularity != "element":
            raise Refused(
                f"{requested} cuts the optimizer's state into slices, and {facts.optimizer} does "
                "not update element by element (as SGD, Adam, AdamW, RMSprop, Adagrad do); give "
                "servers=1, or another optimizer"
            )

    def explain_no_schedule(self) -> str:
        return "the requests to servers are known only during the run; try data(4, reduce=ring)"

    def explain_choices(
        self, resolved: Self, environment: Environment
    ) -> Iterator[tuple[str, str, str]]:
        if self.uses_work_queue:
            yield "batch norm", "of each share", "the workers of a step are not known before it"
            yield (
                "scheduler",
                "by samples",
                "it steps after every full batch of applied samples",
            )
        if not self.is_synchronous:
            yield "clipping", "by each worker", "of its own gradient: the others' are not known"
            yield (
                "optimizer",
                "an update for every share",
                (
                    f"of gradients divided by {self.workers}: plain SGD moves as far as in one "
                    f"step of all; Adam, which divides by their size, {self.workers} times as far, "
                    f"and momentum and decay act {self.workers} times as often"
                ),
            )
        if not self.is_synchronous and self.rate == "constant":
            yield (
                "rate",
                "as the job's",
                f"where others join, times {self.workers} over the number of workers",
            )
