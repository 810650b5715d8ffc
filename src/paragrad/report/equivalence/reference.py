"""What a strategy is compared with: a plain PyTorch loop, and its rounding baseline.

The loop (`plain_loop.py`) takes the whole global batch in one loss call, so it shares no fault of
weights with the strategy. Only if batch norm takes statistics of micro-batches, its model runs on
the same micro-batches.

The rounding baseline is the same loop with every parameter moved by about one unit in the last
place before every step. Its distance is what rounding alone does to this model. It does not reverse
its samples. In a model that draws noise or mixes samples this would be another training, and a
wrong strategy would pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paragrad.datasets.loading import Dataset, separate_target
from paragrad.jobs.job import Job
from paragrad.jobs.precision import perturb_parameters
from paragrad.report.equivalence.plain_loop import PlainLoop
from paragrad.runtime.generators import keep_generators, seed_everything
from paragrad.runtime.world import World
from paragrad.strategies.serial import Serial
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.trainer import Trainer

WHOLE_BATCH_LOSS = "loss of the whole batch"  # compared with the mean over micro-batches


class SerialReference:
    """A plain loop and, if requested, its rounding baseline, over the same batches of a job.

    Attributes:
        norm_statistics: names of running statistics if batch norm is computed in training, else
            None.

        coarsest_eps: the eps of the coarsest numbers that the model computes.

        micro_count: number of micro-batches.

        serial: the plain loop.

        rounding_baseline: the loop of the rounding baseline; None without it.

        sign_generator: draws the directions in which the baseline's parameters move.
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
        training = None if isinstance(first_step, str) else first_step.training
        self.norm_statistics = (
            training.batch_norm.normalized_buffers
            if training is not None and training.batch_norm.has_computed
            else None
        )
        self.coarsest_eps = training.setup.coarsest_eps if training is not None else 0.0
        self.micro_count = 1 if self.norm_statistics is None else strategy.division.micro
        loops = [
            PlainLoop(
                job,
                train,
                places,
                device,
                training.setup.draws if training is not None else None,
                strategy.division if self.micro_count > 1 else None,
            )
            for _ in range(1 + rounding_baseline)
        ]
        self.serial = loops[0]
        self.rounding_baseline = loops[1] if rounding_baseline else None
        self.sign_generator = torch.Generator().manual_seed(job.seed)

    @property
    def loops(self) -> Iterator[PlainLoop]:
        """The plain loop and that of the rounding baseline."""
        yield self.serial
        if self.rounding_baseline is not None:
            yield self.rounding_baseline

    def step(self) -> None:
        """Train the next batch.

        Both loops draw the same random numbers. The strategy's random numbers are as if there were
        no reference.
        """
        if self.rounding_baseline is not None:
            perturb_parameters(self.rounding_baseline.model, self.sign_generator)
        for loop in self.loops:
            with keep_generators():
                seed_everything(loop.job.seed + 1 + loop.steps)
                loop.step()

    def __str__(self) -> str:
        if self.micro_count == 1:
            return "serial"
        is_checked = self.serial.joins_outputs or self.serial.loss_deviation is not None
        return f"serial(micro={self.micro_count})" + (
            "" if is_checked else " with weights that were not checked"
        )


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
        for fetched in trainer.iterate_batches_at(train, job.make_order(train), [place]):
            trainer.step(*separate_target(fetched))
    except Exception as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return trainer
