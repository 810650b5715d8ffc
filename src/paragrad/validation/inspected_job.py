"""What a strategy may ask about a job at the door."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import SGD, Optimizer

from paragrad.engine.optimizer.modes import has_modes
from paragrad.engine.optimizer.update_probe import keeps_copies, updates_by
from paragrad.engine.optimizer.update_slices import FOREACH
from paragrad.jobs.job import Job
from paragrad.trainer.first_step.diagnosis import by_layout
from paragrad.validation.divisibility import alone, uncut
from paragrad.validation.inspect_job import Findings
from paragrad.validation.repeatability import made_once, unsteady


class Updates:
    """An optimizer, as a strategy may ask about it (`strategies.facts.Updating`)."""

    def __init__(self, optimizer: Optimizer, clip_norm: float | None = None) -> None:
        self.held = optimizer
        self.clip_norm = clip_norm

    @property
    def optimizer(self) -> str:
        return type(self.held).__name__

    @functools.cached_property
    def updates_by(self) -> str:
        return updates_by(self.held, known=type(self.held) in FOREACH)

    @property
    def has_modes(self) -> bool:
        return has_modes(self.held)

    @functools.cached_property
    def keeps_copies(self) -> bool:
        return type(self.held) not in FOREACH and keeps_copies(self.held)

    @property
    def groups_of_sgd(self) -> list[dict[str, Any]] | None:
        return (
            self.held.param_groups
            if isinstance(self.held, SGD) and type(self.held).step is SGD.step
            else None
        )


@dataclass(frozen=True)
class Asked:
    """A job, as a strategy may ask about it (`strategies.facts.Facts`). limit: steps after
    which it stops before its end.
    """

    named: Job
    facts: Findings
    data: Path | None
    limit: int | None = None

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
    def steps(self) -> int:
        whole = self.named.epochs * self.facts.order.steps
        return whole if self.limit is None else min(whole, self.limit)

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

    @functools.cached_property
    def unsteady(self) -> str | None:
        return unsteady(self.named, self.data, self.facts.probe.draws)

    @functools.cached_property
    def made_once(self) -> str | None:
        return made_once(self.named)

    @property
    def replaced(self) -> tuple[str, ...]:
        return self.facts.probe.replaced

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
    def _updating(self) -> Updates:
        optimizer = self.named.optimizer(self.named.built_model().parameters())
        if self.named.scheduler is not None:
            self.named.scheduler(optimizer)  # OneCycleLR sets momentum, too
        return Updates(optimizer)

    @property
    def optimizer(self) -> str:
        return self._updating.optimizer

    @property
    def updates_by(self) -> str:
        return self._updating.updates_by

    @property
    def has_modes(self) -> bool:
        return self._updating.has_modes

    @property
    def keeps_copies(self) -> bool:
        return self._updating.keeps_copies

    @property
    def groups_of_sgd(self) -> list[dict[str, Any]] | None:
        return self._updating.groups_of_sgd

    @property
    def clip_norm(self) -> float | None:
        return self.named.clip_norm
