"""Learning rates of schedulers that count epochs, or steps of a batch of another size.

A training steps its scheduler once for each global batch. `Scaled` steps the job's own scheduler
less or more often: once for each epoch, or as often as with the batch that the job was written
for. The linear scaling rule multiplies the rate by the factor of the batch. Warm-up: the rate
grows to its new value during the first steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paragrad.datasets.sample_order import SampleOrder
from paragrad.errors import Refused
from paragrad.jobs.job import Job
from paragrad.notation.choices import describe_unknown_name

MAX_WARM_UP = 1_000_000  # the largest number of epochs of warm-up

# what a scheduler may count
SCHEDULER_UNITS = ("epoch", "step")
# the factor of the rate, by how many times the batch is larger
SCALING_RULES: dict[str, Callable[[float], float]] = {
    "linear": lambda times: times,  # Goyal et al. 2017, arXiv 1706.02677
    # Krizhevsky 2014, arXiv 1404.5997: this keeps the variance of an update
    "sqrt": math.sqrt,
}


class Scaled(LRScheduler):
    """The rates of a job's own schedule, times a factor that is reached gradually.

    In step t of the larger batch

        rate(t) = own(floor(t before / steps)) (1 + (factor - 1) min(1, t / warm_up))

    torch's SGD needs no correction of its momentum when the rate changes. Its buffer holds
    gradients, and each step multiplies the whole buffer by the current rate. Lars needs one (see
    its docstring).

    Attributes:
        own: The job's scheduler over the same optimizer, or None.

        factor: The factor (SCALING_RULES).

        warm_up: The steps in which the factor is reached, in equal parts (Goyal et al. 2017); 0
            means at once.

        before: How often `own` is stepped in an epoch: once if it counts epochs, otherwise for each
            step of the batch for which it was written.

        steps: The steps of an epoch with this batch. `own` is stepped so often that both end an
            epoch together.

        rates: The rates of the own schedule, by parameter group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        factor: float,
        warm_up: int = 0,
        own: LRScheduler | None = None,
        before: int = 1,
        steps: int = 1,
    ) -> None:
        """Create the scheduler.

        Args:
            optimizer: The optimizer, at the job's own rates.

            factor: The factor of the rates (SCALING_RULES).

            warm_up: The steps in which the factor is reached; 0 means at once.

            own: The job's scheduler over the same optimizer, or None.

            before: How often `own` is stepped in an epoch.

            steps: The steps of an epoch with this batch.
        """
        self.own = own
        self.factor = factor
        self.warm_up = warm_up
        self.before = before
        self.steps = steps
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Count a finished step of the larger batch.

        Args:
            epoch: Must be None; it exists because torch's schedulers have it.

        Raises:
            ValueError: An epoch was given.
        """
        if epoch is not None:
            raise ValueError(
                "Scaled counts steps, not epochs; leave out the epoch, and call step() once "
                "for each step"
            )
        own_steps = (
            [(self.last_epoch + more) * self.before // self.steps for more in (0, 1)]
            if self.last_epoch >= 0
            else [0, 0]
        )
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            # restore the rate that `own` set, because some schedulers continue from it
            _set_rate(group, rate)
        for _ in range(own_steps[1] - own_steps[0] if self.own is not None else 0):
            self.own.step()  # type: ignore[union-attr]
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        super().step()

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step, by parameter group."""
        reached = min(1.0, self.last_epoch / self.warm_up) if self.warm_up else 1.0
        return [rate * (1.0 + (self.factor - 1.0) * reached) for rate in self.rates]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the state of the job's own scheduler."""
        return {
            **super().state_dict(),
            "own": self.own.state_dict() if self.own is not None else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Args:
            state_dict: The state.
        """
        own = self.own
        super().load_state_dict(
            {name: value for name, value in state_dict.items() if name != "own"}
        )
        self.own = own
        if own is not None:
            own.load_state_dict(state_dict["own"])


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def adapt_scheduler(job: Job, samples: int) -> tuple[Job, str | None]:
    """Give a job a scheduler that counts the steps of its batch.

    The job's own scheduler may count epochs, or the job may request other rates for its batch.

    Args:
        job: The job.
        samples: The number of training samples.

    Returns:
        The job with the new scheduler, and a text that says what its rates are and why, or None if
        they are the job's own. The job itself if its scheduler is right as it is.

    Raises:
        Refused: scheduler_every, scale_lr, warm_up or own_batch is wrong.
    """
    if job.scheduler_every not in (None, *SCHEDULER_UNITS):
        raise Refused(
            f"job {job.name}: "
            + describe_unknown_name("scheduler_every", str(job.scheduler_every), SCHEDULER_UNITS)
        )
    steps = SampleOrder(samples, job.batch, 0).steps
    counts_epochs = job.scheduler is not None and job.scheduler_every == "epoch"
    if job.scale_lr is None and not job.warm_up:
        if not counts_epochs:
            return job, None
        build_scheduler = partial(_build_scheduler, job.scheduler, 1.0, 0, 1, steps)
        return job.replace(scheduler=build_scheduler, scheduler_every="step"), None
    _check_scaling(job)
    assert job.scale_lr is not None
    assert job.own_batch is not None
    before = 1 if counts_epochs else SampleOrder(samples, job.own_batch, 0).steps
    factor = SCALING_RULES[job.scale_lr](min(job.batch, samples) / min(job.own_batch, samples))
    warm_up_steps = round(job.warm_up * steps)
    explanation = (
        f"{job.scale_lr} scaling, because the batch is {job.batch} and the job's own batch is "
        f"{job.own_batch}"
        + (
            f"; from the job's own rate in equal parts over the first {warm_up_steps} steps "
            f"({job.warm_up:g} epochs)"
            if warm_up_steps
            else ""
        )
    )
    build_scheduler = partial(_build_scheduler, job.scheduler, factor, warm_up_steps, before, steps)
    return (
        job.replace(
            scheduler=build_scheduler,
            scheduler_every="step" if counts_epochs else job.scheduler_every,
            scale_lr=None,
            warm_up=0.0,
        ),
        f"{factor:.4g} times the job's own: {explanation}",
    )


def _check_scaling(job: Job) -> None:
    if job.scale_lr is None:
        raise Refused(
            f"job {job.name}: warm_up leads from the job's own learning rate to that of a larger "
            "batch; give scale_lr='linear' or 'sqrt' too (--scale-lr)"
        )
    if job.scale_lr not in SCALING_RULES:
        raise Refused(
            f"job {job.name}: "
            + describe_unknown_name("scale_lr", str(job.scale_lr), SCALING_RULES)
        )
    if (
        isinstance(job.warm_up, bool)
        or not isinstance(job.warm_up, int | float)
        or not 0 <= job.warm_up <= MAX_WARM_UP
    ):
        raise Refused(
            f"job {job.name}: warm_up must be a number of epochs from 0 to {MAX_WARM_UP:,}, got "
            f"{job.warm_up!r}"
        )
    if job.own_batch is None:
        raise Refused(
            f"job {job.name}: scale_lr needs the batch for which the learning rate was chosen, and "
            f"this job has had only batch {job.batch}; change it by job.replace(batch=...) "
            "(--batch), or give own_batch=... (an optimizer that is given together with a batch "
            "is for that batch)"
        )
    if isinstance(job.own_batch, bool) or not isinstance(job.own_batch, int) or job.own_batch < 1:
        raise Refused(
            f"job {job.name}: own_batch must be a whole number from 1, got {job.own_batch!r}"
        )


def _build_scheduler(
    own: Callable[[Optimizer], Any] | None,
    factor: float,
    warm_up: int,
    before: int,
    steps: int,
    optimizer: Optimizer,
) -> Any:
    scheduler = own(optimizer) if own is not None else None
    if own is not None and (
        not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau)
    ):
        return scheduler  # validation reports what is wrong with it
    return Scaled(optimizer, factor, warm_up, scheduler, before, steps)
