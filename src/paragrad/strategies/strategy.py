"""Strategies: how one serial training is split over workers, as values, and the table of their names.

    s = strategy("data(2, reduce=ring)")      # == Data(2, reduce=Ring())
    s.workers, s.exact, s * Tensor(2)
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import ClassVar

from paragrad.errors import Refused
from paragrad.notation.choices import (
    Choice,
    Decimal,
    Flag,
    Integer,
    Integers,
    One,
    Word,
    build,
    choice,
    option,
    parts_of,
)
from paragrad.notation.grammar import parse_products
from paragrad.schedules.compose import Composed
from paragrad.schedules.two_level import LEVELS, TwoLevel
from paragrad.strategies import planned


@choice
class Native(Choice):
    """The backend's own all-reduce (gloo: a ring in segments)."""


SCHEDULES: tuple[type[Choice], ...] = (*LEVELS, TwoLevel)                  # ours
ALGORITHMS: tuple[type[Choice], ...] = (Native, *SCHEDULES)


class Strategy(Choice):
    """How the training is split. `exact`: the same training as serial. `*` nests: left to right is outer to inner."""
    replica: ClassVar[bool] = False                 # a part that holds replicas: at most one in a product, leftmost
    workers: int | str

    @property
    def exact(self) -> bool:
        return True

    def __mul__(self, other: Strategy) -> Product:
        return Product(factors_of(self) + factors_of(other))


@choice
class Serial(Strategy):
    """One worker, the reference of every other strategy."""
    threads: int | str = option(Integer(), Word("auto"), default="auto")       # auto: all cores
    micro: int = option(Integer(), default=1)                                  # micro-batches per step
    workers: ClassVar[int] = 1  # type: ignore[misc]


@choice
class Data(Strategy):
    """Synchronous data parallelism: own share of the batch, gradients summed over all workers (Goyal et al. 2017)."""
    workers: int | str = option(Integer(), Word("auto"))
    reduce: Choice | str = option(One(*ALGORITHMS), Word("auto"), default="auto")
    state: str = option(Word("replicated", "shared_memory", "fully_sharded", "auto"), default="auto",
                        later=("fully_sharded",))
    shares: tuple[int, ...] | str = option(Integers(0), Word("equal", "auto"), default="equal", later=("auto",))
    micro: int = option(Integer(), default=1)
    compress: Choice | None = option(One(*planned.COMPRESSORS), Word("none"), default=None)
    batch_norm: str = option(Word("whole", "share"), default="whole")
    dense: str = option(Word("same", "tensor"), default="same", later=("tensor",))
    replica: ClassVar[bool] = True

    def check(self) -> None:
        if self.reduce != "auto" and self.state not in ("replicated", "auto"):
            raise Refused(f"data: reduce={self.reduce} does not fit state={self.state}, which has an exchange of its "
                          "own; leave out one of them")
        if isinstance(self.shares, tuple):
            if isinstance(self.workers, int) and len(self.shares) != self.workers:
                raise Refused(f"data({self.workers}) has {self.workers} workers and {len(self.shares)} shares; "
                              "give one share per worker")
            if 0 in self.shares:
                raise Refused(f"data: every worker needs a share of at least 1, got {list(self.shares)}; "
                              "use fewer workers instead")

    @property
    def exact(self) -> bool:
        return self.compress is None and self.batch_norm == "whole"


@choice
class Tensor(Strategy, planned.Planned):
    """Neurons, channels, heads and vocabulary split (Shoeybi et al. 2019)."""
    workers: int | str = option(Integer(), Word("auto"))


@choice
class Spatial(Strategy, planned.Planned):
    """The image split, with halo exchange (Dryden et al. 2019)."""
    rows: int = option(Integer())
    columns: int = option(Integer(), default=1)
    dense: str = option(Word("same", "tensor"), default="same")
    batch_norm: str = option(Word("whole", "share"), default="whole")

    @property
    def workers(self) -> int:  # type: ignore[override]
        return self.rows * self.columns

    @property
    def exact(self) -> bool:
        return self.batch_norm == "whole"


@choice
class Branch(Strategy, planned.Planned):
    """Independent sub-networks on ranks of their own (Krizhevsky et al. 2012)."""
    workers: int = option(Integer())


