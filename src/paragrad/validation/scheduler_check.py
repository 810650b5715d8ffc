"""A warning about a scheduler that counts epochs.

Schedulers are stepped once for every global batch. The learning rate of such a scheduler vanishes
after a few steps, and nothing else shows it.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR, PolynomialLR, StepLR

from paragrad.jobs.job import Job
from paragrad.optim.rate_scaling import Scaled

# The rates of these never rise again. They call no code of the user, so they can be stepped here.
DECAYING_SCHEDULERS = (ExponentialLR, MultiStepLR, PolynomialLR, StepLR)
MAX_PROBED_STEPS = 1000
VANISHED_RATIO = 1e-6  # relative to the first rate


def warn_epoch_scheduler(job: Job, scheduler: Any, samples: int) -> None:
    """Warn if the learning rate vanishes before half of the steps are completed.

    This steps the scheduler, so the scheduler must not be used afterwards.

    Args:
        job: The job.
        scheduler: The job's scheduler.
        samples: The number of training samples.
    """
    inner = scheduler.own if isinstance(scheduler, Scaled) else scheduler
    if type(inner) not in DECAYING_SCHEDULERS:
        return
    steps_per_epoch = math.ceil(samples / job.batch)
    total = job.epochs * steps_per_epoch
    first = max(scheduler.get_last_lr())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns because the optimizer makes no steps
        vanish_step = next(
            (
                step
                for step in range(1, min(total // 2, MAX_PROBED_STEPS) + 1)
                if _compute_next_rate(scheduler) < VANISHED_RATIO * first
            ),
            None,
        )
    if vanish_step is None:
        return
    # a scaled scheduler counts the steps of the batch for which it was written
    factor = scheduler.before if isinstance(scheduler, Scaled) else steps_per_epoch
    warnings.warn(
        f"job {job.name}: from step {vanish_step:,} of {total:,} on the learning rate is below a "
        f"millionth of the first: {type(inner).__name__} is stepped once for every global batch; "
        f"if it counts epochs, give it {factor:,} times as many",
        stacklevel=2,
    )


def _compute_next_rate(scheduler: Any) -> float:
    """Step the scheduler, and return its largest learning rate."""
    scheduler.step()
    return max(scheduler.get_last_lr())
