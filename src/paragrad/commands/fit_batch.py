"""batch="fit": the largest global batch of which no rank holds more than a budget, found by
what ranks held in single steps.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paragrad.commands.memory import one_step
from paragrad.errors import Refused
from paragrad.jobs.job import Job
from paragrad.launch import Ranks
from paragrad.report.comparison_table import held, sized
from paragrad.runtime.launcher_env import memory_left
from paragrad.runtime.rendezvous import launched_size
from paragrad.strategies.registry import strategy
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.checkpoint.checkpoint_files import newest
from paragrad.trainer.settings import Settings
from paragrad.validation.inspect_job import Findings, examined
from paragrad.validation.validate import Admitted, admitted, here_for, ready

# samples of each micro-batch in the steps from which it is foretold
FEW = 2
MORE = 4
TRIES = 5  # steps of a batch that was foretold to fit
FEWER = 64  # multiples below it that the door is asked about


def fitted(job: Job, asked: str | Strategy, settings: Settings) -> tuple[Job, Settings, str | None]:
    """(the job with its batch, settings without the budget, why it is as large as that); as
    they are where the batch is given.

    Trains two small batches for a step each, extrapolates what every rank held, and makes a
    step of the batch that was found; a run that is resumed has one. Raises Refused.
    """
    if not isinstance(job, Job) or job.batch != "fit":
        return job, settings, None
    if settings.budget is None:
        raise Refused(
            f"job {job.name}: batch='fit' wants to know how much a rank may hold; add memory='2GB' "
            f"(--memory 2GB), "
            "or give a whole number"
        )
    if settings.resume is not None:
        saved = newest(Path(settings.resume))
        if (batch := saved.state["identity"].get("batch")) is None:
            raise Refused(
                f"{saved.folder} was saved in a loop of its own, and knows no batch; go on with it "
                f"there"
            )
        return job.replace(batch=batch), replace(settings, memory=None), f"that of {saved.folder}"
    if launched_size() is not None:
        raise Refused(
            "batch='fit' starts ranks of its own, and cannot under a launcher; find it with plain "
            "python, and give "
            "the number here"
        )
    chosen = strategy(asked)
    plain = replace(settings, memory=None)
    resolved = ready(chosen, here_for(plain))
    if resolved.follows:
        raise Refused(
            f"{chosen}: batch='fit' fits the largest share, and these change; say the shares, such "
            f"as shares=[3, 1]"
        )
    left = memory_left() if settings.device == "cpu" else None
    if left is not None and settings.budget * resolved.size > left:
        raise Refused(
            f"job {job.name}: memory {sized(settings.budget)} for each of {resolved.size} rank(s) "
            f"is more than the "
            f"{sized(left)} that this host has left; give at most {left // resolved.size >> 20}MiB"
        )
    division = resolved.division
    grain = sum(division.shares) * division.micro
    facts = examined(job.replace(batch=MORE * grain), plain.folder)
    with Ranks(resolved.size) as ranks:
        found = Fitting(ranks, job, chosen, plain, facts, grain, settings.budget)
        batch, because = found.largest()
    return job.replace(batch=batch), plain, because


class Fitting:
    """The search. grain: all micro-batches are as large as each other where the batch is a
    multiple of it.
    """

    def __init__(
        self,
        ranks: Ranks,
        job: Job,
        chosen: Strategy,
        settings: Settings,
        facts: Findings,
        grain: int,
        budget: int,
    ) -> None:
        self.ranks = ranks
        self.job = job
        self.chosen = chosen
        self.settings = settings
        self.facts = facts
        # let: what else the batch had to be
        self.grain = grain
        self.budget = budget
        self.let = ""

    def largest(self) -> tuple[int, str]:
        """(the batch, why)."""
        few, more = (min(count * self.grain, self.facts.samples) for count in (FEW, MORE))
        less = self.totals(few)
        most = self.totals(more) if more > few else self.totals(few)
        slopes = [(b - a) / max(1, more - few) for a, b in zip(less, most, strict=True)]
        fits = min(
            few + (self.budget - each) / slope
            if slope > 0
            else math.inf
            if each <= self.budget
            else 0
            for each, slope in zip(less, slopes, strict=True)
        )
        batch = self.rounded(min(fits, self.facts.samples))
        for _ in range(TRIES):
            if (batch := self.let_in(batch)) < 1:
                break
            held_by = self.step(batch)
            fullest = max(held_by, key=lambda each: sum(each.values()))
            if (over := sum(fullest.values()) - self.budget) <= 0:
                return batch, self.because(batch, fullest)
            batch = self.rounded(
                batch - max(self.grain, over / max(slopes)) if max(slopes) > 0 else 0
            )
        # what came of the line did not fit, and this did
        if few % self.grain == 0 and max(less) <= self.budget:
            return few, self.because(
                few,
                max(self.step(few), key=lambda each: sum(each.values())),
                f"the largest that was seen to fit, for {TRIES} larger ones held more than was "
                f"foretold",
            )
        least = max(a - slope * (few - self.grain) for a, slope in zip(less, slopes, strict=True))
        raise Refused(
            f"job {self.job.name}, {self.chosen}: memory {sized(self.budget)} does not hold a step "
            f"of {self.grain} "
            f"sample{'s' if self.grain > 1 else ''}, the smallest batch of equal micro-batches: "
            f"the fullest rank "
            f"holds about {sized(least)}; give more, or more workers that share the model"
        )

    def rounded(self, batch: float) -> int:
        """Down to equal micro-batches; all samples where they are fewer than that."""
        whole = math.floor(batch) // self.grain * self.grain
        return whole or (self.facts.samples if batch >= self.facts.samples else 0)

    def because(self, batch: int, fullest: dict[str, int], limit: str = "") -> str:
        multiple = (
            f"the largest multiple of {self.grain}, which makes micro-batches equal,{self.let}"
        )
        limit = limit or (
            "all samples of the dataset"
            if batch == self.facts.samples
            else f"{multiple} that the dataset has"
            if batch + self.grain > self.facts.samples
            else f"{multiple} of which no rank is to hold more than {sized(self.budget)}, by a "
            f"straight line through "
            "two smaller steps"
        )
        return (
            f"{limit}; in a step of it the fullest rank held {sized(sum(fullest.values()))}: "
            f"{held(fullest)}"
        )

    def totals(self, batch: int) -> list[int]:
        return [sum(each.values()) for each in self.step(batch)]

    def let_in(self, batch: int) -> int:
        """The largest multiple up to it whose epochs the door lets in, their short last batch
        too; itself where none is.
        """
        for fewer in range(batch, max(0, batch - FEWER * self.grain), -self.grain):
            with suppress(Refused):
                self.admitted(fewer, self.facts.samples)
                self.let = (
                    "" if fewer == batch else " whose epochs end in no batch that is refused,"
                )
                return fewer
        return batch

    def admitted(self, batch: int, samples: int) -> Admitted:
        """With that batch, of a dataset of so many samples."""
        job = self.job.replace(batch=batch)
        return admitted(
            job,
            self.chosen,
            self.settings,
            replace(self.facts, samples=samples, order=job.order(samples)),
        )

    def step(self, batch: int) -> list[dict[str, int]]:
        """What each rank held in a step of so many samples, by kind; its process left out."""
        checked = self.admitted(batch, self.facts.samples // batch * batch)
        return [
            {kind: size for kind, size in each.items() if kind != "resident"}
            for each in one_step(self.ranks, checked)
        ]