@choice
class Place(Strategy, planned.Planned):
    """Layers in sequence on different ranks, one batch at a time (Dean et al. 2012)."""
    workers: int = option(Integer())
    cut: tuple[int, ...] | str = option(*planned.CUT, default="auto")


@choice
class Pipeline(Strategy, planned.Planned):
    """Micro-batches in flight through stages of layers (Huang et al. 2019; Narayanan et al. 2019)."""
    workers: int = option(Integer())
    micro: int | str = option(Integer(), Word("auto"), default="auto")          # auto: 4 x workers
    schedule: Choice = option(planned.SCHEDULES, default=planned.OneFOneB())
    recompute: bool = option(Flag(), default=False)
    cut: tuple[int, ...] | str = option(*planned.CUT, default="auto")


@choice
class Server(Strategy, planned.Planned):
    """Servers hold the parameters; workers push gradients and pull parameters (Li et al. 2014)."""
    workers: int = option(Integer())
    servers: int = option(Integer(), default=1)
    sync: Choice = option(planned.SYNC, default=planned.Bsp())
    rate: str = option(Word("constant", "by_staleness"), default="constant")
    replica: ClassVar[bool] = True

    @property
    def exact(self) -> bool:
        return self.sync == planned.Bsp()


@choice
class Local(Strategy, planned.Planned):
    """Local SGD: weights averaged every so many steps (Stich 2018; at the end: ParallelSGD, Zinkevich et al. 2010)."""
    workers: int = option(Integer())
    every: int | str = option(Integer(), Word("end"), default=8)
    outer: Choice = option(planned.OUTER, default=planned.Mean())
    after: int = option(Integer(0), default=0)
    replica: ClassVar[bool] = True

    @property
    def exact(self) -> bool:
        return False


@choice
class Federated(Strategy, planned.Planned):
    """Federated averaging: clients with data of their own, some of them each round (McMahan et al. 2017)."""
    workers: int = option(Integer())
    clients: int = option(Integer(), default=100)
    fraction: float = option(Decimal(most=1.0), default=0.1)
    local_epochs: int = option(Integer(), default=1)
    rounds: int | str = option(Integer(), Word("auto"), default="auto")
    split: Choice = option(planned.SPLIT, default=planned.Even())
    replica: ClassVar[bool] = True

    @property
    def exact(self) -> bool:
        return False


@choice
class Product(Strategy, planned.Planned):
    """A hybrid: strategies multiplied along axes, left to right is outer to inner."""
    factors: tuple[Strategy, ...] = ()

    def __post_init__(self) -> None:
        for place, factor in enumerate(self.factors):
            if isinstance(factor, Serial):
                raise Refused("serial is one worker and cannot be multiplied; leave it out")
            if factor.replica and place > 0:
                raise Refused(f"{factor.name} holds replicas: at most one such part in a product, leftmost; got {self}")
        data = self.factors[0]
        if isinstance(data, Data) and data.micro != 1 and any(isinstance(each, Pipeline) for each in self.factors):
            raise Refused("data(micro=...) does not fit beside pipeline, which cuts micro-batches itself; "
                          "give pipeline(micro=...)")

    def __str__(self) -> str:
        return " * ".join(map(str, self.factors))

    def __repr__(self) -> str:
        return " * ".join(map(repr, self.factors))

    @property
    def workers(self) -> int | str:  # type: ignore[override]
        counts = [factor.workers for factor in self.factors]
        return "auto" if "auto" in counts else prod(int(count) for count in counts)

    @property
    def exact(self) -> bool:
        return all(factor.exact for factor in self.factors)


STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (
    Serial, Data, Tensor, Spatial, Branch, Place, Pipeline, Server, Local, Federated)}
REDUCES = {cls.name: f"data(2, reduce={cls.name})" for cls in ALGORITHMS}       # all-reduces are no strategies of their own


def factors_of(strategy: Strategy) -> tuple[Strategy, ...]:
    return strategy.factors if isinstance(strategy, Product) else (strategy,)


