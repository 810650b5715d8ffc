"""What a strategy may ask about a job at the door."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from paragrad.jobs.job import Job
from paragrad.techniques.slices import FOREACH
from paragrad.techniques.updating import updates_by
from paragrad.training.divisible import alone, uncut
from paragrad.training.door import Findings
from paragrad.training.first_step.causes import by_layout


@dataclass(frozen=True)
class Asked:
    """A job, as a strategy may ask about it (`strategies.strategy.Facts`)."""
    named: Job
    facts: Findings
    data: Path | None

    @property
    def job(self) -> str:
        return self.named.name

    @property
    def samples(self) -> int:
        return self.facts.samples

    @property
    def full(self) -> int:
        return min(self.named.batch, self.facts.samples)

    @property
    def uncut(self) -> str | None:
        return uncut(self.named, self.data)

    @property
    def whole_loss(self) -> str | None:
        return self.facts.whole_loss

    @property
    def by_layout(self) -> str | None:
        drawn = self.facts.probe.draws.by_layout
        return by_layout(drawn) if drawn else None

    @property
    def sizes(self) -> tuple[int, ...]:
        rest = self.facts.samples % self.full
        return (self.full, rest) if rest else (self.full,)

    @property
    def alone(self) -> str | None:
        return alone(self.named, self.data) if self.facts.probe.normed else None

    @property
    def drawn_outside(self) -> tuple[str, ...]:
        return self.facts.probe.draws.others

    @property
    def casts(self) -> bool:
        return self.named.autocast is not None

    @property
    def elements(self) -> int:
        return self.facts.parameters

    @functools.cached_property
    def _updating(self) -> tuple[str, str]:
        optimizer = self.named.optimizer(self.named.built_model().parameters())
        return updates_by(optimizer, known=type(optimizer) in FOREACH), type(optimizer).__name__

    @property
    def updates_by(self) -> str:
        return self._updating[0]

    @property
    def optimizer(self) -> str:
        return self._updating[1]
