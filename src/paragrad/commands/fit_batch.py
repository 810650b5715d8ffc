"""batch="fit": the largest global batch with which no rank exceeds a memory budget.

It is found from the memory that ranks held in single steps.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paragrad.commands.memory import measure_step_memory
from paragrad.errors import Refused
from paragrad.jobs.job import Job
from paragrad.launch import Launcher
from paragrad.report.comparison_table import format_bytes, format_memory_kinds
from paragrad.runtime.launcher_env import read_available_memory
from paragrad.runtime.rendezvous import get_launched_size
from paragrad.strategies.registry import strategy
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.checkpoint.checkpoint_files import find_newest_checkpoint
from paragrad.trainer.settings import Settings
from paragrad.validation.inspect_job import JobInspection, inspect_job
from paragrad.validation.validate import (
    ValidatedRun,
    detect_environment,
    resolve_and_check_strategy,
    validate_run,
)

# samples of each micro-batch in the two steps from which memory is extrapolated
FEW_SAMPLES = 2
MORE_SAMPLES = 4
MAX_TRIES = 5  # steps of batches that are predicted to fit
MAX_MULTIPLES_BELOW = 64  # multiples below a batch that are validated


def fit_job_batch(
    job: Job, requested: str | Strategy, settings: Settings
) -> tuple[Job, Settings, str | None]:
    """Find the batch of a job with batch="fit".

    Trains two small batches for one step each and extrapolates the memory of every rank. Then it
    makes a step of the batch that was found. A resumed run keeps its batch.

    Args:
        job: the job.
        requested: the strategy as it is written.
        settings: the settings, with the budget.

    Returns:
        (the job with its batch, the settings without the budget, the reason of the batch size). If
        the batch is given, job and settings are unchanged and the reason is None.

    Raises:
        Refused: there is no budget, it does not hold a step, or the strategy is not suitable.
    """
    if not isinstance(job, Job) or job.batch != "fit":
        return job, settings, None
    if settings.memory_budget is None:
        raise Refused(
            f"job {job.name}: batch='fit' needs to know how much a rank may hold; add memory='2GB' "
            "(--memory 2GB), or give a whole number"
        )
    if settings.resume is not None:
        checkpoint = find_newest_checkpoint(Path(settings.resume))
        if (batch := checkpoint.state["identity"].get("batch")) is None:
            raise Refused(
                f"{checkpoint.folder} was saved in a loop of your own, and has no batch; resume it "
                "in that loop"
            )
        return (
            job.replace(batch=batch),
            replace(settings, memory=None),
            f"that of {checkpoint.folder}",
        )
    if get_launched_size() is not None:
        raise Refused(
            "batch='fit' starts its own ranks and cannot run under a launcher; find it with plain "
            "python, and give the number here"
        )
    chosen = strategy(requested)
    step_settings = replace(settings, memory=None)
    resolved = resolve_and_check_strategy(chosen, detect_environment(step_settings))
    if resolved.adapts_shares:
        raise Refused(
            f"{chosen}: batch='fit' fits the largest share, and shares change; give shares, such "
            "as shares=[3, 1]"
        )
    free_bytes = read_available_memory() if settings.device == "cpu" else None
    if free_bytes is not None and settings.memory_budget * resolved.size > free_bytes:
        raise Refused(
            f"job {job.name}: memory {format_bytes(settings.memory_budget)} for each of "
            f"{resolved.size} rank(s) is more than the {format_bytes(free_bytes)} that this host "
            f"has free; give at most {free_bytes // resolved.size >> 20}MiB"
        )
    division = resolved.division
    batch_multiple = sum(division.shares) * division.micro
    inspection = inspect_job(job.replace(batch=MORE_SAMPLES * batch_multiple), step_settings.folder)
    with Launcher(resolved.size) as launcher:
        search = BatchSearch(
            launcher, job, chosen, step_settings, inspection, batch_multiple, settings.memory_budget
        )
        batch, because = search.find_largest_batch()
    return job.replace(batch=batch), step_settings, because


class BatchSearch:
    """The search for the largest batch.

    Attributes:
        launcher: starts the ranks.

        job: the job.

        chosen: the strategy.

        settings: the settings.

        inspection: the inspected job.

        batch_multiple: if the batch is a multiple of this, all micro-batches have equal size.

        budget: bytes that a rank may hold.

        refusal_note: words for a further condition that the batch has to meet.
    """

    def __init__(
        self,
        launcher: Launcher,
        job: Job,
        chosen: Strategy,
        settings: Settings,
        inspection: JobInspection,
        batch_multiple: int,
        budget: int,
    ) -> None:
        self.launcher = launcher
        self.job = job
        self.chosen = chosen
        self.settings = settings
        self.inspection = inspection
        self.batch_multiple = batch_multiple
        self.budget = budget
        self.refusal_note = ""

    def find_largest_batch(self) -> tuple[int, str]:
        """Find the largest batch.

        Returns:
            (the batch, the reason).

        Raises:
            Refused: the budget does not hold the smallest batch.
        """
        few, more = (
            min(count * self.batch_multiple, self.inspection.samples)
            for count in (FEW_SAMPLES, MORE_SAMPLES)
        )
        few_totals = self.measure_totals(few)
        more_totals = self.measure_totals(more) if more > few else self.measure_totals(few)
        slopes = [
            (b - a) / max(1, more - few) for a, b in zip(few_totals, more_totals, strict=True)
        ]
        fits = min(
            few + (self.budget - each) / slope
            if slope > 0
            else math.inf
            if each <= self.budget
            else 0
            for each, slope in zip(few_totals, slopes, strict=True)
        )
        batch = self.round_batch_down(min(fits, self.inspection.samples))
        for _ in range(MAX_TRIES):
            if (batch := self.find_valid_batch(batch)) < 1:
                break
            bytes_by_rank = self.measure_batch_step(batch)
            fullest = max(bytes_by_rank, key=lambda each: sum(each.values()))
            if (excess := sum(fullest.values()) - self.budget) <= 0:
                return batch, self.explain_batch(batch, fullest)
            batch = self.round_batch_down(
                batch - max(self.batch_multiple, excess / max(slopes)) if max(slopes) > 0 else 0
            )
        # the extrapolated batches did not fit, and this one did
        if few % self.batch_multiple == 0 and max(few_totals) <= self.budget:
            return few, self.explain_batch(
                few,
                max(self.measure_batch_step(few), key=lambda each: sum(each.values())),
                f"the largest that was seen to fit, because {MAX_TRIES} larger ones held more than "
                "was predicted",
            )
        smallest_bytes = max(
            a - slope * (few - self.batch_multiple)
            for a, slope in zip(few_totals, slopes, strict=True)
        )
        raise Refused(
            f"job {self.job.name}, {self.chosen}: memory {format_bytes(self.budget)} does not hold "
            f"a step of {self.batch_multiple} sample{'s' if self.batch_multiple > 1 else ''}, the "
            "smallest batch of equal micro-batches: the fullest rank holds about "
            f"{format_bytes(smallest_bytes)}; give more, or more workers that share the model"
        )

    def round_batch_down(self, batch: float) -> int:
        """Round down to equal micro-batches, or to all samples if the dataset has fewer."""
        whole = math.floor(batch) // self.batch_multiple * self.batch_multiple
        return whole or (self.inspection.samples if batch >= self.inspection.samples else 0)

    def explain_batch(self, batch: int, fullest: dict[str, int], limit: str = "") -> str:
        """Explain the batch in words.

        Args:
            batch: the batch.
            fullest: bytes of the rank that held most, by kind.
            limit: what limits the batch; "" for the usual reasons.
        """
        multiple = (
            f"the largest multiple of {self.batch_multiple}, which makes micro-batches "
            f"equal,{self.refusal_note}"
        )
        limit = limit or (
            "all samples of the dataset"
            if batch == self.inspection.samples
            else f"{multiple} that the dataset has"
            if batch + self.batch_multiple > self.inspection.samples
            else f"{multiple} of which no rank holds more than {format_bytes(self.budget)}, "
            "predicted by a straight line through two smaller steps"
        )
        return (
            f"{limit}; in a step of it the fullest rank held "
            f"{format_bytes(sum(fullest.values()))}: {format_memory_kinds(fullest)}"
        )

    def measure_totals(self, batch: int) -> list[int]:
        """Bytes that each rank held in a step."""
        return [sum(each.values()) for each in self.measure_batch_step(batch)]

    def find_valid_batch(self, batch: int) -> int:
        """Find the largest multiple up to `batch` that validation accepts.

        Its epochs must be valid, too, with their short last batch. If there is none, `batch` is
        returned.
        """
        for fewer in range(
            batch, max(0, batch - MAX_MULTIPLES_BELOW * self.batch_multiple), -self.batch_multiple
        ):
            with suppress(Refused):
                self.validate_batch(fewer, self.inspection.samples)
                self.refusal_note = (
                    "" if fewer == batch else " whose epochs end with an allowed batch,"
                )
                return fewer
        return batch

    def validate_batch(self, batch: int, samples: int) -> ValidatedRun:
        """Validate the run with a batch size.

        Args:
            batch: the batch size.
            samples: number of samples of the dataset.
        """
        job = self.job.replace(batch=batch)
        return validate_run(
            job,
            self.chosen,
            self.settings,
            replace(
                self.inspection,
                samples=samples,
                order=replace(self.inspection.order, batch=batch, samples=samples),
            ),
        )

    def measure_batch_step(self, batch: int) -> list[dict[str, int]]:
        """Bytes that each rank held in a step, by kind, without the process's resident memory."""
        validated_run = self.validate_batch(batch, self.inspection.samples // batch * batch)
        return [
            {kind: size for kind, size in each.items() if kind != "resident"}
            for each in measure_step_memory(self.launcher, validated_run)
        ]
