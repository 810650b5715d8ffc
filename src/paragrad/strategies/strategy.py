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
from paragrad.notation.choices import Family, Several, option
from paragrad.runtime.mesh import Axis
from paragrad.schedules.actions import Schedule
from paragrad.strategies.job_facts import Facts, Updating
from paragrad.strategies.shares import Division, divide, smallest


@dataclass(frozen=True)
class Promise:
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
class Here:
    """Where a strategy is to run, read once.

    cores: of this host;  ranks: the world's size, where a launcher gave one;  group: how many
    of them are on this host; unshared: why they cannot share memory, or None;  backend: what
    carries their messages;  own_loop: the user's.
    """

    cores: int = 1
    ranks: int | None = None
    group: int | None = None
    unshared: str | None = "nobody knows whether all ranks are on this host"
    backend: str = "gloo"
    own_loop: bool = False


@dataclass(frozen=True)
class Plan:
    """A schedule that a strategy will play over `size` ranks: proved at the door, drawn,
    simulated, sabotaged. what: its goal, by its name in `players.proof.GOALS`; unpriced: why
    what travels along it is not priced, with the repair.
    """

    what: str
    schedule: Schedule
    size: int
    unpriced: str | None = None


# how an optimizer updates: the later, the more must be together
ELEMENT = "element"
TENSOR = "tensor"
ALL = "all"
KINDS = (ELEMENT, TENSOR, ALL)


class Strategy(Family, abstract=True):
    """How the training is split. `*` nests: left to right is outer to inner.

    One of your own says its `workers`, what it promises, and brings an `exchange`, or a `share`
    where its axes divide the model; it may say more of the rest.
    """

    # it holds replicas: at most one such factor in a product, leftmost
    replica = False
    reference = False  # it is what others are compared with
    cuts_micro = False  # it cuts micro-batches itself
    # a rank runs other calls, or sees other samples, than one worker
    lays_out = True
    # its shares are by what each rank takes, from the second epoch on
    follows = False
    # a rank does not run all calls that one worker runs
    skips = False
    # workers train clients, each over its own samples, and meet once a round
    in_rounds = False
    # it splits the layers of whatever other cuts leave of the model
    inside = False
    # what an optimizer may want together, where it is inside
    together = TENSOR
    if TYPE_CHECKING:  # options of some

        @property
        def hands_out(self) -> bool: ...
        @property
        def recovers(self) -> bool: ...
        @property
        def workers(self) -> int | str: ...
        @property
        def servers(self) -> int: ...
        @property
        def clients(self) -> int: ...
        @property
        def taking(self) -> int: ...
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
        def bucketed(self) -> bool: ...
        @property
        def sharded(self) -> bool: ...
        @property
        def promise(self) -> Promise: ...
        def exchange(self, replica: Any, world: Any, log: Any, how: Any) -> Any: ...
        def share(self, model: Any, example: Any, axis: Any) -> Any: ...
    else:
        # samples are handed out, to workers that come and go
        hands_out = False
        # its servers keep all of a training: workers that die begin again
        recovers = False
        # ranks beside the workers, after them, that serve (`Exchange.serve`)
        servers = 0
        threads = None  # of each rank: the cores are divided
        # replicas hold the parameters together, each some: no rank can run the model alone
        sharded = False
        # gradients travel in groups: all ranks know beforehand which parameters have none
        bucketed = False
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
    def verified(self) -> Self:
        """What is compared with serial, of one that changes as it goes."""
        return self

    def serves(self, rank: int) -> bool:
        """Is a rank of a resolved strategy a server? They are the last ones."""
        return rank >= self.size - self.servers

    @property
    def exact(self) -> bool:
        """Is it the same training as serial?"""
        return self.promise.exact

    def plans(self) -> tuple[Plan, ...]:
        """The schedules that a resolved strategy will play."""
        return ()

    def picks_all_reduce(self) -> bool:
        """Is an all-reduce to be picked by what is known or measured of the machine?"""
        return False

    def unplanned(self) -> str:
        """Why there are none, with the repair."""
        return "try data(4, reduce=ring)"

    # ---- where and what it is for ------------------------------------------------------------
    def resolved(self, here: Here) -> Self:
        """The same with every `auto` replaced. Raises Refused where it cannot be here."""
        return (
            replace(cast(Any, self), workers=here.ranks or here.cores)
            if self.workers == "auto"
            else self
        )

    def picked(self, resolved: Self, here: Here) -> Iterator[tuple[str, str, str]]:
        """What its `auto`s became, and why: (what, picked, because)."""
        yield from ()

    def alternatives(self, here: Here) -> tuple[Strategy, ...]:
        """Other strategies, the same training, that may be faster here: worth a trial for a
        moment.
        """
        return ()

    def refuse(self, facts: Facts, asked: Strategy, unchecked: bool = False) -> None:
        """Refuse a job that a resolved strategy cannot train, with the repair. asked: the
        strategy as the user wrote it; unchecked: go on with what is known to be another
        training.
        """
        division = self.division
        self.refuse_few(facts.full, asked)
        if division.micro > (most := max(divide(facts.full, division.shares))):
            raise Refused(
                f"{asked} cuts shares into {division.micro} micro-batches, and the largest of a "
                f"full batch has "
                f"{most} sample(s); give micro of at most {most}, or a larger batch"
            )
        if division.micro > 1 and facts.uncut:
            raise Refused(f"job {facts.job}: {facts.uncut}")
        self.refuse_alone(facts, asked)
        if self.exact and not unchecked and division != Division():
            if facts.whole_loss:
                raise Refused(f"job {facts.job}: {facts.whole_loss}")
            if facts.by_layout:
                raise Refused(f"{asked}: {facts.by_layout}")

    def refuse_few(self, full: int, asked: Strategy) -> None:
        """Refuse a full batch of fewer samples than shares."""
        if full < (shares := len(self.division.shares)):
            raise Refused(
                f"{asked} has {shares} workers and the full batch {full} sample(s); give a batch "
                f"of at least "
                f"{shares}, or fewer workers"
            )

    def refuse_alone(self, facts: Facts, asked: Strategy) -> None:
        """Refuse micro-batches of one sample where batch norm wants more."""
        division = self.division
        apart = self.batch_norm == "share"
        for samples in facts.sizes:
            if smallest(samples, division, apart) == 1 and facts.alone:
                fewer = [
                    micro
                    for micro in range(1, division.micro)
                    if smallest(samples, replace(division, micro=micro), apart) > 1
                ]
                repair = (
                    f"give micro of at most {fewer[-1]}" if fewer else "give another batch size"
                )
                raise Refused(
                    f"job {facts.job}: {facts.alone}, and {asked} makes a micro-batch of one out "
                    f"of a batch of "
                    f"{samples}; {repair}"
                )

    def refuse_updates(self, updating: Updating, asked: Strategy) -> None:
        """Refuse an optimizer, of a job or of a loop of the user's own, with the repair."""

    def noticed(self, facts: Facts, asked: Strategy) -> Iterator[str]:
        """What the user is told at the door of a job that can be trained, and comes to
        something else than its words say.
        """
        yield from ()

    def refuse_beside(self, factors: tuple[Strategy, ...]) -> None:
        """Refuse the other factors of a product, with the repair."""

    def __mul__(self, other: Strategy) -> Product:
        return Product(factors_of(self) + factors_of(other))


