"""place and pipeline: a model in consecutive parts on consecutive ranks, a batch or its
micro-batches going through them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

from paragrad.errors import Refused
from paragrad.notation.choices import Flag, Integer, Integers, Names, One, Word, option
from paragrad.runtime.mesh import Axis
from paragrad.schedules.pipeline import Gpipe, OneFOneB, Pipelined, PipelineSchedule
from paragrad.strategies.job_facts import Facts
from paragrad.strategies.shares import Division
from paragrad.strategies.strategy import Here, Plan, Promise, Strategy

# modules of each part; with which module each part but the first begins
Asked = tuple[int, ...] | tuple[str, ...]
# auto: parts that take as long as each other
CUT = (Integers(), Names(), Word("auto"))


class InParts(Strategy, abstract=True):
    """The model in consecutive parts."""

    cuts_micro = True
    recompute = False  # an option of pipeline
    if TYPE_CHECKING:

        @property
        def cut(self) -> Asked | str: ...
        @property
        def pipelined(self) -> Pipelined:
            """The schedule of a full share, of a resolved strategy."""

    @property
    def promise(self) -> Promise:
        return Promise()

    @property
    def axes(self) -> tuple[Axis, ...]:
        assert isinstance(self.workers, int)
        return (Axis(self.name, self.workers, "model"),)

    @property
    def asked(self) -> Asked | None:
        """Modules of each part, or the first ones of all parts but the first, where the user
        says so.
        """
        return self.cut if isinstance(self.cut, tuple) else None

    def refuse(self, facts: Facts, asked: Strategy, unchecked: bool = False) -> None:
        super().refuse(facts, asked, unchecked)
        if facts.by_layout and not unchecked:
            raise Refused(f"{asked}: {facts.by_layout}")
        if facts.drawn_outside:
            raise Refused(
                f"job {facts.job}: the model draws from {', '.join(facts.drawn_outside)}, and in "
                f"parts its calls are "
                f"others; draw by torch, or in the dataset, or train without {asked}"
            )

    def plans(self) -> tuple[Plan, ...]:
        """Of a full share first; a short last batch may have fewer micro-batches."""
        whole = self.pipelined
        counts = sorted(
            {whole.schedule.filled(micro, self.size) for micro in range(1, whole.micro + 1)},
            reverse=True,
        )
        return tuple(Plan("pipeline", replace(whole, micro=count), self.size) for count in counts)


class Place(InParts):
    """Consecutive parts on consecutive ranks, one batch at a time (Dean et al. 2012)."""

    workers: int = option(Integer())
    cut: Asked | str = option(*CUT, default="auto")

    @property
    def pipelined(self) -> Pipelined:
        return Pipelined(Gpipe(), 1)


class Pipeline(InParts):
    """Micro-batches in flight through stages of layers (Huang et al. 2019; Narayanan et al.
    2019).
    """

    workers: int = option(Integer())
    # auto: 4 x workers
    micro: int | str = option(Integer(), Word("auto"), default="auto")
    schedule: PipelineSchedule = option(One(PipelineSchedule), default=OneFOneB())
    recompute: bool = option(Flag(), default=False)
    cut: Asked | str = option(*CUT, default="auto")

    @property
    def division(self) -> Division:
        assert isinstance(self.micro, int)
        return Division((1,), self.micro)

    @property
    def pipelined(self) -> Pipelined:
        assert isinstance(self.micro, int)
        return Pipelined(self.schedule, self.schedule.filled(self.micro, self.workers))

    def resolved(self, here: Here) -> Self:
        micro = 4 * self.workers if isinstance(self.micro, str) else self.micro
        if (filled := self.schedule.filled(micro, self.workers)) != micro:
            raise Refused(
                f"{self}: {self.schedule.name} takes micro-batches in groups of {self.workers}; "
                f"give micro={filled}"
            )
        return replace(self, micro=micro)
