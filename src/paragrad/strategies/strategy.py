"""A strategy is a frozen value that describes itself; no code asks for its class or its name.

    s = strategy("data(2, reduce=ring)")      # == Data(2, reduce=Ring())
    s.workers, s.exact, s * Tensor(2)

`s * Tensor(2)` is a product of two factors. Its ranks form a grid, in which each factor has axes of
its own.

`parallel/registry.py` maps a strategy to the code that runs inside a rank. A user's own strategy
provides this code itself (`make_exchange`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Self, cast

from paragrad.errors import Refused
from paragrad.notation.choices import Family, ManyOf, option
from paragrad.runtime.mesh import Axis
from paragrad.schedules.actions import Schedule
from paragrad.strategies.job_facts import JobFacts, OptimizerFacts
from paragrad.strategies.shares import Division, apportion_samples, count_smallest_micro_batch


@dataclass(frozen=True)
class Guarantees:
    """What a strategy guarantees for every job.

    Attributes:
        exact: The training is that of serial; the first step has to show this.

        replicas_equal: All ranks have the same parameters after a step.

        buffers_equal: All ranks have the same buffers after a step.

        jobs_only: Why the strategy does not work in a user's own training loop, or None.
    """

    exact: bool = True
    replicas_equal: bool = True
    buffers_equal: bool = True
    jobs_only: str | None = None


@dataclass(frozen=True)
class Environment:
    """Where a strategy is to run; read once.

    Attributes:
        cores: The cores of this host.

        ranks: The size of the world, if a launcher set it; otherwise None.

        ranks_on_host: How many ranks are on this host.

        shared_memory_refusal: Why the ranks cannot share memory, or None.

        backend: The backend that carries their messages.

        user_loop: Whether the training loop is the user's own.

        threads: The threads of a single rank; None for the cores.

        gpus: The GPUs of this host, if ranks train on GPUs; otherwise 0.
    """

    cores: int = 1
    ranks: int | None = None
    ranks_on_host: int | None = None
    shared_memory_refusal: str | None = "it is not known whether all ranks are on this host"
    backend: str = "gloo"
    user_loop: bool = False
    threads: int | None = None
    gpus: int = 0

    def count_automatic_ranks(self) -> int:
        """Count the ranks that `auto` stands for.

        They are those of the launcher, or one for each GPU, or one for each core.
        """
        return self.ranks or self.gpus or self.cores


@dataclass(frozen=True)
class ScheduleUse:
    """A schedule that a resolved strategy will run; validation proves it.

    It can also be drawn and simulated, with a planted fault or without.

    Attributes:
        goal: The name of its goal in `executors.proof.GOALS`.
        schedule: The schedule.
        size: The number of its ranks.
        pricing_refusal: Why its messages have no price, with the repair, or None.
    """

    goal: str
    schedule: Schedule
    size: int
    pricing_refusal: str | None = None


# How an optimizer updates. The later in this list, the more of the model one rank must hold.
PER_ELEMENT = "element"
PER_TENSOR = "tensor"
WHOLE_MODEL = "all"
UPDATE_GRANULARITIES = (PER_ELEMENT, PER_TENSOR, WHOLE_MODEL)

# Members of a strategy that had another name until version 0.1, and the names that they have now.
RENAMED_MEMBERS = {
    **Family.renamed_members,
    "exchange": "make_exchange",
    "share": "shard_model",
    "passes": "make_passes",
    "promise": "guarantees",
    "together": "update_granularity",
    "inside": "splits_layers",
    "follows": "adapts_shares",
    "skips": "skips_calls",
    "in_rounds": "trains_clients",
    "hands_out": "uses_work_queue",
    "recovers": "can_recover",
    "lays_out": "changes_layout",
    "cuts_micro": "schedules_micro_batches",
    "verified": "verifiable",
    "taking": "clients_per_round",
    "replica": "is_replicated",
    "reference": "is_reference",
    "bucketed": "uses_buckets",
    "sharded": "shards_parameters",
    "serves": "is_server",
    "plans": "plan_schedules",
    "picks_all_reduce": "has_open_all_reduce",
    "unplanned": "explain_no_schedule",
    "resolved": "resolve",
    "picked": "explain_choices",
    "alternatives": "list_alternatives",
    "refuse": "refuse_job",
    "refuse_few": "refuse_small_batch",
    "refuse_alone": "refuse_single_sample",
    "refuse_updates": "refuse_optimizer",
    "noticed": "list_warnings",
    "refuse_beside": "refuse_factors",
}


class Strategy(Family, abstract=True):
    """How the training is divided. `*` nests: left to right is outer to inner.

    A class of your own sets its `workers` and its guarantees. It provides `make_exchange`, or
    `shard_model` if its axes divide the model. It may override more of the rest.

    Attributes:
        is_replicated: Whether it holds replicas. A product has at most one such factor, leftmost.

        is_reference: Whether other strategies are compared with it.

        schedules_micro_batches: Whether it divides batches into micro-batches itself.

        changes_layout: Whether a rank runs other calls, or sees other samples, than one worker.

        adapts_shares: Whether the shares follow the pace of each rank, from the second epoch on.

        skips_calls: Whether a rank does not run all calls that one worker runs.

        trains_clients: Whether workers train clients, each over its own samples, and meet once a
            round.

        splits_layers: Whether it splits the layers of the part of the model that other factors
            leave.

        update_granularity: What an optimizer may need in one place, if it splits layers.

        uses_work_queue: Whether samples come from a queue, for workers that come and go.

        can_recover: Whether its servers keep the whole training, so that dead workers can restart.

        servers: The ranks after the workers that serve (`Exchange.serve`).

        threads: The threads of each rank; None: the cores are divided.

        shards_parameters: Whether each replica holds a shard of the parameters only. Then no rank
            can run the model alone.

        uses_buckets: Whether gradients travel in groups. Then all ranks know in advance which
            parameters have no gradient.

        batch_norm: Which samples batch statistics are of: "whole" micro-batches, or each "share".
    """

    renamed_members = RENAMED_MEMBERS
    is_replicated = False
    is_reference = False
    schedules_micro_batches = False
    changes_layout = True
    adapts_shares = False
    skips_calls = False
    trains_clients = False
    splits_layers = False
    update_granularity = PER_TENSOR
    if TYPE_CHECKING:  # options of some strategies

        @property
        def uses_work_queue(self) -> bool: ...
        @property
        def can_recover(self) -> bool: ...
        @property
        def workers(self) -> int | str: ...
        @property
        def servers(self) -> int: ...
        @property
        def clients(self) -> int: ...
        @property
        def clients_per_round(self) -> int: ...
        @property
        def local_epochs(self) -> int: ...
        @property
        def rounds(self) -> int | str: ...
        @property
        def alpha(self) -> float | None: ...
        @property
        def threads(self) -> int | str | None: ...
        @property
        def batch_norm(self) -> str: ...
        @property
        def uses_buckets(self) -> bool: ...
        @property
        def shards_parameters(self) -> bool: ...
        @property
        def guarantees(self) -> Guarantees: ...
        def make_exchange(self, replica: Any, world: Any, log: Any, options: Any) -> Any: ...
        def shard_model(self, model: Any, example: Any, axis: Any) -> Any: ...
    else:
        uses_work_queue = False
        can_recover = False
        servers = 0
        threads = None
        shards_parameters = False
        uses_buckets = False
        batch_norm = "whole"

    # ---- properties --------------------------------------------------------------------------
    @property
    def technique(self) -> str:
        """The name under which the registry finds the implementation."""
        return self.name

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of a resolved strategy, outer to inner; ranks of the last one are neighbours."""
        assert isinstance(self.workers, int)
        return (Axis(self.name, self.workers),)

    @property
    def division(self) -> Division:
        """How a resolved strategy divides a batch."""
        return Division((1,) * prod(axis.size for axis in self.axes if axis.divides == "samples"))

    @property
    def size(self) -> int:
        """The number of ranks of a resolved strategy, servers included."""
        return prod(axis.size for axis in self.axes) + self.servers

    @property
    def verifiable(self) -> Self:
        """The strategy to compare with serial; it differs if this strategy changes as it runs."""
        return self

    def is_server(self, rank: int) -> bool:
        """Return whether a rank of a resolved strategy is a server; servers are the last ranks.

        Args:
            rank: The rank.
        """
        return rank >= self.size - self.servers

    @property
    def exact(self) -> bool:
        """Whether the training is that of serial."""
        return self.guarantees.exact

    def plan_schedules(self) -> tuple[ScheduleUse, ...]:
        """List the schedules that a resolved strategy will run."""
        return ()

    def has_open_all_reduce(self) -> bool:
        """Return whether an all-reduce must still be chosen, by measurements of the machine."""
        return False

    def explain_no_schedule(self) -> str:
        """Return why there are no schedules, with the repair."""
        return "try data(4, reduce=ring)"

    # ---- the environment and the job ---------------------------------------------------------
    def resolve(self, environment: Environment) -> Self:
        """Return the same strategy with every `auto` replaced.

        Args:
            environment: Where the strategy runs.

        Raises:
            Refused: If it cannot run in this environment.
        """
        return (
            replace(cast(Any, self), workers=environment.count_automatic_ranks())
            if self.workers == "auto"
            else self
        )

    def explain_choices(
        self, resolved: Self, environment: Environment
    ) -> Iterator[tuple[str, str, str]]:
        """Generate what each `auto` became, and why.

        Args:
            resolved: The resolved strategy.
            environment: Where it runs.

        Yields:
            (option, choice, reason).
        """
        yield from ()

    def list_alternatives(self, environment: Environment) -> tuple[Strategy, ...]:
        """List other strategies for the same training that may be faster, worth a short trial.

        Args:
            environment: The machine and the launcher.
        """
        return ()

    def refuse_job(
        self, facts: JobFacts, requested: Strategy, skip_first_step_check: bool = False
    ) -> None:
        """Refuse a job that a resolved strategy cannot train, with the repair.

        Args:
            facts: The job.
            requested: The strategy as the user wrote it, for the messages.
            skip_first_step_check: Whether to continue even if the training is known to be another
                one.

        Raises:
            Refused: With the repair.
        """
        division = self.division
        self.refuse_small_batch(facts.full_batch, requested)
        if division.micro > (most := max(apportion_samples(facts.full_batch, division.shares))):
            raise Refused(
                f"{requested} divides batches into {division.micro} micro-batches, and the largest "
                f"share of a full batch has {most} sample(s); give micro of at most {most}, or a "
                "larger batch"
            )
        if division.micro > 1 and facts.micro_batch_refusal:
            raise Refused(f"job {facts.job}: {facts.micro_batch_refusal}")
        self.refuse_single_sample(facts, requested)
        if self.exact and not skip_first_step_check and division != Division():
            if facts.additivity_refusal:
                raise Refused(f"job {facts.job}: {facts.additivity_refusal}")
            if facts.layout_refusal:
                raise Refused(f"{requested}: {facts.layout_refusal}")

    def refuse_small_batch(self, full_batch: int, requested: Strategy) -> None:
        """Refuse a full batch of fewer samples than shares.

        Args:
            full_batch: The samples of a full batch.
            requested: The strategy as the user wrote it, for the message.

        Raises:
            Refused: With the repair.
        """
        if full_batch < (shares := len(self.division.shares)):
            raise Refused(
                f"{requested} has {shares} workers and the full batch {full_batch} sample(s); give "
                f"a batch of at least {shares}, or fewer workers"
            )

    def refuse_single_sample(self, facts: JobFacts, requested: Strategy) -> None:
        """Refuse micro-batches of a single sample if batch norm needs more.

        Args:
            facts: The job.
            requested: The strategy as the user wrote it, for the message.

        Raises:
            Refused: With the repair.
        """
        division = self.division
        per_share = self.batch_norm == "share"
        for samples in facts.batch_sizes:
            if (
                count_smallest_micro_batch(samples, division, per_share) == 1
                and facts.single_sample_refusal
            ):
                allowed = [
                    micro
                    for micro in range(1, division.micro)
                    if count_smallest_micro_batch(
                        samples, replace(division, micro=micro), per_share
                    )
                    > 1
                ]
                repair = (
                    f"give micro of at most {allowed[-1]}" if allowed else "give another batch size"
                )
                raise Refused(
                    f"job {facts.job}: {facts.single_sample_refusal}, and {requested} makes a "
                    f"micro-batch of one out of a batch of {samples}; {repair}"
                )

    def refuse_optimizer(self, optimizer_facts: OptimizerFacts, requested: Strategy) -> None:
        """Refuse an optimizer, of a job or of a user's own training loop, with the repair.

        Args:
            optimizer_facts: The optimizer.
            requested: The strategy as the user wrote it, for the message.

        Raises:
            Refused: With the repair.
        """

    def list_warnings(self, facts: JobFacts, requested: Strategy) -> Iterator[str]:
        """Generate warnings for a job that can train, but not as the options suggest.

        Args:
            facts: The job.
            requested: The strategy as the user wrote it, for the messages.
        """
        yield from ()

    def refuse_factors(self, factors: tuple[Strategy, ...]) -> None:
        """Refuse the other factors of a product, with the repair.

        Args:
            factors: All factors of the product, this one included.

        Raises:
            Refused: With the repair.
        """

    def __mul__(self, other: Strategy) -> Product:
        return Product(list_factors(self) + list_factors(other))


