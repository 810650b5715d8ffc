"""Milliseconds per step, from step to step: of whole paragrad trainings, read from their records,
and of loops in workers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from common import compute_step_milliseconds
from torch import Tensor, nn
from workers import Workers, serve

import paragrad as pg
from paragrad.commands.train import train_on_ranks
from paragrad.commands.trial import choose_by_trial
from paragrad.jobs.job import open_dataset
from paragrad.launch import Launcher
from paragrad.record.record import DETAILED_STEPS, read_lines
from paragrad.trainer.settings import Settings
from paragrad.validation.validate import validate_run


class Setting(Protocol):
    """A job, and the number of its steps to run."""

    def job(self) -> pg.Job: ...

    @property
    def steps(self) -> int: ...


def make_training_measure(
    ranks: Launcher, strategy: str, setting: Setting, folder: Path, settings: Settings | None = None
) -> Callable[[], float]:
    number = itertools.count()

    def measure_step() -> float:
        place = folder / f"{strategy}-{setting}-{next(number)}"
        place.mkdir(parents=True)
        train_on_ranks(
            ranks,
            choose_by_trial(
                ranks,
                validate_run(
                    setting.job(), strategy, replace(settings or Settings(), limit=setting.steps)
                ),
            ),
            place,
        )
        starts = [
            line["start"]
            for line in read_lines(place / "rank-0.jsonl", spans=False)
            if line["kind"] == "step"
        ]
        # the first steps are recorded in detail, and several are compared with one worker's
        few = len(starts) < 2 * DETAILED_STEPS.stop
        return compute_step_milliseconds(starts if few else starts[DETAILED_STEPS.stop - 3 :])

    return measure_step


def make_loop_measure(workers: Workers, setting: Setting) -> Callable[[], float]:
    return lambda: compute_step_milliseconds(workers.ask(setting)[0])


def train_with_ddp(job: pg.Job, batch: int, steps: int, data: Path) -> list[float]:
    """Train with DDP over gloo in a plain loop, and return the start time of each step.

    This runs in a rank that torchrun started. The batch is the first samples of the job, divided
    over the ranks.
    """
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = open_dataset(job.train, data)
    inputs, targets = (
        torch.stack([torch.as_tensor(samples[number][place]) for number in range(batch)])[
            dist.get_rank() :: dist.get_world_size()
        ]
        for place in (0, 1)
    )
    model = nn.parallel.DistributedDataParallel(job.build_model())
    optimizer = job.optimizer(model.parameters())
    starts = list[float]()
    for _ in range(steps):
        starts.append(time.perf_counter())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    # without it, the first rank to finish would close connections that other ranks still read
    dist.barrier()
    dist.destroy_process_group()
    return starts


# ---- in a rank of a peer ---------------------------------------------------------------------
@dataclass(frozen=True)
class Loop:
    """The parts of a loop over batches.

    step: computes the gradients from inputs and targets.
    batch: returns the batch of a step, given the number of the step.
    """

    update: torch.optim.Optimizer
    step: Callable[[Tensor, Tensor], object]
    batch: Callable[[int], tuple[Tensor, Tensor]]


def serve_loops(kind: str, address: str, made: Callable[[Any], Loop]) -> None:
    """Train each requested setting with torch alone, and answer with the start times of its steps.

    kind: the kind of the peer. If it contains "gloo", the ranks use gloo, otherwise shm. If it
    contains "in step", the ranks wait for each other after every step.
    """
    import paragrad.backends  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo" if "gloo" in kind else "shm")

    def time_steps(setting: Setting) -> list[float]:
        torch.manual_seed(0)
        loop = made(setting)
        found = []
        for number in range(setting.steps):
            found.append(time.perf_counter())
            inputs, targets = loop.batch(number)
            loop.update.zero_grad()
            loop.step(inputs, targets)
            loop.update.step()
            if "in step" in kind:
                dist.barrier()
        dist.barrier()
        return found

    serve(address, time_steps)
    dist.destroy_process_group()


def make_backward(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor, Tensor], None]:
    return lambda inputs, targets: loss(model(inputs), targets).backward()


def shuffle_batches(
    inputs: Tensor, targets: Tensor, batch: int
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function that gives the batch of a step, from a dataset in memory. After the last
    batch it begins again with the first.
    """
    order = torch.randperm(len(inputs)).split(batch)
    return lambda number: (inputs[mine := order[number % len(order)]], targets[mine])
