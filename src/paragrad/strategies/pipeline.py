"""place and pipeline: a model in consecutive parts on consecutive ranks.

A batch, or its micro-batches, go through the parts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

from paragrad.errors import Refused
from paragrad.notation.choices import Flag, Integer, IntegerList, NameList, OneOf, Word, option
from paragrad.runtime.mesh import Axis
from paragrad.schedules.pipeline import Gpipe, MicroBatchSchedule, OneFOneB, PipelineSchedule
from paragrad.strategies.job_facts import JobFacts
from paragrad.strategies.shares import Division
from paragrad.strategies.strategy import Environment, Guarantees, ScheduleUse, Strategy

# The number of modules of each part; or the first module of each part but the first.
RequestedCut = tuple[int, ...] | tuple[str, ...]
# With auto, all parts take equally long.
CUT_KINDS = (IntegerList(), NameList(), Word("auto"))


class PartitionedStrategy(Strategy, abstract=True):
    """A strategy that partitions the model into consecutive parts.

    Attributes:
        cut: Where the model is partitioned, an option of each.
        recompute: Whether forwards run again instead of keeping activations, an option of pipeline.
    """

    schedules_micro_batches = True
    recompute = False
    if TYPE_CHECKING:

        @property
        def cut(self) -> RequestedCut | str: ...
        @property
        def micro_batch_schedule(self) -> MicroBatchSchedule:
            """The schedule of a full share, of a resolved strategy."""

    @property
    def guarantees(self) -> Guarantees:
        return Guarantees()

    @property
    def axes(self) -> tuple[Axis, ...]:
        assert isinstance(self.workers, int)
        return (Axis(self.name, self.workers, "model"),)

    @property
    def requested_cut(self) -> RequestedCut | None:
        """The partition that the user requests, or None.

        It is the number of modules of each part, or the first module of each part but the first.
        """
        return self.cut if isinstance(self.cut, tuple) else None

    def refuse_job(
        self, facts: JobFacts, requested: Strategy, skip_first_step_check: bool = False
    ) -> None:
        super().refuse_job(facts, requested, skip_first_step_check)
        if facts.layout_refusal and not skip_first_step_check:
            raise Refused(f"{requested}: {facts.layout_refusal}")
        if facts.other_generators:
            raise Refused(
                f"job {facts.job}: the model draws from {', '.join(facts.other_generators)}, and "
                "in parts its calls are others; draw by torch, or in the dataset, or train "
                f"without {requested}"
            )

    def plan_schedules(self) -> tuple[ScheduleUse, ...]:
        """List the schedule of a full share first, then those of fewer micro-batches.

        A shorter last batch may have fewer micro-batches.
        """
        whole = self.micro_batch_schedule
        counts = sorted(
            {
                whole.schedule.pad_micro_count(micro, self.size)
                for micro in range(1, whole.micro + 1)
            },
            reverse=True,
        )
        return tuple(
            ScheduleUse("pipeline", replace(whole, micro=count), self.size) for count in counts
        )


class Place(PartitionedStrategy):
    """Consecutive parts on consecutive ranks, one batch at a time (Dean et al. 2012).

    Attributes:
        workers: The number of workers, one part of the model each.

        cut: The modules with which parts begin, the number of modules in each part, or auto.
    """

    workers: int = option(Integer())
    cut: RequestedCut | str = option(*CUT_KINDS, default="auto")

    @property
    def micro_batch_schedule(self) -> MicroBatchSchedule:
        return MicroBatchSchedule(Gpipe(), 1)


class Pipeline(PartitionedStrategy):
    """Micro-batches in flight through stages of layers (Huang et al. 2019; Narayanan et al. 2019).

    Attributes:
        workers: The number of workers, one stage each (or several, if the schedule is interleaved).

        micro: The number of micro-batches; auto: 4 x workers.

        schedule: The order of forwards and backwards.

        recompute: Whether forwards run again instead of keeping activations.

        cut: Where the model is partitioned.
    """

    workers: int = option(Integer())
    micro: int | str = option(Integer(), Word("auto"), default="auto")
    schedule: PipelineSchedule = option(OneOf(PipelineSchedule), default=OneFOneB())
    recompute: bool = option(Flag(), default=False)
    cut: RequestedCut | str = option(*CUT_KINDS, default="auto")

    @property
    def division(self) -> Division:
        assert isinstance(self.micro, int)
        return Division((1,), self.micro)

    @property
    def micro_batch_schedule(self) -> MicroBatchSchedule:
        assert isinstance(self.micro, int)
        return MicroBatchSchedule(
            self.schedule, self.schedule.pad_micro_count(self.micro, self.workers)
        )

    def resolve(self, environment: Environment) -> Self:
        micro = 4 * self.workers if isinstance(self.micro, str) else self.micro
        if (padded := self.schedule.pad_micro_count(micro, self.workers)) != micro:
            raise Refused(
                f"{self}: {self.schedule.name} takes micro-batches in groups of {self.workers}; "
                f"give micro={padded}"
            )
        return replace(self, micro=micro)
