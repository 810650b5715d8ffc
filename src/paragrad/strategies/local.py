"""local: every worker steps by its own gradients; weights are averaged every so many steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Self

from paragrad.errors import Refused
from paragrad.notation.choices import Choice, Decimal, Integer, OneOf, Word, option
from paragrad.schedules.all_reduce import AllReduce
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.data import Native
from paragrad.strategies.job_facts import JobFacts, OptimizerFacts, refuse_replaced_parameters
from paragrad.strategies.strategy import Environment, Guarantees, ScheduleUse, Strategy


class Mean(Choice):
    """All replicas continue from the mean of their weights (McDonald et al. 2010; Stich 2018)."""


class Nesterov(Choice):
    """The mean's change is the gradient of an outer Nesterov step (DiLoCo, Douillard et al. 2023).

    Attributes:
        lr: The learning rate of the outer step.
        momentum: The momentum of the outer step.
    """

    lr: float = option(Decimal(), default=0.7)
    momentum: float = option(Decimal(above=-1e-300, most=1.0), default=0.9)

    def check_options(self) -> None:
        if self.momentum == 1:
            raise Refused("nesterov(momentum=1) never slows down; give it a momentum below 1")


class Elastic(Choice):
    """Replicas and a common centre attract each other (EASGD, Zhang et al. 2015).

    Attributes:
        pull: The strength of the attraction; auto: 0.9 over the number of workers, as published.
    """

    pull: float | str = option(Decimal(most=1.0), Word("auto"), default="auto")


class Local(Strategy):
    """Local SGD: weights averaged every few steps (Stich 2018), or once (Zinkevich et al. 2010).

    Attributes:
        workers: The number of workers.

        every: The steps between two averages; end: one average at the end (ParallelSGD).

        outer: How the replicas continue after an average.

        after: The number of synchronous steps that come first (post-local SGD, Lin et al. 2018).

        reduce: The all-reduce of the averages.

        compress: The compressor of the changes of the weights, which are sent at an average.
    """

    workers: int | str = option(Integer(), Word("auto"))
    every: int | str = option(Integer(), Word("end"), default=8)
    outer: Choice = option(OneOf(Mean, Nesterov, Elastic), default=Mean())
    after: int = option(Integer(0), default=0)
    reduce: Choice = option(OneOf(Native, AllReduce), default=Native())
    compress: Compressor | None = option(OneOf(Compressor), Word("none"), default=None)
    is_replicated = True
    batch_norm = "share"  # ranks do not communicate in a step

    def check_options(self) -> None:
        if self.every == "end" and not isinstance(self.outer, Mean):
            raise Refused(
                f"local(every=end) averages replicas only at the end, and outer={self.outer} steps "
                "where they meet before; leave out outer, or let them meet, such as every=16"
            )
        if self.compress is not None and self.compress.feedback:
            raise Refused(
                f"local: {self.compress} adds what it does not send to the next gradient, and "
                "replicas send the change of their weights; compress by int8, bf16 or fp16, or use "
                f"{self.compress} under data(n)"
            )
        if self.compress is not None and self.every == "end":
            raise Refused(
                "local(every=end) averages once, for the saved model, without compression; leave "
                f"out compress={self.compress}, or let replicas meet, such as every=16"
            )
        if self.compress is not None and isinstance(self.reduce, AllReduce):
            self.compress.refuse_all_reduce("local", self.reduce)

    @property
    def guarantees(self) -> Guarantees:
        return Guarantees(exact=False, replicas_equal=False, buffers_equal=False)

    def is_averaging_step(self, step: int) -> bool:
        """Return whether replicas are averaged after a step.

        The last synchronous step is an averaging step too.

        Args:
            step: The step, counted from 0.
        """
        local_steps = step + 1 - self.after
        return (
            local_steps == 0
            if self.every == "end"
            else local_steps >= 0 and local_steps % int(self.every) == 0
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
        return "name an all-reduce for its averages, such as local(4, reduce=ring)"

    def resolve(self, environment: Environment) -> Self:
        resolved = super().resolve(environment)
        assert isinstance(resolved.workers, int)
        outer = resolved.outer
        reduce = resolved.reduce
        if isinstance(outer, Elastic) and outer.pull == "auto":
            outer = Elastic(0.9 / resolved.workers)  # as published
        if isinstance(outer, Elastic) and float(outer.pull) >= (most := 2 / (resolved.workers + 1)):
            raise Refused(
                f"{self}: with {resolved.workers} worker(s) a pull of {most:.3g} or more drives "
                "centre and replicas apart without end; leave it out (then it is 0.9 over the "
                "number of workers), or give less"
            )
        if isinstance(reduce, AllReduce):
            reduce = reduce.resolve(resolved.workers, environment.ranks_on_host or resolved.workers)
        return replace(resolved, outer=outer, reduce=reduce)

    def refuse_job(
        self, facts: JobFacts, requested: Strategy, skip_first_step_check: bool = False
    ) -> None:
        super().refuse_job(facts, requested, skip_first_step_check)
        refuse_replaced_parameters(facts, requested)
        if self._averages_only_at_end(facts) and (
            self.compress or not isinstance(self.outer, Mean)
        ):
            what, left = (
                (f"{self.compress} compresses only what they send", "compress")
                if isinstance(self.outer, Mean)
                else (f"{self.outer.name} steps", "outer")
            )
            raise Refused(
                f"{requested}: {self._describe_first_average(facts)}, and {what} where they meet; "
                f"give every of at most {facts.steps - self.after}, or leave out {left}"
            )

    def refuse_optimizer(self, optimizer_facts: OptimizerFacts, requested: Strategy) -> None:
        if optimizer_facts.has_modes and not isinstance(self.outer, Mean):
            raise Refused(
                f"{requested}: {optimizer_facts.optimizer} has weights for training and others for "
                f"tests, and {self.outer.name} has a centre of one kind only; leave out outer"
            )
        if optimizer_facts.keeps_copies:
            raise Refused(
                f"{requested}: {optimizer_facts.optimizer} continues from its own copies of the "
                "weights (tried on a small copy), so its next step undoes the average; use one "
                "that updates the parameters themselves, such as AdamW, or data(n)"
            )

    def list_warnings(self, facts: JobFacts, requested: Strategy) -> Iterator[str]:
        if self.after >= facts.steps > 0:
            yield (
                f"{requested}: job {facts.job} makes {facts.steps} step(s), all of them "
                "synchronous: it is data(n) with batch_norm=share; give after of less than "
                f"{facts.steps}"
            )
        elif self._averages_only_at_end(facts):
            yield (
                f"{requested}: {self._describe_first_average(facts)}, so their weights are "
                "averaged once, at the end, as by every=end; give every of at most "
                f"{facts.steps - self.after}"
            )

    def _averages_only_at_end(self, facts: JobFacts) -> bool:
        """Return whether the training ends before the first average."""
        return self.every != "end" and self.after < facts.steps < self.after + int(self.every)

    def _describe_first_average(self, facts: JobFacts) -> str:
        return (
            f"job {facts.job} makes {facts.steps} step(s), and replicas first meet after step "
            f"{self.after + int(self.every)}"
        )

    def explain_choices(
        self, resolved: Self, environment: Environment
    ) -> Iterator[tuple[str, str, str]]:
        after = f", after {self.after} synchronous steps" if self.after else ""
        yield (
            "weights",
            "averaged "
            + ("at the end" if self.every == "end" else f"every {self.every} steps")
            + after,
            "tests, checkpoints and the model use the effective weights, between averages too",
        )
        if self.outer != resolved.outer:
            yield (
                "outer",
                str(resolved.outer),
                "a pull of 0.9 over the number of workers, as published",
            )
