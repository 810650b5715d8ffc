"""Whether a scheduler counts epochs or steps must be known.

Most loops step a scheduler once an epoch, others once a batch. A training cannot see which one a
scheduler was written for, and with the wrong one it learns otherwise without a word.
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR

from paragrad.errors import Refused
from paragrad.jobs.job import Job
from paragrad.optim.rate_scaling import Scaled

# The documents of torch step these after each batch, or with fractions of an epoch.
STEP_SCHEDULERS = (CosineAnnealingWarmRestarts, CyclicLR)


def refuse_unclear_scheduler(job: Job, scheduler: Any) -> None:
    """Refuse a scheduler that may count epochs as well as steps, if the job does not say which.

    One that is told the number of all its steps (`total_steps`, as OneCycleLR) counts steps.

    Args:
        job: The job.
        scheduler: The job's scheduler, or None.

    Raises:
        Refused: The job does not say what the scheduler counts.
    """
    own = scheduler.own if isinstance(scheduler, Scaled) else scheduler
    if (
        own is None
        or job.scheduler_every is not None
        or isinstance(own, STEP_SCHEDULERS)
        or hasattr(own, "total_steps")
    ):
        return
    raise Refused(
        f"job {job.name}: {type(own).__name__} can count epochs or steps; give "
        "scheduler_every='epoch' if your loop calls scheduler.step() once an epoch, or "
        "scheduler_every='step' if it calls it for every batch"
    )
