"""federated: clients with samples of their own, some of which train in every round.

The resulting weights are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import floor
from typing import Self

from paragrad.errors import Refused
from paragrad.notation.choices import Choice, Decimal, Integer, OneOf, Word, option
from paragrad.schedules.all_reduce import AllReduce
from paragrad.schedules.star import Star
from paragrad.strategies.data import Native
from paragrad.strategies.job_facts import JobFacts, refuse_replaced_parameters
from paragrad.strategies.shares import Division
from paragrad.strategies.strategy import Environment, Guarantees, ScheduleUse, Strategy


class Even(Choice):
    """Every client has a random, equal part of the samples."""


class Dirichlet(Choice):
    """Clients differ in their mix of classes (Hsu et al. 2019).

    Attributes:
        alpha: The smaller, the fewer classes each client has.
    """

    alpha: float = option(Decimal(most=1e6), default=0.5)


class Federated(Strategy):
    """Federated averaging: clients with own data, some of them each round (McMahan et al. 2017).

    Attributes:
        workers: The number of workers.

        clients: The number of clients.

        fraction: The fraction of the clients that take part in a round; at least one does.

        local_epochs: The epochs of each client over its own samples in a round.

        rounds: The number of rounds. `auto` passes over as many samples as the epochs of the job
            do.

        split: Which samples a client has.

        reduce: The all-reduce of the averages. star goes through a server, which is rank 0; a ring
            has no server.
    """

    workers: int = option(Integer())
    clients: int = option(Integer(), default=100)
    fraction: float = option(Decimal(most=1.0), default=0.1)
    local_epochs: int = option(Integer(), default=1)
    rounds: int | str = option(Integer(), Word("auto"), default="auto")
    split: Choice = option(OneOf(Even, Dirichlet), default=Even())
    reduce: Choice = option(OneOf(Native, AllReduce), default=Star())
    is_replicated = True
    trains_clients = True
    batch_norm = "share"  # a batch has samples of one client only

    @property
    def guarantees(self) -> Guarantees:
        return Guarantees(
            exact=False,
            replicas_equal=False,
            buffers_equal=False,
            jobs_only=(
                "in a loop of your own paragrad cannot choose which client trains, and on which "
                "samples; make it a Job, or train with local(n)"
            ),
        )

    @property
    def division(self) -> Division:
        """One share: a batch is that of a single client."""
        return Division()

    @property
    def alpha(self) -> float | None:
        """How much clients differ in their mix of classes; None: by chance only."""
        return self.split.alpha if isinstance(self.split, Dirichlet) else None

    @property
    def clients_per_round(self) -> int:
        """The number of clients that take part in a round."""
        return max(1, floor(self.fraction * self.clients + 0.5))

    def plan_schedules(self) -> tuple[ScheduleUse, ...]:
        return (
            (ScheduleUse("all-reduce", self.reduce, self.workers),)
            if isinstance(self.reduce, AllReduce)
            else ()
        )

    def explain_no_schedule(self) -> str:
        return "name an all-reduce for its averages, such as federated(4, reduce=ring)"

    def resolve(self, environment: Environment) -> Self:
        if self.clients < self.workers:
            raise Refused(
                f"{self}: {self.clients} client(s) cannot keep {self.workers} workers busy; give "
                f"at most {self.clients} worker(s), or more clients"
            )
        if not isinstance(self.reduce, AllReduce):
            return self
        return replace(
            self,
            reduce=self.reduce.resolve(self.workers, environment.ranks_on_host or self.workers),
        )

    def refuse_job(
        self, facts: JobFacts, requested: Strategy, skip_first_step_check: bool = False
    ) -> None:
        """Refuse a job; the samples of each client are checked where they are divided.

        Args:
            facts: The job.
            requested: The strategy as written, for the messages.
            skip_first_step_check: Whether to train a job that does not repeat.

        Raises:
            Refused: With the repair.
        """
        if facts.samples < self.clients:
            raise Refused(
                f"{requested} has {self.clients} clients, and job {facts.job} {facts.samples} "
                f"sample(s); give at most clients={facts.samples}"
            )
        refuse_replaced_parameters(facts, requested)
        if facts.optimizer_refusal:
            raise Refused(
                f"{requested} makes an optimizer for every client and round, and that of job "
                f"{facts.job} cannot be made again: {facts.optimizer_refusal}"
            )
        if facts.repeatability_refusal and not skip_first_step_check:
            raise Refused(f"job {facts.job}: {facts.repeatability_refusal}")

    def list_warnings(self, facts: JobFacts, requested: Strategy) -> Iterator[str]:
        if (taking := self.clients_per_round) < self.workers:
            yield (
                f"{requested}: {taking} of {self.clients} clients take{'s' if taking == 1 else ''} "
                f"part in a round, which keeps at most {taking} of {self.workers} workers busy"
                + (", and nothing is averaged" if taking == 1 else "")
                + f"; give fewer workers, or a larger fraction, such as "
                f"fraction={self.workers / self.clients:.3g}"
            )

    def refuse_factors(self, factors: tuple[Strategy, ...]) -> None:
        if len(factors) > 1:
            raise Refused(
                "federated: a worker trains one whole client at a time; use it alone, or multiply "
                "local(n), which allows divided replicas"
            )

    def explain_choices(
        self, resolved: Self, environment: Environment
    ) -> Iterator[tuple[str, str, str]]:
        yield (
            "optimizer",
            "fresh for every client and round",
            "its state belongs to one client, and stays there",
        )
        yield (
            "scheduler",
            "by samples, between rounds",
            (
                "it makes as many steps as serial does over as many samples; the rate does not "
                "change in a round"
            ),
        )
        yield (
            "batch norm",
            "of each client's batch",
            "a client must not know other clients' samples",
        )
