"""data: every worker computes its share of the batch, gradients are summed over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Self

from paragrad.errors import Refused
from paragrad.notation.choices import Choice, Integer, Integers, One, Word, option
from paragrad.runtime.mesh import Axis
from paragrad.schedules.all_reduce import AllReduce
from paragrad.schedules.two_level import LEVELS, TwoLevel
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.job_facts import Facts, Updating
from paragrad.strategies.serial import Serial
from paragrad.strategies.shares import Division
from paragrad.strategies.strategy import ELEMENT, Here, Plan, Promise, Strategy


class Native(Choice):
    """The backend's own all-reduce (gloo: a ring in segments)."""


AllReduce.members[Native.name] = Native  # a name that nobody else may have
SCHEDULES: tuple[type[Choice], ...] = (*LEVELS, TwoLevel)  # ours
ALGORITHMS: tuple[type[Choice], ...] = (Native, *SCHEDULES)


class Data(Strategy):
    """Synchronous data parallelism: own share of the batch, gradients summed over all workers
    (Goyal et al. 2017).
    """

    workers: int | str = option(Integer(), Word("auto"))
    reduce: Choice | str = option(One(Native, AllReduce), Word("auto"), default="auto")
    state: str = option(
        Word("replicated", "shared_memory", "fully_sharded", "auto"), default="auto"
    )
    shares: Sequence[int] | str = option(Integers(0), Word("equal", "auto"), default="equal")
    micro: int = option(Integer(), default=1)
    compress: Compressor | None = option(One(Compressor), Word("none"), default=None)
    batch_norm: str = option(Word("whole", "share"), default="whole")
    dense: str = option(Word("same", "tensor"), default="same")
    together = ELEMENT  # asked where it divides neurons

    def check(self) -> None:
        if self.reduce != "auto" and self.state not in ("replicated", "auto"):
            raise Refused(
                f"data: reduce={self.reduce} does not fit state={self.state}, which has an "
                f"exchange of its "
                "own; leave out one of them"
            )
        if self.compress is not None and self.state not in ("replicated", "auto"):
            raise Refused(
                f"data: compress={self.compress} does not fit state={self.state}, which has an "
                f"exchange of its own, "
                "of whole gradients; leave out one of them"
            )
        if self.compress is not None and isinstance(self.reduce, AllReduce):
            self.compress.refuse_reduce("data", self.reduce)
        if isinstance(self.shares, tuple):
            if isinstance(self.workers, int) and len(self.shares) != self.workers:
                raise Refused(
                    f"data({self.workers}) has {self.workers} workers and {len(self.shares)} "
                    f"shares; "
                    "give one share per worker"
                )
            if 0 in self.shares:
                raise Refused(
                    f"data: every worker needs a share of at least 1, got {list(self.shares)}; "
                    "use fewer workers instead"
                )

        if self.follows and self.sharded:
            raise Refused(
                "data(shares=auto) measures forwards, and with state=fully_sharded these wait for "
                "other ranks; say "
                "the shares, such as shares=[3, 1]"
            )
        unfit = [
            each.name
            for each in fields(self)
            if each.name not in ("workers", "batch_norm", "dense")
            and getattr(self, each.name) != each.default
        ]
        if self.integrated and unfit:
            raise Refused(
                f"data(dense=tensor) divides a batch evenly and sums gradients where a layer makes "
                f"them; leave out "
                f"{unfit[0]}"
            )

    # ---- what it is --------------------------------------------------------------------------
    @property
    def integrated(self) -> bool:
        """Its ranks have samples up to the first fully connected layer, and neurons from there
        on.
        """
        return self.dense == "tensor"

    @property
    def technique(self) -> str:
        return "integrated" if self.integrated else self.name

    @property
    def replica(self) -> bool:  # type: ignore[override]
        return not self.integrated

    @property
    def inside(self) -> bool:  # type: ignore[override]
        return self.integrated

    @property
    def lays_out(self) -> bool:  # type: ignore[override]
        return not self.integrated

    @property
    def promise(self) -> Promise:
        whole = self.batch_norm == "whole"
        lossless = self.compress is None or self.compress.lossless
        return Promise(
            exact=lossless and whole,
            buffers_equal=whole,
            jobs_only=(
                f"in a loop of your own every rank holds the parameters and their mean gradients; "
                f"leave out state={self.state}, or "
                "make it a Job"
            )
            if self.shared or self.sharded
            else None,
        )

    @property
    def follows(self) -> bool:  # type: ignore[override]
        return self.shares == "auto"

    @property
    def verified(self) -> Self:
        """Shares that follow may come to be any: with uneven ones."""
        count = self.division.shares
        return replace(self, shares=tuple(range(len(count), 0, -1))) if self.follows else self

    @property
    def shared(self) -> bool:
        return self.state == "shared_memory"

    @property
    def sharded(self) -> bool:
        return self.state == "fully_sharded"

    @property
    def bucketed(self) -> bool:
        return not self.shared and not self.integrated

    @property
    def axes(self) -> tuple[Axis, ...]:
        assert isinstance(self.workers, int)
        return (Axis("data", self.workers, "domain" if self.integrated else "samples"),)

    @property
    def division(self) -> Division:
        assert isinstance(self.workers, int)
        if self.integrated:
            return Division()
        return Division(
            self.shares if isinstance(self.shares, tuple) else (1,) * self.workers, self.micro
        )

    def plans(self) -> tuple[Plan, ...]:
        assert isinstance(self.workers, int)
        unpriced = None if self.compress is None else self.compress.unpriced
        return (
            (Plan("all-reduce", self.reduce, self.workers, unpriced),)
            if isinstance(self.reduce, AllReduce)
            else ()
        )

    def unplanned(self) -> str:
        if self.integrated:
            return (
                "with dense=tensor gradients are summed where a layer makes them, by the "
                "backend's own; leave it out"
            )
        if self.compress is not None and not self.compress.sums:
            return (
                f"every rank is given all that {self.compress.name} sends, in one round; leave out "
                f"compress, or "
                "try data(4, reduce=ring, compress=bf16)"
            )
        if isinstance(self.reduce, Native):
            return (
                "native is the backend's own all-reduce, of which there is no schedule (gloo's is "
                "like ring_async); name "
                "one: " + ", ".join(each.name for each in SCHEDULES)
            )
        if self.sharded:
            return (
                "state=fully_sharded gathers and sums by the backend's own collectives, of which "
                "there is no schedule; "
                "try data(4, reduce=ring)"
            )
        return "say which all-reduce, for example data(4, reduce=ring)"

    # ---- where and what it is for ------------------------------------------------------------
    def resolved(self, here: Here) -> Self:
        """Over gloo `reduce=auto` stays: which is the quickest is seen when the first gradients
        are exchanged.
        """
        count = self.workers if isinstance(self.workers, int) else here.ranks or here.cores
        state = self.state
        reduce = self.reduce
        if self.integrated:
            return replace(self, workers=count)
        if state == "auto":
            alone = here.own_loop or here.unshared is not None or count == 1
            state = "replicated" if alone or reduce != "auto" or self.compress else "shared_memory"
        if state == "shared_memory" and here.unshared and not here.own_loop:
            raise Refused(f"{self}: {here.unshared}; leave out state=shared_memory")
        if reduce == "auto" and state == "replicated" and (count == 1 or here.backend != "gloo"):
            reduce = Native()
        if isinstance(reduce, AllReduce):
            reduce = reduce.resolved(count, here.group or count)
        return replace(self, workers=count, reduce=reduce, state=state)

    def picks_all_reduce(self) -> bool:
        return self.reduce == "auto" and self.state == "replicated"

    def picked(self, resolved: Self, here: Here) -> Iterator[tuple[str, str, str]]:
        if self.state == "auto" and not self.integrated:
            yield (
                "state",
                resolved.state,
                here.unshared
                or (
                    "all ranks are on this host"
                    if resolved.shared
                    else "an exchange was asked for, or there is one worker"
                ),
            )
        if self.reduce == "auto" and isinstance(resolved.reduce, Native):
            yield (
                "reduce",
                str(resolved.reduce),
                f"the backend's own is the quickest over {here.backend}",
            )

    def alternatives(self, here: Here) -> tuple[Strategy, ...]:
        # not what was asked to take statistics of shares, or of other micro-batches, or not to
        # have all of the state
        same = (
            self.batch_norm == "whole"
            and self.micro == 1
            and not self.follows
            and not self.sharded
            and not self.integrated
        )
        same = same and self.compress is None
        return (Serial(threads=here.cores),) if self.workers == "auto" and same else ()

    def refuse(self, facts: Facts, asked: Strategy, unchecked: bool = False) -> None:
        super().refuse(facts, asked, unchecked)
        if self.follows and facts.alone and (self.micro > 1 or self.batch_norm == "share"):
            raise Refused(
                f"{asked}: shares that change may come to micro-batches of one sample, of which "
                f"batch norm takes no "
                f"variance; leave out {'micro' if self.micro > 1 else 'batch_norm=share'}, or say "
                f"the shares"
            )

    def refuse_updates(self, updating: Updating, asked: Strategy) -> None:
        if self.compress is not None:
            self.compress.refuse_updates(updating, asked)

    def noticed(self, facts: Facts, asked: Strategy) -> Iterator[str]:
        if self.follows and facts.steps <= -(-facts.samples // facts.full):
            yield (
                f"{asked}: shares change where an epoch begins, and job {facts.job} begins one "
                f"alone, so they stay equal; "
                "give more epochs, or say the shares, such as shares=[3, 1]"
            )

    def refuse_beside(self, factors: tuple[Strategy, ...]) -> None:
        if self.integrated and len(factors) > 1:
            raise Refused(
                "data(dense=tensor) gives a model all samples on every rank, and splits its layers "
                "itself; give it "
                "alone"
            )
        if self.sharded and len(factors) > 1:
            raise Refused(
                "data(state=fully_sharded) gathers the parameters of a module when all of it is "
                "called, and beside "
                "it the model is cut into parts, which call some of it; leave out the state"
            )
        if self.follows and len(factors) > 1:
            raise Refused(
                "data(shares=auto) measures forwards of whole models, and beside it the model is "
                "cut; say the "
                "shares, such as shares=[3, 1]"
            )
        if self.micro != 1 and (other := next((each for each in factors if each.cuts_micro), None)):
            raise Refused(
                f"data(micro=...) does not fit beside {other.name}, which says itself how a batch "
                f"passes; leave it "
                "out, or give pipeline(micro=...)"
            )
