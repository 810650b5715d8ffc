"""batch="fit": the largest global batch of which no rank holds more than a budget, found by
what ranks held in single steps.
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

# samples of each micro-batch in the steps from which it is foretold
FEW_SAMPLES = 2
MORE_SAMPLES = 4
MAX_TRIES = 5  # steps of a batch that was foretold to fit
MAX_MULTIPLES_BELOW = 64  # multiples below it that the door is asked about


def fit_job_batch(
    job: Job, requested: str | Strategy, settings: Settings
) -> tuple[Job, Settings, str | None]:
    """(the job with its batch, settings without the budget, why it is as large as that); as
    they are where the batch is given.

    Trains two small batches for a step each, extrapolates what every rank held, and makes a
    step of the batch that was found; a run that is resumed has one. Raises Refused.
    """
    if not isinstance(job, Job) or job.batch != "fit":
        return job, settings, None
    if settings.memory_budget is None:
        raise Refused(
            f"job {job.name}: batch='fit' wants to know how much a rank may hold; add memory='2GB' "
            f"(--memory 2GB), "
            "or give a whole number"
        )
    if settings.resume is not None:
        saved = find_newest_checkpoint(Path(settings.resume))
        if (batch := saved.state["identity"].get("batch")) is None:
            raise Refused(
                f"{saved.folder} was saved in a loop of its own, and knows no batch; go on with it "
                f"there"
            )
        return job.replace(batch=batch), replace(settings, memory=None), f"that of {saved.folder}"
    if get_launched_size() is not None:
        raise Refused(
            "batch='fit' starts ranks of its own, and cannot under a launcher; find it with plain "
            "python, and give "
            "the number here"
        )
    chosen = strategy(requested)
    plain = replace(settings, memory=None)
    resolved = resolve_and_check_strategy(chosen, detect_environment(plain))
    if resolved.adapts_shares:
        raise Refused(
            f"{chosen}: batch='fit' fits the largest share, and these change; say the shares, such "
            f"as shares=[3, 1]"
        )
    left = read_available_memory() if settings.device == "cpu" else None
    if left is not None and settings.memory_budget * resolved.size > left:
        raise Refused(
            f"job {job.name}: memory {format_bytes(settings.memory_budget)} for each of "
            f"{resolved.size} rank(s) "
            f"is more than the "
            f"{format_bytes(left)} that this host has left; give at most "
            f"{left // resolved.size >> 20}MiB"
        )
    division = resolved.division
    grain = sum(division.shares) * division.micro
    facts = inspect_job(job.replace(batch=MORE_SAMPLES * grain), plain.folder)
    with Launcher(resolved.size) as ranks:
        found = BatchSearch(ranks, job, chosen, plain, facts, grain, settings.memory_budget)
        batch, because = found.find_largest_batch()
    return job.replace(batch=batch), plain, because


class BatchSearch:
    """The search. grain: all micro-batches are as large as each other where the batch is a
    multiple of it.
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
        # let: what else the batch had to be
        self.batch_multiple = batch_multiple
        self.budget = budget
        self.refusal_note = ""

    def find_largest_batch(self) -> tuple[int, str]:
        """(the batch, why)."""
        few, more = (
            min(count * self.batch_multiple, self.inspection.samples)
            for count in (FEW_SAMPLES, MORE_SAMPLES)
        )
        less = self.measure_totals(few)
        most = self.measure_totals(more) if more > few else self.measure_totals(few)
        slopes = [(b - a) / max(1, more - few) for a, b in zip(less, most, strict=True)]
        fits = min(
            few + (self.budget - each) / slope
            if slope > 0
            else math.inf
            if each <= self.budget
            else 0
            for each, slope in zip(less, slopes, strict=True)
        )
        batch = self.round_batch_down(min(fits, self.inspection.samples))
        for _ in range(MAX_TRIES):
            if (batch := self.find_valid_batch(batch)) < 1:
                break
            held_by = self.measure_batch_step(batch)
            fullest = max(held_by, key=lambda each: sum(each.values()))
            if (over := sum(fullest.values()) - self.budget) <= 0:
                return batch, self.explain_batch(batch, fullest)
            batch = self.round_batch_down(
                batch - max(self.batch_multiple, over / max(slopes)) if max(slopes) > 0 else 0
            )
        # what came of the line did not fit, and this did
        if few % self.batch_multiple == 0 and max(less) <= self.budget:
            return few, self.explain_batch(
                few,
                max(self.measure_batch_step(few), key=lambda each: sum(each.values())),
                f"the largest that was seen to fit, for {MAX_TRIES} larger ones held more than was "
                f"foretold",
            )
        least = max(
            a - slope * (few - self.batch_multiple) for a, slope in zip(less, slopes, strict=True)
        )
        raise Refused(
            f"job {self.job.name}, {self.chosen}: memory {format_bytes(self.budget)} does not hold "
            f"a step "
            f"of {self.batch_multiple} "
            f"sample{'s' if self.batch_multiple > 1 else ''}, the smallest batch of equal "
            f"micro-batches: "
            f"the fullest rank "
            f"holds about {format_bytes(least)}; give more, or more workers that share the model"
        )

    def round_batch_down(self, batch: float) -> int:
        """Down to equal micro-batches; all samples where they are fewer than that."""
        whole = math.floor(batch) // self.batch_multiple * self.batch_multiple
        return whole or (self.inspection.samples if batch >= self.inspection.samples else 0)

    def explain_batch(self, batch: int, fullest: dict[str, int], limit: str = "") -> str:
        multiple = (
            f"the largest multiple of {self.batch_multiple}, which makes micro-batches "
            f"equal,{self.refusal_note}"
        )
        limit = limit or (
            "all samples of the dataset"
            if batch == self.inspection.samples
            else f"{multiple} that the dataset has"
            if batch + self.batch_multiple > self.inspection.samples
            else f"{multiple} of which no rank is to hold more than {format_bytes(self.budget)}, "
            f"by a "
            f"straight line through "
            "two smaller steps"
        )
        return (
            f"{limit}; in a step of it the fullest rank held "
            f"{format_bytes(sum(fullest.values()))}: "
            f"{format_memory_kinds(fullest)}"
        )

    def measure_totals(self, batch: int) -> list[int]:
        return [sum(each.values()) for each in self.measure_batch_step(batch)]

    def find_valid_batch(self, batch: int) -> int:
        """The largest multiple up to it whose epochs the door lets in, their short last batch
        too; itself where none is.
        """
        for fewer in range(
            batch, max(0, batch - MAX_MULTIPLES_BELOW * self.batch_multiple), -self.batch_multiple
        ):
            with suppress(Refused):
                self.validate_batch(fewer, self.inspection.samples)
                self.refusal_note = (
                    "" if fewer == batch else " whose epochs end in no batch that is refused,"
                )
                return fewer
        return batch

    def validate_batch(self, batch: int, samples: int) -> ValidatedRun:
        """With that batch, of a dataset of so many samples."""
        job = self.job.replace(batch=batch)
        return validate_run(
            job,
            self.chosen,
            self.settings,
            replace(self.inspection, samples=samples, order=job.make_order(samples)),
        )

    def measure_batch_step(self, batch: int) -> list[dict[str, int]]:
        """What each rank held in a step of so many samples, by kind; its process left out."""
        checked = self.validate_batch(batch, self.inspection.samples // batch * batch)
        return [
            {kind: size for kind, size in each.items() if kind != "resident"}
            for each in measure_step_memory(self.launcher, checked)
        ]
