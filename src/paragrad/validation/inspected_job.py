"""What a strategy may ask about a job during validation."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import SGD, Optimizer

from paragrad.engine.optimizer.modes import has_modes
from paragrad.engine.optimizer.update_probe import find_update_granularity, has_weight_copies
from paragrad.engine.optimizer.update_slices import FOREACH_OPTIMIZERS
from paragrad.jobs.job import Job
from paragrad.trainer.first_step.diagnosis import explain_layout_draws
from paragrad.validation.divisibility import explain_no_micro_batches, explain_no_single_sample
from paragrad.validation.inspect_job import JobInspection
from paragrad.validation.repeatability import explain_single_use_optimizer, explain_unrepeatable


class InspectedOptimizer:
    """An optimizer as a strategy sees it. `strategies.job_facts.OptimizerFacts` has the properties.

    Attributes:
        instance: The optimizer itself.
        clip_norm: The norm to which gradients are clipped, or None.
    """

    def __init__(self, optimizer: Optimizer, clip_norm: float | None = None) -> None:
        self.instance = optimizer
        self.clip_norm = clip_norm

    @property
    def optimizer(self) -> str:
        return type(self.instance).__name__

    @functools.cached_property
    def update_granularity(self) -> str:
        return find_update_granularity(
            self.instance, known_elementwise=type(self.instance) in FOREACH_OPTIMIZERS
        )

    @property
    def has_modes(self) -> bool:
        return has_modes(self.instance)

    @functools.cached_property
    def keeps_copies(self) -> bool:
        return type(self.instance) not in FOREACH_OPTIMIZERS and has_weight_copies(self.instance)

    @property
    def sgd_groups(self) -> list[dict[str, Any]] | None:
        return (
            self.instance.param_groups
            if isinstance(self.instance, SGD) and type(self.instance).step is SGD.step
            else None
        )


@dataclass(frozen=True)
class InspectedJob:
    """A job as a strategy sees it. `strategies.job_facts.JobFacts` has the properties.

    Attributes:
        definition: The job itself.
        inspection: What validation found out about it.
        data: The folder of data.
        limit: The number of steps after which the training stops, or None.
    """

    definition: Job
    inspection: JobInspection
    data: Path | None
    limit: int | None = None

    @property
    def job(self) -> str:
        return self.definition.name

    @property
    def samples(self) -> int:
        return self.inspection.samples

    @property
    def full_batch(self) -> int:
        return min(self.definition.batch, self.inspection.samples)

    @property
    def steps(self) -> int:
        total = self.definition.epochs * self.inspection.order.steps
        return total if self.limit is None else min(total, self.limit)

    @property
    def micro_batch_refusal(self) -> str | None:
        return explain_no_micro_batches(self.definition, self.data)

    @property
    def additivity_refusal(self) -> str | None:
        return self.inspection.whole_loss_reason

    @property
    def layout_refusal(self) -> str | None:
        draw = self.inspection.probe.draws.layout_dependence
        return explain_layout_draws(draw) if draw else None

    @functools.cached_property
    def repeatability_refusal(self) -> str | None:
        return explain_unrepeatable(self.definition, self.data, self.inspection.probe.draws)

    @functools.cached_property
    def optimizer_refusal(self) -> str | None:
        return explain_single_use_optimizer(self.definition)

    @property
    def replaced_parameters(self) -> tuple[str, ...]:
        return self.inspection.probe.replaced_parameters

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        rest = self.inspection.samples % self.full_batch
        return (self.full_batch, rest) if rest else (self.full_batch,)

    @property
    def single_sample_refusal(self) -> str | None:
        return (
            explain_no_single_sample(self.definition, self.data)
            if self.inspection.probe.has_batch_norm
            else None
        )

    @property
    def other_generators(self) -> tuple[str, ...]:
        return self.inspection.probe.draws.other_generators

    @property
    def uses_autocast(self) -> bool:
        return self.definition.autocast is not None

    @property
    def trained_elements(self) -> int:
        return self.inspection.parameter_count

    @functools.cached_property
    def _inspected_optimizer(self) -> InspectedOptimizer:
        optimizer = self.definition.optimizer(self.definition.build_model().parameters())
        if self.definition.scheduler is not None:
            # a scheduler may change the optimizer: OneCycleLR sets momentum
            self.definition.scheduler(optimizer)
        return InspectedOptimizer(optimizer)

    @property
    def optimizer(self) -> str:
        return self._inspected_optimizer.optimizer

    @property
    def update_granularity(self) -> str:
        return self._inspected_optimizer.update_granularity

    @property
    def has_modes(self) -> bool:
        return self._inspected_optimizer.has_modes

    @property
    def keeps_copies(self) -> bool:
        return self._inspected_optimizer.keeps_copies

    @property
    def sgd_groups(self) -> list[dict[str, Any]] | None:
        return self._inspected_optimizer.sgd_groups

    @property
    def clip_norm(self) -> float | None:
        return self.definition.clip_norm