def strategies(text: str) -> tuple[Strategy, ...]:
    """Read `strategy; strategy; ...`."""
    read = []
    for product in parse_products(text):
        factors = [build(call, dict(STRATEGIES), "strategy", elsewhere=REDUCES) for call in product]
        assert all(isinstance(factor, Strategy) for factor in factors)
        read.append(factors[0] if len(factors) == 1 else Product(tuple(factors)))  # type: ignore[arg-type]
    return tuple(read)  # type: ignore[arg-type]


def strategy(text: str | Strategy) -> Strategy:
    """Read one strategy; a strategy is returned as it is. Raises Refused."""
    if isinstance(text, Strategy):
        return text
    if not isinstance(text, str):
        raise Refused(f"a strategy is a text such as 'data(2, reduce=ring)' or a value such as Data(2); got {text!r}")
    read = strategies(text)
    if len(read) > 1:
        raise Refused(f"one strategy is wanted here, got {len(read)}: {text}")
    return read[0]


def refuse_unbuilt(chosen: Strategy) -> None:
    """Refuse what is known by name and not built yet: a strategy, an algorithm, or a value of an option."""
    factors = factors_of(chosen)
    for value in [*factors, *(inner for factor in factors for _, _, inner in parts_of(factor)), chosen]:
        if isinstance(value, Choice) and not value.built:
            what = "products of strategies (hybrids) are" if isinstance(value, Product) else f"{value.name} is"
            raise Refused(f"{what} known and not built yet; built: " + ", ".join(built_names()))
    for owner, spec, value in parts_of(chosen):
        if value in spec.metadata["later"]:
            raise Refused(f"{owner.name}({spec.name}={str(value).lower()}) is known and not built yet; leave it out")


def built_names() -> list[str]:
    return [cls.name for cls in (*STRATEGIES.values(), *ALGORITHMS) if cls.built]


def resolve(chosen: Strategy, *, cores: int, workers: int | None = None, sharing: bool = False,
            own: bool = False, group: int | None = None) -> Strategy:
    """The same strategy with every `auto` replaced. workers: the world's size where one is given already;  sharing: its ranks
    can share memory;  own: their backend's own all-reduce is known to be the quickest, as shm's and NCCL's;  group: ranks of a
    host, where not all are on one. Which all-reduce is the quickest over gloo is seen when the first gradients are exchanged.

    Raises Refused where the world has another size than the strategy asks for.
    """
    if isinstance(chosen, Serial):
        found: Strategy = replace(chosen, threads=cores) if chosen.threads == "auto" else chosen
    elif isinstance(chosen, Data):
        count = chosen.workers if isinstance(chosen.workers, int) else workers or cores
        state = chosen.state
        if state == "auto":
            state = "shared_memory" if sharing and count > 1 and chosen.reduce == "auto" else "replicated"
        reduce = chosen.reduce
        if reduce == "auto" and state == "replicated" and (count == 1 or own):
            reduce = Native()                       # otherwise one is picked for each size of buckets
        if isinstance(reduce, Choice):
            reduce = settled(reduce, count, group or count)
        found = replace(chosen, workers=count, reduce=reduce, state=state)
    else:
        raise Refused(f"{chosen} is not built yet")
    if workers is not None and found.workers != workers:
        raise Refused(f"{chosen} wants {found.workers} worker(s) and the launcher started {workers}; "
                      f"start {found.workers}, or write data(auto)")
    return found


def settled(algorithm: Choice, size: int, group: int) -> Choice:
    """An algorithm with its numbers of segments, and of ranks in a group. Raises Refused where that does not make up `size`."""
    if isinstance(algorithm, TwoLevel):
        found = replace(algorithm, group=group if algorithm.group == "auto" else algorithm.group)
        found.grouping(size)
        return replace(found, inside=found.inside.settled(), across=found.across.settled())
    return algorithm.settled() if isinstance(algorithm, Composed) else algorithm


def share_weights(resolved: Strategy) -> tuple[list[int], int]:
    """(relative shares of the batch by rank, micro-batches within each share) of a resolved strategy."""
    if isinstance(resolved, Data):
        assert isinstance(resolved.workers, int)
        return list(resolved.shares) if isinstance(resolved.shares, tuple) else [1] * resolved.workers, resolved.micro
    assert isinstance(resolved, Serial)
    return [1], resolved.micro
