"""What a strategy is: a frozen value that answers for itself. Nobody asks for its class or its
name.

    s = strategy("data(2, reduce=ring)")      # == Data(2, reduce=Ring())
    s.workers, s.exact, s * Tensor(2)

What runs inside a rank for it is found in `parallel/registry.py`; a strategy of a user's own
brings it along (`exchange`).
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
    """What holds of a strategy, whatever the job.

    exact: the same training as serial, which the first step has to show;  replicas_equal,
    buffers_equal: all have the same parameters, buffers, after a step;  jobs_only: why it is
    nothing for a loop of the user's own.
    """

    exact: bool = True
    replicas_equal: bool = True
    buffers_equal: bool = True
    jobs_only: str | None = None


@dataclass(frozen=True)
class Environment:
    """Where a strategy is to run, read once.

    cores: of this host;  ranks: the world's size, where a launcher gave one;  group: how many
    of them are on this host; unshared: why they cannot share memory, or None;  backend: what
    carries their messages;  own_loop: the user's.
    """

    cores: int = 1
    ranks: int | None = None
    ranks_on_host: int | None = None
    shared_memory_refusal: str | None = "nobody knows whether all ranks are on this host"
    backend: str = "gloo"
    user_loop: bool = False


@dataclass(frozen=True)
class ScheduleUse:
    """A schedule that a strategy will play over `size` ranks: proved at the door, drawn,
    simulated, sabotaged. what: its goal, by its name in `players.proof.GOALS`; unpriced: why
    what travels along it is not priced, with the repair.
    """

    goal: str
    schedule: Schedule
    size: int
    pricing_refusal: str | None = None


# how an optimizer updates: the later, the more must be together
PER_ELEMENT = "element"
PER_TENSOR = "tensor"
WHOLE_MODEL = "all"
UPDATE_GRANULARITIES = (PER_ELEMENT, PER_TENSOR, WHOLE_MODEL)


class Strategy(Family, abstract=True):
    """How the training is split. `*` nests: left to right is outer to inner.

    One of your own says its `workers`, what it promises, and brings an `exchange`, or a `share`
    where its axes divide the model; it may say more of the rest.
    """

    # it holds replicas: at most one such factor in a product, leftmost
    is_replicated = False
    is_reference = False  # it is what others are compared with
    schedules_micro_batches = False  # it cuts micro-batches itself
    # a rank runs other calls, or sees other samples, than one worker
    changes_layout = True
    # its shares are by what each rank takes, from the second epoch on
    adapts_shares = False
    # a rank does not run all calls that one worker runs
    skips_calls = False
    # workers train clients, each over its own samples, and meet once a round
    trains_clients = False
    # it splits the layers of whatever other cuts leave of the model
    splits_layers = False
    # what an optimizer may want together, where it is inside
    update_granularity = PER_TENSOR
    if TYPE_CHECKING:  # options of some

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
        # samples are handed out, to workers that come and go
        uses_work_queue = False
        # its servers keep all of a training: workers that die begin again
        can_recover = False
        # ranks beside the workers, after them, that serve (`Exchange.serve`)
        servers = 0
        threads = None  # of each rank: the cores are divided
        # replicas hold the parameters together, each some: no rank can run the model alone
        shards_parameters = False
        # gradients travel in groups: all ranks know beforehand which parameters have none
        uses_buckets = False
        # whose samples statistics are of: "whole" micro-batches, or each "share"
        batch_norm = "whole"

    # ---- what it is --------------------------------------------------------------------------
    @property
    def technique(self) -> str:
        """By which name the technique that runs it is found."""
        return self.name

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Outer to inner, of a resolved strategy; the ranks of the last one are neighbours."""
        assert isinstance(self.workers, int)
        return (Axis(self.name, self.workers),)

    @property
    def division(self) -> Division:
        """Of a resolved strategy."""
        return Division((1,) * prod(axis.size for axis in self.axes if axis.divides == "samples"))

    @property
    def size(self) -> int:
        """Ranks of a resolved strategy."""
        return prod(axis.size for axis in self.axes) + self.servers

    @property
    def verifiable(self) -> Self:
        """What is compared with serial, of one that changes as it goes."""
        return self

    def is_server(self, rank: int) -> bool:
        """Is a rank of a resolved strategy a server? They are the last ones."""
        return rank >= self.size - self.servers

    @property
    def exact(self) -> bool:
        """Is it the same training as serial?"""
        return self.guarantees.exact

    def plan_schedules(self) -> tuple[ScheduleUse, ...]:
        """The schedules that a resolved strategy will play."""
        return ()

    def has_open_all_reduce(self) -> bool:
        """Is an all-reduce to be picked by what is known or measured of the machine?"""
        return False

    def explain_no_schedule(self) -> str:
        """Why there are none, with the repair."""
        return "try data(4, reduce=ring)"

    # ---- where and what it is for ------------------------------------------------------------
    def resolve(self, environment: Environment) -> Self:
        """The same with every `auto` replaced. Raises Refused where it cannot be here."""
        return (
            replace(cast(Any, self), workers=environment.ranks or environment.cores)
            if self.workers == "auto"
            else self
        )

    def explain_choices(
        self, resolved: Self, environment: Environment
    ) -> Iterator[tuple[str, str, str]]:
        """What its `auto`s became, and why: (what, picked, because)."""
        yield from ()

    def list_alternatives(self, environment: Environment) -> tuple[Strategy, ...]:
        """Other strategies, the same training, that may be faster here: worth a trial for a
        moment.
        """
        return ()

    def refuse_job(
        self, facts: JobFacts, requested: Strategy, skip_first_step_check: bool = False
    ) -> None:
        """Refuse a job that a resolved strategy cannot train, with the repair. asked: the
        strategy as the user wrote it; unchecked: go on with what is known to be another
        training.
        """
        division = self.division
        self.refuse_small_batch(facts.full_batch, requested)
        if division.micro > (most := max(apportion_samples(facts.full_batch, division.shares))):
            raise Refused(
                f"{requested} cuts shares into {division.micro} micro-batches, and the largest of "
                f"a "
                f"full batch has "
                f"{most} sample(s); give micro of at most {most}, or a larger batch"
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
        """Refuse a full batch of fewer samples than shares."""
        if full_batch < (shares := len(self.division.shares)):
            raise Refused(
                f"{requested} has {shares} workers and the full batch {full_batch} sample(s); give "
                f"a batch "
                f"of at least "
                f"{shares}, or fewer workers"
            )

    def refuse_single_sample(self, facts: JobFacts, requested: Strategy) -> None:
        """Refuse micro-batches of one sample where batch norm wants more."""
        division = self.division
        apart = self.batch_norm == "share"
        for samples in facts.batch_sizes:
            if (
                count_smallest_micro_batch(samples, division, apart) == 1
                and facts.single_sample_refusal
            ):
                fewer = [
                    micro
                    for micro in range(1, division.micro)
                    if count_smallest_micro_batch(samples, replace(division, micro=micro), apart)
                    > 1
                ]
                repair = (
                    f"give micro of at most {fewer[-1]}" if fewer else "give another batch size"
                )
                raise Refused(
                    f"job {facts.job}: {facts.single_sample_refusal}, and {requested} makes a "
                    f"micro-batch of one out "
                    f"of a batch of "
                    f"{samples}; {repair}"
                )

    def refuse_optimizer(self, optimizer_facts: OptimizerFacts, requested: Strategy) -> None:
        """Refuse an optimizer, of a job or of a loop of the user's own, with the repair."""

    def list_warnings(self, facts: JobFacts, requested: Strategy) -> Iterator[str]:
        """What the user is told at the door of a job that can be trained, and comes to
        something else than its words say.
        """
        yield from ()

    def refuse_factors(self, factors: tuple[Strategy, ...]) -> None:
        """Refuse the other factors of a product, with the repair."""

    def __mul__(self, other: Strategy) -> Product:
        return Product(list_factors(self) + list_factors(other))


@dataclass(frozen=True, repr=False)
class Product(Strategy, abstract=True):
    """A hybrid: strategies multiplied along axes, left to right is outer to inner. It has no
    name of its own.

    Its answers are its factors'. At most one of them divides samples; the others cut the model,
    the innermost first.
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
        """Shares by who divides samples; micro-batches by who cuts them."""
        every = [factor.division for factor in self.factors]
        return Division(
            max((each.shares for each in every), key=len), prod(each.micro for each in every)
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
        every = [factor.guarantees for factor in self.factors]
        return Guarantees(
            all(each.exact for each in every),
            all(each.replicas_equal for each in every),
            all(each.buffers_equal for each in every),
            next((each.jobs_only for each in every if each.jobs_only), None),
        )

    @property
    def changes_layout(self) -> bool:  # type: ignore[override]
        return any(factor.changes_layout for factor in self.factors)

    def plan_schedules(self) -> tuple[ScheduleUse, ...]:
        return tuple(plan for factor in self.factors for plan in factor.plan_schedules())

    def has_open_all_reduce(self) -> bool:
        return any(factor.has_open_all_reduce() for factor in self.factors)

    def resolve(self, environment: Environment) -> Self:
        """Every factor where there is room for it beside the others; parameters of a cut model
        are nobody's to share.
        """
        known = prod(factor.workers for factor in self.factors if isinstance(factor.workers, int))
        beside = replace(
            environment,
            cores=max(1, environment.cores // known),
            ranks=environment.ranks and max(1, environment.ranks // known),
            ranks_on_host=environment.ranks_on_host and max(1, environment.ranks_on_host // known),
            shared_memory_refusal=f"{self} cuts the model, of which each rank holds a part of its "
            f"own",
        )
        return replace(self, factors=tuple(factor.resolve(beside) for factor in self.factors))

    def explain_choices(
        self, resolved: Self, environment: Environment
    ) -> Iterator[tuple[str, str, str]]:
        for asked, found in zip(self.factors, resolved.factors, strict=True):
            yield from asked.explain_choices(found, environment)

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
    return strategy.factors if isinstance(strategy, Product) else (strategy,)