@dataclass(frozen=True, repr=False)
class Product(Strategy, abstract=True):
    """A hybrid: strategies multiplied along axes, left to right is outer to inner.

    It has no name of its own. Its properties follow from those of its factors. At most one factor
    divides samples; the others partition the model, the innermost first.

    Attributes:
        factors: The strategies, outer to inner.
    """

    factors: tuple[Strategy, ...] = option(ManyOf(Strategy))

    def check_options(self) -> None:
        for factor in self.factors:
            factor.refuse_factors(self.factors)
        if inner := [factor for factor in self.factors[1:] if factor.is_replicated]:
            raise Refused(
                f"{inner[0].name} holds replicas: at most one such part in a product, leftmost; "
                f"got {self}"
            )

    def __str__(self) -> str:
        return " * ".join(map(str, self.factors))

    def __repr__(self) -> str:
        return " * ".join(map(repr, self.factors))

    @property
    def workers(self) -> int | str:
        counts = [factor.workers for factor in self.factors]
        return "auto" if "auto" in counts else prod(int(count) for count in counts)

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for factor in self.factors for axis in factor.axes)

    @property
    def division(self) -> Division:
        """The shares of the factor that divides samples, and the product of all micro-batches."""
        divisions = [factor.division for factor in self.factors]
        return Division(
            max((each.shares for each in divisions), key=len),
            prod(each.micro for each in divisions),
        )

    @property
    def threads(self) -> int | str | None:
        return next((factor.threads for factor in self.factors if factor.threads), None)

    @property
    def batch_norm(self) -> str:
        return next(
            (factor.batch_norm for factor in self.factors if factor.batch_norm != "whole"), "whole"
        )

    @property
    def uses_buckets(self) -> bool:
        return any(factor.uses_buckets for factor in self.factors)

    @property
    def guarantees(self) -> Guarantees:
        guarantees = [factor.guarantees for factor in self.factors]
        return Guarantees(
            all(each.exact for each in guarantees),
            all(each.replicas_equal for each in guarantees),
            all(each.buffers_equal for each in guarantees),
            next((each.jobs_only for each in guarantees if each.jobs_only), None),
        )

    @property
    def changes_layout(self) -> bool:  # type: ignore[override]
        return any(factor.changes_layout for factor in self.factors)

    def plan_schedules(self) -> tuple[ScheduleUse, ...]:
        return tuple(plan for factor in self.factors for plan in factor.plan_schedules())

    def has_open_all_reduce(self) -> bool:
        return any(factor.has_open_all_reduce() for factor in self.factors)

    def resolve(self, environment: Environment) -> Self:
        """Return the product with every factor resolved for its part of the environment.

        The parameters of a partitioned model cannot be in shared memory.

        Args:
            environment: Where the product runs.

        Raises:
            Refused: If a factor cannot run in this environment.
        """
        known_workers = prod(
            factor.workers for factor in self.factors if isinstance(factor.workers, int)
        )
        factor_environment = replace(
            environment,
            cores=max(1, environment.cores // known_workers),
            gpus=environment.gpus and max(1, environment.gpus // known_workers),
            ranks=environment.ranks and max(1, environment.ranks // known_workers),
            ranks_on_host=environment.ranks_on_host
            and max(1, environment.ranks_on_host // known_workers),
            shared_memory_refusal=f"{self} divides the model, and each rank holds its own part",
        )
        return replace(
            self, factors=tuple(factor.resolve(factor_environment) for factor in self.factors)
        )

    def explain_choices(
        self, resolved: Self, environment: Environment
    ) -> Iterator[tuple[str, str, str]]:
        for factor, resolved_factor in zip(self.factors, resolved.factors, strict=True):
            yield from factor.explain_choices(resolved_factor, environment)

    def refuse_job(
        self, facts: JobFacts, requested: Strategy, skip_first_step_check: bool = False
    ) -> None:
        super().refuse_job(facts, requested, skip_first_step_check)
        for factor in self.factors:
            factor.refuse_job(facts, requested, skip_first_step_check)

    def refuse_optimizer(self, optimizer_facts: OptimizerFacts, requested: Strategy) -> None:
        for factor in self.factors:
            factor.refuse_optimizer(optimizer_facts, requested)

    def list_warnings(self, facts: JobFacts, requested: Strategy) -> Iterator[str]:
        for factor in self.factors:
            yield from factor.list_warnings(facts, requested)


def list_factors(strategy: Strategy) -> tuple[Strategy, ...]:
    """Return the factors of a product, or the strategy itself."""
    return strategy.factors if isinstance(strategy, Product) else (strategy,)
