"""data: every worker computes its share of the batch, gradients are summed over all workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Self

from paragrad.errors import Refused
from paragrad.notation.choices import Choice, Integer, IntegerList, OneOf, Word, option
from paragrad.runtime.mesh import Axis
from paragrad.schedules.all_reduce import AllReduce
from paragrad.schedules.two_level import LEVEL_ALGORITHMS, TwoLevel
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.job_facts import JobFacts, OptimizerFacts
from paragrad.strategies.serial import Serial
from paragrad.strategies.shares import Division
from paragrad.strategies.strategy import PER_ELEMENT, Environment, Guarantees, ScheduleUse, Strategy


class Native(Choice):
    """The backend's own all-reduce (gloo: a ring in segments)."""


AllReduce.members[Native.name] = Native  # no other all-reduce may have this name
ALL_REDUCE_SCHEDULES: tuple[type[Choice], ...] = (*LEVEL_ALGORITHMS, TwoLevel)  # the built-in ones


class Data(Strategy):
    """Synchronous data parallelism: gradients of all shares of a batch summed (Goyal et al. 2017).

    Attributes:
        workers: The number of workers; auto: the ranks of the launcher, or one for each GPU,
            or one for each core.

        reduce: The all-reduce of the gradients.

        state: Where parameters and optimizer state are: on every rank, in shared memory, or
            sharded.

        shares: The relative shares of the workers; auto: by the measured pace of each.

        micro: The micro-batches of a batch; each of them is divided among the workers.

        compress: The compressor of the gradients.

        batch_norm: Whether statistics are of the whole micro-batch of all ranks, or of each share.

        dense: Whether ranks divide the neurons of fully connected layers (`tensor`).
    """

    workers: int | str = option(Integer(), Word("auto"))
    reduce: Choice | str = option(OneOf(Native, AllReduce), Word("auto"), default="auto")
    state: str = option(
        Word("replicated", "shared_memory", "fully_sharded", "auto"), default="auto"
    )
    shares: Sequence[int] | str = option(IntegerList(0), Word("equal", "auto"), default="equal")
    micro: int = option(Integer(), default=1)
    compress: Compressor | None = option(OneOf(Compressor), Word("none"), default=None)
    batch_norm: str = option(Word("whole", "share"), default="whole")
    dense: str = option(Word("same", "tensor"), default="same")
    update_granularity = PER_ELEMENT  # used if it divides neurons

    def check_options(self) -> None:
        if self.reduce != "auto" and self.state not in ("replicated", "auto"):
            raise Refused(
                f"data: reduce={self.reduce} does not fit state={self.state}, which has an "
                "exchange of its own; leave out one of them"
            )
        if self.compress is not None and self.state not in ("replicated", "auto"):
            raise Refused(
                f"data: compress={self.compress} does not fit state={self.state}, which has an "
                "exchange of its own, of whole gradients; leave out one of them"
            )
        if self.compress is not None and isinstance(self.reduce, AllReduce):
            self.compress.refuse_all_reduce("data", self.reduce)
        if isinstance(self.shares, tuple):
            if isinstance(self.workers, int) and len(self.shares) != self.workers:
                raise Refused(
                    f"data({self.workers}) has {self.workers} workers and {len(self.shares)} "
                    "shares; give one share per worker"
                )
            if 0 in self.shares:
                raise Refused(
                    f"data: every worker needs a share of at least 1, got {list(self.shares)}; use "
                    "fewer workers instead"
                )

        if self.adapts_shares and self.shards_parameters:
            raise Refused(
                "data(shares=auto) measures forwards, and with state=fully_sharded these wait for "
                "other ranks; give the shares, such as shares=[3, 1]"
            )
        unsuitable = [
            option.name
            for option in fields(self)
            if option.name not in ("workers", "batch_norm", "dense")
            and getattr(self, option.name) != option.default
        ]
        if self.splits_dense_layers and unsuitable:
            raise Refused(
                "data(dense=tensor) divides a batch evenly and sums gradients where a layer makes "
                f"them; leave out {unsuitable[0]}"
            )

    # ---- properties --------------------------------------------------------------------------
    @property
    def splits_dense_layers(self) -> bool:
        """Whether ranks divide samples up to the first dense layer, and neurons from there on."""
        return self.dense == "tensor"

    @property
    def technique(self) -> str:
        return "integrated" if self.splits_dense_layers else self.name

    @property
    def is_replicated(self) -> bool:  # type: ignore[override]
        return not self.splits_dense_layers

    @property
    def splits_layers(self) -> bool:  # type: ignore[override]
        return self.splits_dense_layers

    @property
    def changes_layout(self) -> bool:  # type: ignore[override]
        return not self.splits_dense_layers

    @property
    def guarantees(self) -> Guarantees:
        whole = self.batch_norm == "whole"
        lossless = self.compress is None or self.compress.lossless
        return Guarantees(
            exact=lossless and whole,
            buffers_equal=whole,
            jobs_only=(
                "in a loop of your own every rank holds the parameters and their mean gradients; "
                f"leave out state={self.state}, or make it a Job"
            )
            if self.shares_memory or self.shards_parameters
            else None,
        )

    @property
    def adapts_shares(self) -> bool:  # type: ignore[override]
        return self.shares == "auto"

    @property
    def verifiable(self) -> Self:
        """The strategy with uneven shares, if shares adapt: these may come to be any."""
        count = self.division.shares
        return replace(self, shares=tuple(range(len(count), 0, -1))) if self.adapts_shares else self

    @property
    def shares_memory(self) -> bool:
        return self.state == "shared_memory"

    @property
    def shards_parameters(self) -> bool:
        return self.state == "fully_sharded"

    @property
    def uses_buckets(self) -> bool:
        return not self.shares_memory and not self.splits_dense_layers

    @property
    def axes(self) -> tuple[Axis, ...]:
        assert isinstance(self.workers, int)
        return (Axis("data", self.workers, "domain" if self.splits_dense_layers else "samples"),)

    @property
    def division(self) -> Division:
        assert isinstance(self.workers, int)
        if self.splits_dense_layers:
            return Division()
        return Division(
            self.shares if isinstance(self.shares, tuple) else (1,) * self.workers, self.micro
        )

    def plan_schedules(self) -> tuple[ScheduleUse, ...]:
        assert isinstance(self.workers, int)
        refusal = None if self.compress is None else self.compress.pricing_refusal
        return (
            (ScheduleUse("all-reduce", self.reduce, self.workers, refusal),)
            if isinstance(self.reduce, AllReduce)
            else ()
        )

    def explain_no_schedule(self) -> str:
        if self.splits_dense_layers:
            return (
                "with dense=tensor the backend's own collectives sum gradients where a layer makes "
                "them; leave it out"
            )
        if self.compress is not None and not self.compress.sums:
            return (
                f"every rank receives all that {self.compress.name} sends, in one round; leave out "
                "compress, or try data(4, reduce=ring, compress=bf16)"
            )
        if isinstance(self.reduce, Native):
            return (
                "native is the backend's own all-reduce, which has no schedule (gloo's is like "
                "ring_async); name "
                "one: " + ", ".join(each.name for each in ALL_REDUCE_SCHEDULES)
            )
        if self.shards_parameters:
            return (
                "state=fully_sharded gathers and sums by the backend's own collectives, which have "
                "no schedule; try data(4, reduce=ring)"
            )
        return "say which all-reduce, for example data(4, reduce=ring)"

    # ---- the environment and the job ---------------------------------------------------------
    def resolve(self, environment: Environment) -> Self:
        """Return the same strategy with every `auto` replaced, but for `reduce=auto` over gloo.

        The quickest all-reduce over gloo is known only when the first gradients are exchanged.

        Args:
            environment: Where the strategy runs.

        Raises:
            Refused: If the ranks cannot share memory and `state` needs it.
        """
        count = (
            self.workers if isinstance(self.workers, int) else environment.count_automatic_ranks()
        )
        state = self.state
        reduce = self.reduce
        if self.splits_dense_layers:
            return replace(self, workers=count)
        if state == "auto":
            keep_replicated = (
                environment.user_loop or environment.shared_memory_refusal is not None or count == 1
            )
            state = (
                "replicated"
                if keep_replicated or reduce != "auto" or self.compress
                else "shared_memory"
            )
        if (
            state == "shared_memory"
            and environment.shared_memory_refusal
            and not environment.user_loop
        ):
            raise Refused(
                f"{self}: {environment.shared_memory_refusal}; leave out state=shared_memory"
            )
        if (
            reduce == "auto"
            and state == "replicated"
            and (count == 1 or environment.backend != "gloo")
        ):
            reduce = Native()
        if isinstance(reduce, AllReduce):
            reduce = reduce.resolve(count, environment.ranks_on_host or count)
        return replace(self, workers=count, reduce=reduce, state=state)

    def has_open_all_reduce(self) -> bool:
        return self.reduce == "auto" and self.state == "replicated"

    def explain_choices(
        self, resolved: Self, environment: Environment
    ) -> Iterator[tuple[str, str, str]]:
        if self.state == "auto" and not self.splits_dense_layers:
            yield (
                "state",
                resolved.state,
                environment.shared_memory_refusal
                or (
                    "all ranks are on this host"
                    if resolved.shares_memory
                    else "an exchange was asked for, or there is one worker"
                ),
            )
        if self.reduce == "auto" and isinstance(resolved.reduce, Native):
            yield (
                "reduce",
                str(resolved.reduce),
                f"the backend's own is the quickest over {environment.backend}",
            )

    def list_alternatives(self, environment: Environment) -> tuple[Strategy, ...]:
        # Serial is no alternative if the user wants statistics of shares, other micro-batches, or a
        # part of the state on each rank.
        same = (
            self.batch_norm == "whole"
            and self.micro == 1
            and not self.adapts_shares
            and not self.shards_parameters
            and not self.splits_dense_layers
        )
        same = same and self.compress is None
        return (Serial(threads=environment.cores),) if self.workers == "auto" and same else ()

    def refuse_job(
        self, facts: JobFacts, requested: Strategy, skip_first_step_check: bool = False
    ) -> None:
        super().refuse_job(facts, requested, skip_first_step_check)
        if (
            self.adapts_shares
            and facts.single_sample_refusal
            and (self.micro > 1 or self.batch_norm == "share")
        ):
            raise Refused(
                f"{requested}: shares that change can give micro-batches of one sample, and batch "
                "norm needs more; leave out "
                f"{'micro' if self.micro > 1 else 'batch_norm=share'}, or give the shares"
            )

    def refuse_optimizer(self, optimizer_facts: OptimizerFacts, requested: Strategy) -> None:
        if self.compress is not None:
            self.compress.refuse_optimizer(optimizer_facts, requested)

    def list_warnings(self, facts: JobFacts, requested: Strategy) -> Iterator[str]:
        if self.adapts_shares and facts.steps <= -(-facts.samples // facts.full_batch):
            yield (
                f"{requested}: shares change where an epoch begins, and job {facts.job} has only "
                "one, so they stay equal; give more epochs, or give the shares, such as "
                "shares=[3, 1]"
            )

    def refuse_factors(self, factors: tuple[Strategy, ...]) -> None:
        if self.splits_dense_layers and len(factors) > 1:
            raise Refused(
                "data(dense=tensor) gives a model all samples on every rank, and divides its "
                "layers itself; use it alone"
            )
        if self.shards_parameters and len(factors) > 1:
            raise Refused(
                "data(state=fully_sharded) gathers the parameters of a module when all of it is "
                "called, and another strategy divides the model into parts that call some of it; "
                "leave out the state"
            )
        if self.adapts_shares and len(factors) > 1:
            raise Refused(
                "data(shares=auto) measures forwards of whole models, and another strategy divides "
                "the model; give the shares, such as shares=[3, 1]"
            )
        if self.micro != 1 and (
            other := next((each for each in factors if each.schedules_micro_batches), None)
        ):
            raise Refused(
                f"data(micro=...) does not fit with {other.name}, which divides batches in its own "
                "way; leave it out, or give pipeline(micro=...)"
            )
