"""A scheduler that counts epochs, where it is stepped once for every global batch: the learning
rate is gone after a few steps, and nothing else shows it.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR, PolynomialLR, StepLR

from paragrad.jobs.job import Job
from paragrad.optim.rate_scaling import Scaled

# whose rate never rises again, and which call nothing of the user's: a look may step them
DECAYING_SCHEDULERS = (ExponentialLR, MultiStepLR, PolynomialLR, StepLR)
MAX_PROBED_STEPS = 1000  # steps that are looked at
VANISHED_RATIO = 1e-6  # of the first rate


def warn_epoch_scheduler(job: Job, scheduler: Any, samples: int) -> None:
    """Warn of a rate that is gone before half of the steps are made. Steps a scheduler that
    nobody needs any more.
    """
    own = scheduler.own if isinstance(scheduler, Scaled) else scheduler
    if type(own) not in DECAYING_SCHEDULERS:
        return
    each = math.ceil(samples / job.batch)
    total = job.epochs * each
    first = max(scheduler.get_last_lr())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its optimizer makes no steps
        gone = next(
            (
                step
                for step in range(1, min(total // 2, MAX_PROBED_STEPS) + 1)
                if _compute_next_rate(scheduler) < VANISHED_RATIO * first
            ),
            None,
        )
    if gone is None:
        return
    # of the batch that it is for
    counted = scheduler.before if isinstance(scheduler, Scaled) else each
    warnings.warn(
        f"job {job.name}: from step {gone:,} of {total:,} on the learning rate is below a "
        f"millionth of the first: "
        f"{type(own).__name__} is stepped once for every global batch; if it counts epochs, give "
        f"it {counted:,} "
        "times as many",
        stacklevel=2,
    )


def _compute_next_rate(scheduler: Any) -> float:
    """Its largest rate after one more step."""
    scheduler.step()
    return max(scheduler.get_last_lr())
