"""Milliseconds a step, from step to step: of whole trainings of ours, by their records, and of loops in workers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from common import between
from torch import Tensor
from workers import Workers

import paragrad as pg
from paragrad.record.record import lines_of
from paragrad.training.admission import admitted
from paragrad.training.settings import Settings
from paragrad.verbs.train import run
from paragrad.verbs.trial import tried
from paragrad.world.launching import Ranks


class Setting(Protocol):
    """A job, and how many steps of it are made."""

    def job(self) -> pg.Job: ...

    @property
    def steps(self) -> int: ...


def ours(ranks: Ranks, strategy: str, setting: Setting, folder: Path,
         settings: Settings | None = None) -> Callable[[], float]:
    number = itertools.count()

    def milliseconds() -> float:
        place = folder / f"{strategy}-{setting}-{next(number)}"
        place.mkdir(parents=True)
        run(ranks, tried(ranks, admitted(setting.job(), strategy, replace(settings or Settings(), limit=setting.steps))), place)
        return between([line["start"] for line in lines_of(place / "rank-0.jsonl", spans=False) if line["kind"] == "step"])
    return milliseconds


def theirs(workers: Workers, setting: Setting) -> Callable[[], float]:
    return lambda: between(workers.ask(setting)[0])


def stepped(model: Callable[[Tensor], Tensor], loss: Callable[[Tensor, Tensor], Tensor], update: torch.optim.Optimizer,
            batch: Callable[[int], tuple[Tensor, Tensor]], steps: int,
            after: Callable[[], object] | None = None) -> list[float]:
    """In a worker: steps as one would write them. batch: of the number of a step;  after: is called after each. Gives when each
    began."""
    found = []
    for number in range(steps):
        found.append(time.perf_counter())
        inputs, targets = batch(number)
        update.zero_grad()
        loss(model(inputs), targets).backward()
        update.step()
        if after is not None:
            after()
    return found
