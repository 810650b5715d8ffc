"""What a strategy may ask about a job during validation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.optim import SGD, Optimizer

from paragrad.engine.optimizer.modes import has_modes
from paragrad.engine.optimizer.update_probe import find_update_granularity, has_weight_copies
from paragrad.engine.optimizer.update_slices import FOREACH_OPTIMIZERS
from paragrad.jobs.job import Job
from paragrad.strategies.job_facts import JobFacts, OptimizerFacts
from paragrad.trainer.checks.diagnosis import explain_layout_draws
from paragrad.validation.divisibility import explain_no_micro_batches, explain_no_single_sample
from paragrad.validation.inspect_job import JobInspection
from paragrad.validation.repeatability import explain_single_use_optimizer, explain_unrepeatable


class InspectedOptimizer(OptimizerFacts):
    """The facts about an optimizer.

    Args:
        build_optimizer: Returns the optimizer; called once, when the first fact is read.
        clip_norm: The norm to which gradients are clipped, or None.
    """

    def __init__(
        self, build_optimizer: Callable[[], Optimizer], clip_norm: float | None = None
    ) -> None:
        self._build_optimizer = build_optimizer
        self.clip_norm = clip_norm

    @cached_property
    def _instance(self) -> Optimizer:
        return self._build_optimizer()

    @cached_property
    def optimizer(self) -> str:
        return type(self._instance).__name__

    @cached_property
    def update_granularity(self) -> str:
        return find_update_granularity(self._instance)

    @cached_property
    def has_modes(self) -> bool:
        return has_modes(self._instance)

    @cached_property
    def keeps_copies(self) -> bool:
        return type(self._instance) not in FOREACH_OPTIMIZERS and has_weight_copies(self._instance)

    @cached_property
    def sgd_groups(self) -> list[dict[str, Any]] | None:
        steps_as_sgd = isinstance(self._instance, SGD) and type(self._instance).step is SGD.step
        return self._instance.param_groups if steps_as_sgd else None


class InspectedJob(InspectedOptimizer, JobFacts):
    """The facts about a job. Its optimizer is built as a rank builds it, with its scheduler.

    Args:
        job: The job, prepared for training.
        inspection: What validation found out about it.

        data: The folder of data.
        limit: The number of steps after which the training stops, or None.
    """

    def __init__(
        self, job: Job, inspection: JobInspection, data: Path | None, limit: int | None = None
    ) -> None:
        super().__init__(self._build_job_optimizer, job.clip_norm)
        self._job = job
        self._data = data
        self._probe = inspection.probe
        self.job = job.name
        self.samples = inspection.samples
        self.full_batch = min(job.batch, self.samples)
        rest = self.samples % self.full_batch
        self.batch_sizes = (self.full_batch, rest) if rest else (self.full_batch,)
        steps = job.epochs * inspection.order.steps
        self.steps = steps if limit is None else min(steps, limit)
        self.additivity_refusal = inspection.additivity_refusal
        draw = inspection.probe.draws.layout_dependence
        self.layout_refusal = explain_layout_draws(draw) if draw else None
        self.replaced_parameters = inspection.probe.replaced_parameters
        self.other_generators = inspection.probe.draws.other_generators
        self.uses_autocast = job.autocast is not None
        self.trained_elements = inspection.trained_elements

    def _build_job_optimizer(self) -> Optimizer:
        optimizer = self._job.optimizer(self._job.build_model().parameters())
        if self._job.scheduler is not None:
            # a scheduler may change the optimizer: OneCycleLR sets momentum
            self._job.scheduler(optimizer)
        return optimizer

    @cached_property
    def micro_batch_refusal(self) -> str | None:
        return explain_no_micro_batches(self._job, self._data)

    @cached_property
    def repeatability_refusal(self) -> str | None:
        return explain_unrepeatable(self._job, self._data, self._probe.draws)

    @cached_property
    def optimizer_refusal(self) -> str | None:
        return explain_single_use_optimizer(self._job)

    @cached_property
    def single_sample_refusal(self) -> str | None:
        if not self._probe.has_batch_norm:
            return None
        return explain_no_single_sample(self._job, self._data)
