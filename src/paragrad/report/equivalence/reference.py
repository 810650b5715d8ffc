"""What a strategy is compared with: serial, and its rounding baseline.

Serial takes the whole global batch in one loss call, so it shares no fault of weights with the
strategy. Only if batch norm takes statistics of micro-batches, serial runs the same micro-batches.
Their weights are then checked against one call.

The rounding baseline is serial with every parameter moved by about one unit in the last place
before every step. Its distance from serial is what rounding alone does to this model. It does not
reverse its samples. In a model that draws noise or mixes samples this would be another training,
and a wrong strategy would pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from paragrad.datasets.loading import Dataset, clone_batch, separate_target, slice_batch
from paragrad.engine.loss_additivity import disable_batch_statistics
from paragrad.engine.probe import use_model_eval_mode
from paragrad.jobs.job import Job
from paragrad.jobs.loss import call_model
from paragrad.jobs.precision import perturb_parameters
from paragrad.runtime.generators import keep_generators, seed_everything
from paragrad.runtime.world import World
from paragrad.strategies.serial import Serial
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.trainer import Trainer

WHOLE_BATCH_LOSS = "loss of the whole batch"  # compared with the mean over micro-batches


class SerialReference:
    """Serial and, if requested, its rounding baseline, over the same batches of a job.

    Attributes:
        norm_statistics: names of running statistics if batch norm is computed in training, else
            None.

        micro_count: number of micro-batches.

        serial: the trainer of serial.

        rounding_baseline: the trainer of the rounding baseline; None without it.

        batch_iterators: the batches of each trainer.

        sign_generator: draws the directions in which the baseline's parameters move.

        loss_deviation: deviation of the loss of micro-batches from that of the whole batch; None if
            unknown.
    """

    def __init__(
        self,
        device: torch.device,
        job: Job,
        strategy: Strategy,
        train: Dataset,
        places: list[tuple[int, range]],
        rounding_baseline: bool,
    ) -> None:
        first_step = _try_serial_step(job, train, places[0], device)
        self.norm_statistics = (
            None
            if isinstance(first_step, str) or not first_step.training.batch_norm.has_computed
            else first_step.training.batch_norm.normalized_buffers
        )
        self.micro_count = 1 if self.norm_statistics is None else strategy.division.micro
        division_source = strategy if self.micro_count > 1 else None
        self.serial = Trainer.build_for_job(
            World(device=device), job, Serial(), compared_strategy=division_source
        )
        self.rounding_baseline = (
            Trainer.build_for_job(
                World(device=device), job, Serial(), compared_strategy=division_source
            )
            if rounding_baseline
            else None
        )
        self.batch_iterators = {
            trainer: trainer.iterate_batches_at(train, job.make_order(len(train)), places)
            for trainer in self.trainers
        }
        self.sign_generator = torch.Generator().manual_seed(job.seed)
        self.loss_deviation: float | None = None

    @property
    def trainers(self) -> Iterator[Trainer]:
        """The trainers of serial and of the rounding baseline."""
        yield self.serial
        if self.rounding_baseline is not None:
            yield self.rounding_baseline

    def step(self) -> None:
        """Train the next batch.

        Both trainers draw the same random numbers. The strategy's random numbers are as if there
        were no reference.
        """
        if self.rounding_baseline is not None:
            perturb_parameters(self.rounding_baseline.model, self.sign_generator)
        for trainer in self.trainers:
            fetched = next(self.batch_iterators[trainer])
            if trainer is self.serial and self.micro_count > 1:
                self.loss_deviation = _measure_loss_deviation(trainer, *separate_target(fetched))
            with keep_generators():
                seed_everything(trainer.training.seed + 1 + trainer.steps)
                trainer.step(*separate_target(fetched))

    def __str__(self) -> str:
        if self.micro_count == 1:
            return "serial"
        return f"serial(micro={self.micro_count})" + (
            " with weights that were not checked" if self.loss_deviation is None else ""
        )


def _measure_loss_deviation(trainer: Trainer, inputs: Any, target: Any) -> float | None:
    """Measure how far the weighted mean over micro-batches is from the loss of the whole batch.

    The model is in eval mode, which mixes no samples. Returns None if the loss cannot be computed
    in eval mode.
    """
    batch = trainer.training.feed.pending_batch
    assert batch is not None
    samples = len(batch.sample_indices)
    try:
        with (
            use_model_eval_mode(trainer.model),
            trainer.training.use_autocast(),
            keep_generators(),
            disable_batch_statistics(),
            torch.set_grad_enabled(trainer.training.module.uses_graph_divisor),
        ):
            whole_batch = _compute_weighted_loss(trainer, clone_batch(inputs), target, samples)
            parts = [
                _compute_weighted_loss(
                    trainer,
                    slice_batch(clone_batch(inputs), part, samples),
                    slice_batch(target, part, samples),
                    len(micro.positions),
                )
                for micro, part in batch.iterate_slices()
            ]
    except (TypeError, AttributeError, KeyError, ValueError, RuntimeError):
        return None
    weight = sum(each[1] for each in parts)
    if not weight or not whole_batch[1]:
        return 0.0 if weight == whole_batch[1] else math.inf
    mean = sum(each[0] for each in parts) / weight
    expected = whole_batch[0] / whole_batch[1]
    scale = max(abs(expected), sum(abs(each[0]) for each in parts) / weight)
    deviation = abs(mean - expected) / scale if scale else 0.0
    return math.inf if math.isnan(deviation) else deviation


def _compute_weighted_loss(
    trainer: Trainer, inputs: Any, target: Any, samples: int
) -> tuple[float, float]:
    total, weight = trainer.training.module.compute_loss_sum(
        call_model(trainer.model, inputs), target, samples
    )
    return float(total.detach()), weight


def choose_reference_dtype(
    job: Job, train: Dataset, place: tuple[int, range], device: torch.device
) -> tuple[torch.dtype, str | None]:
    """Choose the dtype of the comparison.

    It is float64, or float32 if a step of serial fails in float64 and not in float32.

    Args:
        job: the job.
        train: the dataset.
        place: (epoch, batch) of the step.
        device: the device of the trainer.

    Returns:
        (dtype, why it is not float64 or None).
    """
    failure = _try_serial_step(job.replace(dtype=torch.float64), train, place, device)
    if not isinstance(failure, str) or isinstance(
        _try_serial_step(job.replace(dtype=torch.float32), train, place, device), str
    ):
        # if it fails in both, the run itself reports the failure
        return torch.float64, None
    return torch.float32, f"a step in float64 fails: {failure}"


def _try_serial_step(
    job: Job, train: Dataset, place: tuple[int, range], device: torch.device
) -> Trainer | str:
    """Return a serial trainer after its first step, or the message of its failure."""
    try:
        trainer = Trainer.build_for_job(World(device=device), job, Serial())
        for fetched in trainer.iterate_batches_at(train, job.make_order(len(train)), [place]):
            trainer.step(*separate_target(fetched))
    except Exception as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return trainer
