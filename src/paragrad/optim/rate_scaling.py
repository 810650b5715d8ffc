"""The learning rate of a job whose batch is another than the one it was written for."""

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

MAX_WARM_UP = 1_000_000  # epochs of warm-up

# what the rate is multiplied by where the batch is so many times as large
SCALING_RULES: dict[str, Callable[[float], float]] = {
    "linear": lambda times: times,  # Goyal et al. 2017, arXiv 1706.02677
    # Krizhevsky 2014, arXiv 1404.5997: the variance of an update stays
    "sqrt": math.sqrt,
}


class Scaled(LRScheduler):
    """Rates of a job's own schedule, times a factor that is reached gradually: in step t of the
    larger batch

        rate(t) = own(floor(t before / steps)) (1 + (factor - 1) min(1, t / warm_up))

    optimizer: at the job's own rates;  factor: see RULES;  warm_up: steps (0: none), as Goyal
    et al. 2017 have it from the own rate on, in even parts;  own: the job's scheduler over the
    same optimizer, or None;  before, steps: steps of an epoch by the batch it counts, and by
    this one: it is stepped so often that both end an epoch together.

    torch's SGD needs no correction of its momentum for a rate that changes: its buffer holds
    gradients, and each step multiplies all of it by the rate of now. Lars says how it does.
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
        self.own = own
        self.factor = factor
        self.warm_up = warm_up
        self.before = before
        self.steps = steps
        # of the own schedule
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """A step of the larger batch is done. Raises ValueError where it is sent to an
        epoch.
        """
        if epoch is not None:
            raise ValueError(
                "Scaled counts steps of the batch, and goes to no epoch; leave it out, one step() "
                "a step"
            )
        due = (
            [(self.last_epoch + more) * self.before // self.steps for more in (0, 1)]
            if self.last_epoch >= 0
            else [0, 0]
        )
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            _set_rate(group, rate)  # as it left it: some go on from there
        for _ in range(due[1] - due[0] if self.own is not None else 0):
            self.own.step()  # type: ignore[union-attr]
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        super().step()

    def get_lr(self) -> list[float | Tensor]:
        """Of the step that comes, by group."""
        reached = min(1.0, self.last_epoch / self.warm_up) if self.warm_up else 1.0
        return [rate * (1.0 + (self.factor - 1.0) * reached) for rate in self.rates]

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "own": self.own.state_dict() if self.own is not None else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
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


def rescale_job(job: Job, samples: int) -> tuple[Job, str | None]:
    """(the job with the rates of its batch, what they are and why), where it is trained on so
    many samples; itself where nobody asks for others. Raises Refused.
    """
    if job.scale_lr is None and not job.warm_up:
        return job, None
    _check_scaling(job)
    assert job.scale_lr is not None
    assert job.own_batch is not None
    steps, before = (
        SampleOrder(samples, job.batch, 0).steps,
        SampleOrder(samples, job.own_batch, 0).steps,
    )
    factor = SCALING_RULES[job.scale_lr](min(job.batch, samples) / min(job.own_batch, samples))
    first = round(job.warm_up * steps)
    told = (
        f"{job.scale_lr} scaling, for the batch is {job.batch} and the job's own {job.own_batch}"
        + (
            f"; from the job's own rate in even parts over the first {first} steps "
            f"({job.warm_up:g} epochs)"
            if first
            else ""
        )
    )
    made = partial(_build_scheduler, job.scheduler, factor, first, before, steps)
    return job.replace(
        scheduler=made, scale_lr=None, warm_up=0.0
    ), f"{factor:.4g} times the job's own: {told}"


def _check_scaling(job: Job) -> None:
    if job.scale_lr is None:
        raise Refused(
            f"job {job.name}: warm_up leads from the job's own learning rate to that of a larger "
            f"batch; give "
            "scale_lr='linear' or 'sqrt' too (--scale-lr)"
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
            f"job {job.name}: scale_lr wants to know for which batch the learning rate was chosen, "
            f"and this one has "
            f"had no other than {job.batch}; change it by job.replace(batch=...) (--batch), or say "
            f"own_batch=... "
            "(an optimizer that is given beside a batch is for that one)"
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
    made = own(optimizer) if own is not None else None
    if own is not None and (
        not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau)
    ):
        return made  # the door says what is wrong with it
    return Scaled(optimizer, factor, warm_up, made, before, steps)
