"""What a strategy is compared with: serial, and beside it its rounding twin.

Serial takes the whole global batch in one loss call, so that it shares no fault of weights with
the strategy. Only where batch norm takes statistics of micro-batches it runs the same ones;
then their weights are checked against one call.

The twin is serial with every parameter moved by about one unit in the last place before every
step. How far it comes from serial is what rounding alone does to this model. It does not
reverse its samples: in a model that draws noise or mixes samples that would be another
training, and a wrong strategy would hide behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from paragrad.datasets.loading import Dataset, called, copied, cut, parted
from paragrad.engine.loss_additivity import statistics_apart
from paragrad.engine.probe import evaluating
from paragrad.jobs.job import Job
from paragrad.jobs.precision import move
from paragrad.runtime.generators import generators_kept, seed_everything
from paragrad.runtime.world import World
from paragrad.strategies.serial import Serial
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.trainer import Trainer

WHOLE = "loss of the whole batch"  # beside the weighted mean of its micro-batches


class Reference:
    """Serial and, with twin=True, its rounding twin, over the same batches of a job.

    micro: its micro-batches;  normed: the names of running statistics where a batch norm is
    computed in training, else None.
    """

    def __init__(
        self,
        device: torch.device,
        job: Job,
        strategy: Strategy,
        train: Dataset,
        places: list[tuple[int, range]],
        twin: bool,
    ) -> None:
        tried = _tried(job, train, places[0], device)
        self.normed = (
            None
            if isinstance(tried, str) or not tried.batch_norm.computed
            else tried.batch_norm.normed
        )
        self.micro = 1 if self.normed is None else strategy.division.micro
        like = strategy if self.micro > 1 else None
        self.serial = Trainer.of_job(World(device=device), job, Serial(), like=like)
        self.twin = Trainer.of_job(World(device=device), job, Serial(), like=like) if twin else None
        self.running = {
            trainer: trainer.batches_at(train, job.order(len(train)), places)
            for trainer in self.trainers
        }
        self.signs = torch.Generator().manual_seed(job.seed)
        # of the loss of micro-batches from that of the whole batch
        self.apart: float | None = None

    @property
    def trainers(self) -> Iterator[Trainer]:
        yield self.serial
        if self.twin is not None:
            yield self.twin

    def step(self) -> None:
        """The next batch. Both draw the same random numbers, and the strategy's are as if there
        were no reference.
        """
        if self.twin is not None:
            move(self.twin.model, self.signs)
        for trainer in self.trainers:
            fetched = next(self.running[trainer])
            if trainer is self.serial and self.micro > 1:
                self.apart = _apart_from_whole(trainer, *parted(fetched))
            with generators_kept():
                seed_everything(trainer.seed + 1 + trainer.steps)
                trainer.step(*parted(fetched))

    def __str__(self) -> str:
        if self.micro == 1:
            return "serial"
        return f"serial(micro={self.micro})" + (
            " with weights that were not checked" if self.apart is None else ""
        )


def _apart_from_whole(trainer: Trainer, inputs: Any, target: Any) -> float | None:
    """How far the weighted mean over micro-batches is from the loss of one call over the whole
    batch; None where the model in eval mode, which mixes no samples, gives the loss nothing to
    go by.
    """
    batch = trainer.feed.batch
    assert batch is not None
    samples = len(batch.indices)
    try:
        with (
            evaluating(trainer.model),
            trainer.casting(),
            generators_kept(),
            statistics_apart(),
            torch.set_grad_enabled(trainer.module.by_graph),
        ):
            whole = _loss(trainer, copied(inputs), target, samples)
            parts = [
                _loss(
                    trainer,
                    cut(copied(inputs), part, samples),
                    cut(target, part, samples),
                    len(micro.positions),
                )
                for micro, part in batch.cuts()
            ]
    except (TypeError, AttributeError, KeyError, ValueError, RuntimeError):
        return None
    weight = sum(each[1] for each in parts)
    if not weight or not whole[1]:
        return 0.0 if weight == whole[1] else math.inf
    mean = sum(each[0] for each in parts) / weight
    expected = whole[0] / whole[1]
    scale = max(abs(expected), sum(abs(each[0]) for each in parts) / weight)
    found = abs(mean - expected) / scale if scale else 0.0
    return math.inf if math.isnan(found) else found


def _loss(trainer: Trainer, inputs: Any, target: Any, samples: int) -> tuple[float, float]:
    total, weight = trainer.module.pair(called(trainer.model, inputs), target, samples)
    return float(total.detach()), weight


def precision(
    job: Job, train: Dataset, place: tuple[int, range], device: torch.device
) -> tuple[torch.dtype, str | None]:
    """(float64, None); or, where a step of serial fails in float64 and none in float32 does,
    (float32, why).
    """
    why = _tried(job.replace(dtype=torch.float64), train, place, device)
    if not isinstance(why, str) or isinstance(
        _tried(job.replace(dtype=torch.float32), train, place, device), str
    ):
        # where it fails in both, the run itself will say so
        return torch.float64, None
    return torch.float32, f"a step in float64 fails: {why}"


def _tried(
    job: Job, train: Dataset, place: tuple[int, range], device: torch.device
) -> Trainer | str:
    """A serial trainer after its first step, or the message of its failure."""
    try:
        trainer = Trainer.of_job(World(device=device), job, Serial())
        for fetched in trainer.batches_at(train, job.order(len(train)), [place]):
            trainer.step(*parted(fetched))
    except Exception as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return trainer