@dataclass(frozen=True, repr=False)
class Product(Strategy, abstract=True):
    """A hybrid: strategies multiplied along axes, left to right is outer to inner. It has no
    name of its own.

    Its answers are its factors'. At most one of them divides samples; the others cut the model,
    the innermost first.
    """

    factors: tuple[Strategy, ...] = option(Several(Strategy))

    def check(self) -> None:
        for factor in self.factors:
            factor.refuse_beside(self.factors)
        if inner := [factor for factor in self.factors[1:] if factor.replica]:
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
    def bucketed(self) -> bool:
        return any(factor.bucketed for factor in self.factors)

    @property
    def promise(self) -> Promise:
        every = [factor.promise for factor in self.factors]
        return Promise(
            all(each.exact for each in every),
            all(each.replicas_equal for each in every),
            all(each.buffers_equal for each in every),
            next((each.jobs_only for each in every if each.jobs_only), None),
        )

    @property
    def lays_out(self) -> bool:  # type: ignore[override]
        return any(factor.lays_out for factor in self.factors)

    def plans(self) -> tuple[Plan, ...]:
        return tuple(plan for factor in self.factors for plan in factor.plans())

    def picks_all_reduce(self) -> bool:
        return any(factor.picks_all_reduce() for factor in self.factors)

    def resolved(self, here: Here) -> Self:
        """Every factor where there is room for it beside the others; parameters of a cut model
        are nobody's to share.
        """
        known = prod(factor.workers for factor in self.factors if isinstance(factor.workers, int))
        beside = replace(
            here,
            cores=max(1, here.cores // known),
            ranks=here.ranks and max(1, here.ranks // known),
            group=here.group and max(1, here.group // known),
            unshared=f"{self} cuts the model, of which each rank holds a part of its own",
        )
        return replace(self, factors=tuple(factor.resolved(beside) for factor in self.factors))

    def picked(self, resolved: Self, here: Here) -> Iterator[tuple[str, str, str]]:
        for asked, found in zip(self.factors, resolved.factors, strict=True):
            yield from asked.picked(found, here)

    def refuse(self, facts: Facts, asked: Strategy, unchecked: bool = False) -> None:
        super().refuse(facts, asked, unchecked)
        for factor in self.factors:
            factor.refuse(facts, asked, unchecked)

    def refuse_updates(self, updating: Updating, asked: Strategy) -> None:
        for factor in self.factors:
            factor.refuse_updates(updating, asked)

    def noticed(self, facts: Facts, asked: Strategy) -> Iterator[str]:
        for factor in self.factors:
            yield from factor.noticed(facts, asked)


def factors_of(strategy: Strategy) -> tuple[Strategy, ...]:
    return strategy.factors if isinstance(strategy, Product) else (strategy,)
